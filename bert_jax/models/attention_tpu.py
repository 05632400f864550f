"""Fused attention for TPUs: Pallas kernels of the forward and the backward pass.

They compute what `attention.plain_attention` does and drop the same elements. A step of a kernel
takes a group of heads of one sequence, a tile of its queries and all of its keys, and keeps the
scores in the core's memory. The backward kernel computes the probabilities again. Windows, and
sequences whose keys do not fit, are left to JAX's splash attention, which has no dropout.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import (
    LocalMask,
    MultiHeadMask,
)
from jaxtyping import Array, Float, Int, UInt32

from bert_jax.models.layers import MASKED_SCORE, drop_elements, hash_counter

LANES = 128  # of a TPU's vector unit, which the last axis of a block fills
_MAX_SCORES = 512 * 512  # float32 elements of a tile; several such arrays fit in a core's memory
MAX_LENGTH = 2048  # so many keys and values, their gradients and a tile of scores fit


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """The static options of a kernel."""

    head_size: int
    packed: bool  # a sequence may have several segments
    rate: float  # of dropout
    key_bound: int  # the largest number of keys, by which dropout counts positions


def target_platform() -> str:
    """Return the platform that the program is traced for: of the current mesh, or JAX's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def target_device_kind() -> str:
    """Return JAX's name of the devices that the program is traced for."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return device.device_kind


def supports_length(length: int) -> bool:
    """Return whether the kernels take sequences of a length."""
    return length**2 <= _MAX_SCORES or (length <= MAX_LENGTH and length % LANES == 0)


def splash_attention(
    query: Float[Array, "B L D"],
    key: Float[Array, "B L D"],
    value: Float[Array, "B L D"],
    segment_ids: Int[Array, "B L"],
    *,
    head_size: int,
    window: int,
) -> Float[Array, "B L D"]:
    """Return the context of each query, whose length is a multiple of 128; 0 for no window.

    Tiles without a key in the window are skipped. Tokens of padding have other contexts.
    """
    batch, length, size = query.shape
    tile = next(n for n in (4 * LANES, 2 * LANES, LANES) if length % n == 0)
    reach, tiles = window or length, cast(Any, (tile,) * 8)
    kernel = splash.make_splash_mha(
        MultiHeadMask([LocalMask((length, length), (reach, reach), 0)] * (size // head_size)),
        block_sizes=splash.BlockSizes(*tiles),
        head_shards=1,
        q_seq_shards=1,
        interpret=target_platform() != "tpu",
    )
    by_head = (x.reshape(batch, length, -1, head_size).swapaxes(1, 2) for x in (query, key, value))
    query, key, value = by_head
    ids = splash.SegmentIds(segment_ids, segment_ids)
    context: Any = jax.vmap(kernel)(query * head_size**-0.5, key, value, ids)
    return context.swapaxes(1, 2).reshape(batch, length, size)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def tpu_attention(
    options: KernelOptions,
    query: Float[Array, "B L D"],
    key: Float[Array, "B L D"],
    value: Float[Array, "B L D"],
    segment_ids: Int[Array, "B L"],
    head_keys: UInt32[Array, "B H 2"],
) -> Float[Array, "B L D"]:
    """Return the context of each query; `head_keys` are the dropout key words of each head."""
    (context,) = _call(_forward, options, query, key, value, segment_ids, head_keys)
    return context


def _vjp_forward(options: KernelOptions, *operands: Array) -> tuple[Array, tuple[Array, ...]]:
    return tpu_attention(options, *operands), operands


def _vjp_backward(options: KernelOptions, operands: tuple[Array, ...], gradient: Array) -> Any:
    return *_call(_backward, options, *operands, gradient), None, None


tpu_attention.defvjp(_vjp_forward, _vjp_backward)


def _call(kernel: Callable[..., None], options: KernelOptions, *operands: Array) -> Any:
    """Run a kernel over the grid (sequences, groups of heads, tiles of queries).

    The tiles of a group run one after the other and accumulate the gradients of its keys.
    """
    query, key, value, segment_ids, head_keys, *gradient = operands
    batch, length, size = query.shape
    tile, heads = _query_tile(length), size // options.head_size
    group = _head_group(heads, options.head_size, tile * length)
    width = group * options.head_size
    query_spec = pl.BlockSpec((1, tile, width), lambda b, group, step: (b, step, group))
    key_spec = pl.BlockSpec((1, length, width), lambda b, group, step: (b, 0, group))
    segment_spec = pl.BlockSpec((1, 1, length), lambda b, group, step: (b, 0, 0))
    head_key_spec = pl.BlockSpec(
        (1, 1, group, 2), lambda b, group, step: (b, group, 0, 0), memory_space=pltpu.SMEM
    )
    in_specs = [head_key_spec, segment_spec, query_spec, key_spec, key_spec]
    out_specs, scratch_shapes, matmuls, transfers = [query_spec], [], 2, 4
    if gradient:
        in_specs.append(query_spec)
        out_specs += [key_spec, key_spec]
        scratch_shapes = [pltpu.VMEM((length, width), jnp.float32)] * 2
        matmuls, transfers = 5, 7
    return pl.pallas_call(
        partial(kernel, options),
        grid=(batch, heads // group, length // tile),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(query.shape, query.dtype)] * len(out_specs),
        scratch_shapes=scratch_shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * matmuls * batch * length * length * size,
            transcendentals=batch * heads * length * length,
            bytes_accessed=transfers * query.nbytes,
        ),
        interpret=target_platform() != "tpu",  # as tests run it on a CPU
    )(
        head_keys.reshape(batch, heads // group, group, 2),
        segment_ids[:, None],
        *(query, key, value, *gradient),
    )


def _query_tile(length: int) -> int:
    """Return the queries of a tile: all, or the largest multiple of 128 that fits and divides."""
    if length**2 <= _MAX_SCORES:
        return length
    tiles = range(LANES, length, LANES)
    return max(n for n in tiles if length % n == 0 and n * length <= _MAX_SCORES)


def _head_group(heads: int, head_size: int, scores: int) -> int:
    """Return the heads of a group: as many as fit, filling whole lanes."""
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    aligned = [n for n in divisors if n * head_size % LANES == 0 or n == heads]
    return max((n for n in aligned if n * scores <= _MAX_SCORES), default=aligned[0])


def _heads(options: KernelOptions, head_keys: Any) -> Iterator[tuple[Any, Callable[..., Array]]]:
    """Yield the block of each head of a group, and its dropout."""
    for head in range(head_keys.shape[2]):
        block = (0, slice(None), slice(head * options.head_size, (head + 1) * options.head_size))
        yield block, partial(_dropout, options, [head_keys[0, 0, head, word] for word in range(2)])


def _forward(options: KernelOptions, head_keys: Any, segment_ids: Any, *refs: Any) -> None:
    query, key, value, context = refs
    bias = _mask_bias(options, segment_ids, query.shape[1])
    for block, drop in _heads(options, head_keys):
        probabilities = drop(_softmax(options, query[block], key[block], bias)).astype(value.dtype)
        context[block] = _dot(probabilities, value[block], 1, 0).astype(context.dtype)


def _backward(options: KernelOptions, head_keys: Any, segment_ids: Any, *refs: Any) -> None:
    query, key, value, gradient, *outputs = refs
    query_gradient, key_gradient, value_gradient, key_sum, value_sum = outputs
    step, dtype = pl.program_id(2), query.dtype
    bias = _mask_bias(options, segment_ids, query.shape[1])

    @pl.when(step == 0)
    def _() -> None:
        key_sum[...] = jnp.zeros_like(key_sum)
        value_sum[...] = jnp.zeros_like(value_sum)

    for block, drop in _heads(options, head_keys):
        probabilities = _softmax(options, query[block], key[block], bias)
        value_sum[block[1:]] += _dot(drop(probabilities).astype(dtype), gradient[block], 0, 0)
        # The gradient of the softmax: p * (dp - sum(dp * p)).
        upstream = drop(_dot(gradient[block], value[block], 1, 1))
        mean = (upstream * probabilities).sum(axis=1, keepdims=True)
        scores = (probabilities * (upstream - mean) * options.head_size**-0.5).astype(dtype)
        query_gradient[block] = _dot(scores, key[block], 1, 0).astype(dtype)
        key_sum[block[1:]] += _dot(scores, query[block], 0, 0)

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        key_gradient[0] = key_sum[...].astype(dtype)
        value_gradient[0] = value_sum[...].astype(dtype)


def _mask_bias(options: KernelOptions, segment_ids: Any, tile: int) -> Array:
    """Return the mask's term of the scores of a tile of queries, [tile or 1, M]."""
    key_ids = segment_ids[0]
    attends = key_ids > 0
    if options.packed:
        is_whole = tile == key_ids.shape[1]
        tile_ids = key_ids if is_whole else segment_ids[0, :, pl.ds(pl.program_id(2) * tile, tile)]
        # A transpose takes whole tiles of the vector unit, so the ids are broadcast first.
        query_ids = jnp.broadcast_to(tile_ids, (LANES, tile)).T[:, :1]
        attends &= query_ids == key_ids
    return jnp.where(attends, 0.0, MASKED_SCORE)


def _softmax(options: KernelOptions, query: Array, key: Array, bias: Array) -> Array:
    """Return the float32 attention probabilities of a tile, [tile, M]."""
    scores = _dot(query, key, 1, 1) * options.head_size**-0.5 + bias
    exponentials = jnp.exp(scores - scores.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def _dropout(options: KernelOptions, head_key: Sequence[Array], x: Array) -> Array:
    """Apply the dropout of `layers.apply_dropout` to a tile of probabilities, [tile, M]."""
    if not options.rate:
        return x
    first_query = (pl.program_id(2) * x.shape[0]).astype(jnp.uint32)
    query, key = (jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) for axis in range(2))
    counter = (first_query + query) * jnp.uint32(options.key_bound) + key
    return drop_elements(x, hash_counter(counter, *head_key), options.rate)


def _dot(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    """Return the float32 contraction of one axis of each."""
    numbers = (((x_axis,), (y_axis,)), ((), ()))
    return jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)
