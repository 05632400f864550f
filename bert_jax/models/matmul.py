"""Matrix products, each asked for in the form in which the platform is fast.

Accelerators take them as they come. A CPU with bfloat16 instructions (AVX-512 BF16, AMX) uses them
for `x @ y` of bfloat16 with a float32 result and rows that lie one after the other, and for little
else; a product in another form is converted to float32 first.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

T = TypeVar("T")


def affine(x: Float[Array, "*any N"], kernel: Array, bias: Array) -> Float[Array, "*any M"]:
    """Returns `x @ kernel + bias` over the last dimension, in the type of `x`.

    The gradients of kernel and bias are float32. By itself, JAX would round them to the type that
    these are cast to, before they are added up over devices and over other uses.

    Args:
      x: float32 or bfloat16, [..., N].
      kernel: float32, [N, M].
      bias: float32, [M].
    """
    found: Any = affines(x, [kernel], [bias])
    return found[0]


@jax.custom_vjp
def affines(
    x: Float[Array, "*any N"], kernels: Sequence[Array], biases: Sequence[Array]
) -> tuple[Array, ...]:
    """Returns what `affine` does for several kernels of one shape, [N, M].

    The gradient by `x` is one product for all of them: devices that have parts of the kernels add
    it up once.
    """

    def at_once(x: Array, *kernels: Array) -> tuple[Array, ...]:
        found = _dot(x, jnp.stack(kernels, axis=1), (-1,), (0,))
        return tuple(found[..., number, :] for number in range(len(kernels)))

    def one_by_one(x: Array, *kernels: Array) -> tuple[Array, ...]:
        return tuple(_dot(x, kernel, (-1,), (0,)) for kernel in kernels)

    narrow = (kernel.astype(x.dtype) for kernel in kernels)
    found = _on_cpu(one_by_one, at_once, x, *narrow)
    return tuple(each + bias.astype(x.dtype) for each, bias in zip(found, biases, strict=True))


def _affines_forward(x: Array, kernels: Any, biases: Any) -> tuple[Any, Any]:
    return affines(x, kernels, biases), (x, kernels)


def _affines_backward(saved: Any, gradients: tuple[Array, ...]) -> tuple[Array, Any, Any]:
    x, kernels = saved
    # Cast before, since a CPU's compiler would do it within the loop that puts them side by side.
    narrow = _keep(tuple(kernel.astype(x.dtype) for kernel in kernels))
    side_by_side = jnp.stack(gradients, axis=-2), jnp.stack(narrow, axis=1)
    of_x = _dot(*side_by_side, (-2, -1), (1, 2))
    of_kernels = [_sum_of_outer(x, gradient, x.ndim - 1) for gradient in gradients]
    return of_x, of_kernels, [_sum_of_rows(gradient, x.ndim - 1) for gradient in gradients]


affines.defvjp(_affines_forward, _affines_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def product_with_rows(x: Float[Array, "*any N"], table: Array, dtype: Any = None) -> Array:
    """Returns the products of `x` with each row of a table, computed in the type of `x`.

    The gradient by the table is float32.

    Args:
      x: float32 or bfloat16, [..., N].
      table: float32, [M, N].
      dtype: of the result, [..., M]; that of `x` where there is none.
    """
    return _dot(x, table.astype(x.dtype), (-1,), (1,), dtype)


def _rows_forward(x: Array, table: Array, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    return product_with_rows(x, table, dtype), (x, table)


def _rows_backward(_: Any, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, table = saved
    gradient = gradient.astype(x.dtype)
    of_x = _dot(gradient, table.astype(x.dtype), (-1,), (0,))
    return of_x, _sum_of_outer(gradient, x, x.ndim - 1)


product_with_rows.defvjp(_rows_forward, _rows_backward)


@jax.custom_vjp
def attention_scores(
    query: Float[Array, "B H L K"], key: Float[Array, "B H M K"]
) -> Float[Array, "B H L M"]:
    """Returns the products of queries and keys, float32, computed in their type."""
    return _dot(query, key, (3,), (3,), jnp.float32, batch=2)


def _scores_forward(query: Array, key: Array) -> tuple[Array, tuple[Array, Array]]:
    return attention_scores(query, key), (query, key)


def _scores_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    query, key = saved
    gradient = gradient.astype(query.dtype)
    return _dot(gradient, key, (3,), (2,), batch=2), _turned(gradient, query)


attention_scores.defvjp(_scores_forward, _scores_backward)


@jax.custom_vjp
def attention_mix(
    attention: Float[Array, "B H L M"], value: Float[Array, "B H M K"]
) -> Float[Array, "B H L K"]:
    """Returns the values that each place attends to, in their type, and computed in it."""
    return _dot(attention, value, (3,), (2,), batch=2)


def _mix_forward(attention: Array, value: Array) -> tuple[Array, tuple[Array, Array]]:
    return attention_mix(attention, value), (attention, value)


def _mix_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    attention, value = saved
    return _dot(gradient, value, (3,), (3,), batch=2), _turned(attention, gradient)


attention_mix.defvjp(_mix_forward, _mix_backward)


def _dot(
    x: Array,
    y: Array,
    of_x: tuple[int, ...],
    of_y: tuple[int, ...],
    dtype: Any = None,
    *,
    batch: int = 0,
) -> Array:
    """Returns the sum of products over the last dimensions of `x` and some of `y`.

    Args:
      x: [*batch, ..., *summed].
      y: of the same type, [*batch, ...] with the summed among them.
      of_x: the dimensions of `x` that are summed over.
      of_y: those of `y`.
      dtype: of the result; that of `x` where there is none.
      batch: how many leading dimensions the two have in common.
    """
    dtype = dtype or x.dtype
    shared = tuple(range(batch))
    numbers = ((tuple(n % x.ndim for n in of_x), of_y), (shared, shared))
    dot = partial(jax.lax.dot_general, dimension_numbers=numbers)
    return _on_cpu(
        lambda x, y: _keep(dot(x, y, preferred_element_type=jnp.float32)).astype(dtype),
        lambda x, y: dot(x, y, preferred_element_type=dtype),
        x,
        y,
    )


def _sum_of_outer(x: Array, y: Array, rows: int) -> Array:
    """Returns the sum of outer products over the leading `rows` dimensions, float32."""
    x, y = (each.reshape(-1, *each.shape[rows:]) for each in (x, y))

    def summed(x: Array, y: Array, rows: int) -> Array:
        over = list(range(rows))
        return jnp.tensordot(x, y, [over, over], preferred_element_type=jnp.float32)

    def split(x: Array, y: Array) -> Array:
        return _keep(summed(_split(x, 0), _split(y, 0), 2))

    plain = partial(summed, rows=1)
    return _on_cpu(split if x.dtype == jnp.bfloat16 else plain, plain, x, y)


def _sum_of_rows(x: Array, rows: int) -> Array:
    """Returns the sum over the leading `rows` dimensions, float32."""
    return x.reshape(-1, *x.shape[rows:]).astype(jnp.float32).sum(0)


def _turned(x: Float[Array, "B H L M"], y: Float[Array, "B H L K"]) -> Float[Array, "B H M K"]:
    """Returns `x.T @ y` of each head, in their type; of which `y` is the narrower."""

    def narrow_first(x: Array, y: Array) -> Array:
        x, y = _split(x, 2), _split(y, 2)
        found = jnp.einsum("BHLSK,BHLSM->BHKM", y, x, preferred_element_type=jnp.float32)
        return _keep(found).swapaxes(2, 3).astype(y.dtype)

    def plain(x: Array, y: Array) -> Array:
        return jnp.einsum("BHLM,BHLK->BHMK", x, y)

    return _on_cpu(narrow_first if x.dtype == jnp.bfloat16 else plain, plain, x, y)


def _on_cpu(form: Callable[..., T], other: Callable[..., T], *operands: Array) -> T:
    """Returns what `form` gives on a CPU and what `other` gives elsewhere, which is the same."""
    return jax.lax.platform_dependent(*operands, cpu=form, default=other)


def _split(x: Array, axis: int) -> Array:
    """Returns `x` with an axis split in two, for a sum over it.

    Of a sum over two dimensions a CPU's compiler makes a copy that is summed over its last one, as
    bfloat16 instructions want it; of one over one it does not.
    """
    size = x.shape[axis]
    inner = 1 + (size % 2 == 0)
    return x.reshape(*x.shape[:axis], size // inner, inner, *x.shape[axis + 1 :])


def _keep(x: T) -> T:
    """Returns `x`, which the compiler is not to compute together with what uses it."""
    return jax.lax.optimization_barrier(x)
