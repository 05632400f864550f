"""Products in the form of each platform against the plain one, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.models import matmul as products

SIZES = st.integers(1, 9)
# Of the largest value: float32 adds up in another order; bfloat16 rounds to 8 bits, once or twice.
CLOSE = {"float32": 1e-5, "bfloat16": 2**-7}


def draw(seed: int, dtype: str, *shapes: tuple[int, ...]) -> list[jax.Array]:
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


def check(form, plain, seed, dtype, *operands):
    """Compares values, and the gradients by every operand of a random sum of them."""
    expected, back = jax.vjp(plain, *(x.astype(jnp.float32) for x in operands))
    found, own_back = jax.vjp(jax.jit(form), *operands)
    (gradient,) = draw(seed + 1, dtype, expected.shape)
    all_expected = [expected, *back(gradient.astype(jnp.float32))]
    all_found = [found, *own_back(gradient.astype(found.dtype))]
    for ours, right in zip(all_found, all_expected, strict=True):
        assert ours.shape == right.shape
        scale = max(float(jnp.abs(right).max()), 1.0)
        np.testing.assert_allclose(ours.astype(jnp.float32), right, atol=CLOSE[dtype] * scale)


@pytest.mark.parametrize("dtype", CLOSE)
@settings(max_examples=15, deadline=None)
@given(shape=st.tuples(SIZES, SIZES, SIZES, SIZES), seed=st.integers(0, 99))
def test_affine(dtype, shape, seed):
    b, length, n, m = shape
    (x,) = draw(seed, dtype, (b, length, n))
    # Of values that both types have: the kernel is cast to that of x.
    kernel, bias = (y.astype(jnp.float32) for y in draw(seed + 2, dtype, (n, m), (m,)))
    check(products.affine, lambda x, k, b: x @ k + b, seed, dtype, x, kernel, bias)


@pytest.mark.parametrize("dtype", CLOSE)
@settings(max_examples=15, deadline=None)
@given(shape=st.tuples(SIZES, SIZES, SIZES, SIZES), seed=st.integers(0, 99))
def test_product_with_rows(dtype, shape, seed):
    b, length, n, m = shape
    (x,) = draw(seed, dtype, (b, length, n))
    (table,) = (y.astype(jnp.float32) for y in draw(seed + 2, dtype, (m, n)))
    check(products.product_with_rows, lambda x, t: x @ t.T, seed, dtype, x, table)


@pytest.mark.parametrize("dtype", CLOSE)
@settings(max_examples=15, deadline=None)
@given(shape=st.tuples(SIZES, SIZES, SIZES, SIZES), seed=st.integers(0, 99))
def test_attention(dtype, shape, seed):
    b, heads, length, size = shape
    query, key = draw(seed, dtype, *[(b, heads, length, size)] * 2)
    check(products.attention_scores, lambda q, k: q @ k.mT, seed, dtype, query, key)
    (attention,) = draw(seed + 2, dtype, (b, heads, length, length))
    check(products.attention_mix, lambda a, v: a @ v, seed, dtype, attention, key)


@pytest.mark.parametrize("rows", [(8, 20), (3, 7)])
def test_a_vocabulary_of_odd_size_in_bfloat16(rows):
    """A CPU's compiler, left to itself, makes a product of the table's gradient that it lacks."""
    x, table = draw(0, "bfloat16", (*rows, 768), (997, 768))
    table = table.astype(jnp.float32) / 64
    check(products.product_with_rows, lambda x, t: x @ t.T, 0, "bfloat16", x, table)


def test_gradients_of_kernel_and_bias_are_not_rounded():
    x = jnp.ones((512, 1), jnp.bfloat16)
    kernel, bias = jnp.ones((1, 1)), jnp.ones(1)
    few = jnp.concatenate([jnp.ones(511), jnp.full(1, 0.5)])[:, None].astype(jnp.bfloat16)
    _, of_kernel, of_bias = jax.vjp(products.affine, x, kernel, bias)[1](few)
    assert of_kernel[0, 0] == of_bias[0] == 511.5  # bfloat16 has 512 and 508 there
