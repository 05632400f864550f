"""Every kind of position embedding: what it knows, what it costs in parameters, that it learns."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers import LENGTH, batch, model_config, objective, params, refused

from bert_jax.config import ModelConfig
from bert_jax.config.fields import POSITIONS
from bert_jax.config.validation import validate_model
from bert_jax.convert import huggingface
from bert_jax.models.bert import BertModel
from bert_jax.models.positions import PositionKind
from bert_jax.objectives.sentence_pairs import BertForPreTraining
from bert_jax.training.step import init_state, make_train_step

KINDS = ("absolute", "sinusoidal", "relative_key", "relative_key_query")


def count(kind: str) -> int:
    model = BertForPreTraining(model_config(position_embedding_type=kind))
    shapes = jax.eval_shape(lambda key: nn.unbox(model.init_params(key)), jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(shapes))


def test_parameters():
    layers, head_size = 2, 8
    without = count("sinusoidal")
    assert count("absolute") - without == LENGTH * 16
    for kind in KINDS[2:]:
        assert count(kind) - without == layers * (2 * LENGTH - 1) * head_size


@pytest.mark.parametrize("kind", KINDS)
def test_relative_kinds_see_distances_alone(kind):
    """A text moved along the row, with nothing before it, reads the same; unless places count."""
    config = model_config(position_embedding_type=kind)
    task = objective(position_embedding_type=kind)
    encoder = {"params": params(task)["bert"]}
    ids = np.random.default_rng(0).integers(5, 100, (1, 12)).astype(np.int32)
    moved = np.pad(ids, ((0, 0), (7, 0)))
    mask = np.pad(np.ones_like(ids), ((0, 0), (7, 0)))
    run = jax.jit(BertModel(config).apply)
    plain = run(encoder, ids, np.zeros_like(ids), np.ones_like(ids)).last_hidden_state
    shifted = run(encoder, moved, np.zeros_like(moved), mask).last_hidden_state[:, 7:]
    change = np.abs(plain - shifted).max()
    assert change < 1e-5 if kind.startswith("relative") else change > 1e-2
    turned = run(encoder, ids[:, ::-1], np.zeros_like(ids), np.ones_like(ids)).last_hidden_state
    assert np.abs(plain - turned[:, ::-1]).max() > 1e-2  # the order is seen in any case


_SLOW = ("absolute", "relative_key")  # the other two do all that these do, and more


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if k in _SLOW else k for k in KINDS]
)
def test_every_kind_learns(kind):
    """Rows that count upwards: what stands near a piece tells it, far better than chance."""
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    task = objective(position_embedding_type=kind, initializer_range=0.1, **without)
    optimizer = optax.adam(7e-3)
    start = nn.unbox(jax.jit(task.model.init_params)(jax.random.key(0)))
    state = init_state(start, optimizer, seed=0)
    step = jax.jit(make_train_step(task, optimizer))
    generator, losses = np.random.default_rng(0), []
    rows = batch(32)
    rows["attention_mask"] = np.ones_like(rows["attention_mask"])
    for _ in range(300):
        begin = generator.integers(0, 95, (32, 1))
        rows["input_ids"] = (5 + (begin + np.arange(LENGTH)) % 95).astype(np.int32)
        state, sums = step(state, rows)
        losses.append(float(sums["mlm_loss"].total / sums["mlm_loss"].weight))
        if np.mean(losses[-10:]) < 3.0:
            break
    assert np.mean(losses[-10:]) < 3.0 < np.log(95) - 1
    if kind.startswith("relative"):
        name = lambda p: p["bert"]["layer_1"]["attention"]["distance"]["embeddings"]  # noqa: E731
        assert np.abs(name(state.params) - name(start)).max() > 1e-2


class Nearest(nn.Module):
    """A term of the scores that falls with the distance; nothing of it is learned."""

    config: ModelConfig

    def __call__(self, query, key):
        positions = jnp.arange(query.shape[2])
        distance = jnp.abs(positions[:, None] - positions)
        return jnp.broadcast_to(-1.0 * distance, (*query.shape[:3], key.shape[2]))


def test_a_kind_from_outside_the_package(monkeypatch):
    """It is a setting of every encoder that rotates nothing, and is not exported."""
    config = model_config(position_embedding_type="nearest")
    with refused("'nearest'", "import the file of your own"):
        validate_model(config, "config")
    monkeypatch.setitem(POSITIONS, "nearest", PositionKind(scores=Nearest))
    validate_model(config, "config")
    with refused("has no nearest positions"):
        validate_model(model_config("modernbert", position_embedding_type="nearest"), "config")
    ids = jnp.asarray(np.random.default_rng(0).integers(5, 60, (1, 12)), jnp.int32)
    model = BertModel(config)
    params = model.init(jax.random.key(0), ids, ids * 0, ids * 0 + 1)
    assert "position_embeddings" not in params["params"]["embeddings"]
    output = model.apply(params, ids, ids * 0, ids * 0 + 1, output_attentions=True)
    attention = np.asarray(output.attentions[0])
    assert (attention.argmax(-1) == np.arange(12)).all()
    with refused("cannot be exported"):
        huggingface.save(config, params, None, Path())
