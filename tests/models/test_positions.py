"""A kind of position embedding from outside the package."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from helpers import model_config, refused

from bert_jax.config import ModelConfig
from bert_jax.config.fields import POSITIONS
from bert_jax.config.validation import validate_model
from bert_jax.convert import huggingface
from bert_jax.models.bert import BertModel
from bert_jax.models.positions import PositionKind


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
