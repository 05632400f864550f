"""Measured properties of this host's devices: matmul speed, memory, compile time."""

import contextlib
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.config import ModelConfig
from bert_jax.config.schedule import Stage
from bert_jax.distributed.fsdp import num_batch_shards
from bert_jax.errors import UserError

_ROUNDS, _ROUND_SECONDS = 7, 0.1
_MATMUL_SIZES = {"cpu": (1024,), "gpu": (4096, 8192), "tpu": (4096, 8192)}
_MOST_TOKENS = 4096  # of a matmul of the model; with more it is no faster
_CACHE_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


def compile_twice(compile_step: Callable[[], Any]) -> tuple[Any, float, float | None]:
    """Return a program, and its seconds to compile without a cache and with one, if cached."""
    before = [getattr(jax.config, name) for name in _CACHE_SETTINGS]
    with tempfile.TemporaryDirectory(prefix="bert-jax-") as folder:
        _configure_cache(folder, 0.0)
        try:
            program, cold = _timed(compile_step)
            entries = set(os.listdir(folder))
            _, cached = _timed(compile_step)
            is_hit = entries and entries == set(os.listdir(folder))
        finally:
            _configure_cache(*before)
    return program, cold, cached if is_hit else None


def _configure_cache(*values: Any) -> None:
    for name, value in zip(_CACHE_SETTINGS, values, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it keeps the settings with which it was opened


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    jax.clear_caches()  # of this process
    started = time.perf_counter()
    return function(), time.perf_counter() - started


def measure_matmul(model: ModelConfig, phase: Stage, mesh: Mesh) -> tuple[float, Sequence[int]]:
    """Return the speed and [m, k, n] of the fastest matmul, square or the feed-forward layer's."""
    tokens = min(phase.batch_size * phase.max_length // num_batch_shards(mesh), _MOST_TOKENS)
    size, inner = model.hidden_size, model.intermediate_size
    shapes = [(n, n, n) for n in _MATMUL_SIZES[mesh.devices.flat[0].platform]]
    shapes += [(tokens, size, inner), (tokens, inner, size)]
    return max((_matmul_speed(*shape, model.dtype, mesh), shape) for shape in shapes)


def _matmul_speed(m: int, k: int, n: int, dtype: str, mesh: Mesh) -> float:
    split, replicated = NamedSharding(mesh, P(mesh.axis_names)), NamedSharding(mesh, P())
    # A CPU has instructions for bfloat16 only if the result is float32.
    result = jnp.float32 if mesh.devices.flat[0].platform == "cpu" else dtype
    random = np.random.default_rng(0)
    x = jax.device_put(random.standard_normal((mesh.size * m, k), np.float32).astype(dtype), split)
    y = jax.device_put(random.standard_normal((k, n), np.float32).astype(dtype), replicated)
    matmul = jax.jit(lambda x, y: jnp.dot(x, y, preferred_element_type=result), out_shardings=split)
    jax.block_until_ready(matmul(x, y))

    def seconds(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times - 1):
            matmul(x, y)
        jax.block_until_ready(matmul(x, y))
        return (time.perf_counter() - started) / times

    times = max(1, round(_ROUND_SECONDS / seconds(2)))
    return 2.0 * m * k * n * mesh.size / statistics.median(seconds(times) for _ in range(_ROUNDS))


@contextlib.contextmanager
def out_of_memory_refused(phase: Stage, device: Any) -> Iterator[None]:
    """Raise a UserError if what runs inside does not fit in memory."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        words = ("RESOURCE_EXHAUSTED", "Out of memory")  # on a CPU, the latter
        if not isinstance(error, MemoryError) and not any(each in str(error) for each in words):
            raise
        whose = "this machine" if device.platform == "cpu" else device.device_kind
        sizes = f": {error}" if isinstance(error, MemoryError) and error.args else ""
        wrong = f"a batch of {phase.batch_size:,} × {phase.max_length:,} does not fit in the memory"
        advice = "lower data.batch_size or the sizes of the model, or raise optimizer.microbatches"
        raise UserError(f"{wrong} of {whose}{sizes}; {advice}") from error


def memory(needed: int, devices: Sequence[Any]) -> tuple[int, int | None]:
    """Return the bytes needed, of a device or of all CPU devices, which share them, and free."""
    if devices[0].platform == "cpu":
        kilobytes = _proc_field("meminfo", "MemAvailable").removesuffix(" kB")
        return needed * len(devices), int(kilobytes) << 10 if kilobytes else None
    return needed, (devices[0].memory_stats() or {}).get("bytes_limit")


def check_memory(needed: int, devices: Sequence[Any]) -> None:
    """Refuse a program that needs more bytes per device than there are."""
    needed, available = memory(needed, devices)
    if available is not None and needed > available:
        raise MemoryError(f"{needed / 2**30:,.1f} GiB of {available / 2**30:,.1f}")


def _proc_field(file: str, name: str) -> str:
    """Return the first value of a field in a file of Linux's /proc; "" on other systems."""
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")


def reset_peak_memory() -> None:
    """Let the process's peak start from here, if Linux allows it (proc(5), clear_refs)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(devices: Sequence[Any]) -> int | None:
    """Return the largest peak of the devices in bytes; for CPUs, the peak of the process."""
    if devices[0].platform == "cpu":
        unit = 1 if sys.platform == "darwin" else 1 << 10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((peak for peak in peaks if peak is not None), default=None)


def device_name(device: Any) -> str:
    """Return what a device is called; for a CPU, by Linux, with its number of cores."""
    if device.platform != "cpu":
        return device.device_kind
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return f"CPU ({_proc_field('cpuinfo', 'model name') or 'unnamed'}, {cores} cores)"
