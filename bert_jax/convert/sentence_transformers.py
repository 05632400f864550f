"""Directories of `sentence-transformers`: an encoder, its pooling, and what follows, both ways."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bert_jax.config import EmbeddingConfig, ModelConfig
from bert_jax.convert import (
    huggingface,
    late_interaction,
    module_folders,
    names,
    splade,
    tokenizer_files,
)
from bert_jax.convert.huggingface import Exportable, Exported
from bert_jax.convert.names import Converted
from bert_jax.errors import UserError
from bert_jax.storage import paths
from bert_jax.storage.json_files import read_json
from bert_jax.tasks.base import Task
from bert_jax.tasks.embedding import EmbeddingTaskConfig
from bert_jax.text.tokenizer import Tokenizer

LIBRARY = "sentence-transformers"
_POOLINGS = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}
_OTHER_POOLINGS = ("mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
_MODE = "pooling_mode"
_ACTIVATIONS = {
    "tanh": "torch.nn.modules.activation.Tanh",
    "identity": "torch.nn.modules.linear.Identity",
}
_VECTORS = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
# Of each module, as `module_folders.read_config` has them.
_FIELDS: dict[str, dict[str, Any]] = {
    "Pooling": {
        "include_prompt": True,
        **dict.fromkeys((_MODE, "embedding_dimension", "word_embedding_dimension"), ...),
        **dict.fromkeys((f"{_MODE}_{name}" for name in (*_POOLINGS, *_OTHER_POOLINGS)), ...),
    },
    "Dense": _VECTORS
    | dict.fromkeys(("in_features", "out_features", "bias", "activation_function"), ...),
    "Normalize": _VECTORS,
}
_PASSAGE = ("document", "passage", "corpus")  # names of the prompt of a passage


def is_sentence_transformers(path: Path) -> bool:
    """Return whether a directory is of sentence-transformers and no reranker, by its files."""
    return os.path.isfile(path / module_folders.MODULES) and not huggingface.is_cross_encoder(path)


def load(path: Path) -> tuple[ModelConfig, Converted, Tokenizer]:
    """Return the encoder's config, the parameters with the task of a directory, the tokenizer."""
    folders = module_folders.read(path)
    module_folders.check(folders, path)
    if "SpladePooling" in folders:
        return splade.load(path, folders)
    if "Pooling" not in folders:
        return late_interaction.load(path, folders)
    encoder, normalize = folders["Transformer"], folders.get("Normalize")
    if normalize and paths.exists(normalize / module_folders.CONFIG):
        module_folders.read_config(normalize / module_folders.CONFIG, _FIELDS["Normalize"])
    embedding = {
        "pooling": _read_pooling(folders["Pooling"] / module_folders.CONFIG),
        "normalize": bool(normalize),
    }
    embedding |= _read_prompts(path, is_unit=bool(normalize))
    module_folders.check_encoder(encoder)
    config, converted, tokenizer = huggingface.load(encoder)
    params = {"bert": converted.params["bert"]}
    if "Dense" in folders:
        params["dense"], about = _read_dense(folders["Dense"], config.hidden_size)
        embedding |= about
    task = EmbeddingTaskConfig(embedding=EmbeddingConfig(**embedding))
    unused = [*converted.unused, *sorted(converted.params.keys() - params.keys())]
    length = module_folders.max_length(encoder, config)
    tokenizer = tokenizer_files.with_settings(tokenizer, module_folders.settings_file(encoder))
    return config, Converted(params, unused, task, length), tokenizer


def _read_pooling(file: Path) -> str:
    values = module_folders.read_config(file, _FIELDS["Pooling"])
    old = [name.partition(f"{_MODE}_")[2] for name, is_on in values.items() if is_on]
    modes = values.get(_MODE) or [_POOLINGS.get(name, name) for name in old if name] or "mean"
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in _POOLINGS.values():
        mode = " and ".join(map(str, modes))
        raise UserError(f"{file} pools by {mode}; only {', '.join(_POOLINGS.values())} is read")
    return modes[0]


