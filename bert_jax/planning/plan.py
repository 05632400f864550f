"""What a config's steps cost on given devices: whether they fit, and how fast they can be."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from bert_jax import config as config_lib
from bert_jax.config import Phase, TrainConfig
from bert_jax.distributed.mesh import check_divides, check_model, make_mesh, num_batch_shards
from bert_jax.planning import chips, cost
from bert_jax.planning.cost import Cost
from bert_jax.planning.targets import Target

_COMPILES = 4  # to find the largest batch, at most
_NEAR = 0.97  # of the memory: a batch that fills as much is near enough to the largest


@dataclasses.dataclass(frozen=True)
class Times:
    """The least seconds that a step can take, by what it has to do, and what follows.

    Attributes:
      compute: its operations at the chip's peak.
      memory: the bytes that it moves at the memory's rate; None where another device's compiler
        chose them.
      network: the bytes that it sends at the links' rate, one collective after the other.
      rows_per_second: of all devices, where the three go on at once and the longest is all.
      mfu: the share of the peak that the model's own operations are of that.
    """

    compute: float
    memory: float | None
    network: float
    rows_per_second: float
    mfu: float

    @property
    def step(self) -> float:
        """The longest of the three."""
        return max(self.compute, self.memory or 0.0, self.network)


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest batch that fits, as far as it was looked for.

    Attributes:
      rows: of the whole batch; 0 where not one for each part fits.
      predicted: bytes a device, from the two batches compiled before it.
      total: the same, compiled.
      compiles: programs that were compiled to find it.
    """

    rows: int
    predicted: int
    total: int
    compiles: int


@dataclasses.dataclass(frozen=True)
class PhasePlan:
    """One phase of a config on one topology.

    Attributes:
      target: the devices.
      mesh: sizes of the axes.
      phase: its length and rows.
      cost: of a step, for each device.
      capacity: bytes that a program gets of a device's memory; None of a CPU.
      times: None where it does not fit, and of a CPU.
      largest: None where it was not looked for.
    """

    target: Target
    mesh: dict[str, int]
    phase: Phase
    cost: Cost
    capacity: int | None
    times: Times | None
    largest: Largest | None

    @property
    def fits(self) -> bool | None:
        """Whether it does; None where it is not known."""
        if self.capacity is None:
            return None
        return self.cost.memory is not None and self.cost.total_memory <= self.capacity


def make_plans(
    config: TrainConfig,
    targets: list[Target],
    say: Callable[[str], None],
    *,
    with_largest: bool = True,
) -> list[PhasePlan]:
    """Compiles each phase of a config for each of some devices.

    Args:
      config: of the run.
      targets: the devices.
      say: is told what is being done, since a compilation takes minutes.
      with_largest: whether to look for the largest batch.

    Raises:
      UserError: the config is not valid, or does not divide over the devices.
    """
    config_lib.validate(config)
    meshes = []
    lengths = [phase.max_length for _, phase in config_lib.phases(config)]
    for target in targets:  # all are checked before the first is compiled
        meshes.append(make_mesh(config.parallel, target.devices))
        check_model(config.model, meshes[-1], lengths, packed=config.data.packing)
        for _, phase in config_lib.phases(config):
            check_divides(phase.batch_size, config.optimizer.microbatches, meshes[-1])
    plans = []
    for target, mesh in zip(targets, meshes, strict=True):
        for _, phase in config_lib.phases(config):
            plans.append(
                _plan(target.settled(config), phase, target, mesh, say, with_largest=with_largest)
            )
    return plans


