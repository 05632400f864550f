"""The kernels of fused attention on a TPU, in Pallas.

One step of theirs takes some heads of a row, some of its queries, and all of its keys, which lie in
the core's own memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from bert_jax.models.attention_tile import LARGE_BIAS, Form, Kernels, apply_dropout, dot, scores

_LANES = 128  # of a TPU's vector unit, which the last dimension of a block fills
_SCORES = 512 * 512  # elements, float32, at a time: some arrays of that size fit beside each other
_LONGEST = 2048  # so many keys and values, their gradients and a tile of scores fit beside


def _run(
    kernel: Callable[..., None],
    form: Form,
    query: Array,
    key: Array,
    value: Array,
    texts: Array,
    words: Array,
    *gradient: Array,
) -> Any:
    """Runs a kernel over (rows, groups of heads, tiles of queries).

    All tiles of a group find its keys and values in place, and one after the other add to their
    gradients.
    """
    batch, length, size = query.shape
    tile, heads = _tile(length), size // form.size
    together = _together(heads, form.size, tile * length)
    wide = together * form.size
    of_queries = pl.BlockSpec((1, tile, wide), lambda row, group, step: (row, step, group))
    of_keys = pl.BlockSpec((1, length, wide), lambda row, group, step: (row, 0, group))
    of_texts = pl.BlockSpec((1, 1, length), lambda row, group, step: (row, 0, 0))
    of_words = pl.BlockSpec(
        (1, 1, together, 2), lambda row, group, step: (row, group, 0, 0), memory_space=pltpu.SMEM
    )
    like = jax.ShapeDtypeStruct(query.shape, query.dtype)
    sum_of_keys = pltpu.VMEM((length, wide), jnp.float32)
    products = 5 if gradient else 2
    return pl.pallas_call(
        partial(kernel, form),
        grid=(batch, heads // together, length // tile),
        in_specs=[of_words, of_texts, of_queries, of_keys, of_keys, *[of_queries] * len(gradient)],
        out_specs=(of_queries, of_keys, of_keys) if gradient else (of_queries,),
        out_shape=(like,) * 3 if gradient else (like,),
        scratch_shapes=(sum_of_keys,) * 2 if gradient else (),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * batch * length * length * size,
            transcendentals=batch * heads * length * length,
            bytes_accessed=(7 if gradient else 4) * query.nbytes,
        ),
        interpret=form.interpret,
    )(
        words.reshape(batch, heads // together, together, 2),
        texts[:, None],
        query,
        key,
        value,
        *gradient,
    )


def _tile(length: int) -> int:
    """Returns how many queries a kernel takes at a time: all, or the most 128s that will do."""
    if length**2 <= _SCORES:
        return length
    most = max(1, _SCORES // length // _LANES)
    return _LANES * next(n for n in range(most, 0, -1) if length % (n * _LANES) == 0)


def _together(heads: int, size: int, scores: int) -> int:
    """Returns how many heads a kernel takes at a time: whole lanes' worth, and not too much."""
    fitting = [
        n for n in range(1, heads + 1) if heads % n == 0 and (n * size % _LANES == 0 or n == heads)
    ]
    return max((n for n in fitting if n * scores <= _SCORES), default=fitting[0])


def _forward(
    form: Form, words: Any, texts: Any, query: Any, key: Any, value: Any, mixed: Any
) -> None:
    bias = _bias(form, texts, query.shape[1])
    for head in range(words.shape[2]):
        at = (0, slice(None), slice(head * form.size, (head + 1) * form.size))
        drop = partial(_dropped, form, words=(words[0, 0, head, 0], words[0, 0, head, 1]))
        weights = drop(_softmax(form, query[at], key[at], bias)).astype(value.dtype)
        mixed[at] = dot(weights, value[at], 1, 0).astype(mixed.dtype)


def _backward(
    form: Form,
    words: Any,
    texts: Any,
    query: Any,
    key: Any,
    value: Any,
    gradient: Any,
    of_query: Any,
    of_key: Any,
    of_value: Any,
    sum_of_key: Any,
    sum_of_value: Any,
) -> None:
    step, dtype = pl.program_id(2), query.dtype
    bias = _bias(form, texts, query.shape[1])

    @pl.when(step == 0)
    def _() -> None:
        sum_of_key[...] = jnp.zeros_like(sum_of_key)
        sum_of_value[...] = jnp.zeros_like(sum_of_value)

    for head in range(words.shape[2]):
        at = (0, slice(None), slice(head * form.size, (head + 1) * form.size))
        drop = partial(_dropped, form, words=(words[0, 0, head, 0], words[0, 0, head, 1]))
        weights = _softmax(form, query[at], key[at], bias)
        sum_of_value[at[1:]] += dot(drop(weights).astype(dtype), gradient[at], 0, 0)
        of_weights = drop(dot(gradient[at], value[at], 1, 1))
        mean = (of_weights * weights).sum(axis=1, keepdims=True)
        of_scores = (weights * (of_weights - mean) * form.size**-0.5).astype(dtype)
        of_query[at] = dot(of_scores, key[at], 1, 0).astype(dtype)
        sum_of_key[at[1:]] += dot(of_scores, query[at], 0, 0)

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        of_key[0] = sum_of_key[...].astype(dtype)
        of_value[0] = sum_of_value[...].astype(dtype)


def _bias(form: Form, texts: Any, tile: int) -> Array:
    """Returns what is added to the scores of a tile of queries, [tile or 1, L]."""
    of_keys = texts[0]
    attends = of_keys > 0
    if form.packed:
        is_all = tile == of_keys.shape[1]
        of_tile = of_keys if is_all else texts[0, :, pl.ds(pl.program_id(2) * tile, tile)]
        # Turned to lie along the rows, which takes whole tiles.
        of_queries = jnp.broadcast_to(of_tile, (_LANES, tile)).T[:, :1]
        attends &= of_queries == of_keys
    return jnp.where(attends, 0.0, LARGE_BIAS)


def _softmax(form: Form, query: Array, key: Array, bias: Array) -> Array:
    found = scores(form, query, key, bias)
    powers = jnp.exp(found - found.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _dropped(form: Form, x: Array, words: tuple[Array, Array]) -> Array:
    before = (pl.program_id(2) * x.shape[0]).astype(jnp.uint32)
    return apply_dropout(form, x, words, (before, jnp.uint32(0)))


def _serves(length: int, size: int) -> bool:
    """Up to 512, or in tiles of 128; heads of any size."""
    del size
    return length**2 <= _SCORES or (length <= _LONGEST and length % _LANES == 0)


# Nothing is saved but the operands: the rest is computed anew.
KERNELS = Kernels(_serves, partial(_run, _forward), partial(_run, _backward))
