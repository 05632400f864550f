"""Which mesh and which batch: `bert-jax plan --search`."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bert_jax import config as config_lib
from bert_jax.config import ModelConfig, ParallelConfig, Phase, TrainConfig
from bert_jax.distributed.mesh import make_mesh, num_batch_shards
from bert_jax.errors import UserError
from bert_jax.planning import chips, cost
from bert_jax.planning.targets import Target
from bert_jax.planning.theory import needed

_MESHES = 6  # that are compiled, of those that may be
_SHALLOW = ((1, 8), (1, 16), (2, 8), (2, 16))  # layers, rows of each part
_MOST_ROWS = 1 << 20  # of a part; of the smallest models memory hardly grows
_GAIN = 1.02  # in speed, for which a larger batch is worth a line


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh and a batch, by what they are expected to cost.

    Attributes:
      parallel: the mesh and the ZeRO stage.
      batch_size: rows a step.
      rows: of them, of each part of the mesh.
      memory: bytes of a device.
      compute, moved, network: seconds, as in `plan.Times`; 0 for what is not known.
      rows_per_second: of all devices, at most.
      mfu: at most.
    """

    parallel: ParallelConfig
    batch_size: int
    rows: int
    memory: float
    compute: float
    moved: float
    network: float
    rows_per_second: float
    mfu: float


def search(
    config: TrainConfig, target: Target, say: Callable[[str], None]
) -> tuple[Phase, list[Candidate]]:
    """Returns meshes and batches that fit, the fastest first, for the phase of the most steps.

    The meshes that would send least, by a formula, are compiled with one and two layers and two
    batches; memory, operations and bytes are straight lines in both, so those of the whole model
    follow. Batches are powers of two.

    Raises:
      UserError: the devices have no known rates, or no mesh fits.
    """
    chip = target.chip
    if chip is None:
        raise UserError(
            f"--search ranks by a chip's rates, and {target.name} has none; name a chip"
        )
    config_lib.validate(config)
    config = target.settled(config)
    phase = _longest(config)
    options = sorted(
        meshes(config.model, len(target.devices)), key=lambda option: needed(config, phase, option)
    )[:_MESHES]
    found: list[Candidate] = []
    for number, option in enumerate(options, 1):
        say(f"compiling mesh {number} of {len(options)}: {describe(option)}")
        found += _of_mesh(config, phase, option, target, chip)
    if not found:
        raise UserError(f"not one row fits on {target.name}; take more devices, or model.remat")
    return phase, sorted(found, key=lambda each: (-each.rows_per_second, each.memory))


def describe(option: ParallelConfig) -> str:
    """Returns a mesh and its ZeRO stage in words."""
    return f"data {option.data} × fsdp {option.fsdp} × tensor {option.tensor}, zero {option.zero}"


def meshes(model: ModelConfig, devices: int) -> Iterator[ParallelConfig]:
    """Yields the meshes of some devices whose axes divide a model."""
    split = math.gcd(model.num_attention_heads, model.intermediate_size, model.vocab_size)
    for tensor in (n for n in range(1, devices + 1) if devices % n == 0 and split % n == 0):
        rest = devices // tensor
        for fsdp in (n for n in range(1, rest + 1) if rest % n == 0 and model.hidden_size % n == 0):
            for zero in (1, 3) if fsdp > 1 else (3,):
                yield ParallelConfig(data=rest // fsdp, fsdp=fsdp, tensor=tensor, zero=zero)


def _longest(config: TrainConfig) -> Phase:
    phases = config_lib.phases(config)
    ends = [first for first, _ in phases[1:]] + [config.steps]
    return max(zip(ends, phases, strict=True), key=lambda each: each[0] - each[1][0])[1][1]


def _of_mesh(
    config: TrainConfig, phase: Phase, option: ParallelConfig, target: Target, chip: chips.Chip
) -> Iterator[Candidate]:
    """Yields the batches of a mesh that fit, from one row of each part on."""
    mesh = make_mesh(option, target.devices)
    parts, devices = (
        num_batch_shards(mesh) * config.optimizer.microbatches,
        list(mesh.devices.flat),
    )

    def measure(layers: int, rows: int) -> list[float] | None:
        shallow: Any = copy.deepcopy(config)
        shallow.parallel, shallow.model.num_hidden_layers = option, layers
        found = cost.measure(shallow, dataclasses.replace(phase, batch_size=rows * parts), mesh)
        if found.memory is None:
            return None  # not even the shallow one fits
        network = sum(
            each.sent / chips.rate(chip, each.group, devices) for each in found.collectives
        )
        # Of a GPU another compiler chose what is moved.
        moved = found.bytes / chip.memory_rate if target.is_compiled_for else 0.0
        seconds = found.flops / chip.peak, moved, network
        return [found.total_memory, *seconds]

    terms = [[1, layers, rows, layers * rows] for layers, rows in _SHALLOW]
    measured = [found for each in _SHALLOW if (found := measure(*each)) is not None]
    if len(measured) < len(_SHALLOW):
        return
    solved = np.linalg.solve(terms, measured)
    model = cost.model_flops(config.model, phase, pairs=config.data.pairs != "none")
    layers, rows, fastest = config.model.num_hidden_layers, 1, 0.0
    while True:
        memory, *seconds = np.array([1, layers, rows, layers * rows]) @ solved
        if memory > chip.memory * chip.usable or rows > _MOST_ROWS:
            return
        compute, moved, network = seconds
        speed = rows * parts / max(seconds)
        if speed > _GAIN * fastest:
            fastest, mfu = speed, speed * model / mesh.size / chip.peak
            batch = rows * parts
            yield Candidate(option, batch, rows, memory, compute, moved, network, speed, mfu)
        rows *= 2
