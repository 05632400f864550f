"""A step on a batch without padding, which has no mask, is the step with a mask of ones."""

from unittest.mock import Mock

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers import batch, objective, train

from bert_jax.models import attention
from bert_jax.models.attention import AttentionMask
from bert_jax.models.target import Target, traced_for
from bert_jax.training.step import PRNG, init_state, make_train_step

pytestmark = pytest.mark.devices(8)

MASKED = {**batch(8), "attention_mask": np.ones((8, 32), np.int32)}
_FUSED = {"dtype": "bfloat16", "attention_probs_dropout_prob": 0.0}
FULL = {name: value for name, value in MASKED.items() if name != "attention_mask"}


@pytest.mark.parametrize(
    ("model_type", "layers", "devices", "microbatches"),
    [("modernbert", 2, 2, 1), ("bert", 1, 1, 2), ("electra", 1, 2, 1)],
)
def test_a_step_is_that_with_a_mask(model_type, layers, devices, microbatches):
    task = objective(model_type=model_type, num_hidden_layers=layers)
    places = jax.devices()[:devices]
    (state, metrics, _), (wanted, wanted_metrics, _) = (
        train(task, optax.sgd(0.5), [each], devices=places, microbatches=microbatches)
        for each in (FULL, MASKED)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, wanted.params
    )
    assert metrics[0].keys() == wanted_metrics[0].keys()
    for name, part in wanted_metrics[0].items():
        np.testing.assert_allclose(metrics[0][name].total, part.total, rtol=1e-5)
        assert metrics[0][name].weight == part.weight


@pytest.mark.parametrize(("given", "has_segments"), [(MASKED, True), (FULL, False)])
def test_a_kernel_gets_no_segments_of_a_full_batch(given, has_segments, monkeypatch):
    kernel = Mock(side_effect=lambda config, projected, ids, **_: projected[0])
    monkeypatch.setattr(attention, "fused_attention", kernel)
    task, optimizer = objective(attention="fused", **_FUSED), optax.sgd(0.5)
    key = jax.random.key(0, impl=PRNG)
    params = jax.eval_shape(task.model.init_params, key)
    state = jax.eval_shape(lambda params: init_state(params, optimizer, key), nn.unbox(params))
    with traced_for(Target("gpu")):
        jax.eval_shape(make_train_step(task, optimizer), state, given)
    assert {call.args[2] is not None for call in kernel.call_args_list} == {has_segments}


def test_a_mask_of_numpy_with_padding_is_not_full():
    assert not AttentionMask.of_batch(np.array([[1, 1, 0]])).is_full
