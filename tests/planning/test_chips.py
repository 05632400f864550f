"""The rates at which groups of chips communicate."""

from types import SimpleNamespace

import pytest

from bert_jax.planning.chips import CHIPS, chip_of, num_links, ring_rate


def slice_of(*sizes: int):
    x, y, z = sizes
    coords = ((i, j, k) for i in range(x) for j in range(y) for k in range(z))
    return [SimpleNamespace(coords=each) for each in coords]


@pytest.mark.parametrize(
    ("sizes", "group", "links"),
    [
        ((16, 16, 1), range(256), 4),  # both dimensions of the torus
        ((16, 16, 1), range(16), 2),
        ((16, 16, 1), range(8), 1),  # a line of neighbours
        ((16, 16, 1), range(0, 16, 2), 0.5),  # shares its links with the chips between
        ((2, 4, 1), range(8), 2),  # no torus: a line in each dimension
        ((4, 4, 4), range(64), 6),
        ((4, 4, 2), range(0, 8), 2),
    ],
)
def test_links_of_a_tpu(sizes, group, links):
    assert num_links(group, slice_of(*sizes)) == links


@pytest.mark.parametrize(
    ("chip", "group", "expected"),
    [
        ("h100", range(8), 450e9),
        ("h100", (0, 8), 50e9),  # a card each
        ("h100", range(16), 400e9),  # eight cards lead out of each node
        ("rtx4090", range(4), 32e9),  # over PCIe, within a host and beyond it
        ("rtx4090", range(16), 32e9),
    ],
)
def test_rate_of_gpus(chip, group, expected):
    assert ring_rate(CHIPS[chip], group, []) == expected


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", CHIPS["h100"]),
        ("NVIDIA H100 PCIe", None),  # a similar one is not the same
        ("NVIDIA GeForce RTX 4090", CHIPS["rtx4090"]),
    ],
)
def test_chip_of_a_device(kind, chip):
    assert chip_of(SimpleNamespace(device_kind=kind)) is chip


def test_all_reduce_of_a_pod_is_what_google_states():
    """Cloud TPU documentation: 51.2 TB/s in a v5e pod, 102.4 in a v6e pod."""
    for name, total in (("v5e", 51.2e12), ("v6e", 102.4e12)):
        rate = ring_rate(CHIPS[name], range(256), slice_of(16, 16, 1))
        assert rate * 256 == pytest.approx(total)
