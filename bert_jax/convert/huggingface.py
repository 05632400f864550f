"""Directories of Hugging Face's `transformers`: config.json, safetensors and tokenizer files."""

import dataclasses
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors

from bert_jax.config import DataFiles, ModelConfig, TaskConfig
from bert_jax.convert import config_json, names, tokenizer_files
from bert_jax.convert.names import Converted, Tensors
from bert_jax.errors import UserError, first_line, refuse
from bert_jax.models.architecture import architecture as architecture_of
from bert_jax.models.architecture import num_token_types
from bert_jax.models.exchange import COMPANION_FOLDER, Head
from bert_jax.models.positions import position_kind
from bert_jax.storage.json_files import read_json
from bert_jax.storage.paths import AnyPath
from bert_jax.tasks.base import Task
from bert_jax.text import tokenizer_loading
from bert_jax.text.tokenizer import Tokenizer

_WRITER, _BACKEND = "bert-jax", "TokenizersBackend"
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLE = "pytorch_model*.bin"  # of several shards each is one
# Files of sentence-transformers: the module that is the encoder, and the whole model's settings.
TRANSFORMER, SETTINGS = "sentence_bert_config.json", "config_sentence_transformers.json"
_POSITIONS = "bert.embeddings.position_embeddings.weight"
# What an export may have: the card, and the files of each kind of tokenizer.
FILES = ("config.json", _FILE, "README.md", "tokenizer.json", "tokenizer_config.json")
FILES += ("vocab.txt", "vocab.json", "merges.txt", "sentencepiece.model")
# Of a model of embeddings, by `sentence_transformers.save`.
FILES += ("modules.json", TRANSFORMER, SETTINGS)
FOLDERS = (COMPANION_FOLDER, "1_Pooling", "2_Dense", "2_Normalize", "3_Normalize")
FOLDERS += ("1_Dense", "1_SpladePooling")


class Exportable(Protocol):
    """A model with its tokenizer; `Bert` says what its attributes are."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def params(self) -> Mapping[str, Any]: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def task(self) -> TaskConfig | None: ...
    @property
    def data(self) -> DataFiles: ...
    @property
    def source(self) -> str | AnyPath | None: ...


@dataclasses.dataclass(frozen=True)
class Exported:
    """The class of `transformers` that was exported."""

    architecture: str
    dropped: Sequence[str]  # modules of the model that the class does not have
    newly_initialized: Sequence[str]  # modules of the class that the model does not have
    num_parameters: int = 0
    task: Task | None = None  # whose head the class has
    library: str = "transformers"  # that loads it


def is_huggingface(path: Path) -> bool:
    """Return whether a directory is a Hugging Face checkpoint, by its files."""
    return os.path.isfile(path / "config.json") and any(
        any(path.glob(name)) for name in (_FILE, _INDEX, _PICKLE)
    )


def is_cross_encoder(path: Path) -> bool:
    """Return whether a directory is of a `CrossEncoder`, as its later versions write it."""
    file = path / SETTINGS
    if not os.path.isfile(file):
        return False
    return read_json(file, "fetch it again").get("model_type") == "CrossEncoder"


def _check_modules(file: Path) -> None:
    """Refuse a `CrossEncoder` of several modules, as one whose head is a module of its own."""
    modules = read_json(file, "fetch it again", list) if os.path.isfile(file) else []
    types = [str(each.get("type") if isinstance(each, dict) else each) for each in modules]
    refuse(
        len(types) > 1,
        f"{file} has {', '.join(name.rpartition('.')[2] for name in types)}, and of the modules of "
        "a CrossEncoder only a Transformer is read",
        fix="take a model whose head is a part of it",
    )


def _max_length(path: Path) -> int | None:
    """Return the number of tokens to which the tokenizer of a directory truncates."""
    for name, key in (
        (TRANSFORMER, "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        values = read_json(path / name, "fetch it again") if os.path.isfile(path / name) else {}
        length = values.get(key)
        # An unset one is written as a huge number.
        if isinstance(length, int) and not isinstance(length, bool) and 8 <= length < 1 << 30:
            return length
    return None


def is_export(path: Path) -> bool:
    """Return whether a directory is one that `save` has written, with nothing added."""
    try:
        with safetensors.safe_open(str(path / _FILE), "np") as opened:
            is_ours = (opened.metadata() or {}).get("written_by") == _WRITER
    except (OSError, safetensors.SafetensorError):
        return False
    return is_ours and {file.name for file in path.rglob("*")} <= {*FILES, *FOLDERS}


def load(path: Path) -> tuple[ModelConfig, Converted, Tokenizer]:
    """Return a model's config, parameters and tokenizer."""
    file = path / "config.json"
    values = read_json(file, "fetch it again")
    if is_cross_encoder(path):  # of older versions, config.json says it
        _check_modules(path / "modules.json")
        library = read_json(path / SETTINGS, "fetch it again")
        before = values.get("sentence_transformers")
        before = before if isinstance(before, dict) else {}
        values = {**values, "sentence_transformers": {**before, **library}}
    config = config_json.read_config(values, str(file))
    task = config_json.read_task(values, config, str(file))
    architecture = config_json.architecture(values)
    exchange = names.exchange_of(config.model_type)
    tensors = {
        exchange.standard_name(name, architecture if task else ""): read
        for name, read in open_weights(path).items()
    }
    first = exchange.first_position(values)
    if first and _POSITIONS in tensors:
        read_positions = tensors[_POSITIONS]
        tensors[_POSITIONS] = lambda: np.atleast_1d(read_positions())[first:]
    converted = names.from_foreign(tensors, config, str(path), task, architecture)
    if task:
        data, longest = config_json.read_data(values, task, str(file)), _max_length(path)
        # Another library may have changed it. One of more than the positions is for windows here.
        most = config.max_position_embeddings
        if data and longest and min(longest, most) != min(data.max_length, most):
            data.max_length = min(longest, most)
        converted = dataclasses.replace(converted, max_length=longest, data=data)
    tokenizer = tokenizer_loading.load(path)
    if is_cross_encoder(path):
        tokenizer = tokenizer_files.with_settings(tokenizer, path / TRANSFORMER)
    config_json.check_tokenizer(path, tokenizer, config, values)
    refuse(
        first not in (0, tokenizer.pad_id + 1),
        f"{file} has the pad_token_id {first - 1}, and its tokenizer pads with "
        f"{tokenizer.pad_id}; transformers gives token {first - 1} of a text no position",
        fix="correct the one that is wrong",
    )
    _read_pairs(path, tokenizer, config)
    beside = path / COMPANION_FOLDER
    if exchange.companion_modules and not task and is_huggingface(beside):
        companion, its, _ = load(beside)
        config, params = exchange.join(config, converted.params, companion, its.params, str(beside))
        converted = dataclasses.replace(converted, params=params)
    return config, converted, tokenizer


