"""How fast the train step of a config is on the devices of this host: `bert-jax benchmark`."""

import dataclasses
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib.version
import numpy as np

from bert_jax.batches import Batch, loader
from bert_jax.config import Phase, TrainConfig
from bert_jax.distributed.mesh import (
    check_divides,
    check_model,
    init_sharded,
    make_mesh,
    shard_batch,
)
from bert_jax.distributed.precision import resolve_dtype
from bert_jax.errors import TrainingError
from bert_jax.planning import machine
from bert_jax.planning.chips import chip_of
from bert_jax.planning.costs import model_flops, total_memory
from bert_jax.planning.synthetic import abstract_batch, random_batch, set_up
from bert_jax.text.prepare import resolve_vocab_size
from bert_jax.text.store import Corpus
from bert_jax.training.masking import make_masking

_WARM_UP = 6  # steps before those that are timed
_TRACED = 5  # steps
_IN_FLIGHT = 4  # steps; two keep the devices busy, and many more would exceed a time limit


def measure(
    config: TrainConfig,
    phase: Phase,
    corpus: Corpus | None,
    log: Callable[[str], None],
    *,
    steps: int = 50,
    seconds: float = 60.0,
    trace_folder: str | None = None,
) -> dict[str, Any]:
    """Measure the train step of a phase on random sequences, and with a corpus on its own too.

    Args:
      config: of the run, valid.
      phase: its length and batch.
      corpus: the text.
      log: prints what is being done.
      steps: to time of each kind, at most.
      seconds: to time them, at most.
      trace_folder: where to write a trace of some steps.

    Returns:
      Figures for JSON: bytes, seconds, and operations per second of all devices.

    Raises:
      UserError: a batch does not fit.
      TrainingError: a loss or a gradient is not finite.
    """
    load, _, _ = os.getloadavg()
    mesh = make_mesh(config.parallel)
    device = mesh.devices.flat[0]
    model = dataclasses.replace(
        resolve_dtype(config.model, device), vocab_size=resolve_vocab_size(config, None)
    )
    config = dataclasses.replace(config, model=model)
    check_model(model, mesh, [phase.max_length], packed=config.data.packing)
    check_divides(phase.batch_size, config.optimizer.microbatches, mesh)
    masking = make_masking(corpus.tokenizer, phase, config.data) if corpus else None
    with machine.out_of_memory_refused(phase, device):
        setup = set_up(config, phase, mesh, masking)
        log("compiling the step, without a cache and with one")
        arguments = setup.abstract_state, abstract_batch(config, phase, mesh)
        step, cold, cached = machine.compile_twice(lambda: setup.jit().lower(*arguments).compile())
        needed = total_memory(step.memory_analysis())
        machine.check_memory(phase, needed, list(mesh.devices.flat))
        machine.reset_peak_memory()
        state = init_sharded(setup.new_state, setup.layout.state, jax.random.key(config.seed))
        parameters = sum(x.size for x in jax.tree.leaves(state.params))
        random = itertools.repeat(shard_batch(mesh, random_batch(config, phase)))
        kinds: dict[str, Iterator[Any]] = {"random": random}
        if corpus:
            batches = text_batches(corpus, config, phase)
            kinds["text"] = (shard_batch(mesh, batch) for batch in batches)
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
        peak = machine.peak_memory(list(mesh.devices.flat))
        log("matmuls alone")
        matmul_speed, matmul_shape = machine.measure_matmul(model, phase, mesh)
    chip = chip_of(device) if model.dtype == "bfloat16" else None
    stated = chip.peak * mesh.size if chip else None
    flops = model_flops(model, phase, pairs=config.data.pairs != "none")
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
        **{
            name: _rates(phase, seconds, padding, flops, stated, matmul_speed)
            for name, (seconds, padding) in timings.items()
        },
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
    batches: Iterator[Any],
    steps: int,
    seconds: float,
) -> tuple[Any, np.ndarray, float]:
    """Take steps as in training, a few in flight, until there are enough of them.

    Returns:
      The last state, the seconds of each step from the end of the one before, and the share of
      padding in the batches.

    Raises:
      TrainingError: a loss or a gradient is not finite.
    """
    in_flight: deque[Any] = deque()
    metrics, tokens, size, mask, count = [], 0, 0, None, 0
    times = [time.perf_counter()]

    def wait() -> None:
        metrics.append(jax.block_until_ready(in_flight.popleft()))
        times.append(time.perf_counter())

    for number in range(steps):
        if number and time.perf_counter() - times[0] >= seconds:
            break
        batch = next(batches)
        state, metric = step(state, batch)
        in_flight.append(metric)
        if batch["attention_mask"] is not mask:  # a repeated batch is counted once
            mask = batch["attention_mask"]
            count = int((np.asarray(mask) > 0).sum())
        tokens, size = tokens + count, size + mask.size
        if len(in_flight) == _IN_FLIGHT:
            wait()
    while in_flight:
        wait()
    for number, metric in enumerate(jax.device_get(metrics), 1):
        for name, value in metric.items():
            if not math.isfinite(value.total):
                raise TrainingError(
                    f"{name} is {value.total} at step {number} of the benchmark; lower "
                    "optimizer.learning_rate"
                )
    return state, np.diff(times), 1 - tokens / size


