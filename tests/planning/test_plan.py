"""Topologies, batches, meshes, rates and the command."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import model_config

from bert_jax.config import DataConfig, ModelConfig, ParallelConfig, Phase, TrainConfig
from bert_jax.errors import UserError
from bert_jax.planning import chips, plan, search, table, targets
from bert_jax.planning.cost import Cost, Memory
from bert_jax.planning.program import Collective

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "not a chip that is known"),
        ("v5e:8", "write it as v5e:4x4"),
        ("v5e:", "write it as v5e:4x4"),
        ("h100:2x2", "write it as h100:8"),
        ("cpu:0", "write it as cpu:8"),
        ("cpu:2,", "not a chip that is known"),
    ],
)
def test_topologies_that_are_none(name, message):
    with pytest.raises(UserError, match=message):
        targets.read(name)


def test_gpus_are_as_many_cpus():
    cpus, gpus = targets.read("cpu:4, h100:8")
    assert (len(cpus.devices), cpus.chip, cpus.is_compiled_for) == (4, None, True)
    assert (len(gpus.devices), gpus.chip, gpus.is_compiled_for) == (8, chips.CHIPS["h100"], False)


def test_a_tpus_compiler_that_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install libtpu"):
        targets.read("v5e:2x2")


def test_tpus():
    pytest.importorskip("libtpu")
    (v4,) = targets.read("v4:2x2x2")
    assert len(v4.devices) == 8  # not its 16 cores
    with pytest.raises(UserError, match="is not one"):
        targets.read("v5e:3x5")


def slice_of(*sizes: int):
    x, y, z = sizes
    places = ((i, j, k) for i in range(x) for j in range(y) for k in range(z))
    return [SimpleNamespace(coords=each) for each in places]


@pytest.mark.parametrize(
    ("sizes", "group", "links"),
    [
        ((16, 16, 1), range(256), 4),  # all around both dimensions of the torus
        ((16, 16, 1), range(16), 2),
        ((16, 16, 1), range(8), 1),  # a line of neighbours
        ((16, 16, 1), range(0, 16, 2), 0.5),  # shares its links with those between
        ((2, 4, 1), range(8), 2),  # no torus: a line in each dimension
        ((4, 4, 4), range(64), 6),
        ((4, 4, 2), range(0, 8), 2),
    ],
)
def test_links_of_a_tpu(sizes, group, links):
    assert chips.links(group, slice_of(*sizes)) == links


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (range(8), 450e9),
        ((0, 8), 50e9),  # a card each
        (range(16), 400e9),  # eight cards lead out of each node
    ],
)
def test_rate_of_gpus(group, expected):
    assert chips.rate(chips.CHIPS["h100"], group, []) == expected


def test_all_reduce_of_a_pod_is_what_google_states():
    """Cloud TPU documentation: 51.2 TB/s in a v5e pod, 102.4 in a v6e pod."""
    for name, total in (("v5e", 51.2e12), ("v6e", 102.4e12)):
        chip = chips.CHIPS[name]
        assert chips.rate(chip, range(256), slice_of(16, 16, 1)) * 256 == pytest.approx(total)


@pytest.mark.parametrize(
    ("first", "bytes_of", "rows"),
    [
        (4, lambda rows: 100 + 10 * rows, 90),
        (200, lambda rows: 100 + 10 * rows, 90),
        (4, lambda rows: 100 + 10 * rows + (50 if rows > 40 else 0), 85),
        (200, lambda rows: 100 + 10 * rows - (100 if 80 < rows <= 95 else 0), 95),
        (1, lambda rows: 2000 + rows, 0),
    ],
)
def test_largest_batch(first, bytes_of, rows):
    """A straight line is met at once; one with a step in it, on the way."""
    asked = []

    def total(batch):
        asked.append(batch)
        assert batch % 8 == 0
        return bytes_of(batch // 8)

    found = plan.largest_batch(total, (first, bytes_of(first)), 1000, 8)
    assert found.rows == rows * 8
    assert found.compiles == len(asked) <= 4
    assert found.total == (bytes_of(rows) if rows else 0)


def test_meshes_divide_the_model():
    found = list(search.meshes(ModelConfig(vocab_size=30592), 8))
    shapes = {(each.data, each.fsdp, each.tensor) for each in found}
    assert (8, 1, 1) in shapes
    assert (1, 2, 4) in shapes
    assert (1, 1, 8) not in shapes  # 12 heads
    assert all(data * fsdp * tensor == 8 for data, fsdp, tensor in shapes)
    assert {each.zero for each in found if each.fsdp == 1} == {3}


def a_plan(chip: str, memory: int) -> plan.PhasePlan:
    """Of a step that takes a second by each of the three."""
    kind = chips.CHIPS[chip]
    target = targets.Target(f"{chip}:2", [None, None], kind)
    sent = Collective("all-reduce", ("data",), 2, "f32", 1 << 20, 3, True, "", (0, 1))
    parts = Memory(1 << 30, 2 << 30, 0, memory - (3 << 30), 0, 0, memory)
    fits = memory < kind.memory * kind.usable
    cost = Cost(1000, parts if fits else None, memory, kind.peak, int(kind.memory_rate), [sent])
    return plan.PhasePlan(
        target=target,
        mesh={"data": 2, "fsdp": 1, "tensor": 1},
        phase=Phase(0.0, 128, 64, 20),
        cost=cost,
        capacity=int(kind.memory * kind.usable),
        times=plan.Times(1.0, None, 0.5, 64.0, 0.4) if fits else None,
        largest=plan.Largest(128, 50 << 30, 51 << 30, 2) if fits else plan.Largest(0, 0, 0, 1),
    )


def test_table():
    shown = table.text([a_plan("h100", 40 << 30)])
    assert "moments         2.000 GiB" in shown
    assert "total          40.000 GiB of 55.879 for a program: fits" in shown
    assert "largest batch that fits: 128 rows, 51.000 GiB compiled, 50.000 expected" in shown
    assert "all-reduce          data                  2   f32      3       3.00       3.00" in shown
    assert "1000.000 ms at least, bound by compute: 64 rows/s, MFU 40.0% at most" in shown


def test_table_of_what_does_not_fit():
    shown = table.text([a_plan("h100", 70 << 30)])
    assert "70.000 GiB of 55.879 for a program: does not fit" in shown
    assert "no batch fits" in shown
    assert json.dumps(plan.as_json(a_plan("h100", 70 << 30)))


def test_a_mesh_that_does_not_divide():
    config = TrainConfig(
        model=model_config(), data=DataConfig(max_length=32), parallel=ParallelConfig(data=3)
    )
    with pytest.raises(UserError, match="does not make 8 devices"):
        plan.make_plans(config, targets.read("cpu:8"), print)


def test_search_needs_rates():
    with pytest.raises(UserError, match="name a chip"):
        search.search(TrainConfig(), targets.read("cpu:8")[0], print)


def test_command():
    """From the command line, with a field of the config set, to JSON."""
    small = ("model.hidden_size=16", "model.num_attention_heads=2", "model.num_hidden_layers=1")
    command = [
        sys.executable,
        "-m",
        "bert_jax",
        "plan",
        "--config=configs/tiny.py",
        "--quick",
    ]
    command += ["--topology=h100:2", "--json", *(f"--config.{field}" for field in small)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout)
    assert (found["devices"], found["mesh"]["data"], found["fits"]) == (2, 2, True)
    assert found["memory"]["parameters"] == 4 * found["parameters"]
    assert found["collectives"][0]["axes"] == ["data"]
    assert 0 < found["seconds"]["mfu"] < 1
    assert "compiling for h100:2" in done.stderr


def test_command_with_bad_input():
    command = [sys.executable, "-m", "bert_jax", "plan", "--config=configs/tiny.py"]
    done = subprocess.run([*command, "--topology=h99:2"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
