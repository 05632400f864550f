"""A report as a person reads it, and as JSON."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from bert_jax.config import phases
from bert_jax.planning.measure import Rates, Report
from bert_jax.planning.timing import Timing

_MIB = 2**20


def text(report: Report, name: str) -> str:
    """Returns a report as tables.

    Args:
      report: what was measured.
      name: of the config.
    """
    config, phase, steps = report.config, report.phase, report.steps
    model, count = config.model, len(phases(config))
    of_several = f", phase {report.number} of {count}" if count > 1 else ""
    lines = [
        f"{name}{of_several}: {phase.batch_size:,} rows of {phase.max_length} a step, "
        f"{phase.max_predictions} predictions each",
        f"{steps.parameters:,} parameters: {model.num_hidden_layers} layers of "
        f"{model.hidden_size}, {model.dtype}",
        f"{report.num_devices} × {device_name(report.device)}, JAX {jax.__version__}",
        "",
        *_columns(report),
        "",
        *(f"{what:<30}{value}" for what, value in _beside(report).items()),
    ]
    if steps.shares is not None:
        lines += ["", "what runs, of the time of a step"]
        lines += [f"  {kind:<30}{share:>7.1%}" for kind, share in steps.shares.items()]
    return "\n".join(lines)


def _beside(report: Report) -> dict[str, str]:
    """Returns what was found beside the steps."""
    steps, compiled, most = report.steps, report.compiled, report.ceiling
    peak, of_what = steps.peak
    slower = steps.real.mean / steps.synthetic.mean
    m, k, n = most.shape
    stated = f"{report.datasheet / 1e9:,.0f} GFLOP/s" if report.datasheet else "not known"
    cached = "could not be cached" if compiled.warm is None else f"{compiled.warm:.1f} s"
    memory = "not known" if peak is None else f"{peak / _MIB:,.0f} MiB, {of_what}"
    return {
        "the text's steps take": f"{slower:.2f} times as long",
        "its rows alone": f"{report.phase.batch_size / steps.input_seconds:,.0f} rows/s",
        "matrix products alone": f"{most.flops / 1e9:,.1f} GFLOP/s, {m} × {k} × {n} each device",
        "the datasheet": stated,
        "compiling": f"{compiled.cold:.1f} s",
        "  with a cache on disk": cached,
        "memory at its peak": memory,
        "  as the compiler sees it": f"{report.needed / _MIB:,.0f} MiB on each device",
        "load when it began": f"{report.load:.1f}",
    }


def _columns(report: Report) -> list[str]:
    """Returns what was found with either kind of rows, side by side."""
    of_synthetic, of_real = report.steps.synthetic, report.steps.real
    pairs = [(each, report.rates(each)) for each in (of_synthetic, of_real)]

    def line(name: str, value: Callable[[Timing, Rates], str]) -> str:
        return f"{name:<30}" + "".join(f"{value(*pair):>14}" for pair in pairs)

    def part(number: int) -> Callable[[Timing, Rates], str]:
        return lambda timing, _: f"{1e3 * timing.quartiles[number]:,.2f}"

    return [
        f"{'':<30}{'random rows':>14}{'the text':>14}",
        line("steps timed", lambda timing, _: f"{len(timing.seconds):,}"),
        line("a step, mean              ms", lambda timing, _: f"{1e3 * timing.mean:,.2f}"),
        line("        lower quartile    ms", part(0)),
        line("        median            ms", part(1)),
        line("        upper quartile    ms", part(2)),
        line("waiting for rows, of it    %", lambda timing, _: f"{100 * timing.waiting:.1f}"),
        line("rows                      /s", lambda _, rates: f"{rates.rows:,.1f}"),
        line("real tokens               /s", lambda _, rates: f"{rates.real_tokens:,.0f}"),
        line("padding                    %", lambda timing, _: f"{100 * timing.padding:.1f}"),
        line("the model's own      GFLOP/s", lambda _, rates: f"{rates.flops / 1e9:,.1f}"),
        line("MFU, of the datasheet      %", lambda _, rates: _share(rates.mfu_of_datasheet)),
        line("MFU, of products alone     %", lambda _, rates: _share(rates.mfu_of_products)),
    ]


def _share(value: float | None) -> str:
    return "not known" if value is None else f"{100 * value:.1f}"


def as_json(report: Report) -> dict[str, Any]:
    """Returns a report as JSON holds it: bytes, seconds, and operations a second."""
    steps, phase = report.steps, report.phase
    peak, of_what = steps.peak
    return {
        "device": device_name(report.device),
        "platform": report.device.platform,
        "devices": report.num_devices,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "phase": report.number,
        "batch_size": phase.batch_size,
        "max_length": phase.max_length,
        "max_predictions": phase.max_predictions,
        "parameters": steps.parameters,
        "synthetic": _as_json(report, steps.synthetic),
        "real": _as_json(report, steps.real),
        "real_step_over_synthetic_step": steps.real.mean / steps.synthetic.mean,
        "input_rows_per_second": phase.batch_size / steps.input_seconds,
        "matrix_products_flops_per_second": report.ceiling.flops,
        "matrix_products_shape": report.ceiling.shape,
        "datasheet_flops_per_second": report.datasheet,
        "compile_seconds": {"cold": report.compiled.cold, "warm": report.compiled.warm},
        "peak_memory_bytes": peak,
        "peak_memory_is": of_what,
        "compiler_memory_bytes_per_device": report.needed,
        "load_when_it_began": report.load,
        "share_of_time_by_kind": steps.shares,
        "config": dataclasses.asdict(report.config),
    }


def _as_json(report: Report, timing: Timing) -> dict[str, Any]:
    low, middle, high = timing.quartiles
    rates = report.rates(timing)
    return {
        "steps": len(timing.seconds),
        "step_seconds": {
            "mean": timing.mean,
            "median": middle,
            "lower_quartile": low,
            "upper_quartile": high,
        },
        "rows_per_second": rates.rows,
        "tokens_per_second": rates.places,
        "real_tokens_per_second": rates.real_tokens,
        "padding_share": timing.padding,
        "model_flops_per_second": rates.flops,
        "mfu_of_datasheet": rates.mfu_of_datasheet,
        "mfu_of_matrix_products": rates.mfu_of_products,
        "waiting_for_rows_share": timing.waiting,
    }


def device_name(device: Any) -> str:
    """Returns what a device is called; of a CPU, what Linux calls it and how many cores we have."""
    if device.platform != "cpu":
        return device.device_kind
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return f"CPU ({os.cpu_count()} cores)"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"CPU ({next(names, 'unnamed')}, {len(os.sched_getaffinity(0))} cores)"
