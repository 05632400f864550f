"""Late interaction in directories of PyLate and of `MultiVectorEncoder`; written as the former.

sentence-transformers 6, which has `MultiVectorEncoder`, reads both.
"""

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tokenizers

from bert_jax.config import ModelConfig
from bert_jax.convert import huggingface, module_folders, names, tokenizer_files
from bert_jax.convert.huggingface import Exportable, Exported
from bert_jax.convert.names import Converted
from bert_jax.errors import UserError, refuse
from bert_jax.models.exchange import check_switches
from bert_jax.storage.json_files import read_json
from bert_jax.tasks.base import Task
from bert_jax.tasks.late_interaction import LateInteractionConfig, check_skipped, check_windows
from bert_jax.tasks.sequences import longest_sequence
from bert_jax.text.tokenizer import Tokenizer

_IDENTITY = "torch.nn.modules.linear.Identity"
_TANH = "torch.nn.modules.activation.Tanh"
_KERNEL = "linear.weight"
_DENSE = "pylate.models.Dense.Dense"
_LEAST = 3  # tokens of a text
_WANTED = {int: f"{_LEAST} tokens or more", bool: "true or false", str: "a token"}


def load(path: Path, folders: Mapping[str, Path]) -> tuple[ModelConfig, Converted, Tokenizer]:
    """Return the model of a directory, from the folders of its modules."""
    is_pylate = "MultiVectorMask" not in folders
    own = () if is_pylate else ("query_length", "document_length", "query_expansion")
    module_folders.check_encoder(folders["Transformer"], also=own)
    config, converted, tokenizer = huggingface.load(folders["Transformer"])
    tokenizer = tokenizer_files.with_settings(
        tokenizer, module_folders.settings_file(folders["Transformer"])
    )
    kernel = _read_dense(folders["Dense"], config.hidden_size)
    params = {"bert": converted.params["bert"], "dense": {"kernel": jnp.asarray(kernel.T)}}
    if is_pylate:
        settings, length = _pylate_settings(path, tokenizer)
    else:
        longest = module_folders.max_length(folders["Transformer"], config)
        settings, length = _library_settings(path, folders, tokenizer, longest)
    task = LateInteractionConfig(size=len(kernel), **settings)
    if task.expansion == "unattended":
        longest = longest_sequence(config, task.query_length)
        check_windows(config, longest, "take a model with shorter queries")
    unused = [*converted.unused, *sorted(converted.params.keys() - {"bert"})]
    length = min(length, config.max_position_embeddings)
    return config, Converted(params, unused, task, length), tokenizer


def _pylate_settings(path: Path, tokenizer: Tokenizer) -> tuple[dict[str, Any], int]:
    """Return the settings of the task that PyLate wrote, and the maximum length of a passage."""
    file = path / huggingface.SETTINGS
    values = read_json(file, module_folders.REMEDY) if file.exists() else {}
    module_folders.check_settings(values, file, "maxsim")
    # The latter is the name in ColBERT's own files.
    names = "attend_to_expansion_tokens", "attend_to_mask_tokens"
    name = next((name for name in names if name in values), names[0])
    is_attended = _setting(values, name, False, file)
    expands = _setting(values, "do_query_expansion", True, file)
    settings = {
        "query_length": _setting(values, "query_length", 32, file),
        "expansion": _expansion(is_attended=is_attended) if expands else "none",
        "query_token": _setting(values, "query_prefix", "[Q] ", file),
        "passage_token": _setting(values, "document_prefix", "[D] ", file),
        "skipped_tokens": _tokens(values, file, list(string.punctuation), tokenizer),
    }
    return settings, _setting(values, "document_length", 180, file)


def _library_settings(
    path: Path, folders: Mapping[str, Path], tokenizer: Tokenizer, longest: int
) -> tuple[dict[str, Any], int]:
    """Return the same of what `MultiVectorEncoder` wrote; `longest` is where it has no length."""
    refuse(
        "Normalize" not in folders,
        f"{path} does not scale its vectors to unit length",
        fix="take a model that does",
    )
    file = path / huggingface.SETTINGS
    values = read_json(file, module_folders.REMEDY)
    prompts = values.pop("prompts", None) or {}
    query, passage = (_mark(prompts, name, tokenizer, file) for name in module_folders.PROMPTS)
    others = {name: prompts[name] for name in prompts if name not in module_folders.PROMPTS}
    module_folders.check_settings({**values, "prompts": others}, file, "maxsim")
    mask_file = folders["MultiVectorMask"] / module_folders.CONFIG
    mask = read_json(mask_file, module_folders.REMEDY)
    skipped_in = mask.get("skiplist_tasks")
    refuse(
        mask.get("keep_only_token_ids") or skipped_in not in (None, "document", ["document"]),
        f"{mask_file} has keep_only_token_ids, or skiplist_tasks other than document",
        fix="take a model without",
    )
    file = module_folders.settings_file(folders["Transformer"])
    values = read_json(file, module_folders.REMEDY)
    filled = values.get("query_expansion") or {}
    is_known = isinstance(filled, Mapping) and filled.get("strategy", "fixed") == "fixed"
    refuse(
        not is_known or filled.get("token") not in (None, tokenizer.id_to_token(tokenizer.mask_id)),
        f"{file} has the query_expansion {str(filled)[:99]}",
        fix="take a model with the strategy fixed, which fills queries up with [MASK]s",
    )
    is_attended = _setting(filled, "attend", False, file)
    length = _setting(values, "query_length", longest, file)
    settings = {
        "query_length": _setting(filled, "length", length, file),
        "expansion": _expansion(is_attended=is_attended) if filled else "none",
        "query_token": query,
        "passage_token": passage,
        "skipped_tokens": _tokens(mask, mask_file, [], tokenizer),
    }
    return settings, _setting(values, "document_length", longest, file)


