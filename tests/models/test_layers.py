"""Dropout bits as random as they must be, and the same wherever they are computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bert_jax.config import ModelConfig
from bert_jax.models.layers import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    DropoutKey,
    LayerNorm,
    apply_dropout,
    random_bits,
    round_to_dtype,
    truncated_normal,
)
from bert_jax.models.target import Target, traced_for

SHAPE = (32, 64)


def bits(seed: int = 0, rows: int = 64, first: int = 0) -> np.ndarray:
    return np.asarray(random_bits(jax.random.key(seed), jnp.arange(first, first + rows), SHAPE))


def test_every_bit_is_fair():
    ones = (bits().ravel()[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    z = (ones.mean(0) - 0.5) * 2 * np.sqrt(len(ones))
    assert np.abs(z).max() < 4


def test_values_are_uniform():
    values = bits().ravel() / 2.0**32
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    assert stats.chisquare(np.bincount((values * 1000).astype(int), minlength=1000)).pvalue > 1e-3


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_what_is_dropped_is_independent(rate):
    """Of its neighbours in every direction, of the next rows, steps and layers."""
    dropped = bits() < np.uint32(rate * 2**32)
    next_key = bits(seed=1) < np.uint32(rate * 2**32)
    folded = [
        np.asarray(random_bits(jax.random.fold_in(jax.random.key(0), i), jnp.arange(64), SHAPE))
        < np.uint32(rate * 2**32)
        for i in range(2)
    ]
    pairs = {
        "key": (dropped, next_key),
        "step": (folded[0], folded[1]),
        "own key": (dropped, folded[0]),
        "row": (dropped[1:], dropped[:-1]),
        "second row": (dropped[2:], dropped[:-2]),
        "eighth row": (dropped[8:], dropped[:-8]),
        "line": (dropped[:, 1:], dropped[:, :-1]),
        "column": (dropped[:, :, 1:], dropped[:, :, :-1]),
        "second column": (dropped[:, :, 2:], dropped[:, :, :-2]),
        "diagonal": (dropped[:, 1:, 1:], dropped[:, :-1, :-1]),
    }
    for name, (a, b) in pairs.items():
        count = a.size
        z = np.corrcoef(a.ravel(), b.ravel())[0, 1] * np.sqrt(count)
        assert abs(z) < 4, name


def test_counts_vary_as_a_binomial_does():
    """Over rows, lines and columns: neither too even nor too clustered."""
    dropped = bits(rows=512) < np.uint32(0.1 * 2**32)
    for axes in ((1, 2), (0, 2), (0, 1), (0,), (2,)):
        counts = dropped.sum(axes).ravel()
        trials = dropped.size // counts.size
        ratio = counts.var() / (trials * 0.1 * 0.9)
        assert abs(ratio - 1) < 5 * np.sqrt(2 / counts.size), axes


@pytest.mark.parametrize("most", [8192, 32768, 40000, 65536, 131072])
def test_heads_do_not_share_bits(most):
    """Of attention in a model of many positions, whose places are more than 32 bits count."""
    bits = np.asarray(random_bits(jax.random.key(0), jnp.arange(1), (16, 8, 8), (16, most, most)))
    assert len(np.unique(bits)) == bits.size


def test_rows_far_apart_do_not_share_bits():
    """Shifted copies of a stream, which a counter without a second key word would give."""
    values = bits(rows=256).reshape(256, -1)
    assert len(np.unique(values)) > 0.999 * values.size * (1 - values.size / 2**33)
    far = bits(rows=256, first=1_000_000).reshape(256, -1)
    assert len(np.intersect1d(values, far)) < 3 * values.size**2 / 2**32


def test_bits_follow_the_row():
    part = np.asarray(random_bits(jax.random.key(0), jnp.array([9, 3]), SHAPE))
    np.testing.assert_array_equal(part, bits()[[9, 3]])


def test_dropout_keeps_the_mean_and_is_off_without_a_key():
    x = jnp.ones((64, 32, 64))
    y = np.asarray(apply_dropout(x, DropoutKey(jax.random.key(0), jnp.arange(64)), 0.1))
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.9)}
    assert y.mean() == pytest.approx(1.0, abs=4 * np.sqrt(0.1 / 0.9 / y.size))
    np.testing.assert_array_equal(apply_dropout(x, None, 0.1), x)


def test_rounding_to_a_dtype_does_not_round_the_gradient():
    x = jax.random.normal(jax.random.key(0), (1000,)) * 10.0 ** jnp.arange(-10, 10, 0.02)
    rounded, pull = jax.vjp(jax.jit(lambda x: round_to_dtype(x, "bfloat16")), x)
    np.testing.assert_array_equal(rounded, x.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(pull(x)[0], x)


def test_initializer_is_cut_at_two_deviations():
    x = np.asarray(truncated_normal(0.02)(jax.random.key(0), (400, 400)))
    assert np.abs(x).max() <= 0.04
    expected = stats.truncnorm(-2, 2, scale=0.02)
    assert stats.kstest(x.ravel(), expected.cdf).pvalue > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_norm_has_float32_statistics(dtype):
    """Of values far from zero, which bfloat16 statistics would lose."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 16)) + 20, dtype)
    module = LayerNorm(ModelConfig(dtype=dtype, layer_norm_eps=1e-3))
    params = {"scale": jnp.linspace(1, 2, 16), "bias": jnp.linspace(-1, 1, 16)}
    found = module.apply({"params": params}, x)
    wide = np.asarray(x, np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-3)
    expected = expected * params["scale"] + params["bias"]
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(found.astype(jnp.float32), expected, tolerance, tolerance)


