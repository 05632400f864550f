"""The devices of this host: names, preferred dtype, memory, and what a step needs of it."""

import contextlib
import dataclasses
import math
import platform
import re
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bert_jax.config import ModelConfig, OptimizerConfig
from bert_jax.config.schedule import Stage
from bert_jax.distributed.fsdp import num_batch_shards
from bert_jax.errors import UserError
from bert_jax.models.architecture import architecture
from bert_jax.models.attention import FUSED, WINDOWS, attention_route
from bert_jax.storage.machine import PROC, available_memory, num_cores, proc_field

_FLOAT32 = 4  # bytes
# Measured (benchmarks/records/2026-11-24-memory): what a process holds beside its arrays, and by
# how much more than the compiler's memory it grows.
_LIBRARIES, _GROWTH = 0.7 * 2**30, 1.15
# Linux's names of the instructions: x86's AMX and AVX-512, and Arm's.
_BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}
_AMPERE = 8.0  # the first compute capability of NVIDIA with bfloat16


def device_name(device: Any) -> str:
    """Return what a device is called; for a CPU, by Linux, with its number of cores."""
    if device.platform != "cpu":
        return device.device_kind
    name = proc_field("cpuinfo", "model name") or platform.machine()  # such as arm64
    return f"CPU ({name}, {num_cores()} cores)"


def resolve_dtype(model: ModelConfig, device: Any) -> ModelConfig:
    """Return the model with a `dtype` of "auto" replaced by the device's preferred one."""
    if model.dtype != "auto":
        return model
    return dataclasses.replace(model, dtype=preferred_dtype(device))


def preferred_dtype(device: Any) -> str:
    """Return "bfloat16" for a device that has instructions for it."""
    if device.platform == "cpu":
        names = proc_field("cpuinfo", "flags") or proc_field("cpuinfo", "Features")
        has_bfloat16 = not _BFLOAT16.isdisjoint(names.split())
    elif device.platform == "gpu":
        version = str(device.compute_capability)  # AMD's is a name, such as gfx942
        has_bfloat16 = not re.fullmatch(r"[\d.]+", version) or float(version) >= _AMPERE
    else:
        has_bfloat16 = True
    return "bfloat16" if has_bfloat16 else "float32"


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that memory did not suffice."""
    texts = ("RESOURCE_EXHAUSTED", "Out of memory")  # on a CPU, the latter
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
    return isinstance(error, MemoryError) or (is_of_jax and any(t in str(error) for t in texts))


@contextlib.contextmanager
def out_of_memory_refused(stage: Stage, device: Any) -> Iterator[None]:
    """Raise a UserError if what runs inside does not fit in memory."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        owner = "this machine" if device.platform == "cpu" else device.device_kind
        sizes = f": {error}" if isinstance(error, MemoryError) and error.args else ""
        raise UserError(
            f"a batch of {stage.batch_size:,} × {stage.max_length:,} does not fit in the memory of "
            f"{owner}{sizes}; lower data.batch_size, that of the phase, or the sizes of the model, "
            "or raise optimizer.microbatches; a run that resumes may change model.remat and "
            "parallel instead"
        ) from error


def check_fits(model: ModelConfig, stage: Stage, optimizer: OptimizerConfig, mesh: Mesh) -> None:
    """Refuse sizes that certainly do not fit in the memory of the mesh's devices."""
    with out_of_memory_refused(stage, mesh.devices.flat[0]):
        check_memory(least_memory(model, stage, optimizer, mesh), mesh.local_devices)


def check_memory(per_device: int, devices: Sequence[Any]) -> None:
    """Raise a MemoryError if a program needs more bytes per device than there are."""
    needed = per_device * len(devices) if devices[0].platform == "cpu" else per_device
    memory = available(devices)
    if memory is not None and needed > memory:
        raise MemoryError(f"{needed / 2**30:,.1f} GiB of {memory / 2**30:,.1f}")


def available(devices: Sequence[Any]) -> int | None:
    """Return the bytes available to a device, or to all CPU devices together, if known."""
    if devices[0].platform == "cpu":
        return available_memory()
    return (devices[0].memory_stats() or {}).get("bytes_limit")


