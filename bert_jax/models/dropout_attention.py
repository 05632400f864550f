"""Attention with dropout on a GPU, by a kernel in Pallas: no array of all scores is in memory.

cuDNN has dropout by a generator of its own, which no other device has. This kernel drops what plain
attention does: it computes the bits of `layers.random_bits` where it needs them.

JAX 0.11 calls Pallas for Triton deprecated, and names `jax_triton` in its place, whose kernels are
written alike. Where JAX has no Pallas for Triton, or `largest_error` is too large, the plain form
is taken; see `fused_attention.unsupported`.

Source of the algorithm: T. Dao, "FlashAttention-2", 2023. Shape letters are those of `models.bert`.
Of a tile of scores, Q are the queries and M the keys.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int, UInt32

from bert_jax.models.layers import MASKED_SCORE, DropoutKey, mix_bits, random_words, strides
from bert_jax.models.target import target

_LOG2_E = math.log2(math.e)  # a GPU has powers of two
_LENGTHS_OF_ONE_BLOCK = (16, 32, 64, 128)  # to which shorter sequences are padded


class _Program(NamedTuple):
    """The sizes of a program of the GPU. Each block of each head of each sequence has one.

    Attributes:
      block: tokens whose results it computes; of a shorter sequence all.
      step: tokens that it reads in each turn of its loop.
      warps: groups of 32 threads.
      stages: turns whose tokens it loads ahead.
    """

    block: int
    step: int
    warps: int
    stages: int


# The fastest that were right on an H200, each timed alone: benchmarks/records/2026-11-28-h200.
# Backward with block=64 and step=64 the compiler gave a wrong gradient of `value`.
_FORWARD = _Program(block=64, step=64, warps=4, stages=3)
_BACKWARD = _Program(block=64, step=32, warps=4, stages=3)
_BACKWARD_IN_ONE = _Program(block=128, step=16, warps=4, stages=2)


class _Settings(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
      rate: of dropout.
      stride: from the position of a score to that of the next query's, as dropout counts them.
      packed: whether tokens attend to their own segment alone.
      is_interpreted: by Pallas, on any device, as tests do on a CPU.
    """

    rate: float
    stride: int
    packed: bool
    is_interpreted: bool


def dropout_attention(
    query: Float[Array, "B L D"],
    key: Float[Array, "B L D"],
    value: Float[Array, "B L D"],
    segment_ids: Int[Array, "B L"] | None,
    dropout_key: DropoutKey,
    *,
    heads: int,
    rate: float,
    positions: int,
    packed: bool,
) -> Float[Array, "B L D"]:
    """Return the context of each query that is a token, as plain attention does with the same key.

    Dropout counts as in a sequence of `positions`, which are at least the tokens of this one.
    Without `segment_ids`, every token attends to every other.
    """
    head_stride, query_stride, _ = strides((heads, positions, positions))
    first, second = random_words(dropout_key.key, dropout_key.indices)
    first = first[:, None] + jnp.arange(heads, dtype=jnp.uint32) * jnp.uint32(head_stride)
    words = jnp.stack([first, jnp.broadcast_to(second[:, None], first.shape)], axis=1)
    settings = _Settings(rate, query_stride, packed, is_interpreted=_is_interpreted())
    kernel = partial(_kernel_attention, settings)
    length = query.shape[1]
    padded = _padded_length(length)
    if padded > length and segment_ids is None:
        segment_ids = jnp.ones(query.shape[:2], jnp.int32)
    operands = [_pad(x, padded) for x in (query, key, value, segment_ids)]
    return target().map_over_heads(kernel)(*operands, words)[:, :length]


