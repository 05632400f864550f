"""Whether a config's train step fits on given devices, and the least time that it takes there."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from bert_jax.config import ModelConfig, ParallelConfig, TrainConfig
from bert_jax.config.schedule import Stage, make_schedule
from bert_jax.config.validation import validate
from bert_jax.distributed.fsdp import num_batch_shards
from bert_jax.errors import UserError
from bert_jax.models.electra import embedding_size, pretrained_encoders
from bert_jax.planning.chips import CHIPS, Chip, ring_rate
from bert_jax.planning.costs import abstract_parameters, compile_cost, model_flops, sent_bytes
from bert_jax.planning.synthetic import make_checked_mesh
from bert_jax.planning.topology import Topology

_GIB = 2**30
_SEARCHED = 4  # meshes that are compiled, of those that send least

Plan = dict[str, Any]


def make_plans(
    config: TrainConfig,
    topologies: Sequence[Topology],
    log: Callable[[str], None],
    *,
    search: bool = False,
    with_largest: bool = True,
) -> list[Plan]:
    """Return the cost of each phase; with `search`, of the longest on several meshes, for JSON."""
    validate(config)
    plans = []
    # All are checked before any compilation, which is slow.
    for steps in [_choose_steps(config, topology, search) for topology in topologies]:
        compiled = [step.plan(log, with_largest=with_largest) for step in steps]
        if search:
            compiled.sort(key=lambda plan: -plan.get("sequences_per_second", 0.0))
        plans += compiled
    return plans


def _choose_steps(config: TrainConfig, topology: Topology, search: bool) -> list["_Step"]:
    config = topology.resolve(config)
    chosen = list(make_schedule(config).main_stages)
    configs = [config]
    if search:
        chosen = [max(chosen, key=lambda stage: stage.end - stage.first_step)]
        configs = _best_meshes(config, chosen[0], topology)
    # Of phases with the same sequences, the largest batch needs most.
    by_size = sorted(chosen, key=lambda phase: phase.batch_size)
    largest = {(phase.max_length, phase.max_predictions): phase for phase in by_size}.values()
    chosen = [phase for phase in chosen if any(phase is each for each in largest)]
    return [
        _Step(each, phase, topology, make_checked_mesh(each, phase, topology.devices))
        for each in configs
        for phase in chosen
    ]


def _best_meshes(config: TrainConfig, phase: Stage, topology: Topology) -> list[TrainConfig]:
    """Return the config with each of the meshes that send least."""
    if topology.chip is None:
        raise UserError(f"--search needs a chip's rates, and {topology.name} has none; name a chip")
    parameters, options = abstract_parameters(config), []
    for option in list_meshes(config.model, len(topology.devices)):
        if phase.batch_size % (option.data * option.fsdp * config.optimizer.microbatches) == 0:
            sent = sent_bytes(config, phase, option, parameters)
            options.append((sum(each["bytes"] for each in sent), option))
    if not options:
        raise UserError(f"data.batch_size {phase.batch_size} divides over no mesh; change it")
    best = sorted(options, key=operator.itemgetter(0))[:_SEARCHED]
    return [dataclasses.replace(config, parallel=option) for _, option in best]


def list_meshes(model: ModelConfig, devices: int) -> Iterator[ParallelConfig]:
    """Yield the meshes of some devices whose axes divide a model."""
    encoders = pretrained_encoders(model)
    sizes = ((c.num_attention_heads, c.intermediate_size, c.vocab_size) for c in encoders)
    split = math.gcd(*itertools.chain(*sizes))
    wide = math.gcd(embedding_size(model), *(c.hidden_size for c in encoders))
    for tensor in (n for n in range(1, devices + 1) if devices % n == 0 and split % n == 0):
        rest = devices // tensor
        for fsdp in (n for n in range(1, rest + 1) if rest % n == 0 and wide % n == 0):
            for zero in (1, 3) if fsdp > 1 else (3,):
                yield ParallelConfig(data=rest // fsdp, fsdp=fsdp, tensor=tensor, zero=zero)


@dataclasses.dataclass(frozen=True)
class _Step:
    """The train step of a phase on the mesh of a topology."""

    config: TrainConfig
    phase: Stage
    topology: Topology
    mesh: Mesh

    def plan(self, log: Callable[[str], None], *, with_largest: bool) -> Plan:
        config, phase, mesh, topology = self.config, self.phase, self.mesh, self.topology

        def compiled(batch_size: int) -> dict[str, Any]:
            log(f"compiling for {topology.name}: {batch_size:,} sequences of {phase.max_length}")
            return compile_cost(config, dataclasses.replace(phase, batch_size=batch_size), mesh)

        cost, chip = compiled(phase.batch_size), topology.chip
        sizes = dict(mesh.shape)
        parallel = dataclasses.replace(config.parallel, **sizes)
        plan = {
            "topology": topology.name,
            "compiled_for": topology.name if topology.has_compiler else "cpu",
            "devices": mesh.size,
            "mesh": sizes,
            "zero": config.parallel.zero,
            "max_length": phase.max_length,
            "batch_size": phase.batch_size,
            **cost,
            "sent": sent_bytes(config, phase, parallel, abstract_parameters(config)),
        }
        if chip is None:
            return plan
        used = cost["memory"] and cost["memory"]["total"]
        plan |= {"capacity": chip.usable, "fits": used is not None and used <= chip.usable}
        if plan["fits"]:
            plan |= self.least_time(chip, plan)
        if with_largest:
            unit = num_batch_shards(mesh) * config.optimizer.microbatches
            plan["largest_batch"] = largest_batch(
                lambda size: (compiled(size)["memory"] or {}).get("total"),
                *(phase.batch_size, used, chip.usable, unit),
            )
        return plan

    def least_time(self, chip: Chip, plan: Plan) -> dict[str, Any]:
        """Return the least seconds of a step, and the speed and MFU if the longest were all."""
        model, batch_size, mesh = self.config.model, self.phase.batch_size, self.mesh
        pairs = self.config.data.pairs != "none"
        useful = batch_size * model_flops(model, self.phase, pairs=pairs)
        recomputed = 4 / 3 if model.remat else 1.0
        held = ["parameters", "moments"] + ["temporaries"] * self.topology.has_compiler
        devices, network = list(mesh.devices.flat), 0.0
        indices = np.arange(mesh.size).reshape(mesh.devices.shape)
        for each in plan["sent"]:
            ring = tuple(slice(None) if axis in each["axes"] else 0 for axis in mesh.axis_names)
            network += each["bytes"] / ring_rate(chip, indices[ring].ravel().tolist(), devices)
        seconds = {
            # The compiler counts a loop's body once.
            "compute": max(plan["flops"], useful * recomputed / mesh.size) / chip.peak,
            # Each byte is written and read at least once.
            "memory": 2 * sum(plan["memory"][use] for use in held) / chip.memory_rate,
            "network": network,
        }
        step = max(seconds.values())
        return {
            "seconds": {**seconds, "step": step},
            "sequences_per_second": batch_size / step,
            "mfu": useful / step / mesh.size / chip.peak,
        }


def largest_batch(
    total: Callable[[int], int | None], batch_size: int, used: int | None, limit: float, unit: int
) -> int | None:
    """Return the largest batch by a line through two batches' bytes; None if they do not grow."""
    units = batch_size // unit
    while used is None and units > 1:
        units //= 2
        used = total(units * unit)
    if used is None:
        return 0
    other = units // 2 or 2
    used_by_other = total(other * unit)
    if used_by_other is None:  # one unit fits, and two do not
        return unit
    growth = (used - used_by_other) / (units - other)
    return max(0, int(units + (limit - used) / growth)) * unit if growth > 0 else None


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
            *(f"  {use:<12}{size / _GIB:9.3f} GiB" for use, size in (plan["memory"] or {}).items()),
        ]
        if "fits" in plan:
            verdict = "fits" if plan["fits"] else f"does not fit. {plan['error']}"
            lines.append(f"  {'available':<12}{plan['capacity'] / _GIB:9.3f} GiB: {verdict}")
        largest = plan.get("largest_batch")
        if largest is not None:
            lines.append(f"  the largest batch that fits: about {largest:,} sequences")
        for each in plan["sent"]:
            size, axes = each["bytes"] / 1e6, " × ".join(each["axes"])
            lines.append(f"  sends {size:15,.1f} MB: {each['collective']} over {axes}")
        if "seconds" in plan:
            speed, mfu = plan["sequences_per_second"], plan["mfu"]
            lines += [f"  {what:<9}{1e3 * s:12.3f} ms" for what, s in plan["seconds"].items()]
            lines[-1] += f" at least: {speed:,.0f} sequences/s, MFU {mfu:.1%} at most"
    return "\n".join(lines)


def _describe_devices(plan: Plan) -> list[str]:
    axes = " × ".join(f"{name} {size}" for name, size in plan["mesh"].items())
    if plan["mesh"]["fsdp"] > 1:
        axes += f", ZeRO {plan['zero']}"
    parameters = f"{plan['parameters']:,} parameters"
    lines = [f"{plan['topology']}: {plan['devices']} devices as {axes}; {parameters}"]
    chip = CHIPS.get(plan["topology"].split(":")[0])
    if chip is None:
        return lines
    network = "" if chip.is_tpu else f", {chip.network / 1e9:.0f} GB/s beyond a node"
    lines += [
        f"  each {chip.peak / 1e12:,.0f} TFLOP/s in bfloat16, {chip.memory / _GIB:.1f} GiB at "
        f"{chip.memory_rate / 1e9:,.0f} GB/s, links of {chip.link / 1e9:.0f} GB/s{network}",
        f"  source: {chip.source}",
    ]
    if plan["compiled_for"] == "cpu":
        lines.append("  compiled for as many CPUs: temporaries are approximate")
    return lines
