"""Attention in one kernel, whose memory grows with the length of a row and not with its square.

It computes what `attention.plain_attention` does, dropout included, whose bits are a hash of their
place: it needs none of the scores that the plain form keeps for the gradient. Here are the kernels
of a TPU, in Pallas. One step of theirs takes some heads of a row, some of its queries, and all of
its keys, which lie in the core's own memory.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from bert_jax.models.layers import DropoutKey, hashed, is_kept, row_words

_LANES = 128  # of a TPU's vector unit, which the last dimension of a block fills
_SCORES = 512 * 512  # elements, float32, at a time: some arrays of that size fit beside each other
_LONGEST = 2048  # so many keys and values, their gradients and a tile of scores fit beside
LARGE_BIAS = -10000.0  # of a score of what is not attended to

_INTERPRETED = contextvars.ContextVar("interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within it, a CPU stands in for a TPU: the kernels are run by Pallas's interpreter."""
    token = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(token)


def platform() -> str:
    """Returns what the program is traced for: the devices of the mesh at hand, or JAX's own."""
    if _INTERPRETED.get():
        return "tpu"
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def serves(length: int) -> bool:
    """Returns whether the kernels take rows of this length: up to 512, or in tiles of 128."""
    return length**2 <= _SCORES or (length <= _LONGEST and length % _LANES == 0)


@dataclasses.dataclass(frozen=True)
class Form:
    """What a kernel is made for.

    Attributes:
      size: of a head.
      packed: whether there may be several texts in a row.
      rate: of dropout.
      span: keys by which the places of the scores are counted.
      interpret: whether to run it without a TPU.
    """

    size: int
    packed: bool
    rate: float
    span: int
    interpret: bool


def fused_attention(
    projected: Sequence[Array],
    texts: Int[Array, "B L"],
    dropout_key: DropoutKey | None,
    *,
    packed: bool,
    rate: float,
    bounds: tuple[int, int, int],
) -> Float[Array, "B L D"]:
    """Returns the values that each place attends to, the heads side by side.

    Args:
      projected: queries, keys and values, each [B, L, D], float32 or bfloat16; the products are
        computed in that type, the softmax in float32.
      texts: as in `AttentionMask`.
      dropout_key: as in `Dropout`.
      packed: as in `AttentionMask`.
      rate: of dropout.
      bounds: as in `Dropout`: heads, queries and keys.
    """
    (batch, _, size), heads = projected[0].shape, bounds[0]
    words = jnp.zeros((batch, heads, 2), jnp.uint32)
    if dropout_key is None:
        rate = 0.0
    elif rate > 0:
        first, second = row_words(dropout_key.key, dropout_key.rows)
        # The bits of a head are those of a row whose first word is as much further on.
        before = jnp.arange(heads, dtype=jnp.uint32) * jnp.uint32(bounds[1] * bounds[2])
        words = jnp.stack(jnp.broadcast_arrays(first[:, None] + before, second[:, None]), axis=-1)
    form = Form(size // heads, packed, rate, bounds[2], _INTERPRETED.get())
    return _attend(form, *projected, texts, words)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: Form, *operands: Array) -> Array:
    """Takes query, key and value [B, L, D], texts [B, L], and the words of each head [B, H, 2]."""
    (mixed,) = _of_each_part(partial(_run, _forward, form), 1)(*operands)
    return mixed


def _attend_forward(form: Form, *operands: Array) -> tuple[Array, tuple[Array, ...]]:
    return _attend(form, *operands), operands


def _attend_backward(form: Form, operands: tuple[Array, ...], gradient: Array) -> Any:
    found = _of_each_part(partial(_run, _backward, form), 3)(*operands, gradient)
    return *found, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _of_each_part(kernel: Callable[..., Any], results: int) -> Callable[..., Any]:
    """Returns a kernel that each device runs for its own heads, where they are split over some.

    The compiler cannot split a kernel, nor takes one where it might have to.
    """
    axes = jax.sharding.get_abstract_mesh().auto_axes
    if not axes:
        return kernel
    heads = P(None, None, axes)

    def run(*operands: Array) -> Any:
        specs = (heads, heads, heads, P(), P(None, axes), heads)[: len(operands)]
        return jax.shard_map(
            kernel,
            in_specs=specs,
            out_specs=(heads,) * results,
            axis_names=set(axes),
            check_vma=False,
        )(*operands)

    return run


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
        weights = _softmax(form, query[at], key[at], bias)
        weights = _dropped(form, weights, words[0, 0, head, 0], words[0, 0, head, 1])
        mixed[at] = _dot(weights.astype(value.dtype), value[at], 1, 0).astype(mixed.dtype)


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
        drop = partial(_dropped, form, first=words[0, 0, head, 0], second=words[0, 0, head, 1])
        weights = _softmax(form, query[at], key[at], bias)
        sum_of_value[at[1:]] += _dot(drop(weights).astype(dtype), gradient[at], 0, 0)
        of_weights = drop(_dot(gradient[at], value[at], 1, 1))
        mean = (of_weights * weights).sum(axis=1, keepdims=True)
        of_scores = (weights * (of_weights - mean) * form.size**-0.5).astype(dtype)
        of_query[at] = _dot(of_scores, key[at], 1, 0).astype(dtype)
        sum_of_key[at[1:]] += _dot(of_scores, query[at], 0, 0)

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
    scores = _dot(query, key, 1, 1) * form.size**-0.5 + bias
    powers = jnp.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _dropped(form: Form, x: Array, first: Array, second: Array) -> Array:
    """Returns what `Dropout` makes of the scores of a tile of queries, or of their gradient."""
    if not form.rate:
        return x
    before = (pl.program_id(2) * x.shape[0]).astype(jnp.uint32)
    query, key = (jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) for axis in range(2))
    bits = hashed((query + before) * jnp.uint32(form.span) + key, first, second)
    return jnp.where(is_kept(bits, form.rate), x / (1.0 - form.rate), 0.0)


def _dot(x: Array, y: Array, of_x: int, of_y: int) -> Array:
    """Returns the float32 sum of products over a dimension of each."""
    numbers = (((of_x,), (of_y,)), ((), ()))
    return jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)
