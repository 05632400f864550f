"""A fine-tuning step is the same at every padded length and on any devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers import FakeTokenizer, model_config

from bert_jax.batches.buckets import Batcher, BucketedBatches, Features
from bert_jax.distributed.mesh import (
    compile_step,
    init_sharded,
    make_layout,
    make_mesh,
    replicated_layout,
)
from bert_jax.objectives.labels import LabelsObjective
from bert_jax.tasks.classification import BertForSequenceClassification
from bert_jax.tasks.multiple_choice import BertForMultipleChoice
from bert_jax.tasks.question_answering import BertForQuestionAnswering
from bert_jax.training.step import PREDICT_OUTPUTS, init_state, make_predict_step, make_train_step

HEADS = {
    "regression": (BertForSequenceClassification, 1),
    "spans": (BertForQuestionAnswering, 2),
    "choices": (BertForMultipleChoice, 1),
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


def setting(kind: str):
    module = HEADS[kind][0](MODEL, HEADS[kind][1])
    objective = LabelsObjective(module, is_regression=kind == "regression")
    optimizer = optax.sgd(0.5)

    def new_state(key):
        return init_state(module.init_params(key), optimizer, 7)

    return objective, optimizer, new_state


def trained(kind: str, batches, devices: int = 1):
    """Returns the parameters and the sums after a step for each batch."""
    objective, optimizer, new_state = setting(kind)
    mesh = make_mesh(devices=jax.devices()[:devices])
    _, layout = make_layout(new_state, mesh)
    state = init_sharded(new_state, layout.state, jax.random.key(0))
    train_step = make_train_step(objective, optimizer)
    step = compile_step(train_step, "mesh", layout, ("state", "metrics"))
    sums = None
    for batch in batches:
        state, sums = step(state, batch)
    return jax.device_get((state.params, sums))


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
    examples, (objective, _, new_state) = batcher("choices"), setting("choices")
    params = nn.unbox(jax.jit(new_state)(jax.random.key(0)).params)
    batch = {**examples.batch(np.arange(8), 32), "index": np.arange(8)}
    batch = jax.tree.map(jnp.asarray, batch)
    keys = (None, jax.random.key(0), jax.random.key(1))
    apply = jax.jit(objective.apply)
    logits = [apply(params, batch, key) for key in keys]
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
    objective, _, new_state = setting("spans")
    params = nn.unbox(jax.jit(new_state)(jax.random.key(0)).params)
    mesh = make_mesh(devices=jax.devices()[:devices])
    layout = replicated_layout(mesh)
    params = jax.device_put(params, layout.params) if mode == "mesh" else params
    step = compile_step(make_predict_step(objective), mode, layout, PREDICT_OUTPUTS)
    batch = batcher("spans").batch(np.arange(16), 32)
    wanted = jax.jit(objective.apply)(params, jax.tree.map(jnp.asarray, batch), None)
    logits, sums = step(params, batch)
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    assert float(sums["loss"].weight) == (batch["labels"] >= 0).sum()