def _rates(
    phase: Phase,
    seconds: np.ndarray,
    padding: float,
    flops: float,
    stated: float | None,
    matmul_speed: float,
) -> dict[str, Any]:
    """Return what the times of steps amount to; all rates are of the mean."""
    mean = float(seconds.mean())
    low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
    speed = phase.batch_size / mean
    return {
        "steps": len(seconds),
        "step_seconds": {
            "mean": mean,
            "lower_quartile": low,
            "median": median,
            "upper_quartile": high,
        },
        "sequences_per_second": speed,
        "tokens_per_second": speed * phase.max_length * (1 - padding),
        "padding": padding,
        "model_flops_per_second": speed * flops,
        "mfu": speed * flops / stated if stated else None,
        "mfu_of_matmul": speed * flops / matmul_speed,
    }


def text_batches(corpus: Corpus, config: TrainConfig, phase: Phase) -> Iterator[Batch]:
    """Yield the batches of a phase without end, prefetched as in training."""
    data = dataclasses.replace(
        config.data, max_length=phase.max_length, batch_size=phase.batch_size, phases=()
    )
    endless = dataclasses.replace(config, data=data, steps=1 << 40)
    return loader.prefetch(loader.TrainBatches(corpus, endless), 0)


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

    def milliseconds(each: dict[str, Any], key: str) -> str:
        return f"{1e3 * each['step_seconds'][key]:,.2f}"

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "steps timed": lambda each: f"{each['steps']:,}",
        "step, mean                ms": lambda each: milliseconds(each, "mean"),
        "      lower quartile      ms": lambda each: milliseconds(each, "lower_quartile"),
        "      median              ms": lambda each: milliseconds(each, "median"),
        "      upper quartile      ms": lambda each: milliseconds(each, "upper_quartile"),
        "sequences                 /s": lambda each: f"{each['sequences_per_second']:,.1f}",
        "tokens without padding    /s": lambda each: f"{each['tokens_per_second']:,.0f}",
        "padding                    %": lambda each: f"{100 * each['padding']:.1f}",
        "model's operations   GFLOP/s": lambda each: f"{each['model_flops_per_second'] / 1e9:,.1f}",
        "MFU of the datasheet       %": lambda each: _percent(each["mfu"]),
        "MFU of a matmul alone      %": lambda each: _percent(each["mfu_of_matmul"]),
    }
    for label, value in columns.items():
        lines.append(f"{label:<30}" + "".join(f"{value(result[kind]):>14}" for kind in kinds))
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


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f}"
