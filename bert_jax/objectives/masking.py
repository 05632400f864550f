"""MLM masking: choose tokens to predict and replace them, inside the jitted step.

Source: `create_masked_lm_predictions` in google-research/bert `create_pretraining_data.py`. Masks
depend on the step's key and the sequence's index in the global batch, not on its device.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from bert_jax.config import DataConfig
from bert_jax.config.schedule import Stage
from bert_jax.models.layers import random_bits
from bert_jax.text.tokenizer import Tokenizer

# Tokens of a part of a word that has too many to be chosen, as proteins and DNA do. SpanBERT's
# spans have 3.8 on average (Joshi et al. 2020, section 3.1).
_PART = 4


@struct.dataclass
class Predictions:
    """The positions to predict in each sequence."""

    positions: Any  # [B, P], in the sequence; 0 where it has fewer
    labels: Any  # [B, P], the tokens at these positions before masking
    weights: Any  # [B, P] float32, 1 for a prediction and 0 where the sequence has fewer


@dataclasses.dataclass(frozen=True, eq=False)
class Masking:
    """Google's masking for sequences of one length."""

    counts: np.ndarray  # [L + 1], how many positions to predict, by the number of tokens
    max_predictions: int  # P; none of them is larger
    vocab_size: int  # of the tokenizer; a random replacement is any of its tokens
    special_ids: tuple[int, ...]  # tokens that are never chosen
    mask_id: int  # replaces `mask_share` of the chosen tokens
    continues_word: np.ndarray | None  # [vocab_size] bool, as `Tokenizer`'s, for whole words
    mask_share: float = 0.8
    random_share: float = 0.1  # of the chosen tokens; the others stay as they are

    def __call__(
        self,
        key: Array,
        input_ids: Int[Array, "B L"],
        attention_mask: Int[Array | np.ndarray, "B L"],
        index: Int[Array, "B"],
    ) -> tuple[Int[Array, "B L"], Predictions]:
        """Return the sequences, each masked as one if packed, and the predictions to make."""
        # The bits of dropout: JAX's own take a quarter of the time to compile a small step.
        bits = random_bits(key, index, (input_ids.shape[1] + 2 * self.max_predictions,))
        return jax.vmap(self._mask_sequence)(bits, input_ids, jnp.asarray(attention_mask))

    def _mask_sequence(
        self, bits: UInt32[Array, "L_and_2P"], input_ids: Int[Array, "L"], attention_mask: Array
    ) -> tuple[Int[Array, "L"], Predictions]:
        length = len(input_ids)
        choice, kind, random = jnp.split(bits, [length, length + self.max_predictions])
        is_special = (input_ids[:, None] == jnp.array(self.special_ids)).any(-1)
        candidate = (attention_mask > 0) & ~is_special
        count = jnp.asarray(self.counts)[(attention_mask > 0).sum()]
        scores = _uniform(choice)
        if self.continues_word is not None:
            continues_word = jnp.asarray(self.continues_word)[input_ids]
            of_full = int(self.counts[-1])  # less than the largest count if that is rounded up
            begins_word, is_divided = _word_starts(candidate, continues_word, choice, of_full)
            scores, count = _choose_words(scores, candidate, begins_word, is_divided, count)
        _, positions = jax.lax.top_k(jnp.where(candidate, scores, -1.0), self.max_predictions)
        valid = jnp.arange(self.max_predictions) < jnp.minimum(count, candidate.sum())
        labels = input_ids[positions]
        kind, random = _uniform(kind), random % jnp.uint32(self.vocab_size)
        changed = self.mask_share + self.random_share
        new = jnp.where(kind < changed, random, labels)
        new = jnp.where(kind < self.mask_share, self.mask_id, new)
        masked = input_ids.at[jnp.where(valid, positions, length)].set(
            new.astype(input_ids.dtype), mode="drop"
        )
        positions, labels = jnp.where(valid, positions, 0), jnp.where(valid, labels, 0)
        return masked, Predictions(positions, labels, valid.astype(jnp.float32))


