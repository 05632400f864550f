"""Measurements of `bert-jax benchmark`: time, throughput and memory of a train step here."""

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax.sharding import Mesh

from bert_jax.batches import loader
from bert_jax.config import TrainConfig
from bert_jax.config.schedule import Stage, make_schedule
from bert_jax.distributed.mesh import shard_batch
from bert_jax.errors import TrainingError
from bert_jax.planning import machine, synthetic
from bert_jax.planning.chips import chip_of
from bert_jax.planning.costs import model_flops, total_memory
from bert_jax.text.store import Corpus
from bert_jax.training.masking import make_masking
from bert_jax.training.setup import set_up

_WARM_UP = 6  # steps before those that are timed
_TRACED = 5  # steps
_IN_FLIGHT = 4  # steps; two keep the devices busy, and many more would exceed a time limit

# The label, key, factor and digits of each row of the table.
_ROWS = (
    ("steps timed", "steps", 1, 0),
    ("step, mean                ms", "mean", 1e3, 2),
    ("      lower quartile      ms", "lower_quartile", 1e3, 2),
    ("      median              ms", "median", 1e3, 2),
    ("      upper quartile      ms", "upper_quartile", 1e3, 2),
    ("sequences                 /s", "sequences_per_second", 1, 1),
    ("tokens without padding    /s", "tokens_per_second", 1, 0),
    ("padding                    %", "padding", 100, 1),
    ("model's operations   GFLOP/s", "model_flops_per_second", 1e-9, 1),
    ("MFU of the datasheet       %", "mfu", 100, 1),
    ("MFU of a matmul alone      %", "mfu_of_matmul", 100, 1),
)


def measure(
    config: TrainConfig,
    phase: Stage,
    corpus: Corpus | None,
    log: Callable[[str], None],
    *,
    steps: int = 50,
    seconds: float = 60.0,
    trace_folder: str | None = None,
) -> dict[str, Any]:
    """Time steps on random sequences, and of a corpus if given; return bytes, seconds and rates."""
    load, _, _ = os.getloadavg()
    devices = jax.devices()
    device = devices[0]
    config = synthetic.resolve(config, device)
    model, mesh = config.model, synthetic.make_checked_mesh(config, phase, devices)
    masking = make_masking(corpus.tokenizer, phase, config.data) if corpus else None
    with machine.out_of_memory_refused(phase, device):
        setup = set_up(config, make_schedule(config).rate, mesh)
        jitted = synthetic.train_step(setup, config, phase, masking)
        log("compiling the step, without a cache and with one")
        arguments = setup.abstract_state, synthetic.abstract_batch(config, phase, mesh)
        step, cold, cached = machine.compile_twice(lambda: jitted.lower(*arguments).compile())
        needed = total_memory(step.memory_analysis())
        machine.check_memory(needed, devices)
        machine.reset_peak_memory()
        state = setup.new_state()
        parameters = sum(x.size for x in jax.tree.leaves(state.params))
        random = itertools.repeat((shard_batch(mesh, synthetic.random_batch(config, phase)), 0.0))
        kinds: dict[str, Iterator[Any]] = {"random": random}
        if corpus:
            kinds["text"] = text_batches(corpus, config, phase, mesh)
        timings = {}
        for kind, batches in kinds.items():
            log(f"steps with {kind} sequences")
            state, _, _ = take_steps(step, state, batches, _WARM_UP, seconds)
            state, *timings[kind] = take_steps(step, state, batches, steps, seconds)
        if trace_folder:
            log(f"a trace of {_TRACED} steps")
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # it slows the steps down
            with jax.profiler.trace(trace_folder, profiler_options=options):
                state, _, _ = take_steps(step, state, random, _TRACED, seconds)
        peak = machine.peak_memory(devices)
        log("matmuls alone")
        matmul_speed, matmul_shape = machine.measure_matmul(model, phase, mesh)
    chip = chip_of(device) if model.dtype == "bfloat16" else None
    stated = chip.peak * mesh.size if chip else None
    peaks = {"mfu": stated, "mfu_of_matmul": matmul_speed}
    flops = model_flops(model, phase, pairs=config.data.pairs != "none")
    rates = {name: _rates(phase, each, flops, peaks) for name, each in timings.items()}
    return {
        "device": machine.device_name(device),
        "platform": device.platform,
        "devices": mesh.size,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "batch_size": phase.batch_size,
        "max_length": phase.max_length,
        "max_predictions": phase.max_predictions,
        "parameters": parameters,
        **rates,
        "matmul_flops_per_second": matmul_speed,
        "matmul_shape": matmul_shape,
        "stated_flops_per_second": stated,
        "compile_seconds": {"cold": cold, "cached": cached},
        "peak_memory_bytes": peak,
        "compiler_memory_bytes_per_device": needed,
        "load_average": load,
        "config": dataclasses.asdict(config),
    }


