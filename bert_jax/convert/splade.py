"""Sparse vectors as `SparseEncoder` of sentence-transformers has them, both ways."""

from collections.abc import Mapping
from pathlib import Path

from bert_jax.config import ModelConfig
from bert_jax.convert import huggingface, module_folders, tokenizer_files
from bert_jax.convert.huggingface import Exportable, Exported
from bert_jax.convert.names import Converted
from bert_jax.errors import refuse
from bert_jax.models.exchange import check_switches
from bert_jax.storage.json_files import read_json
from bert_jax.tasks.base import Task
from bert_jax.tasks.sparse import SparseConfig
from bert_jax.text.tokenizer import Tokenizer

_POOLING = {"pooling_strategy": "max", "activation_function": "relu"}
_TYPE = "sentence_transformers.sparse_encoder.models."


def load(path: Path, folders: Mapping[str, Path]) -> tuple[ModelConfig, Converted, Tokenizer]:
    """Return the model of a directory, from the folders of its modules."""
    file = folders["SpladePooling"] / module_folders.CONFIG
    values = read_json(file, module_folders.REMEDY)
    check_switches(values, _POOLING, str(file))
    settings = path / huggingface.SETTINGS
    if settings.exists():
        found = read_json(settings, module_folders.REMEDY)
        module_folders.check_settings(found, settings, "dot")
    encoder = folders["Transformer"]
    module_folders.check_encoder(encoder, "fill-mask", "logits")
    config, converted, tokenizer = huggingface.load(encoder)
    refuse(
        "mlm_head" not in converted.params,
        f"{encoder} has no masked LM head, of which the vectors are made",
        fix=module_folders.REMEDY,
    )
    params = {name: converted.params[name] for name in ("bert", "mlm_head")}
    unused = [*converted.unused, *sorted(converted.params.keys() - params.keys())]
    length = module_folders.max_length(encoder, config)
    tokenizer = tokenizer_files.with_settings(tokenizer, module_folders.settings_file(encoder))
    return config, Converted(params, unused, SparseConfig(), length), tokenizer


def save(model: Exportable, path: Path, task: Task, max_length: int) -> Exported:
    """Write a directory that `SparseEncoder` loads."""
    exported = huggingface.save(model.config, model.params, model.tokenizer, path, head="masked-lm")
    pooling = {**_POOLING, "word_embedding_dimension": None}
    module_folders.write(path, {"MLMTransformer": {}, "SpladePooling": pooling}, prefix=_TYPE)
    described = {"model_type": "SparseEncoder", "prompts": {}, "similarity_fn_name": "dot"}
    module_folders.write_settings(path, exported, max_length, described)
    return Exported(
        "SparseEncoder", exported.dropped, (), exported.num_parameters, task, task.library
    )