def _expansion(*, is_attended: bool) -> str:
    return "attended" if is_attended else "unattended"


def _mark(prompts: Any, name: str, tokenizer: Tokenizer, file: Path) -> str:
    """Return the token that a prompt puts before each text; empty without a prompt."""
    prompt = prompts.get(name) if isinstance(prompts, Mapping) else prompts
    if not prompt:
        return ""
    text = "a"
    marks, alone, together = tokenizer.encode([str(prompt), text, f"{prompt}{text}"])
    refuse(
        len(marks) != 1 or [*marks, *alone] != [*together] or not isinstance(prompts, Mapping),
        f"{file} has the prompt {str(prompt)[:60]!r} for a {name}, which is no token of its own",
        fix="take a model whose prompts are tokens, such as [unused0], or without",
    )
    return tokenizer.id_to_token(marks[0])


def _check_exported(token: str, path: Path) -> None:
    """Refuse a token that marks texts, after which an exported tokenizer reads a text otherwise."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    if tokenizer.encode(token, add_special_tokens=False).tokens != [token]:
        # As `MultiVectorEncoder` does.
        tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True)])
    text = "a"
    alone, marked = (
        tokenizer.encode(each, add_special_tokens=False).ids for each in (text, f"{token}{text}")
    )
    refuse(
        marked != [tokenizer.token_to_id(token), *alone],
        f"sentence-transformers would read the start of a text after {token!r} as other tokens",
        fix="train without task.query_token and task.passage_token, or export the encoder, with "
        "--head=none",
    )


def _read_dense(folder: Path, inputs: int) -> np.ndarray:
    """Return the matrix of the dense layer, [out, in]."""
    values = read_json(file := folder / module_folders.CONFIG, module_folders.REMEDY)
    size = module_folders.num_outputs(values, file)
    # Where a file does not say it, the library has a bias and tanh.
    said = {"bias": True, "activation_function": _TANH, **values}
    check_switches(said, {"bias": False, "activation_function": _IDENTITY}, str(file))
    refuse(values.get("use_residual"), f"{file} has use_residual", fix="take a model without it")
    tensors = huggingface.open_weights(folder)
    return names.read_tensor(tensors, _KERNEL, (size, inputs), str(folder), _KERNEL)


def _setting(values: Mapping[str, Any], name: str, default: Any, file: Path) -> Any:
    """Return a setting, which is of the type of its default: a length, a switch or a token."""
    value = values.get(name)
    value = default if value is None else value
    if type(value) is not type(default) or (type(value) is int and value < _LEAST):
        wanted = _WANTED[type(default)]
        raise UserError(f"{file}: {name} is {str(value)[:60]!r}; it must be {wanted}")
    return value


def _tokens(
    values: Mapping[str, Any], file: Path, default: Sequence[str], tokenizer: Tokenizer
) -> tuple[str, ...]:
    # One that the tokenizer lacks has no effect, as in sentence-transformers. PyLate then skips
    # every unknown token of a passage.
    tokens = values.get("skiplist_words")
    tokens = default if tokens is None else tokens
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise UserError(f"{file}: skiplist_words are no list of tokens; {module_folders.REMEDY}")
    check_skipped(tokens, tokenizer, f"{file}: skiplist_words")
    return tuple(tokens)


def save(model: Exportable, path: Path, task: Task, max_length: int) -> Exported:
    """Write a directory that PyLate and `MultiVectorEncoder` load."""
    own = task.config
    assert isinstance(own, LateInteractionConfig)
    encoder = {"bert": model.params["bert"]}
    exported = huggingface.save(model.config, encoder, model.tokenizer, path, head="none")
    for token in filter(None, (own.query_token, own.passage_token)):
        _check_exported(token, path)
    dense = {
        "in_features": model.config.hidden_size,
        "out_features": own.size,
        "bias": False,
        "activation_function": _IDENTITY,
    }
    modules = {"Transformer": {}, _DENSE: dense}
    # The names that every version reads.
    folders = module_folders.write(path, modules, prefix="sentence_transformers.models.")
    kernel = np.asarray(model.params["dense"]["kernel"]).T
    huggingface.write_weights(folders[_DENSE], {_KERNEL: kernel})
    described = {
        "model_type": "ColBERT",
        "similarity_fn_name": "MaxSim",
        "query_prefix": own.query_token,
        "document_prefix": own.passage_token,
        "query_length": own.query_length,
        "document_length": max_length,
        "do_query_expansion": own.expansion != "none",
        "attend_to_expansion_tokens": own.expansion == "attended",
        "skiplist_words": list(own.skipped_tokens),
    }
    module_folders.write_settings(path, exported, max_length, described)
    size = exported.num_parameters + kernel.size
    return Exported("MultiVectorEncoder", exported.dropped, (), size, task, task.library)
