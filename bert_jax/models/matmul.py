"""Matrix products, in the form that each platform computes fastest.

Accelerators take a product as it is, and `jax.jvp` works through it. A CPU with bfloat16
instructions (AVX-512 BF16, AMX) uses them for `x @ y` of bfloat16 operands with a float32 result
and a contiguous last axis, and for little else: any other product is converted to float32 first
(benchmarks/records/2026-11-21-peers). So a CPU's products have gradients that are written by hand,
through which `jax.jvp` raises a TypeError.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier
from jaxtyping import Array, Float

from bert_jax.models.target import target


def dense_group(
    x: Float[Array, "*any I"], kernels: Sequence[Array], biases: Sequence[Array]
) -> tuple[Array, ...]:
    """Return `x @ kernel + bias` for several kernels [I, O], in the dtype of `x`.

    Without biases, `biases` is empty. Kernels and biases are float32, and so are their gradients;
    those of kernels an accelerator computes in the dtype of `x`.
    """
    if target().platform == "cpu":
        return _dense_group_on_cpu(x, kernels, biases)
    cast = [kernel.astype(x.dtype) for kernel in kernels]
    outputs = tuple(jnp.einsum("...I,IO->...O", x, kernel) for kernel in cast)
    if not biases:
        return outputs
    return tuple(_add_bias(y, bias) for y, bias in zip(outputs, biases, strict=True))


@jax.custom_jvp
def _add_bias(y: Array, bias: Array) -> Array:
    """Return `y + bias` in the dtype of `y`, as cuBLAS adds it while it writes a product.

    The bias is rounded first, as it is where it is gathered from several devices.
    """
    return y + bias.astype(y.dtype)


@_add_bias.defjvp
def _add_bias_jvp(
    operands: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (y, bias), (by_y, by_bias) = operands, tangents
    # In float32, as the gradient of a bias then is, which is a sum over all tokens.
    return _add_bias(y, bias), (by_y + by_bias).astype(y.dtype)


def logits_from_embeddings(
    hidden: Float[Array, "*any D"], embeddings: Float[Array, "V D"]
) -> Float[Array, "*any V"]:
    """Return the float32 product with each token's embedding, computed in the dtype of `hidden`.

    The embeddings and their gradient are float32.
    """
    if target().platform == "cpu":
        return _logits_on_cpu(hidden, embeddings)
    return _float32_product("...D,VD->...V", hidden, embeddings.astype(hidden.dtype))


def attention_scores(
    query: Float[Array, "B H L K"], key: Float[Array, "B H M K"]
) -> Float[Array, "B H L M"]:
    """Return the product of queries and keys in float32, computed in their dtype."""
    if target().platform == "cpu":
        return _scores_on_cpu(query, key)
    return _float32_product("BHLK,BHMK->BHLM", query, key)


def attention_context(
    probabilities: Float[Array, "B H L M"], value: Float[Array, "B H M K"]
) -> Float[Array, "B H L K"]:
    """Return the values weighted by attention probabilities, in their dtype."""
    if target().platform == "cpu":
        return _context_on_cpu(probabilities, value)
    return jnp.einsum("BHLM,BHMK->BHLK", probabilities, value)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _float32_product(subscripts: str, x: Array, y: Array) -> Array:
    """Return an einsum in float32, whose derivative is computed in the dtype of `x` and `y`.

    JAX alone would multiply the float32 gradient, which is slower than a product in bfloat16.
    """
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


@_float32_product.defjvp
def _float32_product_jvp(
    subscripts: str, operands: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    x, y = operands
    by_x = jnp.einsum(subscripts, tangents[0], y)
    by_y = jnp.einsum(subscripts, x, tangents[1])
    return _float32_product(subscripts, x, y), (by_x + by_y).astype(jnp.float32)


# --- The form of a CPU ---------------------------------------------------------------------------


def _with_gradient(backward: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Give a function a gradient, which is computed from the operands."""

    def decorate(function: Callable[..., Any]) -> Any:
        result = jax.custom_vjp(function)
        result.defvjp(lambda *operands: (result(*operands), operands), backward)
        return result

    return decorate


def _dense_group_backward(saved: Any, gradients: tuple[Array, ...]) -> tuple[Array, Any, Any]:
    x, kernels, biases = saved
    # Without the barrier the compiler would cast kernels again inside of a loop that stacks them.
    cast = optimization_barrier(tuple(kernel.astype(x.dtype) for kernel in kernels))
    if target().splits_outputs:
        stacked = jnp.stack(gradients, axis=-2), jnp.stack(cast, axis=1)
        x_gradient = _einsum("...GO,IGO->...I", *stacked)
    else:  # without the transposed copies of what is stacked
        products = [
            jnp.einsum("...O,IO->...I", gradient, kernel, preferred_element_type=jnp.float32)
            for gradient, kernel in zip(gradients, cast, strict=True)
        ]
        x_gradient = optimization_barrier(sum(products)).astype(x.dtype)
    kernel_gradients = [_weight_gradient(x, gradient) for gradient in gradients]
    flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
    bias_gradients = [g.astype(jnp.float32).sum(0) for g, _ in zip(flat, biases, strict=False)]
    return x_gradient, kernel_gradients, bias_gradients


