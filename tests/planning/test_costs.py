"""The formulas of a step's cost, against the traced step and the compiler."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import pytest
from helpers import LENGTH, PREDICTIONS, model_config

import bert_jax
from bert_jax.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from bert_jax.config.schedule import Stage, make_schedule
from bert_jax.distributed import devices
from bert_jax.distributed.mesh import make_mesh
from bert_jax.errors import UserError
from bert_jax.models.architecture import architecture
from bert_jax.objectives import make_objective
from bert_jax.objectives.sentence_pairs import BertForPreTraining
from bert_jax.planning import costs, plan, synthetic
from bert_jax.planning.topology import read_topologies
from bert_jax.storage import machine
from bert_jax.training.setup import set_up

pytestmark = pytest.mark.devices(8)

BATCH = 16
METRICS = 1024  # bytes, at most, of losses and norms, which are summed too
PHASE = Stage(LENGTH, BATCH, PREDICTIONS)


def config_of(model: dict | None = None, **axes: int) -> TrainConfig:
    return TrainConfig(
        model=model_config(**{"vocab_size": 96, "num_hidden_layers": 1, **(model or {})}),
        data=DataConfig(max_length=LENGTH, batch_size=BATCH),
        parallel=ParallelConfig(**{"data": 1, **axes}),  # pyright: ignore[reportArgumentType]
    )


def mesh_of(config: TrainConfig):
    parallel = config.parallel
    count = parallel.data * parallel.fsdp * parallel.tensor
    return make_mesh(parallel, jax.devices()[:count])


def setup_of(config: TrainConfig):
    model, rate = make_objective(config).model, make_schedule(config).rate
    return set_up(model, config, rate, mesh_of(config))


def sent_bytes(config: TrainConfig, parallel: ParallelConfig):
    return costs.sent_bytes(config, PHASE, parallel, setup_of(config))


def num_parameters(config: TrainConfig) -> int:
    shapes = jax.eval_shape(BertForPreTraining(config.model).init_params, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(shapes))


def equations(jaxpr):
    """All equations of a program, and of the programs in it; of alternatives, the first one's."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            several = isinstance(value, tuple | list)
            is_choice = equation.primitive.name == "cond"
            for each in (value[:1] if is_choice else value) if several else (value,):
                if hasattr(getattr(each, "jaxpr", each), "eqns"):
                    yield from equations(each)


def trace(config: TrainConfig, phase: Stage = PHASE):
    setup = setup_of(config)
    batch = synthetic.abstract_batch(config, phase, setup.layout.mesh)
    return synthetic.train_step(setup, config, phase).trace(setup.abstract_state, batch).jaxpr


def test_memory():
    """Parameters, twice as much for the moments, and the parts add up to the compiler's total."""
    config = config_of(data=8)
    cost = costs.compile_cost(config, PHASE, setup_of(config))
    memory = cost["memory"]
    assert cost["parameters"] == num_parameters(config)
    assert memory["parameters"] == 4 * cost["parameters"]
    assert memory["moments"] == pytest.approx(8 * cost["parameters"], abs=16)
    assert memory["batch"] == BATCH // 8 * (3 * LENGTH + 2) * 4
    assert sum(memory.values()) == 2 * memory["total"]
    assert 0 <= memory["other"] < 4096
    assert cost["flops"] > 2 * costs.model_flops(config, PHASE)


def test_a_step_that_does_not_fit(monkeypatch):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 25G\nof 15.75G hbm.")

    config = config_of()
    monkeypatch.setattr(synthetic.mesh_lib, "jit_step", lambda *_: SimpleNamespace(lower=fail))
    cost = costs.compile_cost(config, PHASE, setup_of(config))
    assert cost["memory"] is None
    assert cost["error"] == "RESOURCE_EXHAUSTED: Used 25G of 15.75G hbm."


@pytest.mark.parametrize("axes", [{"data": 8}, {"fsdp": 4, "zero": 1}, {"data": 2, "fsdp": 4}])
def test_bytes_sent_are_those_of_the_traced_collectives(axes):
    config = config_of(**axes)
    shape, sent = dict(mesh_of(config).shape), 0.0
    factors = {"psum": 2, "psum_invariant": 2, "reduce_scatter": 1, "all_gather": 1}
    for equation in equations(trace(config)):
        name, params = equation.primitive.name, equation.params
        assert name not in ("ppermute", "all_to_all")
        if name in factors:
            over = params.get("axes") or params["axis_name"]
            devices = math.prod(shape[axis] for axis in ([over] if over in shape else over))
            arrays = equation.outvars if name == "all_gather" else equation.invars
            size = sum(x.aval.size * x.aval.dtype.itemsize for x in arrays)
            sent += factors[name] * (devices - 1) / devices * size
    expected = sum(each["bytes"] for each in sent_bytes(config, config.parallel))
    assert expected <= sent <= expected + METRICS


