"""The compute dtype that `model.dtype` "auto" stands for on a device."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from bert_jax.config import ModelConfig

_CPUINFO = Path("/proc/cpuinfo")
# Linux's names of the instructions: x86's AMX and AVX-512, and Arm's.
_BFLOAT16 = re.compile(r"\b(amx_bf16|avx512_bf16|bf16)\b")
_AMPERE = 8.0  # the first compute capability of NVIDIA with bfloat16


def resolve_dtype(model: ModelConfig, device: Any) -> ModelConfig:
    """Return the model with a `dtype` of "auto" replaced by the device's preferred one."""
    if model.dtype != "auto":
        return model
    return dataclasses.replace(model, dtype=preferred_dtype(device))


def preferred_dtype(device: Any) -> str:
    """Return "bfloat16" for a device that has instructions for it."""
    if device.platform == "cpu":
        has = _CPUINFO.is_file() and _BFLOAT16.search(_CPUINFO.read_text(errors="replace"))
    elif device.platform == "gpu":
        version = str(device.compute_capability)  # AMD's is a name, such as gfx942
        has = not re.fullmatch(r"[\d.]+", version) or float(version) >= _AMPERE
    else:
        has = True
    return "bfloat16" if has else "float32"