@_with_gradient(_dense_group_backward)
def _dense_group_on_cpu(
    x: Float[Array, "*any I"], kernels: Sequence[Array], biases: Sequence[Array]
) -> tuple[Array, ...]:
    """Return what `dense_group` does.

    JAX alone would round the gradients of kernels and biases to the dtype of `x` before they are
    summed over devices. The gradient by `x` is one product for all kernels, which is faster, and
    which tensor parallelism sums once.
    """
    outputs = tuple(_einsum("...I,IO->...O", x, kernel.astype(x.dtype)) for kernel in kernels)
    if not biases:
        return outputs
    return tuple(y + bias.astype(x.dtype) for y, bias in zip(outputs, biases, strict=True))


def _logits_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    hidden, embeddings = saved
    gradient = gradient.astype(hidden.dtype)
    hidden_gradient = _einsum("...V,VD->...D", gradient, embeddings.astype(hidden.dtype))
    return hidden_gradient, _weight_gradient(gradient, hidden)


@_with_gradient(_logits_backward)
def _logits_on_cpu(hidden: Array, embeddings: Array) -> Array:
    """Return what `logits_from_embeddings` does."""
    return _einsum("...D,VD->...V", hidden, embeddings.astype(hidden.dtype), jnp.float32)


def _scores_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    query, key = saved
    gradient = gradient.astype(query.dtype)
    by_query = _product_of_heads(gradient, key, (3, 2)).astype(query.dtype)
    return by_query, _transposed_matmul(gradient, query)


@_with_gradient(_scores_backward)
def _scores_on_cpu(query: Array, key: Array) -> Array:
    """Return what `attention_scores` does."""
    return _product_of_heads(query, key, (3, 3))


def _context_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    probabilities, value = saved
    by_probabilities = _product_of_heads(gradient, value, (3, 3)).astype(value.dtype)
    return by_probabilities, _transposed_matmul(probabilities, gradient)


@_with_gradient(_context_backward)
def _context_on_cpu(probabilities: Array, value: Array) -> Array:
    """Return what `attention_context` does."""
    return _product_of_heads(probabilities, value, (3, 2)).astype(value.dtype)


def _einsum(subscripts: str, x: Array, y: Array, dtype: Any = None) -> Array:
    """Return an einsum in `dtype`, by default that of `x`."""
    # The barrier keeps the float32 result, without which the instructions are not used.
    product = jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)
    return optimization_barrier(product).astype(dtype or x.dtype)


def _weight_gradient(x: Float[Array, "*any I"], y: Float[Array, "*any O"]) -> Float[Array, "I O"]:
    """Return the sum over tokens of the outer products of `x` and `y`, in float32."""
    inputs, outputs = x.shape[-1], y.shape[-1]
    tokens = x.size // inputs
    if x.dtype != jnp.bfloat16:
        x, y = x.reshape(tokens, inputs), y.reshape(tokens, outputs)
        return jnp.einsum("tI,tO->IO", x, y, preferred_element_type=jnp.float32)
    # The narrower operand comes first, unless it takes longer to transpose the float32 result.
    if tokens * (inputs - outputs) > 2 * inputs * outputs:
        return _weight_gradient(y, x).T
    # A copy of the first operand is transposed, slowly if its axes were joined before.
    if sum(size > 1 for size in x.shape[:-1]) < 2:
        x, y = (_split_axis(each.reshape(tokens, -1), 0) for each in (x, y))
    axes = tuple(range(x.ndim - 1))
    product = jnp.tensordot(x, y, (axes, axes), preferred_element_type=jnp.float32)
    return optimization_barrier(product)


def _product_of_heads(
    x: Float[Array, "B H *x"], y: Float[Array, "B H *y"], axes: tuple[int, int]
) -> Float[Array, "B H *xy"]:
    """Return the float32 product of each head, summed over an axis of `x` and one of `y`."""
    summed: Any = [(axis,) for axis in axes]
    if x.dtype == jnp.bfloat16:
        x, y = _split_axis(x, axes[0]), _split_axis(y, axes[1])
        summed = [(axis, axis + 1) for axis in axes]
    dimensions = summed, ((0, 1), (0, 1))  # the latter are those of the heads
    product = jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)
    return optimization_barrier(product)


def _transposed_matmul(
    x: Float[Array, "B H L M"], y: Float[Array, "B H L K"]
) -> Float[Array, "B H M K"]:
    """Return `x.T @ y` of each head, in their dtype."""
    if x.dtype != jnp.bfloat16:
        return jnp.einsum("BHLM,BHLK->BHMK", x, y)
    # The narrower operand comes first.
    return _product_of_heads(y, x, (2, 2)).swapaxes(2, 3).astype(y.dtype)


def _split_axis(x: Array, axis: int) -> Array:
    """Return `x` with an axis split in two, for a contraction over both.

    For a contraction over two axes the compiler copies the operand so that they are contiguous,
    as bfloat16 instructions need them. For one over a single axis it joins a transpose to the
    product, which it then computes in float32 (benchmarks/records/2026-11-29-cpu).
    """
    size = x.shape[axis]
    inner = 1 + (size % 2 == 0)
    return x.reshape(*x.shape[:axis], size // inner, inner, *x.shape[axis + 1 :])