def make_masking(tokenizer: Tokenizer, stage: Stage, data: DataConfig) -> Masking:
    """Return the masking of a stage's sequences for a tokenizer."""
    most = stage.max_predictions
    lengths = range(stage.max_length + 1)
    share = stage.mask_fraction or data.mask_fraction
    counts = [min(most, max(1, round(share * n))) for n in lengths]
    return Masking(
        counts=np.array(counts, np.int32),
        max_predictions=most,
        vocab_size=tokenizer.vocab_size,
        special_ids=tokenizer.special_ids,
        mask_id=tokenizer.mask_id,
        continues_word=tokenizer.continues_word if data.whole_word_masking else None,
    )


def _uniform(bits: UInt32[Array, "*any"]) -> Float[Array, "*any"]:
    """Return numbers in [0, 1), in steps that float32 can hold."""
    return (bits >> 8).astype(jnp.float32) * 2**-24


def _word_starts(
    candidate: Array, continues_word: Array, bits: UInt32[Array, "L"], most: int
) -> tuple[Array, Array]:
    """Return the tokens, [L] bool, that begin a word or a part, and those of a divided word.

    A word of more than `most` tokens is divided into parts: it would never be chosen whole.
    """
    # A token after a special one begins a word even if it is marked as a continuation.
    after_other = ~jnp.concatenate([jnp.zeros(1, bool), candidate[:-1]])
    begins_word = candidate & (~continues_word | after_other)
    index = jnp.arange(len(candidate))
    # The start of each token's word, and eight random bits of that token, which `_uniform` leaves.
    packed = (index << 8) | (bits & 255).astype(jnp.int32)
    packed = jax.lax.cummax(jnp.where(begins_word, packed, 0))
    start, random = packed >> 8, packed & 255
    word, size = _words(candidate, begins_word, 1)
    size = size.at[word].get(mode="fill", fill_value=0)
    is_divided, part = size > most, min(_PART, most)
    # A part that is smaller has another chance than the others: it comes after any number of them.
    before = (random * (size // part + 1) >> 8) * part
    since_start = index - start
    since_start -= jnp.where(since_start > before, size % part, 0)
    return begins_word | (is_divided & (since_start % part == 0)), is_divided


def _words(
    candidate: Array, begins_word: Array, value: Array | int
) -> tuple[Int[Array, "L"], Int[Array, "L"]]:
    """Return the word of each token, L where it has none, and the sum of values in each word."""
    length = len(candidate)
    word = jnp.where(candidate, jnp.cumsum(begins_word) - 1, length)
    return word, jnp.zeros(length, jnp.int32).at[word].add(value, mode="drop")


def _choose_words(
    scores: Float[Array, "L"],
    candidate: Array,
    begins_word: Array,
    is_divided: Array,
    count: Int[Array, ""],
) -> tuple[Float[Array, "L"], Int[Array, ""]]:
    """Return scores, highest for the tokens of chosen words, and their number, at most `count`.

    Of the part of a divided word that does not fit, as many tokens are chosen as do.
    """
    length = scores.shape[0]
    word, least = _words(candidate, begins_word, jnp.where(is_divided, -1, 1))
    order = jnp.argsort(scores)  # a random order of the words, since the scores are uniform
    least = least[order]  # the size of a word, negative for a part: any room is enough for it

    def choose(room: Array, least: Array) -> tuple[Array, Array]:
        chosen = jnp.where(least <= room, jnp.minimum(jnp.abs(least), room), 0)
        return room - chosen, chosen

    room, chosen = jax.lax.scan(choose, count, least)
    # The tokens of a part compete by their scores: they come after whole words, before all others.
    rank = jnp.where(chosen == jnp.abs(least), 1, jnp.where(chosen > 0, 0, -1))
    rank = jnp.zeros(length, jnp.int32).at[order].set(rank)
    return scores + rank.at[word].get(mode="fill", fill_value=-1), count - room
