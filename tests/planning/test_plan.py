"""Plans: their figures, and the command."""

import json
from unittest.mock import Mock

import jax
import pytest
from helpers import model_config, refused

from bert_jax.commands import plan as command
from bert_jax.commands.flags import Recipe
from bert_jax.config import DataConfig, ParallelConfig, Phase, TrainConfig
from bert_jax.planning import plan
from bert_jax.planning.topology import read_topologies

jax.devices()  # before a topology asks JAX for fewer


def small_config(**parallel) -> TrainConfig:
    return TrainConfig(
        model=model_config(num_hidden_layers=1, dtype="bfloat16"),
        data=DataConfig(max_length=32, batch_size=16),
        parallel=ParallelConfig(**parallel),
    )


@pytest.fixture
def compiled(monkeypatch):
    """Replace the compiler by a line: 1 GiB of parameters, 2 of moments, 0.25 for a sequence."""
    batches = []

    def compile_cost(config, phase, setup):
        batches.append(phase.batch_size)
        sizes = {"parameters": 1 << 30, "moments": 2 << 30, "batch": 0, "program": 0, "other": 0}
        sizes["temporaries"] = phase.batch_size // setup.layout.mesh.size << 28
        sizes["total"] = sum(sizes.values())
        return {"parameters": 1000, "memory": sizes, "error": "", "flops": 197e9}

    monkeypatch.setattr(plan, "compile_cost", compile_cost)
    return batches


def test_a_plan(compiled):
    topologies = read_topologies("h100:2")
    (made,) = plan.make_plans(small_config(), topologies, compiles=True)
    assert made["mesh"] == {"data": 2, "fsdp": 1, "tensor": 1}
    assert made["memory"]["total"] == 5 << 30
    assert (made["fits"], made["capacity"]) == (True, 0.75 * 81_559 * 2**20)
    assert compiled == [16]
    seconds = made["seconds"]
    assert seconds["compute"] == 197e9 / 989e12
    assert seconds["memory"] == 2 * (5 << 30) / 3350e9
    (sent,) = made["sent"]
    assert sent["axes"] == ("data",)
    assert seconds["network"] == sent["bytes"] / 450e9
    assert seconds["step"] == seconds["memory"]
    assert made["sequences_per_second"] == 16 / seconds["step"]
    assert 0 < made["mfu"] < 1


def test_of_batches_that_grow_the_largest_is_planned(compiled):
    config = small_config()
    config.data.phases = (Phase(0.2, 32, 32), Phase(0.4, 32, 64), Phase(0.6, 16, 32))
    plans = plan.make_plans(config, read_topologies("h100:2"))
    assert compiled == []  # formulas are enough
    assert [(made["max_length"], made["batch_size"]) for made in plans] == [(32, 64), (16, 32)]


def test_text(compiled):
    config = small_config()
    config.data.phases = (Phase(0.5, 16, 1024),)
    topologies = read_topologies("h100:2")
    shown = plan.as_text(plan.make_plans(config, topologies, compiles=True))
    assert "h100:2: 2 devices as data 2 × fsdp 1 × tensor 1; 1,000 parameters\n" in shown
    assert "moments         2.000 GiB" in shown
    assert "total           5.000 GiB\n  available      59.736 GiB: fits" in shown
    assert "total         131.000 GiB\n  available      59.736 GiB: does not fit" in shown
    assert "all-reduce of gradients over data" in shown
    assert shown.count("at least") == shown.count("source:") == 1


@pytest.mark.parametrize(
    ("name", "over", "verdict"),
    [
        ("v5e-8", 1.3, "may not fit; --compile asks the compiler"),
        ("v5e-8", 1.4, "does not fit."),
        ("h100:8", 1.1, "does not fit."),
    ],
)
def test_a_step_that_is_too_large_by_formula(name, over, verdict, monkeypatch):
    """A TPU's compiler may find room."""
    (topology,) = read_topologies(name)
    memory = {"total": int(over * topology.chip.usable)}
    cost = {"parameters": 9, "memory": memory, "error": "", "flops": 0.0}
    monkeypatch.setattr(plan, "estimate_cost", lambda *_: cost)
    shown = plan.as_text(plan.make_plans(small_config(), [topology]))
    assert f" GiB: {verdict}\n" in shown


def test_what_is_not_planned(monkeypatch):
    config, topologies = small_config(), read_topologies("cpu:1")
    config.parallel.mode = "pmap"
    with refused("parallel.mode pmap is not planned; use mesh"):
        plan.make_plans(config, topologies)
    config = small_config()
    config.model.vocab_size = 4
    with refused("model.vocab_size is 4, all of them special tokens"):
        plan.make_plans(config, topologies)
    config = small_config()
    config.model.attention, config.model.attention_probs_dropout_prob = "fused", 0.0
    config.model.max_position_embeddings = config.data.max_length = 128
    assert plan.make_plans(config, read_topologies("v5e-1"))[0]["attention"] == "fused"
    config.steps, config.data.length_warmup_fraction = 100, 0.2
    with refused("takes a multiple of 128 tokens on a TPU, not 16; give all sequences such"):
        plan.make_plans(config, read_topologies("v5e-1"))
    config = small_config()
    placed = Mock(side_effect=ValueError("cannot reshape"))  # as of v5e:7x9 in JAX 0.10
    monkeypatch.setattr("jax.experimental.mesh_utils.create_device_mesh", placed)
    with refused("the devices are not connected as parallel needs them"):
        plan.make_plans(config, topologies)


def test_a_plan_by_formula(bert_jax_main, monkeypatch):
    """Of a TPU, without its compiler; a slice has a line of links in each dimension."""
    monkeypatch.setattr(command, "read_config", lambda *_: Recipe(small_config(), "small"))
    (made,) = json.loads(bert_jax_main("plan", "--topology=v5e-8", "--json"))
    assert (made["topology"], made["compiled"], made["fits"]) == ("v5e:2x4", False, True)
    memory = made["memory"]
    assert memory["parameters"] == 4 * made["parameters"]
    assert memory["total"] == sum(memory.values()) - memory["total"]
    assert memory["temporaries"] > memory["parameters"]  # the gradients, and what they need
    (sent,) = made["sent"]
    assert made["seconds"]["network"] == sent["bytes"] / (2 * 50e9)
    held = sum(memory[use] for use in ("parameters", "moments", "temporaries"))
    assert made["seconds"]["memory"] == 2 * held / 819e9
    shown = bert_jax_main("plan", "--topology=v5e-8")
    assert "by formula, temporaries are approximate; --compile asks the compiler\n" in shown
    shown = bert_jax_main("plan", "--topology=h100:8")
    assert "by formula, temporaries are approximate\n" in shown


def test_command(bert_jax_main, monkeypatch):
    """On a TPU's own compiler, if it is installed: the smallest slice."""
    pytest.importorskip("libtpu")
    monkeypatch.delenv("XLA_FLAGS")  # it does not know all of a CPU's
    monkeypatch.setattr(command, "read_config", lambda *_: Recipe(small_config(), "small"))
    (made,) = json.loads(bert_jax_main("plan", "--topology=v5e:2x2", "--compile", "--json"))
    assert (made["devices"], made["mesh"]["data"], made["fits"]) == (4, 4, True)
    assert made["memory"]["parameters"] == 4 * made["parameters"]
    assert made["compiled"]
    assert 0 < made["mfu"] < 1