def take_steps(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: Iterator[Any],  # pairs of a batch and the share of padding in it
    steps: int,
    seconds: float,
) -> tuple[Any, np.ndarray, float]:
    """Return the state after steps taken as in training, the seconds of each, and their padding."""
    metrics, padding, times = [], [], [time.perf_counter()]

    def wait() -> None:
        jax.block_until_ready(metrics[len(times) - 1])
        times.append(time.perf_counter())

    while len(metrics) < steps and not (metrics and time.perf_counter() - times[0] >= seconds):
        batch, share = next(batches)
        state, metric = step(state, batch)
        metrics.append(metric)
        padding.append(share)
        if len(metrics) - len(times) == _IN_FLIGHT - 1:
            wait()
    while len(times) <= len(metrics):
        wait()
    for number, metric in enumerate(jax.device_get(metrics), 1):
        for name, value in metric.items():
            if not math.isfinite(value.total):
                where = f"{name} is {value.total} at step {number} of the benchmark"
                raise TrainingError(f"{where}; lower optimizer.learning_rate")
    return state, np.diff(times), float(np.mean(padding))


def _rates(
    phase: Stage, timing: Any, flops: float, peaks: Mapping[str, float | None]
) -> dict[str, Any]:
    """Return the figures of some steps; all rates are of the mean."""
    seconds, padding = timing
    low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
    mean = float(seconds.mean())
    times = {"mean": mean, "lower_quartile": low, "median": median, "upper_quartile": high}
    speed = phase.batch_size / mean
    return {
        "steps": len(seconds),
        "step_seconds": times,
        "sequences_per_second": speed,
        "tokens_per_second": speed * phase.max_length * (1 - padding),
        "padding": padding,
        "model_flops_per_second": speed * flops,
        **{name: speed * flops / peak if peak else None for name, peak in peaks.items()},
    }


def text_batches(
    corpus: Corpus, config: TrainConfig, phase: Stage, mesh: Mesh
) -> Iterator[tuple[dict[str, jax.Array], float]]:
    """Yield the batches of a phase without end, prefetched as in training, with their padding."""
    endless = dataclasses.replace(phase, first_step=0, end=1 << 40)
    batches = loader.TrainBatches(corpus, [endless], config.data, config.seed)
    for batch in loader.prefetch(batches, 0):
        yield shard_batch(mesh, batch), float((batch["attention_mask"] == 0).mean())


def as_text(result: dict[str, Any], name: str) -> str:
    """Return a result as tables, for the config of a name."""
    model, kinds = result["config"]["model"], [k for k in ("random", "text") if k in result]
    lines = [
        f"{name}: {result['batch_size']:,} sequences of {result['max_length']} per step, "
        f"{result['max_predictions']} predictions each",
        f"{result['parameters']:,} parameters: {model['num_hidden_layers']} layers of "
        f"{model['hidden_size']}, {model['dtype']}",
        f"{result['devices']} × {result['device']}, JAX {result['jax']}",
        "",
        f"{'sequences':<30}" + "".join(f"{kind:>14}" for kind in kinds),
    ]
    for label, key, factor, digits in _ROWS:
        values = [(result[kind] | result[kind]["step_seconds"])[key] for kind in kinds]
        cells = ("unknown" if v is None else f"{factor * v:,.{digits}f}" for v in values)
        lines.append(f"{label:<30}" + "".join(f"{cell:>14}" for cell in cells))
    compile_seconds, peak = result["compile_seconds"], result["peak_memory_bytes"]
    cached, stated = compile_seconds["cached"], result["stated_flops_per_second"]
    m, k, n = result["matmul_shape"]
    needed = result["compiler_memory_bytes_per_device"] / 2**20
    beside = {
        "matmul alone": f"{result['matmul_flops_per_second'] / 1e9:,.1f} GFLOP/s, {m} × {k} × {n}",
        "datasheet": f"{stated / 1e9:,.0f} GFLOP/s" if stated else "unknown",
        "compilation": f"{compile_seconds['cold']:.1f} s",
        "  with a cache on disk": "not cached" if cached is None else f"{cached:.1f} s",
        "peak memory": "unknown" if peak is None else f"{peak / 2**20:,.0f} MiB",
        "  by the compiler": f"{needed:,.0f} MiB per device",
        "load average": f"{result['load_average']:.1f}",
    }
    return "\n".join([*lines, "", *(f"{what:<30}{value}" for what, value in beside.items())])
