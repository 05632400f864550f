"""Attention of a row to itself; shape letters are those of `models.bert`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float

from bert_jax.config import ModelConfig
from bert_jax.models.attention_tile import LARGE_BIAS
from bert_jax.models.fused_attention import fused_attention, platform, serves
from bert_jax.models.layers import Dense, DropoutKey, apply_dropout
from bert_jax.models.matmul import affines, attention_mix, attention_scores
from bert_jax.models.positions import RelativePositions


@struct.dataclass
class AttentionMask:
    """Which pieces of a row attend to which.

    Attributes:
      segment_ids: [B, L] int32, 0 for padding, to which nothing attends. In packed rows each
        segment has another number from 1 on, and its tokens attend to each other alone.
      packed: whether there may be several texts in a row; else every piece is of the same.
    """

    segment_ids: Any
    packed: bool = struct.field(pytree_node=False, default=False)

    def bias(self) -> Float[Array, "B 1 L_or_1 M"]:
        """Returns what is added to the scores: 0, or -10000 where a piece does not attend.

        As in the original it is large and finite, so that a row of padding alone gives no NaN.
        """
        attends = self.segment_ids[:, None, None, :] > 0
        if self.packed:
            attends &= self.segment_ids[:, None, :, None] == self.segment_ids[:, None, None, :]
        return jnp.where(attends, 0.0, LARGE_BIAS)


# By the TPU compiler's count, the kernel moves a third of the bytes here, and less of longer rows.
_FUSED_FROM = 128

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
        output_attentions: bool = True,
    ) -> tuple[Float[Array, "B L D"], Float[Array, "B H L M"] | None]:
        """Returns the attended values, and the attention map before dropout, if it is wanted."""
        c = self.config
        length, size = hidden.shape[1:]
        parts = [Dense(c, (size, size), ("embed", "heads"), name=name) for name in _PROJECTIONS]
        projected = affines(hidden, [part.kernel for part in parts], [part.bias for part in parts])
        rate, positions = c.attention_probs_dropout_prob, c.max_position_embeddings
        how: Any = {"rate": rate, "bounds": (c.num_attention_heads, positions, positions)}
        if is_fused(c, length) and not output_attentions:
            texts, packed = mask.segment_ids, mask.packed
            mixed = fused_attention(projected, texts, dropout_key, packed=packed, **how)
            attention = None
        else:
            relative = None
            if c.position_embedding_type.startswith("relative"):
                relative = RelativePositions(c, name="distance")
            mixed, attention = plain_attention(projected, mask, dropout_key, relative, **how)
        return Dense(c, (size, size), ("heads", "embed"), name="output")(mixed), attention


def plain_attention(
    projected: Sequence[Array],
    mask: AttentionMask,
    dropout_key: DropoutKey | None,
    relative: Callable[[Array, Array], Array] | None = None,
    *,
    rate: float,
    bounds: tuple[int, int, int],
) -> tuple[Float[Array, "B L D"], Float[Array, "B H L M"]]:
    """Returns the values that each place attends to, and the attention map before dropout.

    Args:
      projected: queries, keys and values, each [B, L, D], the heads side by side.
      mask: which pieces attend to which.
      dropout_key: as in `Dropout`.
      relative: what positions add to the scores, of queries and keys; None for nothing.
      rate: of dropout.
      bounds: as in `Dropout`: heads, queries and keys.
    """
    (batch, length, size), heads = projected[0].shape, bounds[0]
    query, key, value = (
        each.reshape(batch, length, heads, size // heads).swapaxes(1, 2) for each in projected
    )
    scores = attention_scores(query, key)
    if relative:
        scores += relative(query, key)
    attention = jax.nn.softmax(scores * (size // heads) ** -0.5 + mask.bias(), axis=-1)
    kept = apply_dropout(attention, dropout_key, rate, bounds)
    mixed = attention_mix(kept.astype(value.dtype), value)
    return mixed.swapaxes(1, 2).reshape(batch, length, size), attention


def is_fused(config: ModelConfig, length: int) -> bool:
    """Returns whether rows of a length are attended to in one kernel, where no map is wanted."""
    if config.attention == "plain" or config.position_embedding_type.startswith("relative"):
        return False
    if not serves(length, config.hidden_size // config.num_attention_heads):
        return False
    return config.attention == "fused" or (platform() == "tpu" and length >= _FUSED_FROM)
