"""Self-attention: the plain form, and the fused forms of TPUs and GPUs.

Plain attention is the default. With `model.attention` "fused" a TPU runs the kernels of
`attention_tpu` and an NVIDIA GPU those of cuDNN, where they can serve (`check_attention`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.models import attention_tpu
from bert_jax.models.attention_tpu import target_platform
from bert_jax.models.layers import (
    MASKED_SCORE,
    Dense,
    DropoutKey,
    apply_dropout,
    dense_layers,
    sequence_keys,
)
from bert_jax.models.matmul import attention_context, attention_scores
from bert_jax.models.positions import RelativePositions, rotate

_MAX_CUDNN_HEAD_SIZE = 128  # of GPUs before Hopper, by JAX's own check


@struct.dataclass
class AttentionMask:
    """Which tokens attend to which: none to padding, of segment 0.

    In packed sequences, segments are numbered from 1 on, and a token attends to its own segment.
    """

    segment_ids: Any  # [B, L] int32
    packed: bool = struct.field(pytree_node=False, default=False)
    window: Any = None  # the largest distance of a token from those it attends to, if limited

    def bias(self) -> Float[Array, "B 1 L_or_1 M"]:
        """Return the mask's term of the scores: 0, or -10000 where a token does not attend."""
        attends = self.segment_ids[:, None, None, :] > 0
        if self.packed:
            attends &= self.segment_ids[:, None, :, None] == self.segment_ids[:, None, None, :]
        if self.window is not None:
            attends &= self._is_in_window()
        return jnp.where(attends, 0.0, MASKED_SCORE)

    def window_bias(self) -> Float[Array, "L M"]:
        """Return the window's part of `bias`."""
        return jnp.where(self._is_in_window(), 0.0, MASKED_SCORE)

    def _is_in_window(self) -> Bool[Array, "L M"]:
        index = jnp.arange(self.segment_ids.shape[1])
        return jnp.abs(index[:, None] - index) <= self.window


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
        relative = None
        if c.position_embedding_type.startswith("relative"):
            relative = RelativePositions(c, name="distance")
        options: Any = {"packed": mask.packed, "training": dropout_key is not None}
        is_fused = c.attention == "fused" and not output_maps
        if is_fused and not unsupported(c, target_platform(), length, **options):
            context, maps = fused_attention(c, (query, key, value), mask, dropout_key), None
        else:
            context, maps = plain_attention(c, (query, key, value), mask, dropout_key, relative)
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
    batch, length, size = projected[0].shape
    heads, most = config.num_attention_heads, config.max_position_embeddings
    query, key, value = (
        x.reshape(batch, length, heads, size // heads).swapaxes(1, 2) for x in projected
    )
    scores = attention_scores(query, key)
    positions = relative(query, key) if relative else None
    if positions is not None:
        scores += positions
    attention = jax.nn.softmax(scores * (size // heads) ** -0.5 + mask.bias(), axis=-1)
    kept = apply_dropout(
        attention, dropout_key, config.attention_probs_dropout_prob, (heads, most, most)
    )
    context = attention_context(kept.astype(value.dtype), value)
    if mask.window is not None:  # what is not used is not computed
        term = mask.window_bias() * (size // heads) ** 0.5
        positions = jnp.broadcast_to(term, attention.shape)
    maps = AttentionMaps(attention, query, key, positions)
    return context.swapaxes(1, 2).reshape(batch, length, size), maps


def fused_attention(
    config: ModelConfig,
    projected: Sequence[Float[Array, "B L D"]],
    mask: AttentionMask,
    dropout_key: DropoutKey | None,
) -> Float[Array, "B L D"]:
    """Return the context of each query, by a kernel of the platform; see `plain_attention`."""
    heads, most = config.num_attention_heads, config.max_position_embeddings
    head_size = config.hidden_size // heads
    axes = jax.sharding.get_abstract_mesh().auto_axes
    head_spec = P(None, None, axes)
    if target_platform() == "gpu":
        function = partial(cudnn_attention, head_size=head_size)
        operands, specs = ((mask.segment_ids > 0).sum(1, dtype=jnp.int32),), (P(),)
    else:
        rate = config.attention_probs_dropout_prob if dropout_key else 0.0
        head_keys = jnp.zeros((len(mask.segment_ids), heads, 2), jnp.uint32)
        if dropout_key and rate:
            first, second = sequence_keys(dropout_key.key, dropout_key.indices)
            # Adding to the first word adds to the counter of positions; a head has its own range.
            first = first[:, None] + jnp.arange(heads, dtype=jnp.uint32) * jnp.uint32(most * most)
            head_keys = jnp.stack(jnp.broadcast_arrays(first, second[:, None]), axis=-1)
        options = attention_tpu.KernelOptions(head_size, mask.packed, rate, most)
        function = partial(attention_tpu.tpu_attention, options)
        operands, specs = (mask.segment_ids, head_keys), (P(), P(None, axes))
    if axes:  # The compiler cannot partition a kernel: each device runs it for its own heads.
        function = jax.shard_map(
            function,
            in_specs=(head_spec, head_spec, head_spec, *specs),
            out_specs=head_spec,
            axis_names=set(axes),
            check_vma=False,
        )
    return function(*projected, *operands)


def cudnn_attention(
    query: Array,
    key: Array,
    value: Array,
    lengths: Array,
    *,
    head_size: int,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B L D"]:
    """Return the context of queries [B, L, D], by cuDNN; `lengths` [B] are without padding."""
    query_heads, key_heads, value_heads = (
        x.reshape(*x.shape[:2], -1, head_size) for x in (query, key, value)
    )
    context = jax.nn.dot_product_attention(
        query_heads,
        key_heads,
        value_heads,
        # A sequence of padding alone keeps one key, since a softmax over none is NaN.
        key_value_seq_lengths=jnp.maximum(lengths, 1),
        implementation=implementation,
    )
    return context.reshape(query.shape)


def check_attention(config: ModelConfig, platform: str, length: int, *, packed: bool) -> None:
    """Refuse a fused attention that cannot serve in training on a platform, such as "gpu"."""
    reason = unsupported(config, platform, length, packed=packed, training=True)
    if config.attention == "fused" and reason:
        raise UserError(f"model.attention fused {reason}, or set model.attention to plain")


def unsupported(
    config: ModelConfig, platform: str, length: int, *, packed: bool, training: bool
) -> str:
    """Return why fused attention cannot serve and what to change, or "" where it can."""
    head_size = config.hidden_size // config.num_attention_heads
    if platform not in ("tpu", "gpu"):
        return f"is for a TPU or a GPU, not for a {platform}; train on one"
    if config.model_type == "modernbert":
        return "has no window, as a modernbert's layers have"
    if config.position_embedding_type.startswith("relative"):
        kind = config.position_embedding_type
        return f"has no {kind} positions; set model.position_embedding_type to absolute"
    if platform == "tpu":
        if attention_tpu.supports_length(length):
            return ""
        return (
            "takes up to 512 tokens, or a multiple of 128 up to 2048, on a TPU, not "
            f"{length}; set data.max_length to such a length"
        )
    if config.dtype == "float32":
        return "needs bfloat16 on a GPU; set model.dtype to bfloat16"
    if packed:
        return "takes no packed sequences on a GPU; set data.packing to False"
    if training and config.attention_probs_dropout_prob:
        return "has no dropout on a GPU; set model.attention_probs_dropout_prob to 0"
    if head_size % 8 or head_size > _MAX_CUDNN_HEAD_SIZE:
        return (
            f"takes heads of a multiple of 8 up to {_MAX_CUDNN_HEAD_SIZE} on a GPU, not of "
            f"{head_size}; change model.num_attention_heads"
        )
    return ""
