"""Attention of a row to itself; shape letters are those of `models.bert`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float

from bert_jax.config import ModelConfig
from bert_jax.models.layers import Dense, Dropout, DropoutKey
from bert_jax.models.positions import RelativePositions
from bert_jax.models.products import affines, attention_mix, attention_scores


@struct.dataclass
class AttentionMask:
    """Which pieces of a row attend to which.

    Attributes:
      texts: [B, L] int32, 0 for padding, to which nothing attends. In packed rows each text has
        another number from 1 on, and its pieces attend to each other alone.
      packed: whether there may be several texts in a row; else every piece is of the same.
    """

    texts: Any
    packed: bool = struct.field(pytree_node=False, default=False)

    def bias(self) -> Float[Array, "B 1 L_or_1 M"]:
        """Returns what is added to the scores: 0, or -10000 where a piece does not attend.

        As in the original it is large and finite, so that a row of padding alone gives no NaN.
        """
        attends = self.texts[:, None, None, :] > 0
        if self.packed:
            attends &= self.texts[:, None, :, None] == self.texts[:, None, None, :]
        return jnp.where(attends, 0.0, -10000.0)


_PROJECTIONS = ("query", "key", "value")


class BertSelfAttention(nn.Module):
    """Multi-head attention of a row to itself, with its output projection."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "B L D"],
        mask: AttentionMask,
        dropout_key: DropoutKey | None,
    ) -> tuple[Float[Array, "B L D"], Float[Array, "B H L M"]]:
        """Returns the attended values, and the attention map before dropout."""
        c = self.config
        batch, length, size = hidden.shape
        heads = c.num_attention_heads
        parts = [Dense(c, (size, size), ("embed", "heads"), name=name) for name in _PROJECTIONS]
        projected = affines(hidden, [part.kernel for part in parts], [part.bias for part in parts])
        query, key, value = (
            each.reshape(batch, length, heads, size // heads).swapaxes(1, 2) for each in projected
        )
        scores = attention_scores(query, key)
        if c.position_embedding_type.startswith("relative"):
            scores += RelativePositions(c, name="distance")(query, key)
        attention = jax.nn.softmax(scores * (size // heads) ** -0.5 + mask.bias(), axis=-1)
        largest = (heads, c.max_position_embeddings, c.max_position_embeddings)
        dropout = Dropout(c.attention_probs_dropout_prob, largest, name="dropout")
        dropped = dropout(attention, dropout_key)
        mixed = attention_mix(dropped.astype(value.dtype), value)
        mixed = mixed.swapaxes(1, 2).reshape(batch, length, size)
        return Dense(c, (size, size), ("heads", "embed"), name="output")(mixed), attention