def _plan(
    config: TrainConfig,
    phase: Phase,
    target: Target,
    mesh: Mesh,
    say: Callable[[str], None],
    *,
    with_largest: bool,
) -> PhasePlan:
    def measure(rows: int) -> Cost:
        say(f"compiling for {target.name}: length {phase.max_length}, {rows:,} rows")
        return cost.measure(config, dataclasses.replace(phase, batch_size=rows), mesh)

    capacity = None if target.chip is None else int(target.chip.memory * target.chip.usable)
    found = measure(phase.batch_size)
    fits = capacity is None or (found.memory is not None and found.total_memory <= capacity)
    largest = None
    if capacity and with_largest:
        parts = num_batch_shards(mesh) * config.optimizer.microbatches
        largest = largest_batch(
            lambda rows: measure(rows).total_memory,
            (phase.batch_size // parts, found.total_memory),
            capacity,
            parts,
        )
    return PhasePlan(
        target=target,
        mesh=dict(mesh.shape),
        phase=phase,
        cost=found,
        capacity=capacity,
        times=times(found, config, phase, target, mesh) if fits and target.chip else None,
        largest=largest,
    )


def times(found: Cost, config: TrainConfig, phase: Phase, target: Target, mesh: Mesh) -> Times:
    """Returns the least times of a step whose cost is known."""
    chip = target.chip
    assert chip is not None
    devices = list(mesh.devices.flat)
    model = cost.model_flops(config.model, phase, pairs=config.data.pairs != "none")
    compute = found.flops / chip.peak
    memory = found.bytes / chip.memory_rate if target.is_compiled_for else None
    network = sum(each.sent / chips.rate(chip, each.group, devices) for each in found.collectives)
    speed = phase.batch_size / max(compute, memory or 0.0, network)
    return Times(compute, memory, network, speed, speed * model / mesh.size / chip.peak)


def largest_batch(
    total: Callable[[int], int], known: tuple[int, int], capacity: int, parts: int
) -> Largest:
    """Returns the largest batch whose memory a device has.

    A device's memory is nearly a straight line in the rows that it has: where the line through two
    batches meets the capacity, a third is compiled, and so on until one fits that all but fills it.

    Args:
      total: compiles for a number of rows, and gives a device's bytes.
      known: a number of rows for each part, and the bytes of it.
      capacity: bytes.
      parts: in which the rows are shared; the batch is a multiple of it.
    """
    first, at_first = known
    second = max(1, first // 2) if at_first > capacity else 2 * first
    points = {first: at_first}
    best, predicted = (first if at_first <= capacity else 0), at_first
    compiles, wanted, expected = 0, second, at_first
    while wanted not in points and compiles < _COMPILES:
        points[wanted] = total(wanted * parts)
        compiles += 1
        if points[wanted] <= capacity and wanted > best:
            best, predicted = wanted, expected
            if compiles > 1 and points[wanted] > _NEAR * capacity:
                break
        # Of the points nearest to the capacity, since the line bends a little.
        (low, at_low), (high, at_high) = sorted(
            sorted(points.items(), key=lambda point: abs(point[1] - capacity))[:2]
        )
        too_large = [rows for rows, bytes_ in points.items() if bytes_ > capacity]
        slope = (at_high - at_low) / (high - low)
        if slope > 0:
            wanted = math.floor(low + (capacity - at_low) / slope)
        elif too_large:  # near the capacity a compiler may choose to compute things again
            wanted = (best + min(too_large)) // 2
        else:
            break
        wanted = max(1, best, min([wanted, *(rows - 1 for rows in too_large)]))
        expected = math.ceil(at_low + slope * (wanted - low))
    return Largest(best * parts, predicted if best else 0, points.get(best, 0), compiles)


def as_json(plan: PhasePlan) -> dict[str, Any]:
    """Returns a plan as JSON holds it; bytes, seconds and operations, all of one device."""
    found = plan.cost
    return {
        "topology": plan.target.name,
        "devices": len(plan.target.devices),
        "chip": dataclasses.asdict(plan.target.chip) if plan.target.chip else None,
        "compiled_for": plan.target.name if plan.target.is_compiled_for else "cpu",
        "mesh": plan.mesh,
        "max_length": plan.phase.max_length,
        "batch_size": plan.phase.batch_size,
        "parameters": found.num_parameters,
        "memory": dataclasses.asdict(found.memory) if found.memory else None,
        "total_memory": found.total_memory,
        "capacity": plan.capacity,
        "fits": plan.fits,
        "largest_batch": dataclasses.asdict(plan.largest) if plan.largest else None,
        "flops": found.flops,
        "bytes": found.bytes,
        "collectives": [
            dataclasses.asdict(each) | {"sent": each.sent} for each in found.collectives
        ],
        "seconds": dataclasses.asdict(plan.times) | {"step": plan.times.step}
        if plan.times
        else None,
    }
