"""Whether a config's train step fits on given devices, and the least time that it takes there."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from jax.sharding import Mesh

from bert_jax import console
from bert_jax.config import TrainConfig, settings
from bert_jax.config.schedule import Stage, make_schedule
from bert_jax.config.validation import validate
from bert_jax.errors import refuse
from bert_jax.models.architecture import describe_attention
from bert_jax.planning.chips import CHIPS, Chip, ring_rate
from bert_jax.planning.costs import (
    compile_cost,
    estimate_cost,
    model_flops,
    sent_bytes,
)
from bert_jax.planning.synthetic import checked_setup
from bert_jax.planning.topology import Topology
from bert_jax.training.setup import Setup

_GIB = 2**30
# Totals by formula were up to 1.29 of those of libtpu (benchmarks/records/2026-11-22-machines).
_MOST_OVER = 1.35

Plan = dict[str, Any]


def make_plans(
    config: TrainConfig, topologies: Sequence[Topology], *, compiles: bool = False
) -> list[Plan]:
    """Return what a step of each stage costs on each topology, as values for JSON.

    The costs are those of formulas, in seconds, or of the compiler, in minutes.
    """
    config = settings.check(config)
    validate(config)
    refuse(config.parallel.mode == "pmap", "parallel.mode pmap is not planned", fix="use mesh")
    steps = []
    # All are checked before any compilation, which is slow.
    for topology in topologies:
        resolved = topology.resolve(config)
        setup = checked_setup(resolved, make_schedule(resolved).stages, topology.devices)
        stages = _distinct_stages(resolved)
        steps += [partial(_plan, resolved, stage, topology, setup) for stage in stages]
    return [plan(compiles=compiles) for plan in steps]


def _distinct_stages(config: TrainConfig) -> list[Stage]:
    """Return the stages, but of those with the same sequences only that of the largest batch."""
    schedule = make_schedule(config)
    # The largest may be one of a length warm-up.
    stages = dict.fromkeys((*schedule.main_stages, schedule.largest))
    by_size = sorted(stages, key=lambda stage: stage.batch_size)
    largest = {(stage.max_length, stage.max_predictions): stage for stage in by_size}
    return sorted(largest.values(), key=lambda stage: stage.first_step)


def _plan(
    config: TrainConfig, stage: Stage, topology: Topology, setup: Setup, *, compiles: bool
) -> Plan:
    """Return the cost of a step and, of a chip, whether it fits and the time it takes."""
    chip, mesh = topology.chip, setup.layout.mesh
    if compiles:
        sequences = f"{stage.batch_size:,} sequences of {stage.max_length}"
        console.follow(f"compiling for {topology.name}: {sequences}")
        cost = compile_cost(config, stage, setup)
    else:
        cost = estimate_cost(config, stage, setup)
    sizes = dict(mesh.shape)
    parallel = dataclasses.replace(config.parallel, **sizes)
    plan = {
        "topology": topology.name,
        "compiled": compiles,
        "devices": mesh.size,
        "mesh": sizes,
        "zero": config.parallel.zero,
        "max_length": stage.max_length,
        "batch_size": stage.batch_size,
        "attention": describe_attention(
            config.model,
            mesh.devices.flat[0].platform,
            [stage.max_length],
            packed=config.data.packing,
        ),
        **cost,
        "sent": sent_bytes(config, stage, parallel, setup),
    }
    if chip is None:
        return plan
    used = cost["memory"] and cost["memory"]["total"]
    plan |= {"capacity": chip.usable, "fits": used is not None and used <= chip.usable}
    if plan["fits"]:
        plan |= _least_time(config, stage, mesh, chip, plan)
    return plan


def _least_time(
    config: TrainConfig, stage: Stage, mesh: Mesh, chip: Chip, plan: Plan
) -> dict[str, Any]:
    """Return the least seconds of a step, and the speed and MFU if the longest were all."""
    counted = model_flops(config, stage)
    useful = stage.batch_size * (counted or 0.0)
    # The forward pass is a third of all; its layers, at least 0.6 of it, are computed again.
    recomputed = 1.2 if config.model.remat else 1.0
    held = "parameters", "moments", "temporaries"
    devices, network = list(mesh.devices.flat), 0.0
    indices = np.arange(mesh.size).reshape(mesh.devices.shape)
    for each in plan["sent"]:
        ring = tuple(slice(None) if axis in each["axes"] else 0 for axis in mesh.axis_names)
        network += each["bytes"] / ring_rate(chip, indices[ring].ravel().tolist(), devices)
    seconds = {
        # The compiler counts a loop's body once.
        "compute": max(plan["flops"] or 0.0, useful * recomputed / mesh.size) / chip.peak,
        # Each byte is written and read at least once.
        "memory": 2 * sum(plan["memory"][use] for use in held) / chip.memory_rate,
        "network": network,
    }
    step = max(seconds.values())
    return {
        "seconds": {**seconds, "step": step},
        "sequences_per_second": stage.batch_size / step,
        "mfu": useful / step / mesh.size / chip.peak if counted else None,
    }


def as_text(plans: Sequence[Plan]) -> str:
    """Return plans as tables."""
    lines: list[str] = []
    devices = None
    for plan in plans:
        if devices != (devices := _describe_devices(plan)):
            lines += devices
        per_shard = plan["batch_size"] // (plan["mesh"]["data"] * plan["mesh"]["fsdp"])
        lines += [
            "",
            f"{plan['batch_size']:,} sequences of {plan['max_length']} per step, {per_shard:,} of "
            "them on a device",
            f"  attention   {plan['attention']}",
            *(f"  {use:<12}{size / _GIB:9.3f} GiB" for use, size in (plan["memory"] or {}).items()),
        ]
        if "fits" in plan:
            verdict = "fits" if plan["fits"] else f"does not fit. {plan['error']}".strip()
            if not plan["fits"] and _is_unsure(plan):
                verdict = "may not fit; --compile asks the compiler"
            lines.append(f"  {'available':<12}{plan['capacity'] / _GIB:9.3f} GiB: {verdict}")
        for each in plan["sent"]:
            size, axes = each["bytes"] / 1e6, " × ".join(each["axes"])
            lines.append(f"  sends {size:15,.1f} MB: {each['collective']} over {axes}")
        if "seconds" in plan:
            speed, mfu = console.speed(plan["sequences_per_second"], "sequence"), plan["mfu"]
            lines += [f"  {what:<9}{1e3 * s:12.3f} ms" for what, s in plan["seconds"].items()]
            share = "unknown" if mfu is None else f"{mfu:.1%} at most"
            lines[-1] += f" at least: {speed}, MFU {share}"
    return "\n".join(lines)


def _chip_of(plan: Plan) -> Chip | None:
    """Return the chip of a plan; None of a CPU."""
    return CHIPS.get(plan["topology"].split(":")[0])


def _is_unsure(plan: Plan) -> bool:
    """Return whether a step that does not fit by formula may fit, as TPUs' compiler saves more."""
    chip = _chip_of(plan)
    if plan["compiled"] or chip is None or not chip.is_tpu:
        return False
    return plan["memory"]["total"] <= _MOST_OVER * plan["capacity"]


def _describe_devices(plan: Plan) -> list[str]:
    axes = " × ".join(f"{name} {size}" for name, size in plan["mesh"].items())
    if plan["mesh"]["fsdp"] > 1:
        axes += f", ZeRO {plan['zero']}"
    parameters = f"{plan['parameters']:,} parameters"
    lines = [
        f"{plan['topology']}: {console.counted(plan['devices'], 'device')} as {axes}; {parameters}"
    ]
    chip = _chip_of(plan)
    if not plan["compiled"]:
        asked = "; --compile asks the compiler" if chip is None or chip.is_tpu else ""
        lines.append(f"  by formula, temporaries are approximate{asked}")
    if chip is None:
        return lines
    network = "" if chip.is_tpu else f", {chip.network / 1e9:.0f} GB/s beyond a node"
    return [
        *lines,
        f"  each {chip.peak / 1e12:,.0f} TFLOP/s in bfloat16, {chip.memory / _GIB:.1f} GiB at "
        f"{chip.memory_rate / 1e9:,.0f} GB/s, links of {chip.link / 1e9:.0f} GB/s{network}",
        f"  source: {chip.source}",
    ]
