"""Measurements of `bert-jax benchmark`: time, throughput and memory of a train step here."""

import dataclasses
import functools
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax import console
from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.config.schedule import Stage
from bert_jax.distributed import devices as device_lib
from bert_jax.distributed.fsdp import num_batch_shards
from bert_jax.distributed.mesh import shard_batch
from bert_jax.errors import TrainingError
from bert_jax.models.architecture import describe_attention
from bert_jax.planning import profile, synthetic
from bert_jax.planning.chips import chip_of
from bert_jax.planning.costs import model_flops
from bert_jax.training.setup import Setup

_WARM_UP = 6  # steps before those that are timed
_TRACED = 5  # steps
_IN_FLIGHT = 4  # steps; two keep the devices busy, and many more would exceed a time limit
_ROUNDS, _ROUND_SECONDS = 7, 0.1  # of a matmul alone
_MATMUL_SIZES = {"cpu": (1024,), "gpu": (4096, 8192), "tpu": (4096, 8192)}
_COPIED = {"cpu": 1 << 28, "gpu": 1 << 31, "tpu": 1 << 30}  # bytes, to measure memory
_COPIES = 4  # in one round
_MOST_TOKENS = 4096  # of a matmul of the model; with more it is no faster


def measure(
    config: TrainConfig,
    stage: Stage,
    *,
    steps: int = 50,
    seconds: float = 60.0,
    trace_folder: str | None = None,
    before_timing: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Time steps on random sequences; return bytes, seconds and rates.

    `before_timing` is called once the step is compiled, such as to wait for the devices.
    """
    load, _, _ = os.getloadavg()
    devices = jax.devices()
    config = synthetic.resolve(config, devices[0])
    setup = synthetic.checked_setup(config, [stage], devices)
    mesh = setup.layout.mesh
    with device_lib.out_of_memory_refused(stage, devices[0]):
        console.follow("compiling the step")
        step, compile_seconds = _compile(setup, config, stage, mesh)
        needed = device_lib.total_memory(step.memory_analysis())
        device_lib.check_memory(needed, devices)
        before_timing()
        device_lib.reset_peak_memory()
        state = setup.new_state()
        parameters = sum(x.size for x in jax.tree.leaves(state.params))
        batch = shard_batch(mesh, synthetic.random_batch(config, stage))
        console.follow("steps with random sequences")
        state, _ = take_steps(step, state, batch, _WARM_UP, seconds)
        state, times = take_steps(step, state, batch, steps, seconds)
        kinds = None
        if trace_folder:
            console.follow(f"a trace of up to {_TRACED} steps")
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # it slows the steps down
            with jax.profiler.trace(trace_folder, profiler_options=options):
                _, traced_times = take_steps(step, state, batch, _TRACED, seconds)
            operations = profile.operations(step.as_text())
            traced = profile.read_trace(Path(trace_folder), operations)
            kinds = profile.shares(traced, operations, steps=len(traced_times) * mesh.size)
        peak = device_lib.peak_memory(devices)
        console.follow("matmuls alone")
        matmul_speed, matmul_shape = measure_matmul(config.model, stage, mesh)
        memory_rate = kinds and measure_memory(mesh)
    chip = chip_of(devices[0]) if config.model.dtype == "bfloat16" else None
    stated = chip.peak * mesh.size if chip else None
    return {
        "device": device_lib.device_name(devices[0]),
        "platform": devices[0].platform,
        "devices": mesh.size,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "batch_size": stage.batch_size,
        "max_length": stage.max_length,
        "max_predictions": stage.max_predictions,
        "attention": describe_attention(
            config.model, devices[0].platform, [stage.max_length], packed=config.data.packing
        ),
        "parameters": parameters,
        "random": _rates(config, stage, times, {"mfu": stated, "mfu_of_matmul": matmul_speed}),
        "matmul_flops_per_second": matmul_speed,
        "matmul_shape": matmul_shape,
        "stated_flops_per_second": stated,
        "memory_bytes_per_second": memory_rate,
        "kinds": kinds,
        "compile_seconds": compile_seconds,
        "peak_memory_bytes": peak,
        "compiler_memory_bytes_per_device": needed,
        "load_average": load,
        "config": dataclasses.asdict(config),
    }


def _compile(setup: Setup, config: TrainConfig, stage: Stage, mesh: Mesh) -> tuple[Any, float]:
    """Return the compiled step and the seconds that it took, without JAX's caches."""
    batch = synthetic.abstract_batch(config, stage, mesh)
    used = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    _use_cache(False)
    jax.clear_caches()  # of this process
    try:
        started = time.perf_counter()
        step = synthetic.train_step(setup, config, stage).lower(setup.abstract_state, batch)
        return step.compile(), time.perf_counter() - started
    finally:
        _use_cache(used)


def _use_cache(used: bool) -> None:
    """Let JAX use its folder of compiled programs, or not."""
    jax.config.update("jax_enable_compilation_cache", used)
    compilation_cache.reset_cache()  # it keeps the settings with which it was opened


def take_steps(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any, steps: int, seconds: float
) -> tuple[Any, np.ndarray]:
    """Return the state after steps taken as in training, and the seconds of each."""
    times, metrics, in_flight = [time.perf_counter()], [], deque()

    def wait() -> None:
        jax.block_until_ready(in_flight.popleft())
        times.append(time.perf_counter())

    while len(metrics) < steps and not (metrics and time.perf_counter() - times[0] >= seconds):
        state, metric = step(state, batch)
        metrics.append(metric)
        in_flight.append(metric)
        # On a CPU the call itself may have taken the step.
        while in_flight and (len(in_flight) == _IN_FLIGHT or _is_ready(in_flight[0])):
            wait()
    while in_flight:
        wait()
    for number, metric in enumerate(jax.device_get(metrics), 1):
        for name, value in metric.items():
            if not math.isfinite(value.total):
                raise TrainingError(
                    f"{name} is {value.total} at step {number} of the benchmark; "
                    "lower optimizer.learning_rate"
                )
    return state, np.diff(times)


def _is_ready(metric: Any) -> bool:
    return all(array.is_ready() for array in jax.tree.leaves(metric))


def _rates(
    config: TrainConfig, stage: Stage, times: np.ndarray, peaks: Mapping[str, float | None]
) -> dict[str, Any]:
    """Return the figures of some steps; all rates are of the mean."""
    mean = float(times.mean())
    speed = stage.batch_size / mean
    counted = model_flops(config, stage)
    flops = counted and speed * counted
    return {
        "steps": len(times),
        "step_seconds": {"mean": mean, "median": float(np.median(times))},
        "sequences_per_second": speed,
        "tokens_per_second": speed * stage.max_length,
        "model_flops_per_second": flops,
        **{name: flops / peak if flops and peak else None for name, peak in peaks.items()},
    }


def measure_matmul(model: ModelConfig, stage: Stage, mesh: Mesh) -> tuple[float, list[int]]:
    """Return the speed and [m, k, n] of the fastest matmul, square or the feed-forward layer's."""
    tokens = min(stage.batch_size * stage.max_length // num_batch_shards(mesh), _MOST_TOKENS)
    size, inner = model.hidden_size, model.intermediate_size
    shapes = [[n, n, n] for n in _MATMUL_SIZES[mesh.devices.flat[0].platform]]
    shapes += [[tokens, size, inner], [tokens, inner, size]]
    return max((_matmul_speed(tuple(shape), model.dtype, mesh), shape) for shape in shapes)


@functools.cache  # of several batches, each with operands that take seconds to draw
def _matmul_speed(shape: tuple[int, ...], dtype: str, mesh: Mesh) -> float:
    """Return the operations per second of a matmul [m, k] × [k, n] on each device at once."""
    m, k, n = shape
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


def measure_memory(mesh: Mesh) -> float:
    """Return the bytes per second that a device reads and writes, of arrays beyond its caches."""
    size = _COPIED[mesh.devices.flat[0].platform]
    everywhere = NamedSharding(mesh, P(mesh.axis_names))
    x = jnp.zeros((mesh.size, size // 4), jnp.float32, device=everywhere)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    times = []
    for _ in range(_ROUNDS + 1):
        started = time.perf_counter()
        for _ in range(_COPIES):  # one alone would also measure how it is started
            x = add(x)
        jax.block_until_ready(x)
        times.append((time.perf_counter() - started) / _COPIES)
    return 2 * size / statistics.median(times[1:])  # the first compiles


def _kinds_as_text(result: dict[str, Any]) -> list[str]:
    """Return a table of the kinds of operations, beside the least time that each could take."""
    step, devices = result["random"]["step_seconds"]["median"], result["devices"]
    counted, lines = result["random"]["model_flops_per_second"], []
    for kind, each in result["kinds"].items():
        least = each["bytes"] / result["memory_bytes_per_second"]
        if kind == profile.MATMULS and counted:
            flops = counted * result["random"]["step_seconds"]["mean"]
            least = max(least, flops / result["matmul_flops_per_second"])
        lines.append(
            f"{kind:<24}{each['share']:6.1%}{1e3 * step * each['share']:12.2f} ms"
            f"{each['bytes'] / 1e6:12,.1f} MB{1e3 * least:12.2f} ms"
        )
    rate = f"{result['memory_bytes_per_second'] / 1e9:,.1f} GB/s"
    matmul = f"{result['matmul_flops_per_second'] / 1e9:,.0f} GFLOP/s"
    each_device = ", of each device" if devices > 1 else ""
    return [
        "",
        f"{'kind of operation':<24}{'share':>6}{'time':>15}{'moved':>15}{'at least':>15}",
        *lines,
        f"at least: what is moved{each_device} at {rate} from memory, and matmuls at {matmul}",
    ]


def as_text(result: dict[str, Any], name: str) -> str:
    """Return a result as a table, for the config of a name."""
    model, rates = result["config"]["model"], result["random"]
    seconds, stated = rates["step_seconds"], result["stated_flops_per_second"]
    flops = rates["model_flops_per_second"]
    matmul = " × ".join(map(str, result["matmul_shape"]))

    def known(value: float | None, form: str, unit: str) -> str:
        return "unknown" if value is None else f"{value:{form}} {unit}".strip()

    rows = {
        "steps timed": f"{rates['steps']:,}",
        "step, mean": f"{1e3 * seconds['mean']:,.2f} ms",
        "  median": f"{1e3 * seconds['median']:,.2f} ms",
        "sequences": f"{rates['sequences_per_second']:,.1f} /s",
        "tokens": f"{rates['tokens_per_second']:,.0f} /s",
        "model's operations": known(flops and flops / 1e9, ",.1f", "GFLOP/s"),
        "MFU of the datasheet": known(rates["mfu"], ".1%", ""),
        "MFU of a matmul alone": known(rates["mfu_of_matmul"], ".1%", ""),
        "matmul alone": f"{result['matmul_flops_per_second'] / 1e9:,.1f} GFLOP/s, {matmul}",
        "datasheet": known(stated and stated / 1e9, ",.0f", "GFLOP/s"),
        "compilation": f"{result['compile_seconds']:.1f} s",
        "peak memory": known(
            result["peak_memory_bytes"] and result["peak_memory_bytes"] / 2**20, ",.0f", "MiB"
        ),
        "  by the compiler": (
            f"{result['compiler_memory_bytes_per_device'] / 2**20:,.0f} MiB per device"
        ),
        "load average": f"{result['load_average']:.1f}",
    }
    lines = [
        f"{name}: {result['batch_size']:,} sequences of {result['max_length']} per step, "
        f"{result['max_predictions']} predictions each",
        f"{result['parameters']:,} parameters: "
        f"{console.counted(model['num_hidden_layers'], 'layer')} of "
        f"{model['hidden_size']}, {model['dtype']}",
        f"{result['devices']} × {result['device']}, JAX {result['jax']}",
        f"attention {result['attention']}",
        "",
        *(f"{label:<24}{value}" for label, value in rows.items()),
        *(_kinds_as_text(result) if result["kinds"] else []),
    ]
    return "\n".join(lines)
