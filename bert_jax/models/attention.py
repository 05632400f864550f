"""Self-attention: the plain form, that of windows, and the choice of `fused_attention`."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from bert_jax.config import ModelConfig
from bert_jax.models.fused_attention import (
    blocks_of,
    fused_attention,
    most_positions,
    unsupported,
)
from bert_jax.models.layers import (
    MASKED_SCORE,
    Dense,
    DropoutKey,
    apply_dropout,
    dense_layers,
    strides,
)
from bert_jax.models.matmul import attention_context, attention_scores
from bert_jax.models.positions import position_kind, rotate
from bert_jax.models.target import target

PLAIN, WINDOWS, FUSED = "plain", "windows alone", "fused"  # names of routes


class Route(NamedTuple):
    """By which function the queries of a layer attend, and why not by a kernel, "" if they do."""

    name: str
    reason: str


def attention_route(
    config: ModelConfig, platform: str, length: int, *, window: int, packed: bool, training: bool
) -> Route:
    """Return how a layer of a window, 0 for none, attends on a platform, such as "gpu"."""
    if platform == "cpu":
        reason = "a CPU has no kernel"
    elif config.attention == "plain":
        reason = "model.attention is plain"
    elif why := unsupported(
        config, platform, length, window=window, packed=packed, training=training
    ):
        reason = f"fused {why}"
    elif config.attention == "auto" and platform == "tpu":
        reason = "auto, until a kernel is measured on a TPU; ask for it by model.attention fused"
    else:
        return Route(FUSED, "")
    # With keys in the window alone, it is faster from some length on.
    return Route(WINDOWS if 0 < 4 * window < length else PLAIN, reason)


@struct.dataclass
class AttentionMask:
    """Which tokens attend to which: none to padding, of segment 0.

    In packed sequences, segments are numbered from 1 on, and a token attends to its own segment.
    """

    segment_ids: Any  # [B, L] int32
    packed: bool = struct.field(pytree_node=False, default=False)
    # The largest distance of a token from those it attends to; 0 for no limit.
    window: int = struct.field(pytree_node=False, default=0)
    # Whether every token is known to be of segment 1, so that a kernel needs no segments.
    is_full: bool = struct.field(pytree_node=False, default=False)

    @classmethod
    def of_batch(
        cls, attention_mask: Int[Array | np.ndarray, "B L"], *, packed: bool = False
    ) -> "AttentionMask":
        """Return the mask of a batch, as an encoder takes it.

        A NumPy array of ones alone tells already when the model is traced that all are tokens.
        """
        is_full = isinstance(attention_mask, np.ndarray) and bool((attention_mask == 1).all())
        return cls(jnp.asarray(attention_mask), packed, is_full=is_full)

    def bias(self) -> Float[Array, "B 1 L_or_1 M"]:
        """Return the mask's term of the scores: 0, or -10000 where a token does not attend."""
        return self._bias(self.segment_ids, self.segment_ids, 0)

    def near_bias(self) -> Float[Array, "BN 1 W M"]:
        """Return the term for blocks of queries as long as the window, and for their keys."""
        key_ids = blocks_of(self.segment_ids, self.window, reach=self.window)
        return self._bias(key_ids[:, self.window : -self.window], key_ids, self.window)

    def _bias(self, query_ids: Any, key_ids: Any, first_query: int) -> Array:
        attends = key_ids[:, None, None, :] > 0
        if self.packed:
            attends = attends & (query_ids[:, None, :, None] == key_ids[:, None, None, :])
        if self.window:
            near_enough = self._is_in_window(query_ids.shape[1], key_ids.shape[1], first_query)
            attends = attends & near_enough
        return jnp.where(attends, 0.0, MASKED_SCORE)

    def window_bias(self) -> Float[Array, "L M"]:
        """Return the window's part of `bias`."""
        length = self.segment_ids.shape[1]
        return jnp.where(self._is_in_window(length, length, 0), 0.0, MASKED_SCORE)

    def _is_in_window(self, queries: int, keys: int, first_query: int) -> Bool[Array, "L M"]:
        query = first_query + jnp.arange(queries)
        return jnp.abs(query[:, None] - jnp.arange(keys)) <= self.window


@struct.dataclass
class AttentionMaps:
    """What plain attention computes in one layer, before dropout.

    Attributes:
      probabilities: of each query, over the keys, [B, H, L, M].
      query, key: of each head, [B, H, L, K].
      position_scores: the term of the scores before scaling that relative positions add, or a
        window, [B, H, L, M]; None without them.
    """

    probabilities: Any
    query: Any
    key: Any
    position_scores: Any


