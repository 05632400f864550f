"""Weights in safetensors files: one file, or several with an index; tensors are read on demand."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from bert_jax.convert.names import Tensors
from bert_jax.errors import UserError
from bert_jax.settings import read_json

_FILE, _INDEX, _PICKLE = "model.safetensors", "model.safetensors.index.json", "*.bin"


def has_weights(path: Path) -> bool:
    """Return whether a directory has the weights of a model of `transformers`, even as a pickle."""
    return any(any(path.glob(name)) for name in (_FILE, _INDEX, _PICKLE))


def open_weights(path: Path) -> Tensors:
    """Return the tensors of a directory by name; refuse a pickle."""
    tensors = {}
    for file in _files(path):
        try:
            with safetensors.safe_open(str(file), "np") as opened:
                tensors |= {name: partial(_read, file, name) for name in opened.offset_keys()}
        except (OSError, safetensors.SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{file} is damaged ({reason}); fetch it again") from error
    return tensors


def _files(path: Path) -> list[Path]:
    if (path / _INDEX).exists():
        names = read_json(path / _INDEX, "fetch it again").get("weight_map")
        names = [str(name) for name in names.values()] if isinstance(names, dict) else []
        if not names or not all(name.isprintable() for name in names):
            raise UserError(f"{path / _INDEX} has no weight_map of files; fetch it again")
        return [path / name for name in sorted({Path(name).name for name in names})]
    if (path / _FILE).exists():
        return [path / _FILE]
    pickle = next(path.glob(_PICKLE))
    raise UserError(
        f"{path} has its weights as a pickle, {pickle.name}, which could run any code and is not "
        f"read; convert it to {_FILE} where torch is installed: python -c "
        "'import torch, safetensors.torch as s; s.save_file({k: v.clone() for k, v in "
        f'torch.load("{pickle}", weights_only=True).items()}}, "{path / _FILE}")\''
    )


def _read(file: Path, name: str) -> np.ndarray:
    # Opened for each tensor: what was read of an open file stays in memory beside the copies.
    with safetensors.safe_open(str(file), "np") as opened:
        try:
            return opened.get_tensor(name)
        except AttributeError as error:  # NumPy has no such type
            raise UserError(f"{file}: {name} is not floating point, or of 8 bits") from error


def write_weights(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write float32 weights one at a time, in less memory than the library (docs/parity.md)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
