"""Directories of google-research/bert, read only: bert_config.json, a TF1 checkpoint, vocab.txt."""

import os
import re
from functools import partial
from pathlib import Path

from bert_jax.config import ModelConfig
from bert_jax.convert import names
from bert_jax.convert.config_json import check_tokenizer, read_config
from bert_jax.convert.names import Converted
from bert_jax.convert.tensor_bundle import open_bundle
from bert_jax.errors import UserError, refuse
from bert_jax.storage.json_files import read_json
from bert_jax.text import tokenizer_loading
from bert_jax.text.tokenizer import Tokenizer

_PREFIX, _CONFIG = "bert_model.ckpt", "bert_config.json"


def is_google(path: Path) -> bool:
    """Return whether a directory is a Google checkpoint, by its files."""
    # One that was converted since has the file of its new library beside it.
    is_converted = os.path.isfile(path / "config.json") and not any(path.glob("*.index"))
    return os.path.isfile(path / _CONFIG) and not is_converted


def load(path: Path) -> tuple[ModelConfig, Converted, Tokenizer]:
    """Return a model's config, parameters and tokenizer."""
    values = read_json(path / _CONFIG, "fetch it again")
    if values.get("hidden_act", "gelu") == "gelu":
        values["hidden_act"] = "gelu_new"  # what Google's code has computed since February 2019
    config = read_config(values, str(path / _CONFIG))
    tensors = {}
    for name, tensor in open_bundle(_find_prefix(path)).items():
        if name.endswith(("/adam_m", "/adam_v")) or name == "global_step":
            continue  # the optimizer's
        if name.endswith("/kernel"):  # of a dense layer, which TensorFlow stores as [in, out]
            tensor = partial(lambda read: read().T, tensor)
        tensors[_standard_name(name)] = tensor
    converted = names.from_foreign(tensors, config, str(path))
    tokenizer = load_tokenizer(path)
    check_tokenizer(path, tokenizer, config)
    return config, converted, tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a directory, which lower-cases text if its vocabulary is so."""
    refuse(not (path / "vocab.txt").exists(), f"{path} has no vocab.txt", fix="fetch it again")
    tokenizer = tokenizer_loading.load(path / "vocab.txt", lowercase=False)
    if _is_lowercase(tokenizer):
        return tokenizer_loading.load(path / "vocab.txt", lowercase=True)
    return tokenizer


def _find_prefix(path: Path) -> Path:
    prefixes = [index.with_suffix("") for index in sorted(path.glob("*.index"))]
    prefixes = [prefix for prefix in prefixes if prefix.name == _PREFIX] or prefixes
    if len(prefixes) != 1:
        several = ", ".join(prefix.name for prefix in prefixes)
        found = f"several: {several}" if several else f"no {_PREFIX}.index"
        raise UserError(f"{path} must have one TensorFlow checkpoint; it has {found}")
    return prefixes[0]


def _standard_name(name: str) -> str:
    name = re.sub(r"/layer_(\d+)/", r"/layer/\1/", name).replace("/", ".")
    name = re.sub(r"\.(kernel|gamma|output_weights)$", ".weight", name)
    name = re.sub(r"\.(beta|output_bias)$", ".bias", name)
    return f"{name}.weight" if name.endswith("_embeddings") else name


def _is_lowercase(tokenizer: Tokenizer) -> bool:
    """Return whether a vocabulary is lowercase, which no file says: few tokens have capitals."""
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.vocab_size)]
    capitals = sum(token != token.lower() for token in tokens if not token.startswith("["))
    return capitals < 0.01 * len(tokens)
