"""A fine-tuning step is the same at every padded length and on any devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers import FakeTokenizer, model_config, train

from bert_jax.batches.buckets import Batcher, BucketedBatches, Features
from bert_jax.distributed.mesh import compile_step, make_mesh, replicated_layout
from bert_jax.models.heads import SequenceScores
from bert_jax.objectives.labels import LabelsObjective, RegressionObjective
from bert_jax.tasks.question_answering import BertForQuestionAnswering
from bert_jax.training.step import PREDICT_OUTPUTS, make_predict_step

pytestmark = pytest.mark.devices(8)

HEADS = {
    "regression": (SequenceScores, 1),
    "spans": (BertForQuestionAnswering, 2),
    "choices": (SequenceScores, 1),
}
MODEL = model_config(num_hidden_layers=1)  # with dropout, of hidden states and of attention


def batcher(kind: str) -> Batcher:
    """41 examples of 3 to 30 tokens, a part of them without labels."""
    generator = np.random.default_rng(3)
    choices = 2 if kind == "choices" else 1
    sizes = generator.integers(3, 31, 41 * choices)
    sequences = [generator.integers(5, 100, size).astype(np.int32) for size in sizes]
    labels = {
        "regression": lambda size: [float("nan"), *generator.normal(size=3)][generator.integers(4)],
        "spans": lambda size: generator.integers(0, size, 2) if size % 3 else np.array([-1, -1]),
        "choices": lambda size: int(generator.integers(-1, 2)),
    }[kind]
    features = Features(
        sequences,
        [size // 2 for size in sizes],
        np.arange(41),
        [labels(size) for size in sizes[:41]],
        choices=choices,
    )
    return Batcher(features, FakeTokenizer(), 2, 32)


def objective(kind: str) -> LabelsObjective:
    module = HEADS[kind][0](MODEL, HEADS[kind][1])
    return RegressionObjective(module) if kind == "regression" else LabelsObjective(module)


def trained(kind: str, batches, devices: int = 1):
    """Returns the parameters and the sums after a step for each batch."""
    places = jax.devices()[:devices]
    state, metrics, _ = train(objective(kind), optax.sgd(0.5), batches, devices=places)
    return state.params, metrics[-1]


def params(objective: LabelsObjective):
    return nn.unbox(jax.jit(objective.model.init_params)(jax.random.key(0)))


@pytest.mark.parametrize("kind", ["regression", "spans", "choices"])
def test_a_step_does_not_depend_on_the_padded_length(kind):
    examples = batcher(kind)
    batches = BucketedBatches(examples, 4, 11, seed=1)
    steps = [step for step in range(11) if batches[step]["input_ids"].shape[-1] < 32][:2]
    assert steps
    longest = [
        {**examples.batch(batches.indices(step), 32), "index": np.arange(4, dtype=np.int32)}
        for step in steps
    ]
    params, sums = trained(kind, [batches[step] for step in steps])
    wanted, wanted_sums = trained(kind, longest)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, wanted)
    for name, part in wanted_sums.items():
        np.testing.assert_allclose(sums[name].total, part.total, rtol=1e-4)
        np.testing.assert_allclose(sums[name].weight, part.weight, rtol=1e-4)


def test_dropout_is_on_in_the_steps_compared():
    """Otherwise the test above would say nothing of it."""
    task = objective("choices")
    batch = {**batcher("choices").batch(np.arange(8), 32), "index": np.arange(8)}
    batch = jax.tree.map(jnp.asarray, batch)
    keys = (None, jax.random.key(0), jax.random.key(1))
    apply, weights = jax.jit(task.apply), params(task)
    logits = [apply(weights, batch, key) for key in keys]
    assert np.abs(logits[0] - logits[1]).max() > 1e-4
    assert np.abs(logits[1] - logits[2]).max() > 1e-4


def test_devices_agree():
    examples = batcher("choices")
    batches = [
        {**examples.batch(i, 32), "index": i} for i in np.arange(32, dtype=np.int32).reshape(2, 16)
    ]
    wanted, _ = trained("choices", batches)
    params, _ = trained("choices", batches, 8)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, wanted)


@pytest.mark.parametrize(("mode", "devices"), [("mesh", 1), ("mesh", 8), ("pmap", 8)])
def test_predictions_come_in_order_whatever_the_devices(mode, devices):
    task = objective("spans")
    weights, layout = params(task), replicated_layout(make_mesh(devices=jax.devices()[:devices]))
    weights = jax.device_put(weights, layout.params) if mode == "mesh" else weights
    step = compile_step(make_predict_step(task), mode, layout, PREDICT_OUTPUTS)
    batch = batcher("spans").batch(np.arange(16), 32)
    wanted = jax.jit(task.apply)(weights, jax.tree.map(jnp.asarray, batch), None)
    logits, sums = step(weights, batch)
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    assert float(sums["loss"].weight) == (batch["labels"] >= 0).sum()
