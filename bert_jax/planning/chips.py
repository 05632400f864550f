"""Accelerator specs: peak FLOP/s, memory, bandwidth and interconnect, by their makers.

A time computed from these figures is a lower bound: matmuls reach 70 to 80% of an H100's peak.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

_MIB, _GIB = 2.0**20, 2.0**30
NODE_SIZE = 8  # GPUs of a DGX or HGX A100, H100 or H200


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
    name: str, peak: float, mib: int, rate: float, link: float, network: float, kind: str
) -> Chip:
    """Return a GPU, of whose memory JAX takes 75% (docs.jax.dev, "GPU memory allocation")."""
    source = f"NVIDIA {name} datasheet; DGX {name.split()[0]} datasheet"
    source += f", {8 * network / 1e9:.0f} Gb/s per GPU"
    memory = mib * _MIB
    return Chip(peak, memory, 0.75 * memory, rate, link, network, source, (kind,))


def _card(source: str, peak: float, mib: int, rate: float, kind: str) -> Chip:
    """Return a GPU without NVLink, on PCIe 4.0 x16, over which it reaches other hosts too."""
    pcie, memory = 64e9 / 2, mib * _MIB  # the datasheet's rate is that of both directions
    return Chip(peak, memory, 0.75 * memory, rate, pcie, pcie, f"NVIDIA {source}", (kind,))


# Google's "inter-chip interconnect bandwidth" counts both directions of all links: one link sends
# at half of it divided by the number of ports. v4's page has only the "all-reduce bandwidth per
# Pod", to divide by chips and ports. NVLink's figure counts both directions too. A GPU node has a
# network card for each GPU. The memory of a GPU is what nvidia-smi shows, in MiB. The H100 PCIe is
# another chip, with three quarters of the peak.
CHIPS = {
    "v4": _tpu("v4", 275e12, 32.0, 30.75, 1200e9, 1.1e15 / 4096 / 6, "TPU v4"),
    "v5e": _tpu("v5e", 197e12, 16.0, 15.75, 819e9, 400e9 / 2 / 4, "TPU v5 lite", "TPU v5e"),
    "v5p": _tpu("v5p", 459e12, 95.0, 95.73, 2765e9, 1200e9 / 2 / 6, "TPU v5", "TPU v5p"),
    "v6e": _tpu("v6e", 918e12, 32.0, 31.24, 1638e9, 800e9 / 2 / 4, "TPU v6 lite", "TPU v6e"),
    "a100": _gpu("A100 80GB SXM", 312e12, 81_920, 2039e9, 600e9 / 2, 25e9, "NVIDIA A100-SXM4-80GB"),
    "h100": _gpu("H100 SXM", 989e12, 81_559, 3350e9, 900e9 / 2, 50e9, "NVIDIA H100 80GB HBM3"),
    # With float32 accumulation; with float16's the whitepaper has twice the speed.
    "rtx4090": _card(
        "Ada GPU architecture whitepaper, appendix A",
        165.2e12,
        24_564,
        1008e9,
        "NVIDIA GeForce RTX 4090",
    ),
    "l4": _card(
        "L4 datasheet; half of its figure with sparsity", 121e12, 23_034, 300e9, "NVIDIA L4"
    ),
    "h200": _gpu("H200 SXM", 989e12, 143_771, 4800e9, 900e9 / 2, 50e9, "NVIDIA H200"),
}


def chip_of(device: Any) -> Chip | None:
    """Return the chip that a JAX device is; None if it is not in the list."""
    return next((chip for chip in CHIPS.values() if device.device_kind in chip.device_kinds), None)


def ring_rate(chip: Chip, group: Sequence[int], devices: Sequence[Any]) -> float:
    """Return the bytes per second that each device of a group, of indices, sends in a ring."""
    if chip.is_tpu:
        return chip.link * num_links(group, devices)
    nodes = {index // NODE_SIZE for index in group}
    if len(nodes) == 1:
        return chip.link
    # A ring leaves each node once, over the network cards of all its GPUs in the group.
    return min(chip.link, chip.network * len(group) / len(nodes))


def num_links(group: Sequence[int], devices: Sequence[Any]) -> float:
    """Return the number of links over which each TPU of a group can send at once in a ring."""
    # A dimension is a torus if it has 16 chips (v5e, v6e), or if all three are multiples of 4 (v4,
    # v5p). Source: Cloud TPU documentation, 'TPU v5e', 'TPU v4', 'TPU configurations'.
    coords = np.array([device.coords for device in devices])
    sizes = coords.max(axis=0) + 1
    is_torus = sizes == 16 if sizes[2] == 1 else np.full(3, not (sizes % 4).any())
    total = 0.0
    for dimension, size in enumerate(sizes):
        members = sorted(set(coords[list(group), dimension].tolist()))
        if len(members) == size and is_torus[dimension]:
            total += 2
        elif len(members) > 1:  # every second chip has half a link: those between use it too
            total += (len(members) - 1) / (members[-1] - members[0])
    return total
