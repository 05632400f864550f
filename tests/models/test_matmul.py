"""Matrix products in the form of each platform beside plain ones: values and gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.models import matmul
from bert_jax.models.target import Target, traced_for

SHAPES = [(1, 1, 1, 1), (3, 7, 5, 9)]
# Of the largest value: float32 sums in another order; bfloat16 rounds to 8 bits, once or twice.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2**-7}

cases = pytest.mark.parametrize(
    ("dtype", "shape"), [(dtype, shape) for dtype in TOLERANCES for shape in SHAPES]
)


@pytest.fixture(params=["cpu", "gpu"])
def platform(request):
    with traced_for(Target(request.param)):
        yield request.param


def draw(seed: int, dtype: str, *shapes: tuple[int, ...]) -> list[jax.Array]:
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


def check(function, plain, dtype, *operands):
    """Compares values, and the gradients by every operand of a random sum of them."""
    shape = jax.eval_shape(plain, *operands).shape
    (cotangent,) = draw(9, dtype, shape)

    @jax.jit
    def run(operands, cotangent):
        found, pull = jax.vjp(function, *operands)
        found_gradients = pull(cotangent.astype(found.dtype))
        wide = [x.astype(jnp.float32) for x in operands]
        expected, pull = jax.vjp(plain, *wide)
        return (found, *found_gradients), (expected, *pull(cotangent.astype(jnp.float32)))

    for actual, expected in zip(*run(operands, cotangent), strict=True):
        assert actual.shape == expected.shape
        atol = TOLERANCES[dtype] * max(float(np.abs(expected).max()), 1.0)
        np.testing.assert_allclose(np.asarray(actual, np.float32), expected, atol=atol)


@cases
@pytest.mark.parametrize("number", [1, 3])
def test_dense_group(platform, dtype, shape, number):
    batch, length, inputs, outputs = shape
    (x,) = draw(0, dtype, (batch, length, inputs))
    # Of values that both dtypes have: the kernels are cast to that of x.
    parameters = draw(1, dtype, *[(inputs, outputs), (outputs,)] * number)
    parameters = [y.astype(jnp.float32) for y in parameters]

    def group(x, *parameters):
        return jnp.stack(matmul.dense_group(x, list(parameters[::2]), list(parameters[1::2])))

    def plain(x, *parameters):
        pairs = zip(parameters[::2], parameters[1::2], strict=True)
        return jnp.stack([x @ kernel + bias for kernel, bias in pairs])

    check(group, plain, dtype, x, *parameters)


@cases
def test_logits_from_embeddings(platform, dtype, shape):
    batch, length, size, vocab = shape
    (hidden,) = draw(0, dtype, (batch, length, size))
    (embeddings,) = (y.astype(jnp.float32) for y in draw(1, dtype, (vocab, size)))
    check(matmul.logits_from_embeddings, lambda x, e: x @ e.T, dtype, hidden, embeddings)
    assert matmul.logits_from_embeddings(hidden, embeddings).dtype == jnp.float32


@cases
def test_attention(platform, dtype, shape):
    batch, heads, length, size = shape
    query, key = draw(0, dtype, *[(batch, heads, length, size)] * 2)
    check(matmul.attention_scores, lambda q, k: q @ k.mT, dtype, query, key)
    (probabilities,) = draw(1, dtype, (batch, heads, length, length))
    check(matmul.attention_context, lambda p, v: p @ v, dtype, probabilities, key)


def dtypes_of_products(function, *operands) -> list[str]:
    """The dtypes of the first operand of each product that the compiler makes of a function."""
    dtypes, found = {}, []
    for line in jax.jit(function).lower(*operands).compile().as_text().splitlines():
        if match := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (\w+)\[.*? ([a-z-]+)\(%?([\w.-]*)", line):
            name, dtype, opcode, operand = match.groups()
            dtypes[name] = dtype
            if opcode == "dot":
                found.append(dtypes[operand])
    return found


def dtype_of_a_plain_product() -> str:
    def plain(x, y):
        return jnp.matmul(x, y, preferred_element_type=jnp.float32)

    (dtype,) = dtypes_of_products(plain, *draw(0, "bfloat16", (32, 64), (64, 32)))
    return dtype


def test_products_of_attention_use_the_instructions_that_a_plain_one_does():
    """Transposes of heads beside a product would otherwise make a CPU convert it to float32."""
    query, key, value, cotangent = draw(0, "bfloat16", *[(2, 32, 64)] * 4)

    def heads(x):
        return x.reshape(2, 32, 4, 16).swapaxes(1, 2)

    def attention(query, key, value):
        scores = matmul.attention_scores(heads(query), heads(key))
        probabilities = jax.nn.softmax(scores).astype(value.dtype)
        return matmul.attention_context(probabilities, heads(value)).swapaxes(1, 2)

    def with_gradients(cotangent, *operands):
        context, pull = jax.vjp(attention, *operands)
        return context, pull(cotangent.reshape(context.shape))

    products = dtypes_of_products(with_gradients, cotangent, query, key, value)
    assert products == [dtype_of_a_plain_product()] * 6


@pytest.mark.parametrize("shape", [(2, 16), (1, 32), (32, 1), (32,)])
def test_gradients_of_a_dense_layer_use_them_too(shape):
    x, cotangent = draw(0, "bfloat16", (*shape, 64), (*shape, 16))
    kernel, bias = draw(1, "float32", (64, 16), (16,))

    def gradients(cotangent, *operands):
        return jax.vjp(matmul.dense_group, *operands)[1]((cotangent,))

    products = dtypes_of_products(gradients, cotangent, x, [kernel], [bias])
    assert products == [dtype_of_a_plain_product()] * 2


@pytest.mark.parametrize("tokens", [(8, 20), (3, 7)])
def test_a_vocabulary_of_odd_size_in_bfloat16(tokens):
    """Left to itself, a CPU's compiler asks for a product of the embeddings that it lacks."""
    hidden, embeddings = draw(0, "bfloat16", (*tokens, 768), (997, 768))
    embeddings = embeddings.astype(jnp.float32) / 64
    check(matmul.logits_from_embeddings, lambda x, e: x @ e.T, "bfloat16", hidden, embeddings)


