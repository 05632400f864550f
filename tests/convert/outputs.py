"""What a model computes, beside the numbers of another program."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import masking

from bert_jax import Bert, ModelConfig, TrainConfig
from bert_jax.models.heads import make_encoder
from bert_jax.objectives.masked_lm import MaskedLM
from bert_jax.objectives.masking import Predictions
from bert_jax.objectives.sentence_pairs import SentencePairs


def close(actual, expected, tolerance: float = 1e-5, least: float = 0.0) -> float:
    """Check that values agree, and that they are of mean size `least` or more.

    Returns their largest difference.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.abs(expected).mean() >= least
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)
    return float(np.abs(actual - expected).max())


def check_encoder(
    config: ModelConfig,
    params: Any,
    inputs: Sequence[np.ndarray],
    hidden_states: Sequence,
    attentions: Sequence,
    pooled: Any = None,
) -> dict[str, float]:
    """Compare all that an encoder computes of token ids, types and mask, but for padding.

    Returns the largest differences by name.
    """
    encoder = make_encoder(config, add_pooling_layer=pooled is not None)
    run = partial(encoder.apply, output_hidden_states=True, output_attentions=True)
    actual = jax.jit(run)({"params": params}, *inputs)
    real = np.asarray(inputs[2]).astype(bool)  # outputs at padding have no meaning
    assert not real.all()
    of_states = [
        close(np.asarray(layer)[real], np.asarray(expected)[real], least=0.3)
        for layer, expected in zip(actual.hidden_states, hidden_states, strict=True)
    ]
    of_maps = [
        close(*(np.moveaxis(np.asarray(x), 1, 2)[real] for x in maps), least=0.04)
        for maps in zip(actual.attentions, attentions, strict=True)
    ]
    if pooled is not None:
        close(actual.pooled, pooled, least=0.3)
    return {"hidden states": max(of_states), "attention maps": max(of_maps)}


def masked_batch(ids, types, mask, positions, labels, next_sentence_label) -> dict[str, Any]:
    """Return a batch that is masked already; position 0 is of no prediction."""
    weights = jnp.float32(jnp.asarray(positions) > 0)
    return {
        "input_ids": jnp.asarray(ids, jnp.int32),
        "token_type_ids": jnp.asarray(types, jnp.int32),
        "attention_mask": jnp.asarray(mask, jnp.int32),
        "predictions": Predictions(jnp.asarray(positions), jnp.asarray(labels), weights),
        "nsp_label": jnp.asarray(next_sentence_label),
        "nsp_weight": jnp.ones(len(positions)),
    }


def loss_of(bert: Bert, batch: dict[str, Any]) -> Callable:
    """Return the pretraining loss of such a batch, as a function of the parameters."""
    kind = SentencePairs if "nsp_head" in bert.params else MaskedLM
    objective = kind(bert.model, TrainConfig(model=bert.config), masking())
    weights = objective.weights(batch)
    return lambda params: objective.loss(params, batch, weights, None)[0]
