"""What chips can do: their makers' figures, and the rate at which a group of them communicates.

Every figure is the maker's best: a time computed from it is a lower bound, not an expectation.
Matmuls reach 70 to 80% of the peak of an H100, for example.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

_GIB = 2**30
_NODE_SIZE = 8  # GPUs of a DGX or HGX A100, H100 or H200


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of TPU chip or GPU."""

    peak: float  # bfloat16 operations per second, dense
    memory: float  # bytes of HBM
    usable: float  # bytes of it that a program gets
    memory_rate: float  # bytes per second from and to HBM
    link: float  # bytes per second: of a TPU to one neighbour, of a GPU to its node
    network: float  # bytes per second of a GPU to other nodes; 0 for a TPU
    source: str
    device_kinds: tuple[str, ...]  # JAX's names of it

    @property
    def is_tpu(self) -> bool:
        """Whether it is a TPU; the others are NVIDIA's GPUs."""
        return self.network == 0


def _tpu(
    name: str, peak: float, gib: float, usable: float, memory_rate: float, link: float, *kinds: str
) -> Chip:
    """Return a TPU; `usable` is from libtpu 0.0.51's "exceeds available HBM (15.75G)"."""
    source = f"Cloud TPU documentation, 'TPU {name}'"
    return Chip(peak, gib * _GIB, usable * _GIB, memory_rate, link, 0.0, source, kinds)


def _gpu(
    kind: str, peak: float, memory: float, rate: float, link: float, network: float, source: str
) -> Chip:
    """Return a GPU, of whose memory JAX takes 75% (docs.jax.dev, "GPU memory allocation")."""
    return Chip(peak, memory, 0.75 * memory, rate, link, network, source, (kind,))


# Google's "inter-chip interconnect bandwidth" counts both directions of all links: one link sends
# at half of it divided by the number of ports. v4's page has only the "all-reduce bandwidth per
# Pod", which divided by chips and ports is the same. NVLink's figure counts both directions too. A
# GPU node has a network card for each GPU. Others of a family differ: the H100 PCIe has three
# quarters of the peak.
CHIPS = {
    "v4": _tpu("v4", 275e12, 32.0, 30.75, 1200e9, 1.1e15 / 4096 / 6, "TPU v4"),
    "v5e": _tpu("v5e", 197e12, 16.0, 15.75, 819e9, 400e9 / 2 / 4, "TPU v5 lite", "TPU v5e"),
    "v5p": _tpu("v5p", 459e12, 95.0, 95.73, 2765e9, 1200e9 / 2 / 6, "TPU v5", "TPU v5p"),
    "v6e": _tpu("v6e", 918e12, 32.0, 31.24, 1638e9, 800e9 / 2 / 4, "TPU v6 lite", "TPU v6e"),
    "a100": _gpu(
        *("NVIDIA A100-SXM4-80GB", 312e12, 80e9, 2039e9, 600e9 / 2, 200e9 / 8),
        "NVIDIA A100 80GB SXM datasheet; DGX A100 datasheet, 200 Gb/s per GPU",
    ),
    "h100": _gpu(
        *("NVIDIA H100 80GB HBM3", 989e12, 80e9, 3350e9, 900e9 / 2, 400e9 / 8),
        "NVIDIA H100 SXM datasheet; DGX H100 datasheet, 400 Gb/s per GPU",
    ),
    "h200": _gpu(
        *("NVIDIA H200", 989e12, 141e9, 4800e9, 900e9 / 2, 400e9 / 8),
        "NVIDIA H200 SXM datasheet; DGX H200 datasheet, 400 Gb/s per GPU",
    ),
}


def chip_of(device: Any) -> Chip | None:
    """Return the chip that a JAX device is; None if it is not in the list."""
    return next((chip for chip in CHIPS.values() if device.device_kind in chip.device_kinds), None)


def ring_rate(chip: Chip, group: Sequence[int], devices: Sequence[Any]) -> float:
    """Return the bytes per second that each device of a group sends in a ring.

    The group are indices into `devices`, which are in the mesh's order. GPUs of one node have
    NVLink. A ring over several nodes leaves each once, over the network cards of all its GPUs in
    the group.
    """
    if chip.is_tpu:
        return chip.link * num_links(group, devices)
    nodes = {index // _NODE_SIZE for index in group}
    if len(nodes) == 1:
        return chip.link
    return min(chip.link, chip.network * len(group) / len(nodes))


def num_links(group: Sequence[int], devices: Sequence[Any]) -> float:
    """Return the number of links over which each TPU of a group can send at once in a ring.

    Each dimension of the slice along which the group extends counts: two links, if the group spans
    a torus; one, if it is a line of neighbours; half a link, if it has every second chip, because
    the chips between use the same links; and so on. A dimension is a torus if it has 16 chips (v5e,
    v6e), or if all three dimensions are multiples of 4 (v4, v5p). Source: Cloud TPU documentation,
    'TPU v5e', 'TPU v4' (3D mesh and 3D torus), 'TPU configurations'.
    """
    coords = np.array([device.coords for device in devices])
    sizes = coords.max(axis=0) + 1
    is_torus = sizes == 16 if sizes[2] == 1 else np.full(3, not (sizes % 4).any())
    total = 0.0
    for dimension, size in enumerate(sizes):
        members = sorted(set(coords[list(group), dimension].tolist()))
        if len(members) == size and is_torus[dimension]:
            total += 2
        elif len(members) > 1:
            total += (len(members) - 1) / (members[-1] - members[0])
    return total