def values_and_gradients(function, *operands):
    values, pull = jax.vjp(function, *operands)
    cotangent = jnp.cos(jnp.arange(values.size)).astype(jnp.bfloat16).astype(values.dtype)
    return jax.tree.leaves((values, pull(cotangent.reshape(values.shape))))


@pytest.mark.parametrize("use_bias", [False, True])
def test_layer_norm_of_an_accelerator_has_the_gradients_of_a_cpu(use_bias):
    """They are computed from the operands anew, of which a CPU saves what it needs."""
    draw = np.random.default_rng(0)
    x = jnp.asarray(3 * draw.normal(size=(4, 5, 32)) + 1, jnp.float32)
    params = {"scale": jnp.linspace(1, 2, 32), "bias": jnp.linspace(-1, 1, 32)}
    params = params if use_bias else {"scale": params["scale"]}
    module = LayerNorm(ModelConfig(dtype="float32"), use_bias)
    forms = []
    for platform in ("cpu", "gpu"):
        with traced_for(Target(platform)):
            forms.append(
                values_and_gradients(lambda p, x: module.apply({"params": p}, x), params, x)
            )
    for found, expected in zip(*forms, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("mean", "first"), [(1000, 0), (0, 1e5)])
def test_one_pass_has_the_gradient_of_values_far_from_zero_and_of_an_outlier(mean, first):
    draw = np.random.default_rng(0)
    x = (3 * draw.normal(size=(4, 5, 32)) + mean).astype(np.float32)
    x[..., 0] += first
    cotangent = np.cos(np.arange(x.size)).reshape(x.shape).astype(np.float32)
    module = LayerNorm(ModelConfig(dtype="float32"), use_bias=False)
    scale = jnp.linspace(1, 2, 32)
    with traced_for(Target("gpu")):
        (found,) = jax.vjp(lambda x: module.apply({"params": {"scale": scale}}, x), jnp.asarray(x))[
            1
        ](cotangent)
    wide, by_y = x.astype(np.float64), cotangent * np.asarray(scale, np.float64)
    centered, factor = wide - wide.mean(-1, keepdims=True), 1 / wide.std(-1, keepdims=True)
    normalized = centered * factor
    along = (by_y * normalized).mean(-1, keepdims=True)
    expected = factor * (by_y - by_y.mean(-1, keepdims=True) - normalized * along)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_an_accelerator_have_the_gradients_of_a_cpu(name):
    x, gate = 3 * jax.random.normal(jax.random.key(0), (2, 7, 9))
    forms = []
    for platform in ("cpu", "gpu"):
        with traced_for(Target(platform)):
            alone = values_and_gradients(ACTIVATIONS[name], x)
            forms.append(alone + values_and_gradients(GATED_ACTIVATIONS[name], x, gate))
    for found, expected in zip(*forms, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_cpu_rounds_an_activation_once(name):
    """In bfloat16, values and gradients are those of float32, to one rounding."""
    x, gate = 3 * jax.random.normal(jax.random.key(0), (2, 7, 9)).astype(jnp.bfloat16)
    with traced_for(Target("cpu")):
        forms = [
            values_and_gradients(ACTIVATIONS[name], x.astype(dtype))
            + values_and_gradients(GATED_ACTIVATIONS[name], x.astype(dtype), gate.astype(dtype))
            for dtype in (jnp.bfloat16, jnp.float32)
        ]
    for found, exact in zip(*forms, strict=True):
        found, exact = (np.asarray(each, np.float32) for each in (found, exact))
        np.testing.assert_allclose(found, exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_operands_of_an_activation_alone_are_saved(platform):
    """The compiler would save more, which takes longer than to compute it again."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    with traced_for(Target(platform)):
        text = jax.jit(jax.grad(lambda x: ACTIVATIONS["gelu"](x).sum())).lower(x).as_text()
    assert text.count("optimization_barrier") == 1


def test_bits_for_a_gpu_keep_sequences_first_in_memory():
    def has_layout(platform, *, splits_outputs=False):
        def draw(indices):
            return random_bits(jax.random.key(0), indices, (3, 4))

        with traced_for(Target(platform, splits_outputs=splits_outputs)):
            text = jax.jit(draw).lower(jax.ShapeDtypeStruct((2,), jnp.int32)).as_text()
        return "LayoutConstraint" in text

    assert [has_layout(platform) for platform in ("cpu", "gpu")] == [False, True]
    # Of heads that devices share, the bits of all would be gathered to be laid out.
    assert not has_layout("gpu", splits_outputs=True)