def test_bytes_sent_by_hand():
    config = config_of()
    assert sent_bytes(config, config.parallel) == []
    (gradients,) = sent_bytes(config, ParallelConfig(data=8))
    assert gradients["axes"] == ("data",)
    assert gradients["bytes"] == 2 * 7 / 8 * 4 * num_parameters(config)
    (activations,) = sent_bytes(config, ParallelConfig(data=1, tensor=2))
    assert activations["axes"] == ("tensor",)
    assert activations["bytes"] == 4 * 16 * BATCH * (4 * LENGTH + LENGTH + PREDICTIONS)
    # Counted in a compiled step: the forward pass of a layer again, but for what no one reads.
    for kind, sums in (("bert", 6), ("modernbert", 5)):
        again = config_of({"model_type": kind, "remat": True})
        again.data.pairs = "none"
        (activations,) = sent_bytes(again, ParallelConfig(data=1, tensor=2))
        assert activations["bytes"] == 4 * 16 * BATCH * (sums * LENGTH + LENGTH + PREDICTIONS)


@pytest.mark.parametrize("kind", ["bert", "electra"])
def test_model_flops_are_those_of_the_traced_matmuls(kind):
    """An electra's are those of both parts."""
    wide = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    positions = {"max_position_embeddings": 128}
    config = config_of(wide | positions)
    if kind == "electra":
        config.data.pairs = "none"
        sizes = {"model_type": kind, "embedding_size": 256, "generator_hidden_size": 1 / 3}
        config = dataclasses.replace(config, model=config_of(wide | positions | sizes).model)
    phase = dataclasses.replace(PHASE, max_length=128, batch_size=2, max_predictions=20)
    flops = 0.0
    for equation in equations(trace(config, phase)):
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            summed = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            flops += 2 * summed * equation.outvars[0].aval.size
    counted = costs.model_flops(config, phase)
    assert flops == pytest.approx(2 * counted, rel=0.01)


def test_model_flops_of_bert_base_and_large():
    """Source: 72 N D² + 12 N D S a token and so on, with a vocabulary of 30,592."""
    base = ModelConfig(vocab_size=30592)
    large = ModelConfig("bert", 30592, 1024, 24, 16, 4096)
    for model, length, predictions, expected in (
        (base, 128, 20, 69.9e9),
        (base, 512, 77, 301.0e9),
        (large, 128, 20, 240.7e9),
        (large, 512, 77, 1020e9),
    ):
        phase = Stage(length, 1, predictions)
        flops = costs.model_flops(TrainConfig(model=model), phase)
        assert flops == pytest.approx(expected, rel=1e-3)


def test_each_microbatch_gathers_parameters_and_scatters_gradients():
    """Under ZeRO stage 3; the sum over data is taken once."""
    one, four, parallel = config_of(), config_of(), ParallelConfig(data=2, fsdp=4)
    four.optimizer.microbatches = 4
    ratios = {
        a["collective"]: b["bytes"] / a["bytes"]
        for a, b in zip(sent_bytes(one, parallel), sent_bytes(four, parallel), strict=True)
    }
    assert ratios.pop("all-gather of parameters") == 4
    assert ratios.pop("reduce-scatter of gradients") == 4
    assert set(ratios.values()) == {1}
    parallel.zero = 1
    assert sent_bytes(four, parallel) == sent_bytes(one, parallel)


@pytest.mark.parametrize(
    ("model", "batch_size"), [({"num_hidden_layers": 1 << 24}, 16), ({}, 1 << 24)]
)
def test_sizes_that_cannot_fit_are_refused_by_arithmetic(model, batch_size):
    mesh, config = mesh_of(config_of()), dataclasses.replace(ModelConfig(), **model)
    stage = Stage(batch_size=batch_size, max_length=512)
    with pytest.raises(UserError, match=r"does not fit in the memory of .* GiB of"):
        devices.check_fits(config, stage, OptimizerConfig(), mesh)


def test_a_large_batch_of_a_tiny_model_is_refused_by_arithmetic(monkeypatch):
    """Its attention maps and feed-forward layers are most of it."""
    memory = {"MemAvailable": f"{16 << 20} kB"}
    monkeypatch.setattr(machine, "proc_field", lambda _, name: memory[name])
    model, mesh = config_of().model, mesh_of(config_of())
    stage = Stage(batch_size=1 << 20, max_length=32)
    with pytest.raises(UserError, match=r"a batch of 1,048,576 × 32 does not fit"):
        devices.check_fits(model, stage, OptimizerConfig(), mesh)
    devices.check_fits(model, stage, OptimizerConfig(microbatches=16), mesh)


