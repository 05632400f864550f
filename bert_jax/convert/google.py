"""Google's own directories: `bert_config.json`, `bert_model.ckpt.*` and `vocab.txt`, read alone.

A checkpoint that google-research/bert fine-tuned (`model.ckpt-1234.*`) is read as well.
"""

import dataclasses
import re
from pathlib import Path

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.convert import huggingface, names
from bert_jax.convert.names import Converted, Tensor
from bert_jax.convert.tensor_bundle import open_bundle
from bert_jax.errors import UserError
from bert_jax.text import tokenizer as tokenizer_lib
from bert_jax.text.tokenizer import Tokenizer

_USUAL = "bert_model.ckpt"
_CONFIG = "bert_config.json"


def is_google(path: Path) -> bool:
    """Returns whether a directory is one of Google's, by its files."""
    return (path / _CONFIG).is_file()


def load(path: Path) -> tuple[ModelConfig, Converted, Tokenizer]:
    """Reads a model and its tokenizer.

    The vocabulary does not say whether it is of lower case: it is if hardly any piece has others.

    Raises:
      UserError: something is missing, damaged or does not fit.
    """
    values = huggingface.read_json(path / _CONFIG)
    if values.get("hidden_act", "gelu") == "gelu":
        values["hidden_act"] = "gelu_new"  # what Google's code has computed since February 2019
    config = huggingface.read_config(values, str(path / _CONFIG))
    tensors: dict[str, Tensor] = {}
    for name, tensor in open_bundle(_prefix(path)).items():
        if name.endswith(("/adam_m", "/adam_v")) or name == "global_step":
            continue  # of the optimizer
        transposed = name.endswith("/kernel")
        tensors[_standard(name)] = _Transposed(tensor) if transposed else tensor
    converted = names.from_foreign(tensors, config, str(path))
    tokenizer = tokenizer_lib.load(path / "vocab.txt", lowercase=_is_uncased(path / "vocab.txt"))
    huggingface.check_vocabulary(path, tokenizer, config)
    return config, converted, tokenizer


def _prefix(path: Path) -> Path:
    found = [p.with_suffix("") for p in sorted(path.glob("*.index"))]
    usual = [p for p in found if p.name == _USUAL] or found
    if len(usual) != 1:
        held = f"several: {', '.join(p.name for p in usual)}" if usual else f"no {_USUAL}.index"
        raise UserError(f"{path} must hold one checkpoint of TensorFlow; it has {held}")
    return usual[0]


def _standard(name: str) -> str:
    """Returns the standard name of one of Google's variables."""
    name = re.sub(r"/layer_(\d+)/", r"/layer/\1/", name).replace("/", ".")
    name = re.sub(r"\.(kernel|gamma|output_weights)$", ".weight", name)
    name = re.sub(r"\.(beta|output_bias)$", ".bias", name)
    return f"{name}.weight" if name.endswith("_embeddings") else name


@dataclasses.dataclass(frozen=True)
class _Transposed:
    """A dense layer's matrix, which TensorFlow keeps as [in, out]."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[::-1]

    def read(self) -> np.ndarray:
        return self.tensor.read().T


def _is_uncased(path: Path) -> bool:
    try:
        pieces = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); fetch it again") from error
    upper = sum(piece != piece.lower() for piece in pieces if not piece.startswith("["))
    return upper < 0.01 * len(pieces)
