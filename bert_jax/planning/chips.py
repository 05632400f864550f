"""What chips can do, by their makers' figures, and how fast they send to each other.

Every figure is the best that the maker states: a time computed from it is one that no program
beats, not one to expect. Matrix products reach 70 to 80% of the peak of an H100, for example.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of chip, or of GPU.

    Attributes:
      name: as in `--topology`.
      maker: "Google" or "NVIDIA".
      peak: bfloat16 operations a second, dense.
      memory: bytes of HBM.
      usable: the share of them that a program gets.
      memory_rate: bytes a second from and to HBM.
      link: bytes a second that a chip sends over one link: of a TPU, to one neighbour; of a GPU,
        over all its NVLinks together, to its node.
      network: bytes a second that a GPU sends to other nodes; a TPU has its links alone.
      source: where the figures are from.
    """

    name: str
    maker: str
    peak: float
    memory: float
    usable: float
    memory_rate: float
    link: float
    network: float
    source: str


NODE = 8  # GPUs of a node: DGX and HGX A100, H100 and H200
# JAX takes so much of a GPU's memory (docs.jax.dev, "GPU memory allocation"), and leaves it the
# program; XLA_PYTHON_CLIENT_MEM_FRACTION sets it.
_GPU_SHARE = 0.75
# GiB that a TPU's compiler grants a program: libtpu 0.0.51's "exceeds available HBM (15.75G)".
_TPU_USABLE = {"v4": 30.75, "v5e": 15.75, "v5p": 95.73, "v6e": 31.24}
_GIB = 2**30


def _tpu(name: str, peak: float, memory: float, rate: float, link: float, source: str) -> Chip:
    usable = _TPU_USABLE[name] / memory
    return Chip(name, "Google", peak, memory * _GIB, usable, rate, link, 0.0, source)


def _gpu(
    name: str, peak: float, memory: float, rate: float, nvlink: float, network: float, source: str
) -> Chip:
    return Chip(name, "NVIDIA", peak, memory, _GPU_SHARE, rate, nvlink, network, source)


# Of TPUs, "inter-chip interconnect bandwidth" counts both ways of all links: a link sends at that,
# halved, divided by the number of ports. The pages' "all-reduce bandwidth per Pod", divided by
# chips and ports, is the same; for v4, whose page has no other figure, it is where it is from.
# Of GPUs, NVLink's figure counts both ways too, and a node has a network card for each GPU.
CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v4", 275e12, 32, 1200e9, 1.1e15 / 4096 / 6, "Cloud TPU documentation, 'TPU v4'"),
        _tpu("v5e", 197e12, 16, 819e9, 400e9 / 2 / 4, "Cloud TPU documentation, 'TPU v5e'"),
        _tpu("v5p", 459e12, 95, 2765e9, 1200e9 / 2 / 6, "Cloud TPU documentation, 'TPU v5p'"),
        _tpu("v6e", 918e12, 32, 1638e9, 800e9 / 2 / 4, "Cloud TPU documentation, 'TPU v6e'"),
        _gpu(
            *("a100", 312e12, 80e9, 2039e9, 600e9 / 2, 200e9 / 8),
            "NVIDIA A100 80GB SXM datasheet; DGX A100 datasheet, 200 Gb/s a GPU",
        ),
        _gpu(
            *("h100", 989e12, 80e9, 3350e9, 900e9 / 2, 400e9 / 8),
            "NVIDIA H100 SXM datasheet; DGX H100 datasheet, 400 Gb/s a GPU",
        ),
        _gpu(
            *("h200", 989e12, 141e9, 4800e9, 900e9 / 2, 400e9 / 8),
            "NVIDIA H200 SXM datasheet; DGX H200 datasheet, 400 Gb/s a GPU",
        ),
    )
}


# By the names that JAX has for them. Others of a family differ in what they can do: the H100 PCIe
# has three quarters of the SXM's peak.
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
}


def of_device(device: Any) -> Chip | None:
    """Returns the chip that a device of JAX is, or None of one that is not known."""
    return CHIPS.get(_KINDS.get(device.device_kind, ""))


def rate(chip: Chip, group: Sequence[int], devices: Sequence[Any]) -> float:
    """Returns the bytes a second that each device of a group can send to the others in a ring.

    GPUs of one node have NVLink. A ring over several nodes leaves each of them once, over the
    network cards of all its GPUs in the group.

    Args:
      chip: of the devices.
      group: places in `devices`.
      devices: all of them, in the mesh's order.
    """
    if chip.maker == "NVIDIA":
        nodes = {place // NODE for place in group}
        if len(nodes) == 1:
            return chip.link
        return min(chip.link, chip.network * len(group) / len(nodes))
    return chip.link * links(group, devices)


def links(group: Sequence[int], devices: Sequence[Any]) -> float:
    """Returns the links over which each TPU of a group can send at once in a ring.

    Along each dimension of the slice over which the group is spread: two, where it goes all around
    a torus; one, where it is a line of neighbours; a half, where it takes every second chip, since
    those between use the same links; and so on. A slice's dimension is a torus where it has 16
    chips (v5e, v6e), or a multiple of 4 as all three have (v4, v5p). Source: Cloud TPU
    documentation, 'TPU v5e', 'TPU v4' (3D mesh and 3D torus), 'TPU configurations'.
    """
    coords = np.array([device.coords for device in devices])
    sizes = coords.max(axis=0) + 1
    is_torus = sizes == 16 if sizes[2] == 1 else np.full(3, not (sizes % 4).any())
    total = 0.0
    for dimension, size in enumerate(sizes):
        found = sorted(set(coords[list(group), dimension].tolist()))
        if len(found) == size and is_torus[dimension]:
            total += 2
        elif len(found) > 1:
            total += (len(found) - 1) / (found[-1] - found[0])
    return total


def text(number: float, unit: str) -> str:
    """Returns a number with its unit and the prefix that suits it, such as "1.50 TFLOP"."""
    power = max(0, min(4, int(math.log10(number) // 3))) if number >= 1 else 0
    return f"{number / 1000**power:.2f} {['', 'k', 'M', 'G', 'T'][power]}{unit}"
