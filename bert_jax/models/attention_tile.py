"""What the kernels of fused attention do with a tile of scores: some queries of a head by keys."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bert_jax.models.layers import hash_counter, keep_mask

LARGE_BIAS = -10000.0  # of a score of what is not attended to


@dataclasses.dataclass(frozen=True)
class Form:
    """What a kernel is made for.

    Attributes:
      size: of a head.
      packed: whether there may be several texts in a row.
      rate: of dropout.
      span: keys by which the places of the scores are counted.
      interpret: whether to run it where its platform is not at hand.
    """

    size: int
    packed: bool
    rate: float
    span: int
    interpret: bool


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of a platform.

    Attributes:
      serves: whether they take rows of a length, and heads of a size.
      forward: gives what is mixed [B, L, D], and what is saved for the gradients, of a form and the
        operands: query, key and value [B, L, D], texts [B, L], and the words of each head
        [B, H, 2].
      backward: gives the gradients by query, key and value, of a form, the operands, what was
        saved, and the gradient by what is mixed.
      saved: of what is saved, the axis that the heads lie along.
    """

    serves: Callable[[int, int], bool]
    forward: Callable[..., Sequence[Array]]
    backward: Callable[..., Sequence[Array]]
    saved: tuple[int, ...] = ()


def scores(form: Form, query: Array, key: Array, bias: Array) -> Array:
    """Returns the float32 scores of queries [Q, K] and keys [M, K], [Q, M].

    Args:
      form: what the kernel is made for.
      query: [Q, K].
      key: [M, K].
      bias: what is added to them, [Q or 1, M].
    """
    return dot(query, key, 1, 1) * form.size**-0.5 + bias


def apply_dropout(
    form: Form, x: Array, words: tuple[Array, Array], place: tuple[Array, Array]
) -> Array:
    """Returns what `Dropout` makes of a tile of scores, or of their gradient.

    Args:
      form: what the kernel is made for.
      x: [Q, M].
      words: of the head.
      place: of the tile's first query and of its first key in their row, uint32.
    """
    if not form.rate:
        return x
    query, key = (
        jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) + place[axis] for axis in range(2)
    )
    bits = hash_counter(query * jnp.uint32(form.span) + key, *words)
    return jnp.where(keep_mask(bits, form.rate), x / (1.0 - form.rate), 0.0)


def dot(x: Array, y: Array, of_x: int, of_y: int) -> Array:
    """Returns the float32 sum of products over a dimension of each."""
    numbers = (((of_x,), (of_y,)), ((), ()))
    return jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)
