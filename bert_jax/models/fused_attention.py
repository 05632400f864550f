"""Attention by a kernel: JAX's splash attention on a TPU, on an NVIDIA GPU cuDNN's, or ours.

`model.attention` "fused" asks for it; where no kernel serves, `check_attention` refuses the config.
"auto" takes it on a GPU, wherever it serves there.
Shape letters are those of `models.bert`.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError, first_line
from bert_jax.models.layers import DropoutKey
from bert_jax.models.positions import position_kind
from bert_jax.models.target import target

_LANES = 128  # of a TPU's vector unit, which the last axis of a block fills
_DROPOUT_HEAD_SIZES = (16, 32, 64, 128)  # a power of two, as Triton's blocks are
# Of bfloat16, relative to the largest number. Right results had 0.007, wrong ones 0.07 or more.
_ROUNDING = 0.02
_NO_DROPOUT = "set model.attention_probs_dropout_prob to 0"
_MAX_CUDNN_HEAD_SIZE = 128  # of GPUs before Hopper, by JAX's own check


def fused_attention(
    config: ModelConfig,
    projected: Sequence[Float[Array, "B L D"]],
    segment_ids: Int[Array, "B L"] | None,
    *,
    window: int,
    packed: bool,
    dropout_key: DropoutKey | None = None,
) -> Float[Array, "B L D"]:
    """Return the context of each query; see `attention.plain_attention`.

    Without `segment_ids`, every token attends to every other, or to those of its window. On a GPU a
    window that reaches all tokens is none. Without a key there is no dropout, with one no window.
    """
    query, key, value = projected
    head_size = config.hidden_size // config.num_attention_heads
    if dropout_key and config.attention_probs_dropout_prob:
        # Imported here, as it is slow. `unsupported` refuses windows.
        from bert_jax.models.dropout_attention import dropout_attention

        if window:
            raise ValueError("attention with dropout has no window")
        return dropout_attention(
            query,
            key,
            value,
            segment_ids,
            dropout_key,
            heads=config.num_attention_heads,
            rate=config.attention_probs_dropout_prob,
            positions=most_positions(config, query.shape[1]),
            packed=packed,
        )
    if target().platform == "gpu" and 0 < window < query.shape[1] - 1:
        kernel = partial(cudnn_windows, head_size=head_size, window=window, packed=packed)
    elif target().platform == "gpu":
        kernel = partial(cudnn_attention, head_size=head_size, packed=packed)
    else:
        kernel = partial(splash_attention, head_size=head_size, window=window)
    return target().map_over_heads(kernel)(query, key, value, segment_ids)


def most_positions(config: ModelConfig, length: int) -> int:
    """Return the positions by which dropout counts: packed texts may have more than the model."""
    return max(config.max_position_embeddings, length)


def splash_attention(
    query: Float[Array, "B L D"],
    key: Float[Array, "B L D"],
    value: Float[Array, "B L D"],
    segment_ids: Int[Array, "B L"] | None,
    *,
    head_size: int,
    window: int,
) -> Float[Array, "B L D"]:
    """Return the context of each query; a window of 0 is none.

    The length is a multiple of 128. Tiles without a key in the window are skipped. Padding attends
    to the first segment, as the [MASK]s that late interaction adds to a query have to.
    """
    # Only the kernel of a TPU needs this import, which is slow.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    batch, length, size = query.shape
    tile = next(n for n in (4 * _LANES, 2 * _LANES, _LANES) if length % n == 0)
    reach, tiles = window or length, cast(Any, (tile,) * 8)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask(
            [splash.LocalMask((length, length), (reach, reach), 0)] * (size // head_size)
        ),
        block_sizes=splash.BlockSizes(*tiles),
        head_shards=1,
        q_seq_shards=1,
        interpret=_is_interpreted(),
    )
    by_head = (x.reshape(batch, length, -1, head_size).swapaxes(1, 2) for x in (query, key, value))
    query, key, value = by_head
    ids = None
    if segment_ids is not None:
        ids = splash.SegmentIds(jnp.maximum(segment_ids, 1), segment_ids)
    context: Any = jax.vmap(kernel)(query * head_size**-0.5, key, value, ids)
    return context.swapaxes(1, 2).reshape(batch, length, size)


def _is_interpreted() -> bool:
    """Return whether Pallas interprets a kernel, as tests do on a CPU."""
    return target().platform != "tpu"


def cudnn_attention(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array | None,
    *,
    head_size: int,
    packed: bool,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B L D"]:
    """Return the context of queries [B, L, D], by cuDNN; `segment_ids` are [B, L] or None.

    Packed sequences take a mask of all pairs of tokens, which the kernel reads for each head. The
    mask is Boolean, so that JAX computes no gradient for it. There padding attends to padding, and
    else to the text.
    """
    query_heads, key_heads, value_heads = (
        x.reshape(*x.shape[:2], -1, head_size) for x in (query, key, value)
    )
    options: dict[str, Any] = {}
    if segment_ids is None:
        pass
    elif packed:
        options["mask"] = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    else:
        lengths = (segment_ids > 0).sum(1, dtype=jnp.int32)
        # A sequence of padding alone keeps one key, since a softmax over none is NaN.
        options["key_value_seq_lengths"] = jnp.maximum(lengths, 1)
    context = jax.nn.dot_product_attention(
        query_heads, key_heads, value_heads, implementation=implementation, **options
    )
    return context.reshape(query.shape)


def cudnn_windows(
    query: Float[Array, "B L D"],
    key: Float[Array, "B L D"],
    value: Float[Array, "B L D"],
    segment_ids: Int[Array, "B L"] | None,
    *,
    head_size: int,
    window: int,
    packed: bool,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B L D"]:
    """Return the context of each query in its window, by cuDNN, which has no windows of its own.

    Blocks of queries, twice as long as the window's reach, see their own keys and a reach on either
    side, under a mask. A query without a key in reach, which is padding, has a finite context of no
    meaning. JAX's option of a window gives wrong results without a causal mask.
    """
    batch, length, size = query.shape
    block = 2 * window
    if segment_ids is None:
        segment_ids = jnp.ones((batch, length), jnp.int32)
    of_queries = partial(blocks_of, size=block, reach=0)
    of_keys = partial(blocks_of, size=block, reach=window)
    query_ids, key_ids = of_queries(segment_ids), of_keys(segment_ids)
    distance = jnp.arange(2 * block) - window - jnp.arange(block)[:, None]
    attends = (jnp.abs(distance) <= window) & (key_ids[:, None, :] > 0)
    if packed:
        attends &= query_ids[:, :, None] == key_ids[:, None, :]
    context = jax.nn.dot_product_attention(
        of_queries(query.reshape(batch, length, -1, head_size)),
        of_keys(key.reshape(batch, length, -1, head_size)),
        of_keys(value.reshape(batch, length, -1, head_size)),
        mask=attends[:, None],
        implementation=implementation,
    )
    return context.reshape(batch, -1, size)[:, :length]


def blocks_of(x: Shaped[Array, "B L *D"], size: int, reach: int) -> Shaped[Array, "BN M *D"]:
    """Return blocks of `size` tokens, with `reach` tokens more on either side, zeros for padding.

    Twice the reach is a multiple of `size`.
    """
    blocks, stretches = -(-x.shape[1] // size), 1 + 2 * reach // size
    ends = (reach, (blocks + stretches - 1) * size - reach - x.shape[1])
    x = jnp.pad(x, ((0, 0), ends, *((0, 0),) * (x.ndim - 2)))
    shifted = (x[:, i * size : (i + blocks) * size] for i in range(stretches))
    # Stretches of blocks are joined: to stack the blocks moves more bytes on a TPU.
    return jnp.concatenate([each.reshape(-1, size, *x.shape[2:]) for each in shifted], axis=1)


def check_attention(
    config: ModelConfig, platform: str, length: int, *, window: int, packed: bool
) -> None:
    """Refuse a fused attention that cannot serve in training on a platform, such as "gpu"."""
    reason = unsupported(config, platform, length, window=window, packed=packed, training=True)
    if config.attention == "fused" and reason:
        raise UserError(f"model.attention fused {reason}, or set model.attention to plain")


def unsupported(
    config: ModelConfig, platform: str, length: int, *, window: int, packed: bool, training: bool
) -> str:
    """Return why fused attention cannot serve a layer and what to change, or "" where it can.

    `window` is that of the layer, 0 for none.
    """
    head_size = config.hidden_size // config.num_attention_heads
    if platform not in ("tpu", "gpu"):
        return f"is for a TPU or a GPU, not for a {platform}; train on one"
    if position_kind(config).scores:
        kind = config.position_embedding_type
        return f"has no {kind} positions; set model.position_embedding_type to absolute"
    has_dropout = training and config.attention_probs_dropout_prob > 0
    if has_dropout and (platform == "tpu" or window):
        where = "in layers with a window" if platform == "gpu" else "on a TPU"
        return f"has no dropout {where}; {_NO_DROPOUT}"
    if platform == "tpu":
        if length % _LANES:
            return (
                f"takes a multiple of {_LANES} tokens on a TPU, not {length}; "
                "give all sequences such a length, those of phases and of a length warm-up too"
            )
        return ""
    if config.dtype == "float32":
        return "needs bfloat16 on a GPU; set model.dtype to bfloat16"
    if has_dropout:
        return _dropout_unsupported(length, head_size, packed=packed)
    if packed and length % 2:
        return f"takes an even number of packed tokens on a GPU, not {length}; change that length"
    if head_size % 8 or head_size > _MAX_CUDNN_HEAD_SIZE:
        return (
            f"takes heads of a multiple of 8 up to {_MAX_CUDNN_HEAD_SIZE} on a GPU, not of "
            f"{head_size}; change model.num_attention_heads"
        )
    if jax.default_backend() == "gpu" and (error := _cudnn_error()):  # not where one is planned for
        return f"by cuDNN fails on this machine ({error}); install jax[cuda13]"
    return ""


def _dropout_unsupported(length: int, head_size: int, *, packed: bool) -> str:
    """Return what `unsupported` does, of dropout on a GPU."""
    if head_size not in _DROPOUT_HEAD_SIZES:
        *sizes, last = _DROPOUT_HEAD_SIZES
        return (
            f"with dropout takes heads of {', '.join(map(str, sizes))} or {last} on a GPU, not of "
            f"{head_size}; change model.num_attention_heads, or {_NO_DROPOUT}"
        )
    if jax.default_backend() == "gpu" and (error := _dropout_error(length, head_size, packed)):
        return f"with dropout fails on this machine ({error}); {_NO_DROPOUT}"
    return ""


@cache
def _dropout_error(length: int, head_size: int, packed: bool) -> str:
    """Return why the kernel with dropout is not to be used here, "" if it is right.

    Its compiler is Triton, as JAX has it, which gave wrong gradients for some sizes of blocks.
    """
    try:
        from bert_jax.models.dropout_attention import largest_error

        error = largest_error(length, head_size, packed=packed)
    except Exception as error:  # of JAX, its Triton, the driver: all have their own
        return first_line(error)
    return "" if error < _ROUNDING else f"its results are off by {error:.2g} of the largest"


@cache
def _cudnn_error() -> str:
    """Return why cuDNN cannot compile an attention and its gradient here, "" if it can."""

    def total(*operands: Array) -> Array:
        context = jax.nn.dot_product_attention(*operands, implementation="cudnn")
        return context.astype(jnp.float32).sum()

    operands = (jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16),) * 3
    try:
        jax.jit(jax.grad(total)).lower(*operands).compile()
    except Exception as error:  # of JAX, cuDNN, the driver or the compiler: all have their own
        return first_line(error)
    return ""
