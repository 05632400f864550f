"""What a compiled step costs: against formulas, and against the compiler's own figures."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import LENGTH, PREDICTIONS, model_config

from bert_jax.config import DataConfig, ModelConfig, ParallelConfig, Phase, TrainConfig
from bert_jax.distributed.mesh import make_mesh
from bert_jax.models import attention
from bert_jax.models.heads import BertForPreTraining
from bert_jax.planning import cost, theory

ROWS = 16
SUMS = 512  # bytes, at most, of losses and norms, which are added up too
PHASE = Phase(0.0, LENGTH, ROWS, PREDICTIONS)


def config_of(model: dict | None = None, **axes: int) -> TrainConfig:
    return TrainConfig(
        model=model_config(vocab_size=96, num_hidden_layers=1, **(model or {})),
        data=DataConfig(max_length=LENGTH, batch_size=ROWS),
        parallel=ParallelConfig(**axes),  # pyright: ignore[reportArgumentType]
    )


def measure_size(config: TrainConfig) -> int:
    shapes = jax.eval_shape(BertForPreTraining(config.model).init_params, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(shapes))


def measure(phase: Phase = PHASE, model: dict | None = None, **axes: int):
    """The cost of a small model's step on the mesh that is given."""
    config = config_of(model, **axes)
    devices = jax.devices()[: axes.get("data", 1) * axes.get("fsdp", 1) * axes.get("tensor", 1)]
    mesh = make_mesh(config.parallel, devices)
    return cost.measure(config, phase, mesh)


@pytest.fixture(scope="module")
def on_eight():
    return measure(data=8)


def payload(found: cost.Cost, axis: str = "") -> Counter:
    """Bytes by kind, of all collectives or of those over one axis alone."""
    total = Counter()
    for each in found.collectives:
        if not axis or each.axes == (axis,):
            total[each.kind] += each.times * each.payload
    return total


def test_memory_is_the_parameters_and_twice_as_much_for_moments(on_eight):
    memory = on_eight.memory
    assert memory.parameters == 4 * on_eight.num_parameters
    assert memory.moments == pytest.approx(8 * on_eight.num_parameters, abs=16)
    assert memory.batch == ROWS // 8 * (3 * LENGTH + 2) * 4
    parts = (memory.parameters, memory.moments, memory.batch, memory.temporaries, memory.program)
    assert sum(parts) + memory.other == memory.total
    assert 0 <= memory.other < 4096


def test_data_parallel_adds_up_each_gradient_once(on_eight):
    gradients = 4 * on_eight.num_parameters
    assert set(payload(on_eight)) == {"all-reduce"}
    assert {each.axes for each in on_eight.collectives} == {("data",)}
    assert gradients <= payload(on_eight)["all-reduce"] <= gradients + SUMS
    sent = sum(each.sent for each in on_eight.collectives)
    assert sent == 2 * 7 / 8 * payload(on_eight)["all-reduce"]


@pytest.mark.parametrize(
    "axes", [{"fsdp": 4, "zero": 1}, {"tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}]
)
def test_a_step_sends_what_it_has_to(axes):
    """And no more than the sums besides, in all; what is sent over each axis is its own."""
    found = measure(**axes)
    option = ParallelConfig(**{"data": 1, **axes})
    total = sum(each.sent for each in found.collectives)
    wanted = theory.needed(config_of(**axes), PHASE, option)
    # A row's losses are added up over "tensor", which in so small a model is a percent or two.
    assert wanted * 0.999 <= total <= wanted * 1.03 + 2 * SUMS
    sent = payload(found, "fsdp"), payload(found, "tensor")
    assert sent[0].keys() <= {"all-gather", "reduce-scatter", "all-reduce"}
    assert sent[1].keys() <= {"all-reduce"}  # of no logits, batch or table


def test_what_has_to_be_sent():
    """Of a model of one width, by hand."""
    config, data = config_of(), ParallelConfig(data=8)
    size = measure_size(config)
    assert theory.needed(config, PHASE, ParallelConfig(data=1)) == 0
    assert theory.needed(config, PHASE, data) == 2 * 7 / 8 * 4 * size
    of_layer, of_ends = 4 * LENGTH, LENGTH + PREDICTIONS
    activations = 4 * 16 * ROWS * (of_layer + of_ends)
    assert theory.needed(config, PHASE, ParallelConfig(data=1, tensor=2)) == activations


def test_operations_are_those_of_the_formula():
    """A BERT-base layer's, at length 128: what is not a matrix product is a few percent."""
    wide = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    wide |= {"max_position_embeddings": 128}
    phase = Phase(0.0, 128, ROWS, 20)
    found = measure(phase=phase, model=wide, data=1)
    model = model_config(vocab_size=96, num_hidden_layers=1, **wide)
    assert found.flops == pytest.approx(ROWS * cost.model_flops(model, phase, pairs=True), rel=0.04)


def test_formula_is_that_of_bert_base_and_large():
    """Source: 72 N D² + 12 N D S a token and so on, with a vocabulary of 30,592."""
    base = ModelConfig(vocab_size=30592)
    large = ModelConfig("bert", 30592, 1024, 24, 16, 4096)
    for model, length, predictions, wanted in (
        (base, 128, 20, 69.9e9),
        (base, 512, 77, 301.0e9),
        (large, 128, 20, 240.7e9),
        (large, 512, 77, 1020e9),
    ):
        phase = Phase(0.0, length, 1, predictions)
        assert cost.model_flops(model, phase, pairs=True) == pytest.approx(wanted, rel=1e-3)


def test_loops_are_counted_as_often_as_they_run():
    def body(carry, matrix):
        return carry @ matrix, None

    def loop(x, matrices):
        return jax.lax.scan(body, x, matrices)[0]

    jaxpr = jax.make_jaxpr(loop)(np.zeros((2, 3)), np.zeros((5, 3, 3)))
    assert cost.matrix_flops(jaxpr) == 5 * 2 * 2 * 3 * 3
    assert cost.matrix_flops(jaxpr, repeats=False) == 2 * 2 * 3 * 3


def test_the_products_of_a_kernel_are_those_of_all_its_steps(monkeypatch):
    segment_ids, x = jnp.ones((2, 640), jnp.int32), jnp.ones((2, 640, 256))

    def attend(*projected):
        config = ModelConfig(hidden_size=256, num_attention_heads=4)
        mask = attention.AttentionMask(segment_ids)
        return attention.fused_attention(config, projected, mask, None)

    monkeypatch.setattr(attention, "target_platform", lambda: "tpu")
    jaxpr = jax.make_jaxpr(attend)(x, x, x)
    assert cost.matrix_flops(jaxpr, repeats=False) == 2 * 2 * x.size * 640


@pytest.mark.parametrize(
    ("message", "gib"),
    [
        ("Ran out of memory in memory space hbm. Used 25.02G of 15.75G hbm. Exceeded", 25.02),
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (113.00G) "
            "exceeds available HBM (15.75G). HLO module: jit_train_step.",
            114,
        ),
    ],
)
def test_a_tpus_error_says_how_much_it_would_take(message, gib):
    assert cost._used("RESOURCE_EXHAUSTED: " + message, 2**30) == int(gib * 2**30)


def test_another_error_does_not():
    assert cost._used("INTERNAL: something else", 2**30) is None