def least_memory(model: ModelConfig, stage: Stage, optimizer: OptimizerConfig, mesh: Mesh) -> int:
    """Return the bytes that a training step certainly needs on a device."""
    size = model.hidden_size
    weights = model.num_hidden_layers * (4 * size**2 + 2 * size * model.intermediate_size)
    weights += model.vocab_size * architecture(model).embedding_size(model)
    # An accelerator's compiler may decide to recompute.
    recomputes = model.remat or mesh.devices.flat[0].platform != "cpu"
    kept = kept_activations(model, stage, optimizer.microbatches, mesh, recomputes=recomputes)
    # Float32 weights with their moments: two, or with Muon one at least.
    copies = 2 if optimizer.name == "muon" else 3
    return int(copies * _FLOAT32 * weights / (mesh.shape["fsdp"] * mesh.shape["tensor"]) + kept)


def kept_activations(
    model: ModelConfig, stage: Stage, microbatches: int, mesh: Mesh, *, recomputes: bool
) -> float:
    """Return the bytes that a device keeps of an encoder's forward pass for the backward pass.

    They are the input of each layer and, unless it is recomputed, the operands of its matmuls and
    its attention map, with dropout a second one. Fused attention has no map. With dropout an H200
    kept a third one and a byte of each pair (benchmarks/records/2026-11-28-h200).
    """
    size, layers, tensor = model.hidden_size, model.num_hidden_layers, mesh.shape["tensor"]
    platform, itemsize = mesh.devices.flat[0].platform, jnp.dtype(model.dtype).itemsize
    width = size
    if not recomputes:
        maps = 1.0
        if model.attention_probs_dropout_prob > 0:
            maps = 3 + 1 / itemsize if platform == "gpu" else 2
        keys = _keys_in_maps(model, platform, stage.max_length)
        attention_maps = maps * model.num_attention_heads * keys / layers
        width = 2 * size + (4 * size + attention_maps + model.intermediate_size) / tensor
    tokens = stage.batch_size * stage.max_length / (microbatches * num_batch_shards(mesh))
    return tokens * layers * width * itemsize


def _keys_in_maps(model: ModelConfig, platform: str, length: int) -> int:
    """Return the keys that a token has in the attention maps of all layers together."""
    keys = 0
    for window, layers in Counter(architecture(model).windows(model)).items():
        route = attention_route(model, platform, length, window=window, packed=False, training=True)
        # A block of queries has the keys of the blocks beside it too.
        keys += layers * {FUSED: 0, WINDOWS: 3 * window}.get(route.name, length)
    return keys


def shard_bytes(tree: Any) -> int:
    """Return the bytes of one device's shards of arrays."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def total_memory(stats: Any) -> int:
    """Return the bytes of each device in `compiled.memory_analysis()`."""
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return held + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes


def step_memory(stats: Any, devices: Sequence[Any]) -> int:
    """Return the bytes of a device that a compiled step takes; of CPUs, those of the process.

    Arrays count that are there already beside the step's arguments, such as the weights of the
    checkpoint that a fine-tuning starts from. `stats` is `compiled.memory_analysis()`.
    """
    others = shard_bytes(jax.live_arrays()) - stats.argument_size_in_bytes
    total = total_memory(stats) + max(0, others)
    if devices[0].platform != "cpu":
        return total
    return int(_LIBRARIES + _GROWTH * len(devices) * total)


def describe_memory(needed: int, mesh: Mesh) -> str:
    """Return the memory that a step takes, as `step_memory` has it, beside what there is."""
    memory = available(mesh.local_devices)
    of = f" of {memory / 2**30:,.1f} GiB" if memory else ""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return f"{needed / 2**30:,.2f} GiB{of}{'' if is_cpu else ' on each device'}"


def reset_peak_memory() -> None:
    """Let the process's peak start from here, if Linux allows it (proc(5), clear_refs)."""
    with contextlib.suppress(OSError):
        (PROC / "self/clear_refs").write_text("5")


def peak_memory(devices: Sequence[Any]) -> int | None:
    """Return the largest peak of the devices in bytes; for CPUs, the peak of the process."""
    if devices[0].platform == "cpu":
        unit = 1 if sys.platform == "darwin" else 1 << 10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((peak for peak in peaks if peak is not None), default=None)
