"""The dtype that "auto" stands for."""

import types

import jax
import pytest

from bert_jax.config import ModelConfig
from bert_jax.distributed.devices import preferred_dtype, resolve_dtype
from bert_jax.storage import machine


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("flags : fpu avx2 avx512f avx512_bf16 sha_ni", "bfloat16"),
        ("flags : fpu amx_tile amx_bf16", "bfloat16"),
        ("Features : fp asimd bf16 i8mm", "bfloat16"),
        ("flags : fpu avx2 avx512f avx512vl", "float32"),
        (None, "float32"),  # another system than Linux
    ],
)
def test_of_a_cpu_by_its_instructions(flags, dtype, tmp_path, monkeypatch):
    if flags:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    monkeypatch.setattr(machine, "PROC", tmp_path)
    assert resolve_dtype(ModelConfig(dtype="auto"), jax.devices()[0]).dtype == dtype
    assert resolve_dtype(ModelConfig(), jax.devices()[0]).dtype == "float32"


@pytest.mark.parametrize(
    ("platform", "version", "dtype"),
    [
        ("gpu", "7.5", "float32"),
        ("gpu", "9.0", "bfloat16"),
        ("gpu", "gfx942", "bfloat16"),
        ("tpu", "", "bfloat16"),
    ],
)
def test_of_an_accelerator(platform, version, dtype):
    values = {"platform": platform, "compute_capability": version, "device_kind": "chip"}
    device = types.SimpleNamespace(**values)
    assert preferred_dtype(device) == dtype