def test_gradients_of_kernel_and_bias_are_not_rounded():
    x = jnp.ones((512, 1), jnp.bfloat16)
    cotangent = jnp.concatenate([jnp.ones(511), jnp.full(1, 0.5)])[:, None].astype(jnp.bfloat16)

    @jax.jit
    def gradients(*operands):
        return jax.vjp(matmul.dense_group, *operands)[1]((cotangent,))

    _, (of_kernel,), (of_bias,) = gradients(x, [jnp.ones((1, 1))], [jnp.ones(1)])
    assert of_kernel[0, 0] == of_bias[0] == 511.5  # bfloat16 has 512 and 508 there


@pytest.mark.parametrize("name", ["cpu", "gpu", "tpu"])
def test_a_bias_that_was_rounded_gives_the_same(name):
    """As it is where it is gathered from several devices, and not on one."""
    x, kernel, bias = draw(0, "float32", (64, 8), (8, 8), (8,))
    rounded = bias.astype(jnp.bfloat16).astype(jnp.float32)
    assert (rounded != bias).any()
    with traced_for(Target(name)):
        one, other = (
            matmul.dense_group(x.astype(jnp.bfloat16), [kernel], [each])[0]
            for each in (bias, rounded)
        )
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["gpu", "tpu"])
def test_the_gradient_of_a_bias_is_not_rounded_on_accelerators(name):
    """There the bias is added in bfloat16, as cuBLAS does."""
    cotangent = jnp.concatenate([jnp.ones(511), jnp.full(1, 0.5)])[:, None].astype(jnp.bfloat16)

    def group(bias):
        return matmul.dense_group(jnp.ones((512, 1), jnp.bfloat16), [jnp.ones((1, 1))], [bias])

    with traced_for(Target(name)):
        ((of_bias,),) = (jax.vjp(group, jnp.ones(1))[1]((cotangent,)),)
    assert of_bias.dtype == jnp.float32
    assert of_bias[0] == 511.5


def along_its_operands(function, *operands):
    return jax.jvp(function, operands, operands)[1]


def test_forward_mode_works_where_a_product_is_an_einsum():
    x, query, key, kernel, bias = draw(0, "float32", (2, 3), *[(1, 2, 5, 3)] * 2, (3, 4), (4,))

    def group(x, kernel, bias):
        return matmul.dense_group(x, [kernel], [bias])[0]

    with traced_for(Target("gpu")):
        found = along_its_operands(group, x, kernel, bias)
        np.testing.assert_allclose(found, 2 * x @ kernel + bias, rtol=1e-5)
        scores = along_its_operands(matmul.attention_scores, query, key)
        np.testing.assert_allclose(scores, 2 * query @ key.mT, rtol=1e-5)