def _read_pairs(path: Path, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Join two texts as the tokenizer does, which may be one of another architecture."""
    found = tokenizer.separators
    refuse(
        found > 2,
        f"the tokenizer of {path} has {found} separators between two texts",
        fix="one or two are read; correct the post_processor of its tokenizer.json",
    )
    if found and found != architecture_of(config).separators:
        config.pair_separators = 1 if found == 1 else 2
    file = path / "tokenizer_config.json"
    settings = read_json(file, "fetch it again") if file.exists() else {}
    types = _pair_token_types(settings, tokenizer)
    if config.type_vocab_size == 1 or not types:
        return
    refuse(
        types > 2,
        f"the tokenizer of {path} gives two texts other token types than 0, or 0 and 1",
        fix="these are read; correct the post_processor of its tokenizer.json",
    )
    if types != min(num_token_types(config), 2):
        config.pair_token_types = 1 if types == 1 else 2


def _pair_token_types(settings: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """Return how many token types `transformers` gives to a pair; 0 for those of the model."""
    inputs = settings.get("model_input_names")
    # The class by which transformers 5 saves the tokenizer of no model has no types by default.
    if settings.get("tokenizer_class") == _BACKEND:
        inputs = inputs or ("input_ids",)
    if inputs and "token_type_ids" not in inputs:
        return 1
    # The class of a model has a rule of its own, whatever the tokenizer.json says.
    return tokenizer.pair_token_types if tokenizer_loading.is_generic(settings) else 0


def save(
    config: ModelConfig,
    params: Mapping[str, Any],
    tokenizer: Tokenizer,
    path: Path,
    *,
    head: str | None = None,
    task: Task | None = None,
    data: DataFiles | None = None,
    max_length: int | None = None,
) -> Exported:
    """Write a checkpoint that `transformers` loads.

    Args:
      head: one of `Exchange.heads`; None for the class of the task, or for the first that fits.
      task: the task whose head the model has.
      data: the columns that it was trained on, if they are known.
      max_length: to which its tokenizer truncates; None for the number of positions.
    """
    positions = position_kind(config)
    if positions.scores:
        raise UserError(
            f"model.position_embedding_type is {config.position_embedding_type}, which "
            "transformers 5 does not have; it cannot be exported"
        )
    exchange = names.exchange_of(config.model_type)
    if task and task.transformers_class and head is None:
        exported, where = _task_class(params, config, task), "lost"
    else:
        task = None
        exported, chosen = _choose_class(params, config.model_type, head)
        where = chosen.companion
    architecture, dropped = exported.architecture, exported.dropped
    companion = None if where == "lost" else exchange.split(config, params)
    if companion:
        lost = tuple(name for name in dropped if name not in exchange.companion_modules)
        exported = dataclasses.replace(exported, dropped=lost)
        other, other_params = companion
        if where == "alone":
            config, params = other, other_params
        else:
            folder = path / COMPANION_FOLDER
            folder.mkdir()
            save(other, other_params, tokenizer, folder, head="masked-lm")
    values = config_json.write_config(config, architecture, tokenizer, task, data)
    tensors = dict(names.to_foreign(params, dropped, config.model_type))
    if positions.embeddings:
        width = architecture_of(config).embedding_size(config)
        tensors[_POSITIONS] = positions.embeddings(config.max_position_embeddings, width)
    if first := exchange.first_position(values):
        tensors[_POSITIONS] = np.pad(tensors[_POSITIONS], ((first, 0), (0, 0)))
    tensors = {
        exchange.name_in_class(name, architecture): tensor for name, tensor in tensors.items()
    }
    (path / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    write_weights(path, tensors)
    reads_words = task is not None and task.reads_words
    files = tokenizer_files.files(tokenizer, config, max_length, reads_words=reads_words)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return dataclasses.replace(exported, num_parameters=sum(x.size for x in tensors.values()))


def _task_class(params: Mapping[str, Any], config: ModelConfig, task: Task) -> Exported:
    shapes, _ = names.stored_shapes(task.model(config))
    dropped = names.module_names(params) - names.module_names(shapes)
    return Exported(config_json.class_name(config, task), sorted(dropped), (), task=task)


def _choose_class(
    params: Mapping[str, Any], model_type: str, head: str | None
) -> tuple[Exported, Head]:
    present, exchange = names.module_names(params), names.exchange_of(model_type)
    heads = exchange.heads
    if head is None:
        head = next((h for h in heads if present >= {*heads[h].modules}), "none")
    if head not in heads:
        raise UserError(f"head={head} does not fit a {model_type}; use {' or '.join(heads)}")
    modules = {*heads[head].modules}
    absent = sorted(modules - present)
    if absent and head != "none":
        has = ", ".join(sorted(present)) or "the encoder only"
        raise UserError(
            f"the checkpoint has no {', '.join(absent)}, as head={head} has; it has {has}"
        )
    name = exchange.class_prefix + heads[head].suffix
    return Exported(name, sorted(present - modules), absent), heads[head]


def open_weights(path: Path) -> Tensors:
    """Return the tensors of a directory by name; refuse a pickle."""
    tensors = {}
    for file in _files(path):
        try:
            with safetensors.safe_open(str(file), "np") as opened:
                tensors |= {name: partial(_read, file, name) for name in opened.offset_keys()}
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{file} is damaged ({first_line(error)}); fetch it again") from error
    return tensors


def _files(path: Path) -> list[Path]:
    if (path / _FILE).exists():  # even beside an index, which may be of older weights
        return [path / _FILE]
    if (path / _INDEX).exists():
        names = read_json(path / _INDEX, "fetch it again").get("weight_map")
        names = [str(name) for name in names.values()] if isinstance(names, dict) else []
        if not names or not all(name.isprintable() for name in names):
            raise UserError(f"{path / _INDEX} has no weight_map of files; fetch it again")
        files = [path / name for name in sorted({Path(name).name for name in names})]
        for file in files:
            refuse(not file.exists(), f"{file} is missing, which {_INDEX} lists", fix="fetch it")
        return files
    pickles = sorted(path.glob(_PICKLE))
    if not pickles:
        raise UserError(f"{path} has no {_FILE}; fetch it again")
    program = (
        "import sys, torch, safetensors.torch as s; s.save_file({k: v.contiguous().clone() for "
        "n in sys.argv[2:] for k, v in torch.load(n, weights_only=True).items()}, sys.argv[1])"
    )
    command = shlex.join(["python", "-c", program, str(path / _FILE), *map(str, pickles)])
    raise UserError(
        f"{path} has its weights as a pickle, {pickles[0].name}, which could run any code and is "
        f"not read; convert it to {_FILE} where torch is installed: {command}"
    )


def _read(file: Path, name: str) -> np.ndarray:
    # Opened for each tensor: what was read of an open file stays in memory beside the copies.
    with safetensors.safe_open(str(file), "np") as opened:
        try:
            return opened.get_tensor(name)
        except (AttributeError, safetensors.SafetensorError) as error:  # NumPy has no such type
            raise UserError(f"{file}: {name} is not floating point, or of 8 bits") from error


def write_weights(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write float32 weights one at a time, in less memory than the library (docs/parity.md)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "written_by": _WRITER}}
    offset = 0
    for name, tensor in tensors.items():
        span = [offset, offset + 4 * tensor.size]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (path / _FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, "<f4").data)