def test_attention_maps_are_those_of_layers_without_a_kernel():
    """On a GPU, dropout leaves the kernel to layers without a window."""
    (topology,) = read_topologies("h200:1")
    gpu = make_mesh(ParallelConfig(), topology.devices)
    recipe = bert_jax.recipe("modernbert_base").model
    model = dataclasses.replace(recipe, dtype="bfloat16", vocab_size=50368)
    stage, windows = Stage(batch_size=8, max_length=1024), architecture(model).windows(model)

    def kept(dropout: float) -> float:
        changed = dataclasses.replace(model, attention_probs_dropout_prob=dropout)
        return devices.kept_activations(changed, stage, 1, gpu, recomputes=False)

    near = [3 * window for window in windows if window]  # keys, of a block and those beside it
    maps = 2 * model.num_attention_heads * sum(near) * 8 * 1024
    assert len(near) == 14
    assert kept(0.1) - kept(0.0) == 3.5 * maps  # bytes of bfloat16, and of which were dropped


@pytest.mark.parametrize(
    ("recipe", "attention", "dropout", "batch_size", "length", "peak"),
    [
        ("base", "plain", 0.1, 512, 128, 30.76),
        ("large", "plain", 0.1, 64, 512, 73.07),
        ("modernbert_base", "fused", 0.0, 128, 1024, 71.13),
    ],
)
def test_the_formula_is_near_the_measured_peak(
    recipe, attention, dropout, batch_size, length, peak
):
    """GiB on an H200: benchmarks/records/2026-11-28-h200."""
    config = bert_jax.recipe(recipe)
    model = dataclasses.replace(
        config.model, attention=attention, attention_probs_dropout_prob=dropout
    )
    data = dataclasses.replace(config.data, max_length=length, batch_size=batch_size, phases=())
    config = dataclasses.replace(config, model=model, data=data)
    (made,) = plan.make_plans(config, read_topologies("h200:1"))
    assert 0.9 < made["memory"]["total"] / 2**30 / peak < 1.02


def test_muon_certainly_needs_a_moment_less():
    stage, mesh = Stage(batch_size=1, max_length=32), mesh_of(config_of())
    model = ModelConfig(num_hidden_layers=1, vocab_size=1000)
    adam, muon = (
        devices.least_memory(model, stage, OptimizerConfig(name=name), mesh)
        for name in ("adamw", "muon")
    )
    assert adam - muon == 4 * (4 * 768**2 + 2 * 768 * 3072 + 1000 * 768)


@pytest.mark.parametrize(
    ("model", "axes", "microbatches"),
    [
        ({"dtype": "bfloat16", "num_hidden_layers": 2}, {}, 1),
        ({"remat": True, "num_hidden_layers": 2}, {}, 1),
        ({"scan_layers": True, "num_hidden_layers": 2}, {}, 2),
        (
            {"hidden_act": "relu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
            {},
            4,
        ),
    ],
)
def test_sizes_that_fit_are_not_refused(model, axes, microbatches, monkeypatch):
    """The estimate is less than what the compiler needs."""
    config, needed = config_of(model, **axes), []
    config.optimizer.microbatches = microbatches
    phase, mesh = dataclasses.replace(PHASE, batch_size=1 << 10), mesh_of(config)
    monkeypatch.setattr(devices, "check_memory", lambda size, _: needed.append(size))
    devices.check_fits(config.model, phase, config.optimizer, mesh)
    assert 0 < needed[0] < costs.compile_cost(config, phase, setup_of(config))["memory"]["total"]


@pytest.mark.parametrize(
    ("axes", "model", "microbatches"),
    [
        ({"data": 8}, {}, 1),
        ({"data": 2, "fsdp": 2, "tensor": 2}, {}, 1),
        ({"fsdp": 8, "zero": 1}, {}, 2),
        ({"data": 8}, {"model_type": "electra", "generator_hidden_size": 0.5}, 1),
    ],
)
def test_what_the_formula_says_is_what_the_compiler_says(axes, model, microbatches):
    """Parameters, moments and the batch to the byte; the total is less."""
    config = config_of({"num_hidden_layers": 2, **model}, **axes)
    if model:
        config.data.pairs = "none"
    config.optimizer.microbatches = microbatches
    stage = dataclasses.replace(PHASE, batch_size=512)
    setup = setup_of(config)
    by_formula = costs.estimate_cost(config, stage, setup)
    compiled = costs.compile_cost(config, stage, setup)
    assert by_formula["parameters"] == compiled["parameters"]
    for use in ("parameters", "moments", "batch"):
        assert by_formula["memory"][use] == compiled["memory"][use]
    share = by_formula["memory"]["total"] / compiled["memory"]["total"]
    assert 0.3 < share < 1.0
    least = devices.least_memory(config.model, stage, config.optimizer, setup.layout.mesh)
    assert 0 < least < compiled["memory"]["total"]
