"""The kernels of fused attention on a GPU, in Pallas, which Triton compiles.

A step takes a head of a row and a tile of its queries or of its keys, and goes through the others a
tile at a time. The softmax is that of "FlashAttention" (Dao et al. 2022): what is summed so far is
scaled down where a higher score is met.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from bert_jax.models.attention_tile import LARGE_BIAS, Form, Kernels, apply_dropout, dot, scores

WARPS, STAGES = 4, 2  # of Triton: groups of threads of a step, and tiles on their way to it

# Bytes of a column of a tile of queries or keys: what is made of it fits in the memory that A100s
# and H100s share within a step, and nearly in their registers (heads of 64, by Triton's compiler).
_MOST = 128
_LEAST = 16  # queries, keys and sizes of what Triton multiplies


class _Queries(NamedTuple):
    """A tile of queries [T, K], the gradient of what they mix, and of each query [T] the rest."""

    vectors: Array
    gradient: Array
    texts: Array
    highest: Array
    total: Array
    mean: Array


class _Keys(NamedTuple):
    """A tile of keys and their values, [T, K], and the texts that they are of, [T]."""

    vectors: Array
    values: Array
    texts: Array


def _run(
    kernel: Callable[..., None], form: Form, operands: Sequence[Array], results: Sequence[Any]
) -> Sequence[Array]:
    """Runs a kernel over (tiles, heads, rows), which finds its row whole and writes its tile."""
    from jax.experimental.pallas import triton  # which has an end in JAX's plans

    batch, length, size = operands[0].shape
    tile = _tile(length, operands[0].dtype)
    row = pl.BlockSpec((None, length, form.size), lambda step, head, row: (row, 0, head))
    row_of_sums = pl.BlockSpec((None, None, length), lambda step, head, row: (row, head, 0))
    part = pl.BlockSpec((None, tile, form.size), lambda step, head, row: (row, step, head))
    part_of_sums = pl.BlockSpec((None, None, tile), lambda step, head, row: (row, head, step))
    texts = pl.BlockSpec((None, length), lambda step, head, row: (row, 0))
    words = pl.BlockSpec((None, None, 2), lambda step, head, row: (row, head, 0))
    taken = (row, row, row, texts, words, row, row_of_sums, row_of_sums, row)
    given = {_forward: (part, part_of_sums, part_of_sums), _backward: (part, part, part)}
    like = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in results]
    return pl.pallas_call(
        partial(kernel, form, tile),
        grid=(length // tile, size // form.size, batch),
        in_specs=taken[: len(operands)],
        out_specs=given[kernel],
        out_shape=like,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=form.interpret,
    )(*operands)


def _tile(length: int, dtype: Any) -> int:
    """Returns how many queries or keys a step takes at a time, a power of two."""
    return math.gcd(length, _MOST // dtype.itemsize)


def _forward(
    form: Form,
    tile: int,
    query: Any,
    key: Any,
    value: Any,
    texts: Any,
    words: Any,
    mixed: Any,
    highest: Any,
    total: Any,
) -> None:
    here = _part(pl.program_id(0), tile)
    queries = query[here]

    def add(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        there = _part(step, tile)
        found = scores(form, queries, key[there], _bias(form, texts[here], texts[there]))
        most = jnp.maximum(sums[1], found.max(axis=1))
        powers, shrunk = jnp.exp(found - most[:, None]), jnp.exp(sums[1] - most)
        kept = _dropped(form, powers, words, (here, there)).astype(value.dtype)
        mix = sums[0] * shrunk[:, None] + dot(kept, value[there], 1, 0)
        return mix, most, sums[2] * shrunk + powers.sum(axis=1)

    none = jnp.zeros(queries.shape, jnp.float32), jnp.full(tile, -jnp.inf), jnp.zeros(tile)
    mix, highest[...], total[...] = jax.lax.fori_loop(0, texts.shape[0] // tile, add, none)
    mixed[...] = (mix / total[...][:, None]).astype(mixed.dtype)


def _backward(
    form: Form,
    tile: int,
    query: Any,
    key: Any,
    value: Any,
    texts: Any,
    words: Any,
    mixed: Any,
    highest: Any,
    total: Any,
    gradient: Any,
    of_query: Any,
    of_key: Any,
    of_value: Any,
) -> None:
    dtype, tiles = query.dtype, texts.shape[0] // tile
    here = _part(pl.program_id(0), tile)

    def of_queries(at: Any) -> _Queries:
        of_mixed = gradient[at]
        mean = (of_mixed.astype(jnp.float32) * mixed[at].astype(jnp.float32)).sum(axis=1)
        return _Queries(query[at], of_mixed, texts[at], highest[at], total[at], mean)

    def of_keys(at: Any) -> _Keys:
        return _Keys(key[at], value[at], texts[at])

    def of_pairs(queries: _Queries, keys: _Keys, places: tuple[Any, Any]) -> tuple[Array, Array]:
        """Returns what is kept of the attention of a tile of scores, and the scores' gradient."""
        bias = _bias(form, queries.texts, keys.texts)
        found = scores(form, queries.vectors, keys.vectors, bias)
        weights = jnp.exp(found - queries.highest[:, None]) / queries.total[:, None]
        drop = partial(_dropped, form, words=words, places=places)
        of_weights = drop(dot(queries.gradient, keys.values, 1, 1))
        of_scores = weights * (of_weights - queries.mean[:, None]) * form.size**-0.5
        return drop(weights).astype(dtype), of_scores.astype(dtype)

    own_keys, own_queries = of_keys(here), of_queries(here)
    none = jnp.zeros(own_keys.vectors.shape, jnp.float32)

    def add_queries(step: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        there = _part(step, tile)
        queries = of_queries(there)
        kept, of_scores = of_pairs(queries, own_keys, (there, here))
        first = sums[0] + dot(of_scores, queries.vectors, 0, 0)
        return first, sums[1] + dot(kept, queries.gradient, 0, 0)

    def add_keys(step: Array, found: Array) -> Array:
        there = _part(step, tile)
        keys = of_keys(there)
        _, of_scores = of_pairs(own_queries, keys, (here, there))
        return found + dot(of_scores, keys.vectors, 1, 0)

    first, second = jax.lax.fori_loop(0, tiles, add_queries, (none, none))
    of_key[...], of_value[...] = first.astype(dtype), second.astype(dtype)
    of_query[...] = jax.lax.fori_loop(0, tiles, add_keys, none).astype(dtype)


def _part(step: Array, tile: int) -> Any:
    return pl.ds(step * tile, tile)


def _bias(form: Form, of_queries: Array, of_keys: Array) -> Array:
    """Returns what is added to the scores of some queries and keys, [Q or 1, M]."""
    attends = of_keys[None] > 0
    if form.packed:
        attends &= of_queries[:, None] == of_keys[None]
    return jnp.where(attends, 0.0, LARGE_BIAS)


def _dropped(form: Form, x: Array, words: Any, places: tuple[Any, Any]) -> Array:
    first, second = (place.start.astype(jnp.uint32) for place in places)
    return apply_dropout(form, x, (words[0], words[1]), (first, second))


def _serves(length: int, size: int) -> bool:
    return length % _LEAST == 0 and size in (16, 32, 64)


def _mix(form: Form, *operands: Array) -> Sequence[Array]:
    query, words = operands[0], operands[4]
    sums = jax.ShapeDtypeStruct((*words.shape[:2], query.shape[1]), jnp.float32)
    mixed, *saved = _run(_forward, form, operands, (query, sums, sums))
    return mixed, mixed, *saved


def _gradients(form: Form, *operands: Array) -> Sequence[Array]:
    return _run(_backward, form, operands, operands[:3])


# Saved: what is mixed, and of each query its highest score and its sum of powers.
KERNELS = Kernels(_serves, _mix, _gradients, saved=(2, 1, 1))
