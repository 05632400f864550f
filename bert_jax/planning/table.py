"""Plans as a person reads them."""

from collections.abc import Sequence

from bert_jax.config import Phase
from bert_jax.planning import chips
from bert_jax.planning.plan import PhasePlan
from bert_jax.planning.program import Collective
from bert_jax.planning.search import Candidate
from bert_jax.planning.targets import Target

_GIB = 2**30
_MIB = 2**20
_BEST = 10  # of a search, that are shown


def text(plans: Sequence[PhasePlan]) -> str:
    """Returns all plans, the phases of one topology after each other."""
    lines: list[str] = []
    shown = None
    for plan in plans:
        if plan.target is not shown:
            lines += ["", *_target(plan)] if lines else _target(plan)
            shown = plan.target
        rows = plan.phase.batch_size
        each = rows // (plan.mesh["data"] * plan.mesh["fsdp"])
        lines += [
            "",
            f"length {plan.phase.max_length}, {rows:,} rows a step, {each:,} of them here",
        ]
        lines += _memory(plan)
        if plan.cost.memory:
            lines += ["", *_collectives(plan), "", *_times(plan)]
    return "\n".join(lines)


def ranking(target: Target, phase: Phase, found: Sequence[Candidate]) -> str:
    """Returns the best of a search."""
    lines = [
        f"{target.name}, length {phase.max_length}: the fastest meshes and batches that fit, from "
        "programs of one and two layers",
        f"  {'data':>5}{'fsdp':>6}{'tensor':>8}{'zero':>6}{'batch':>9}{'each':>7}{'GiB':>8}"
        f"{'compute':>10}{'memory':>9}{'network':>9} ms{'rows/s':>12}{'MFU':>7}",
    ]
    for each in found[:_BEST]:
        mesh, times = each.parallel, (each.compute, each.moved, each.network)
        compute, moved, network = (1e3 * seconds for seconds in times)
        lines.append(
            f"  {mesh.data:>5}{mesh.fsdp:>6}{mesh.tensor:>8}{mesh.zero:>6}{each.batch_size:>9,}"
            f"{each.rows:>7,}{each.memory / _GIB:>8.2f}{compute:>10.2f}{moved:>9.2f}{network:>9.2f}"
            f"   {each.rows_per_second:>12,.0f}{each.mfu:>7.1%}"
        )
    return "\n".join(lines)


def _target(plan: PhasePlan) -> list[str]:
    chip, axes = plan.target.chip, " × ".join(f"{name} {size}" for name, size in plan.mesh.items())
    lines = [
        f"{plan.target.name}: {len(plan.target.devices)} devices as {axes}; "
        f"{plan.cost.num_parameters:,} parameters; all below is of one device"
    ]
    if chip:
        lines.append(
            f"  {chip.peak / 1e12:,.0f} TFLOP/s in bfloat16, {chip.memory / _GIB:.1f} GiB at "
            f"{chip.memory_rate / 1e9:,.0f} GB/s; sends {chip.link / 1e9:.0f} GB/s "
            + ("a link" if not chip.network else f"in a node, {chip.network / 1e9:.0f} beyond")
        )
        lines.append(f"  source: {chip.source}")
    if not plan.target.is_compiled_for:
        lines.append(
            "  There is no compiler for it here. The program is XLA's for as many CPUs: memory and "
            "bytes moved\n  are rough, and the latter give no time; what it sends is what XLA's "
            "partitioner makes it send,\n  at times in float32 where a GPU sends bfloat16."
        )
    return lines


def _memory(plan: PhasePlan) -> list[str]:
    found, lines = plan.cost, []
    if found.memory:
        for name in ("parameters", "moments", "batch", "temporaries", "program", "other"):
            lines.append(f"  {name:<12}{getattr(found.memory, name) / _GIB:9.3f} GiB")
    total = f"  {'total':<12}{found.total_memory / _GIB:9.3f} GiB"
    if plan.capacity is None:
        return [*lines, total]
    verdict = "fits" if plan.fits else "does not fit"
    lines.append(f"{total} of {plan.capacity / _GIB:.3f} for a program: {verdict}")
    largest = plan.largest
    if largest and largest.rows:
        lines.append(
            f"  the largest batch that fits: {largest.rows:,} rows, {largest.total / _GIB:.3f} GiB "
            f"compiled, {largest.predicted / _GIB:.3f} expected of the others"
        )
    elif largest:
        lines.append("  no batch fits; raise parallel.fsdp or optimizer.microbatches")
    return lines


def _collectives(plan: PhasePlan) -> list[str]:
    """Collectives of one kind over the same axes are one line."""
    groups: dict[tuple, list[Collective]] = {}
    for each in plan.cost.collectives:
        key = (each.kind, "×".join(each.axes), each.devices, each.dtype)
        groups.setdefault(key, []).append(each)
    if not groups:
        return ["  nothing is sent"]
    lines = [
        f"  {'sent':<20}{'axes':<18}{'of':>5}{'type':>6}{'times':>7}{'MiB':>11}{'sends MiB':>11}"
    ]
    ranked = sorted(groups.items(), key=lambda item: -sum(each.sent for each in item[1]))
    for (kind, axes, devices, dtype), members in ranked:
        times = sum(each.times for each in members)
        payload = sum(each.times * each.payload for each in members) / _MIB
        sent = sum(each.sent for each in members) / _MIB
        least = "" if all(each.is_exact for each in members) else " at least"
        where = f"  {kind:<20}{axes:<18}{devices:>5}"
        lines.append(f"{where}{dtype:>6}{times:>7,}{payload:>11,.2f}{sent:>11,.2f}{least}")
    return lines


def _times(plan: PhasePlan) -> list[str]:
    found, sent = plan.cost, sum(each.sent for each in plan.cost.collectives)
    done = {
        "compute": chips.text(found.flops, "FLOP"),
        "memory": f"{chips.text(found.bytes, 'B')} moved",
        "network": f"{chips.text(sent, 'B')} sent",
    }
    if not plan.times:
        return [f"  {name:<9}{what}" for name, what in done.items()]
    seconds = {name: getattr(plan.times, name) for name in done}
    longest = max(seconds, key=lambda name: seconds[name] or 0.0)
    lines = []
    for name, what in done.items():
        time = f"{seconds[name] * 1e3:9.3f} ms" if seconds[name] is not None else " " * 12
        lines.append(f"  {name:<9}{time}  {what}")
    return [
        *lines,
        f"  a step takes {plan.times.step * 1e3:.3f} ms at least, bound by {longest}: "
        f"{plan.times.rows_per_second:,.0f} rows/s, MFU {plan.times.mfu:.1%} at most",
    ]