class SelfAttention(nn.Module):
    """Multi-head self-attention with its output projection.

    Attributes:
      config: of the model.
      use_bias: whether the projections have biases.
      output_stddev: of the output's initial kernel; None for `config.initializer_range`.
    """

    config: ModelConfig
    use_bias: bool = True
    output_stddev: float | None = None

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "B L D"],
        mask: AttentionMask,
        dropout_key: DropoutKey | None,
        output_maps: bool,
        rotation: tuple[Array, Array] | None = None,
    ) -> tuple[Float[Array, "B L D"], AttentionMaps | None]:
        """Return the output, and the attention maps if `output_maps`.

        `rotation` is that of rotary positions, as `rotate` takes it.
        """
        c = self.config
        length, size = hidden.shape[1:]
        names, axes = ("query", "key", "value"), ("embed", "heads")
        dense = partial(Dense, c, (size, size), use_bias=self.use_bias)
        query, key, value = dense_layers(hidden, [dense(axes, name=name) for name in names])
        if rotation:
            query, key = (rotate(x, rotation, c.num_attention_heads) for x in (query, key))
        scores = position_kind(c).scores
        relative = scores and scores(c, name="distance")
        projected, maps = (query, key, value), None
        route = attention_route(
            c,
            target().platform,
            length,
            window=mask.window,
            packed=mask.packed,
            training=dropout_key is not None,
        )
        if output_maps or route.name == PLAIN:
            context, maps = plain_attention(c, projected, mask, dropout_key, relative)
        elif route.name == WINDOWS:
            context = local_attention(c, projected, mask, dropout_key)
        else:
            ids = None if mask.is_full else mask.segment_ids
            context = fused_attention(
                c, projected, ids, window=mask.window, packed=mask.packed, dropout_key=dropout_key
            )
        output = dense(("heads", "embed"), stddev=self.output_stddev, name="output")(context)
        return output, maps if output_maps else None


def plain_attention(
    config: ModelConfig,
    projected: Sequence[Float[Array, "B L D"]],
    mask: AttentionMask,
    dropout_key: DropoutKey | None,
    relative: Callable[[Array, Array], Array] | None = None,
) -> tuple[Float[Array, "B L D"], AttentionMaps]:
    """Return the context of each query, and the attention maps.

    `projected` are queries, keys and values, with the heads side by side. `relative` returns the
    positions' term of the scores from queries and keys.
    """
    length = projected[0].shape[1]
    context, maps = _attend(config, projected, mask.bias(), dropout_key, length, relative)
    if mask.window:  # what is not used is not computed
        term = mask.window_bias() * maps.query.shape[-1] ** 0.5
        positions = jnp.broadcast_to(term, maps.probabilities.shape)
        maps = dataclasses.replace(maps, position_scores=positions)
    return context, maps


def local_attention(
    config: ModelConfig,
    projected: Sequence[Float[Array, "B L D"]],
    mask: AttentionMask,
    dropout_key: DropoutKey | None,
) -> Float[Array, "B L D"]:
    """Return the context of `plain_attention`, without the scores of keys far out of the window.

    Blocks of queries, as long as the window's reach, see their own keys and those of the blocks on
    either side. The same elements are dropped. Tokens of padding have other contexts.
    """
    query, key, value = projected
    batch, length, size = query.shape
    blocks, most = -(-length // mask.window), most_positions(config, length)
    query = blocks_of(query, mask.window, reach=0)
    key, value = (blocks_of(x, mask.window, reach=mask.window) for x in (key, value))
    # Where the scores of each block begin among those of all queries and keys.
    _, stride, _ = strides((config.num_attention_heads, most, most))
    first = jnp.arange(blocks, dtype=jnp.uint32) * jnp.uint32((stride + 1) % (1 << 32)) - 1
    first = jnp.tile(first * jnp.uint32(mask.window), batch)
    if dropout_key:
        indices = jnp.repeat(dropout_key.indices, blocks)
        dropout_key = DropoutKey(dropout_key.key, indices)
    projected, bias = (query, key, value), mask.near_bias()
    context, _ = _attend(config, projected, bias, dropout_key, length, first=first)
    return context.reshape(batch, -1, size)[:, :length]


def _attend(
    config: ModelConfig,
    projected: Sequence[Array],
    bias: Array,
    dropout_key: DropoutKey | None,
    length: int,
    relative: Callable[[Array, Array], Array] | None = None,
    first: int | Array = 0,
) -> tuple[Array, AttentionMaps]:
    """Return the context, and the attention maps, of queries and keys that may differ in number."""
    heads = config.num_attention_heads
    query, key, value = (x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) for x in projected)
    scores = attention_scores(query, key)
    positions = relative(query, key) if relative else None
    if positions is not None:
        scores += positions
    with jax.named_scope("softmax"):
        scaled = scores * query.shape[-1] ** -0.5 + bias
        attention = jax.nn.softmax(scaled, axis=-1)
    if dropout_key is None:  # it is faster to divide the sum of values, of which there are fewer
        with jax.named_scope("softmax"):
            largest = jax.lax.stop_gradient(scaled.max(axis=-1, keepdims=True))  # any is right
            powers = jnp.exp(scaled - largest)
            total = powers.sum(axis=-1, keepdims=True)
        context = attention_context(powers.astype(value.dtype), value)
        context = (context / total).astype(value.dtype)
    else:
        most = most_positions(config, length)
        rate, bounds = config.attention_probs_dropout_prob, (heads, most, most)
        kept = apply_dropout(attention, dropout_key, rate, bounds, first)
        context = attention_context(kept.astype(value.dtype), value)
    context = context.swapaxes(1, 2).reshape(projected[0].shape)
    return context, AttentionMaps(attention, query, key, positions)