def _padded_length(length: int) -> int:
    """Return the next length of whole blocks."""
    whole = -(-length // _BACKWARD.block) * _BACKWARD.block
    return min([each for each in _LENGTHS_OF_ONE_BLOCK if length <= each], default=whole)


def _pad(x: Array | None, length: int) -> Array | None:
    """Return `x` with zeros for tokens up to a length."""
    if x is None or x.shape[1] == length:
        return x
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *((0, 0),) * (x.ndim - 2)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel_attention(
    settings: _Settings,
    query: Float[Array, "B L D"],
    key: Float[Array, "B L D"],
    value: Float[Array, "B L D"],
    segment_ids: Int[Array, "B L"] | None,
    words: UInt32[Array, "B 2 H"],
) -> Float[Array, "B L D"]:
    return _forward(settings, query, key, value, segment_ids, words)[0]


def _forward(
    settings: _Settings,
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array | None,
    words: Array,
) -> tuple[Array, Any]:
    operands = query, key, value, segment_ids, words
    batch, length, _ = query.shape
    log_sums = jax.ShapeDtypeStruct((batch, words.shape[2], length), jnp.float32)
    context, log_sums = _call(_attention_forward, _FORWARD, settings, operands, [query, log_sums])
    return context, (*operands, context, log_sums)


def _backward(settings: _Settings, saved: Any, gradient: Array) -> tuple[Any, ...]:
    query, operands = saved[0], (*saved, gradient)
    program = _BACKWARD_IN_ONE if query.shape[1] <= _BACKWARD_IN_ONE.block else _BACKWARD
    return (*_call(_attention_backward, program, settings, operands, [query] * 3), None, None)


_kernel_attention.defvjp(_forward, _backward)


def _call(
    kernel: Any,
    program: _Program,
    settings: _Settings,
    operands: Sequence[Any],
    results: Sequence[Any],
) -> Any:
    """Run a kernel for each sequence, head and block of tokens."""
    batch, length, size = operands[0].shape
    heads = operands[4].shape[2]
    # Each kind of array has a shape of its own, as a sequence and a head have at least 16 numbers.
    specs_by_shape = {
        (batch, length, size): ((None, length, size // heads), lambda b, h, _: (b, 0, h)),
        (batch, 2, heads): ((None, 2, None), lambda b, h, _: (b, 0, h)),
        (batch, heads, length): ((None, None, length), lambda b, h, _: (b, h, 0)),
        (batch, length): ((None, length), lambda b, h, _: (b, 0)),
    }

    def spec(x: Any) -> pl.BlockSpec | None:
        return None if x is None else pl.BlockSpec(*specs_by_shape[x.shape])

    block, step = min(program.block, length), min(program.step, length)
    return pl.pallas_call(
        partial(kernel, settings, block, step),
        grid=(batch, heads, length // block),
        in_specs=[spec(x) for x in operands],
        out_specs=[spec(x) for x in results],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        compiler_params=triton.CompilerParams(num_warps=program.warps, num_stages=program.stages),
        interpret=settings.is_interpreted,
    )(*operands)


def _is_interpreted() -> bool:
    """Return whether Pallas interprets a kernel, as tests do on a CPU."""
    return target().platform != "gpu"


def largest_error(length: int, head_size: int, *, packed: bool) -> float:
    """Return how far the compiled kernel is from the interpreted one on this device.

    It is the largest of the context and the three gradients, relative to the largest number of
    each. Sequences of more than four blocks have the loops of one of four.
    """
    length = min(_padded_length(length), 4 * _BACKWARD.block)
    # In a thread of its own, as a model may be traced in this one.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_largest_error, length, head_size, packed).result()


@cache
def _largest_error(length: int, head_size: int, packed: bool) -> float:
    heads = 2
    random = np.random.default_rng(0).normal(size=(4, 1, length, heads * head_size))
    *projected, gradient = jnp.asarray(random, jnp.bfloat16)
    # Two segments where they are packed, and padding.
    segment_ids = 1 + (np.arange(length) >= length // 3) * packed
    segment_ids[-5:] = 0
    words = jnp.arange(2 * heads, dtype=jnp.uint32).reshape(1, 2, heads)

    def run(*, is_interpreted: bool, ids: Array | None) -> Any:
        settings = _Settings(0.1, length, packed, is_interpreted)
        attend: Any = partial(_kernel_attention, settings)
        context, pull = jax.vjp(lambda *x: attend(*x, ids, words), *projected)
        is_token = jnp.asarray(segment_ids > 0, gradient.dtype)[None, :, None]
        found = jnp.stack([context, *pull(gradient * is_token)])
        return (found * is_token[None]).astype(jnp.float32)

    errors = []
    for ids in (jnp.asarray(segment_ids[None], jnp.int32), None):
        compiled, interpreted = (
            jax.device_get(jax.jit(partial(run, is_interpreted=each, ids=ids))())
            for each in (False, True)
        )
        pairs = zip(compiled, interpreted, strict=True)
        errors += [float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs]
    return math.inf if np.isnan(errors).any() else max(errors)


class _Tile:
    """The scores of some queries and some keys of a head.

    Attributes:
      scores: times log2(e), with the term of the mask, [Q, M].
      is_kept: by dropout, [Q, M].
    """

    scores: Float[Array, "Q M"]
    is_kept: Bool[Array, "Q M"]

    def __init__(
        self, settings: _Settings, query: Array, key: Array, ids: Any, words: Any, at: Any
    ):
        """`at` are the slices of the queries and the keys."""
        self.scores = _matmul(query, key.T) * (query.shape[1] ** -0.5 * _LOG2_E)
        if ids is not None:
            query_ids, key_ids = (ids[each] for each in at)
            attends = key_ids[None, :] > 0
            if settings.packed:
                attends &= query_ids[:, None] == key_ids[None, :]
            self.scores += jnp.where(attends, 0.0, MASKED_SCORE * _LOG2_E)
        row, column = (
            jax.lax.broadcasted_iota(jnp.uint32, self.scores.shape, axis)
            + jnp.asarray(at[axis].start).astype(jnp.uint32)
            for axis in (0, 1)
        )
        bits = mix_bits(row * jnp.uint32(settings.stride) + column, words[0], words[1])
        self.is_kept = bits >= jnp.uint32(round(settings.rate * 2**32))

    def kept(self, x: Float[Array, "Q M"]) -> Float[Array, "Q M"]:
        """Return zeros for what is dropped; nothing is scaled up."""
        return jnp.where(self.is_kept, x, 0.0)


def _attention_forward(
    settings, block, step, query, key, value, ids, words, context, log_sums
) -> None:
    """Write the context of a block of queries, and the logarithm of each softmax's sum."""
    length, size = query.shape
    queries = pl.ds(pl.program_id(2) * block, block)
    own = query[queries, :]

    def add_keys(number: Any, carry: Any) -> Any:
        total, highest, context_sum = carry
        keys = pl.ds(number * step, step)
        tile = _Tile(settings, own, key[keys, :], ids, words, (queries, keys))
        higher = jnp.maximum(highest, tile.scores.max(1))
        powers, rescale = jnp.exp2(tile.scores - higher[:, None]), jnp.exp2(highest - higher)
        context_sum = context_sum * rescale[:, None]
        context_sum += _matmul(tile.kept(powers).astype(own.dtype), value[keys, :])
        return total * rescale + powers.sum(1), higher, context_sum

    zeros = jnp.zeros((block, size), jnp.float32)
    start = jnp.zeros(block, jnp.float32), jnp.full(block, -jnp.inf, jnp.float32), zeros
    total, highest, context_sum = jax.lax.fori_loop(0, length // step, add_keys, start)
    scale = 1 / (total * (1 - settings.rate))
    context[queries, :] = (context_sum * scale[:, None]).astype(context.dtype)
    log_sums[queries] = highest + jnp.log2(total)


def _attention_backward(
    settings,
    block,
    step,
    query,
    key,
    value,
    ids,
    words,
    context,
    log_sums,
    gradient,
    query_gradient,
    key_gradient,
    value_gradient,
) -> None:
    """Write the gradients of a block of keys and values, and of the same block of queries."""
    length, size = query.shape
    own = pl.ds(pl.program_id(2) * block, block)
    steps, is_alone = length // step, length == block
    zeros = jnp.zeros((block, size), jnp.float32)
    keep_scale = 1 / (1 - settings.rate)  # what is kept is scaled up
    product_scale = keep_scale * size**-0.5

    def gradients(queries: Any, keys: Any, key: Array, value: Array) -> Any:
        """Return kept probabilities and the gradient of the products, neither scaled."""
        upstream = gradient[queries, :]
        tile = _Tile(settings, query[queries, :], key, ids, words, (queries, keys))
        probabilities = jnp.exp2(tile.scores - log_sums[queries][:, None])
        # The mean of the gradients of a query's probabilities, which softmax takes off each.
        mean = (upstream.astype(jnp.float32) * context[queries, :].astype(jnp.float32)).sum(1)
        change = tile.kept(_matmul(upstream, value.T)) - (mean / keep_scale)[:, None]
        kept, by_scores = tile.kept(probabilities), probabilities * change
        return kept.astype(key.dtype), by_scores.astype(key.dtype), upstream

    def add_queries(number: Any, carry: Any) -> Any:
        sum_key, sum_value = carry
        queries = pl.ds(number * step, step)
        kept, by_scores, upstream = gradients(queries, own, own_key, own_value)
        if is_alone:
            found = _matmul(by_scores, own_key) * product_scale
            query_gradient[queries, :] = found.astype(query_gradient.dtype)
        sum_key += _matmul(by_scores.T, query[queries, :])
        return sum_key, sum_value + _matmul(kept.T, upstream)

    def add_keys(number: Any, total: Array) -> Array:
        keys = pl.ds(number * step, step)
        some = key[keys, :]
        return total + _matmul(gradients(own, keys, some, value[keys, :])[1], some)

    own_key, own_value = key[own, :], value[own, :]
    sum_key, sum_value = jax.lax.fori_loop(0, steps, add_queries, (zeros, zeros))
    key_gradient[own, :] = (sum_key * product_scale).astype(key_gradient.dtype)
    value_gradient[own, :] = (sum_value * keep_scale).astype(value_gradient.dtype)
    if not is_alone:
        found = jax.lax.fori_loop(0, steps, add_keys, zeros) * product_scale
        query_gradient[own, :] = found.astype(query_gradient.dtype)


def _matmul(x: Float[Array, "M N"], y: Float[Array, "N O"]) -> Float[Array, "M O"]:
    return jax.lax.dot(x, y, preferred_element_type=jnp.float32)
