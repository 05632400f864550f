"""In which type a device computes fastest: what `model.dtype` "auto" stands for."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from bert_jax.config import ModelConfig

_CPU = Path("/proc/cpuinfo")
# Linux's names of the instructions: x86's AMX and AVX-512, and Arm's.
_BFLOAT16 = re.compile(r"\b(amx_bf16|avx512_bf16|bf16)\b")
_FIRST_OF_NVIDIA = 8.0  # compute capability of Ampere


def resolve_dtype(model: ModelConfig, device: Any) -> ModelConfig:
    """Returns the model, with what is fastest on a device for a `dtype` of "auto"."""
    return (
        dataclasses.replace(model, dtype=preferred_dtype(device))
        if model.dtype == "auto"
        else model
    )


def preferred_dtype(device: Any) -> str:
    """Returns "bfloat16" for a device that has instructions for it, or else "float32"."""
    if device.platform == "cpu":
        has = _CPU.is_file() and _BFLOAT16.search(_CPU.read_text(errors="replace"))
    elif device.platform == "gpu":
        version = str(device.compute_capability)  # of AMD's a name, such as gfx942
        has = not re.fullmatch(r"[\d.]+", version) or float(version) >= _FIRST_OF_NVIDIA
    else:
        has = True
    return "bfloat16" if has else "float32"