def _read_dense(folder: Path, inputs: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of a dense layer, and the fields of `EmbeddingConfig` about it."""
    values = module_folders.read_config(file := folder / module_folders.CONFIG, _FIELDS["Dense"])
    name = values.get("activation_function", _ACTIVATIONS["tanh"])
    size = module_folders.num_outputs(values, file)
    activation = str(name).rpartition(".")[2].lower()
    if activation not in _ACTIVATIONS or not str(name).startswith("torch.nn."):
        raise UserError(f"{file} has {name}; only {' and '.join(_ACTIVATIONS.values())} are read")
    tensors, shapes = huggingface.open_weights(folder), {"weight": (size, inputs), "bias": (size,)}
    if not values.get("bias", True):
        tensors = {**tensors, "linear.bias": lambda: np.zeros(size, np.float32)}
    kernel, bias = (
        names.read_tensor(tensors, name := f"linear.{leaf}", shape, str(folder), name)
        for leaf, shape in shapes.items()
    )
    params = {"kernel": jnp.asarray(kernel.T), "bias": jnp.asarray(bias)}
    return params, {"dense": size, "dense_activation": activation}


def _read_prompts(path: Path, *, is_unit: bool) -> dict[str, str]:
    """Return the prompts of queries and passages; warn of settings that are not kept."""
    file = path / huggingface.SETTINGS
    values = read_json(file, module_folders.REMEDY) if file.exists() else {}
    if values.get("truncate_dim"):
        raise UserError(f"{file} has truncate_dim {values['truncate_dim']}, which is not supported")
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(isinstance(p, str) for p in prompts.values()):
        raise UserError(f"{file} has prompts that are no texts by name; {module_folders.REMEDY}")
    passage = next((name for name in _PASSAGE if prompts.get(name)), _PASSAGE[0])
    read = {"query": prompts.get("query", ""), passage: prompts.get(passage, "")}
    lost = module_folders.lost_prompts(values, prompts, kept=read.values())
    if (similarity := values.get("similarity_fn_name") or "cosine") != "cosine":
        lost += [f"the similarity {similarity}"] * (similarity != "dot" or not is_unit)
    module_folders.warn_lost(lost, file)
    return {"query_prompt": read["query"], "passage_prompt": read[passage]}


def save(model: Exportable, path: Path, task: Task, max_length: int) -> Exported:
    """Write a directory that `sentence-transformers` loads."""
    own = task.config
    if not isinstance(own, EmbeddingTaskConfig):
        raise UserError(
            f"{own.kind} has no form in sentence-transformers; export its encoder, with --head=none"
        )
    embedding = own.embedding
    encoder = {"bert": model.params["bert"]}
    exported = huggingface.save(model.config, encoder, model.tokenizer, path, head="none")
    size = exported.num_parameters
    modes = {
        f"{_MODE}_{name}": embedding.pooling == _POOLINGS.get(name)
        for name in (*_POOLINGS, *_OTHER_POOLINGS[:1])
    }
    pooling = {"word_embedding_dimension": model.config.hidden_size, **modes}
    modules: dict[str, dict[str, Any]] = {"Transformer": {}, "Pooling": pooling}
    if embedding.dense:
        sizes = {
            "in_features": model.config.hidden_size,
            "out_features": embedding.dense,
            "bias": True,
        }
        activation = {"activation_function": _ACTIVATIONS[embedding.dense_activation]}
        modules["Dense"] = sizes | activation
    if embedding.normalize:
        modules["Normalize"] = _VECTORS
    # The names that every version reads.
    folders = module_folders.write(path, modules, prefix="sentence_transformers.models.")
    if "Dense" in folders:
        dense = {name: np.asarray(value) for name, value in model.params["dense"].items()}
        tensors = {"linear.weight": dense["kernel"].T, "linear.bias": dense["bias"]}
        huggingface.write_weights(folders["Dense"], tensors)
        size += sum(x.size for x in tensors.values())
    prompts = {"query": embedding.query_prompt, "document": embedding.passage_prompt}
    described = {"prompts": prompts, "similarity_fn_name": "cosine"}
    module_folders.write_settings(path, exported, max_length, described)
    return Exported("SentenceTransformer", exported.dropped, (), size, task, LIBRARY)
