"""The devices that a plan is for: `v5e:16x16`, `h100:16` or `cpu:8`. None need be attached.

The names of the clouds stand for the same: `v5e-256` and `16xh100`.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from bert_jax.config import TrainConfig
from bert_jax.errors import UserError
from bert_jax.planning import chips, synthetic

_CPU = "cpu"  # a kind of device that no list of chips has
_MOST_DEVICES = 65_536  # several times the largest slices and clusters
_CUBES = ("v4", "v5p")  # chips whose slices have three dimensions
# libtpu's compiler asks its host for these. The accelerator type is ignored.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a plan takes no TPU from a process that uses it
}


@dataclasses.dataclass(frozen=True)
class PlannedDevice:
    """What a mesh and the formulas need to know of a device that is not there."""

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, ...] = ()  # of a TPU in its slice
    core_on_chip: int = 0
    process_index: int = 0
    slice_index: int = 0


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to plan for.

    For the formulas they are `PlannedDevice`s; for the compiler abstract TPUs, or fake CPU devices.
    """

    name: str
    devices: Sequence[Any]
    chip: chips.Chip | None  # None for a CPU

    def resolve(self, config: TrainConfig) -> TrainConfig:
        """Return the config with the dtype "auto" and the vocabulary size 0 resolved."""
        if self.chip and config.model.dtype == "auto":  # all chips of the list compute in it
            model = dataclasses.replace(config.model, dtype="bfloat16")
            config = dataclasses.replace(config, model=model)
        return synthetic.resolve(config, self.devices[0])


def read_topologies(names: str, *, compiles: bool = False) -> list[Topology]:
    """Return the devices of a comma-separated list, for the formulas or for the compiler.

    It is called before JAX starts, and has it start on the CPU alone: a plan uses no device.
    """
    parsed = [parse(name.strip()) for name in names.split(",")]
    jax.config.update("jax_platforms", "cpu")
    if not compiles:
        return [_plan_topology(kind, shape) for kind, shape in parsed]
    for name, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    most = max((int(shape) for kind, shape in parsed if kind == _CPU), default=1)
    with contextlib.suppress(RuntimeError):  # JAX runs already, as in tests
        jax.config.update("jax_num_cpu_devices", most)
    return [_compiled_topology(kind, shape) for kind, shape in parsed]


def parse(name: str) -> tuple[str, str]:
    """Return a name's chip and the shape of its slice or number of its devices, or refuse it."""
    kind, _, shape = _from_cloud_name(name.lower()).partition(":")
    if kind != _CPU and kind not in chips.CHIPS:
        known = ", ".join((*chips.CHIPS, _CPU))
        raise UserError(f"--topology {name}: {kind!r} is not a known chip; use one of {known}")
    pattern, example = r"[1-9]\d{0,17}", "8"
    if kind != _CPU and chips.CHIPS[kind].is_tpu:
        most, example = (2, "4x4x4") if kind in _CUBES else (1, "4x4")
        pattern = rf"{pattern}(x{pattern}){{1,{most}}}"
    if not re.fullmatch(pattern, shape):
        raise UserError(f"--topology {name}: write it as {kind}:{example}")
    if (count := math.prod(map(int, shape.split("x")))) > _MOST_DEVICES:
        raise UserError(
            f"--topology {name}: {count:,} devices; a plan is for {_MOST_DEVICES:,} at most"
        )
    return kind, shape


def _from_cloud_name(name: str) -> str:
    """Return the name by chip and shape of `v5e-8`, `v4-32` or `8xh100`; others as they are.

    The number of a v4 or v5p counts the TensorCores, of which a chip has two; that of the others
    the chips. Source: Cloud TPU documentation, 'TPU v4', 'TPU v5p', 'TPU v5e' and 'TPU v6e'.
    """
    if match := re.fullmatch(r"([1-9][0-9]{0,17})x([a-z]\w*)", name):
        return f"{match[2]}:{match[1]}"
    match = re.fullmatch(r"(v[0-9][a-z]?|v5litepod)-([1-9][0-9]{0,17})", name)
    if not match:
        return name
    kind, number = match[1].replace("v5litepod", "v5e"), int(match[2])
    is_cube = kind in _CUBES
    chips_of_slice = number // 2 if is_cube else number
    power, dimensions = chips_of_slice.bit_length() - 1, 3 if is_cube else 2
    if number != (2 if is_cube else 1) << max(power, 0):
        raise UserError(
            f"--topology {name}: no slice of a usual shape has this number; write it as "
            f"{kind}:{'4x4x4' if is_cube else '4x4'}"
        )
    sizes = [1 << (power + index) // dimensions for index in range(dimensions)]
    shape = "x".join(map(str, sorted(sizes, key=lambda size: (size == 1, size))))
    return f"{kind}:{shape}"


def _plan_topology(kind: str, shape: str) -> Topology:
    sizes, chip = list(map(int, shape.split("x"))), chips.CHIPS.get(kind)
    if chip is not None and chip.is_tpu:
        sizes += [1] * (3 - len(sizes))
        places = itertools.product(*map(range, reversed(sizes)))  # x changes fastest
        devices = [
            PlannedDevice(index, "tpu", chip.device_kinds[0], place[::-1])
            for index, place in enumerate(places)
        ]
    else:
        platform, named = (_CPU, kind) if chip is None else ("gpu", chip.device_kinds[0])
        size = sizes[0] if chip is None else chips.NODE_SIZE
        devices = [
            PlannedDevice(index, platform, named, process_index=index // size)
            for index in range(sizes[0])
        ]
    return Topology(f"{kind}:{shape}", devices, chip)


def _compiled_topology(kind: str, shape: str) -> Topology:
    name, chip = f"{kind}:{shape}", chips.CHIPS.get(kind)
    if chip is None:
        return Topology(name, jax.devices(_CPU)[: int(shape)], None)
    if not chip.is_tpu:
        raise UserError(
            f"--compile for {name} needs a GPU and its compiler; leave it out: the formulas are "
            "within 9% of an H200's memory"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"--compile for {name} needs the TPU compiler: pip install libtpu")
    # Otherwise the two cores of a v4 chip are two devices; on Cloud TPU they are one.
    options = {"chip_config_name": "megacore"} if kind == "v4" else {}
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--topology {name} does not exist: {reason}") from error
    return Topology(name, topology.devices, chip)
