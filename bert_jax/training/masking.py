"""Choosing and replacing the positions to predict, inside the jitted step.

Source: `create_masked_lm_predictions` in google-research/bert `create_pretraining_data.py`. Masks
are redrawn each time that a row is seen. A row's mask depends on the key and the row's place in the
global batch alone, not on which device holds it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from bert_jax.config import DataConfig, Phase
from bert_jax.models.layers import random_bits
from bert_jax.text.tokenizer import Tokenizer


@struct.dataclass
class Predictions:
    """Which positions of each row are to be predicted.

    Attributes:
      positions: [B, P], in the row; 0 where the row has fewer.
      labels: [B, P], the pieces that stood there.
      weights: [B, P] float32, 1 for a prediction and 0 for a place left over.
    """

    positions: Any
    labels: Any
    weights: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Masking:
    """Google's masking for rows of one length.

    Attributes:
      counts: [L + 1], how many positions to predict in a row of each number of tokens.
      max_predictions: the most of them, P.
      vocab_size: of the tokenizer; a random replacement is any of its pieces.
      special_ids: pieces that are never chosen.
      mask_id: what 80% of the chosen are replaced by.
      continues: [vocab_size] bool where whole words are chosen: pieces that go with the one before.
    """

    counts: np.ndarray
    max_predictions: int
    vocab_size: int
    special_ids: tuple[int, ...]
    mask_id: int
    continues: np.ndarray | None

    def __call__(
        self,
        key: Array,
        input_ids: Int[Array, "B L"],
        attention_mask: Int[Array, "B L"],
        rows: Int[Array, "B"],
    ) -> tuple[Int[Array, "B L"], Predictions]:
        """Returns the rows with their chosen positions replaced, and the predictions to make.

        Args:
          key: the step's PRNG key.
          input_ids: pieces.
          attention_mask: 0 for padding. A packed row is masked as one: its pieces are counted over
            all its texts.
          rows: the place of each row in the global batch.
        """
        # The bits of dropout: JAX's own take a quarter of the time to compile a small step.
        bits = random_bits(key, rows, (input_ids.shape[1] + 2 * self.max_predictions,))
        return jax.vmap(self._mask_row)(bits, input_ids, attention_mask)

    def _mask_row(
        self, bits: UInt32[Array, "L_and_2P"], input_ids: Int[Array, "L"], attention_mask: Array
    ) -> tuple[Int[Array, "L"], Predictions]:
        length = len(input_ids)
        choice, kind, random = jnp.split(bits, [length, length + self.max_predictions])
        is_special = (input_ids[:, None] == jnp.array(self.special_ids)).any(-1)
        candidate = (attention_mask > 0) & ~is_special
        count = jnp.asarray(self.counts)[(attention_mask > 0).sum()]
        scores = _uniform(choice)
        if self.continues is None:
            chosen = scores
        else:
            chosen, count = _whole_words(
                scores, candidate, jnp.asarray(self.continues)[input_ids], count
            )
        _, positions = jax.lax.top_k(jnp.where(candidate, chosen, -1.0), self.max_predictions)
        valid = jnp.arange(self.max_predictions) < jnp.minimum(count, candidate.sum())
        labels = input_ids[positions]
        kind, random = _uniform(kind), random % jnp.uint32(self.vocab_size)
        new = jnp.where(kind < 0.8, self.mask_id, jnp.where(kind < 0.9, random, labels))
        masked = input_ids.at[jnp.where(valid, positions, length)].set(
            new.astype(input_ids.dtype), mode="drop"
        )
        return masked, Predictions(
            positions=jnp.where(valid, positions, 0),
            labels=jnp.where(valid, labels, 0),
            weights=valid.astype(jnp.float32),
        )


def make_masking(tokenizer: Tokenizer, phase: Phase, data: DataConfig) -> Masking:
    """Returns the masking of a phase's rows for a tokenizer."""
    share, most = data.mask_fraction, phase.max_predictions
    counts = [min(most, max(1, round(share * n))) for n in range(phase.max_length + 1)]
    return Masking(
        counts=np.array(counts, np.int32),
        max_predictions=most,
        vocab_size=tokenizer.vocab_size,
        special_ids=tokenizer.special_ids,
        mask_id=tokenizer.mask_id,
        continues=tokenizer.is_continuation if data.whole_word_masking else None,
    )


def _uniform(bits: UInt32[Array, "*any"]) -> Float[Array, "*any"]:
    """Returns numbers of [0, 1), in steps that float32 holds."""
    return (bits >> 8).astype(jnp.float32) * 2**-24


def _whole_words(
    scores: Float[Array, "L"],
    candidate: Array,
    continues: Array,
    count: Int[Array, ""],
) -> tuple[Float[Array, "L"], Int[Array, ""]]:
    """Takes words in random order, skipping each that would exceed `count` pieces.

    Returns:
      Scores above 1 for the pieces of the words taken and below for the others, and the number of
      pieces taken.
    """
    length = scores.shape[0]
    # A piece after a special one begins a word even where its name says that it goes on.
    after_other = ~jnp.concatenate([jnp.zeros(1, bool), candidate[:-1]])
    begins = candidate & (~continues | after_other)
    word = jnp.where(candidate, jnp.cumsum(begins) - 1, length)
    size = jnp.zeros(length, jnp.int32).at[word].add(1, mode="drop")
    order = jnp.argsort(scores)  # a random order of the words, since the scores are uniform

    def take(total: Array, index: Array) -> tuple[Array, Array]:
        fits = (size[index] > 0) & (total + size[index] <= count)
        return total + jnp.where(fits, size[index], 0), fits

    total, fits = jax.lax.scan(take, jnp.int32(0), order)
    taken = jnp.zeros(length, bool).at[order].set(fits)
    return scores + taken.at[word].get(mode="fill", fill_value=False), total
