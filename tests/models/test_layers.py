"""Dropout bits as random as they must be, and the same wherever they are computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bert_jax.config import ModelConfig
from bert_jax.models.layers import Dropout, DropoutKey, LayerNorm, random_bits, truncated_normal

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


def test_rows_far_apart_do_not_share_bits():
    """Shifted copies of a stream, which a counter without a second key word would give."""
    values = bits(rows=256).reshape(256, -1)
    assert len(np.unique(values)) > 0.999 * values.size * (1 - values.size / 2**33)
    far = bits(rows=256, first=1_000_000).reshape(256, -1)
    assert len(np.intersect1d(values, far)) < 3 * values.size**2 / 2**32


def test_bits_follow_the_row():
    part = np.asarray(random_bits(jax.random.key(0), jnp.array([9, 3]), SHAPE))
    np.testing.assert_array_equal(part, bits()[[9, 3]])


def test_dropout_keeps_the_mean_and_is_off_without_rows():
    x = jnp.ones((64, 32, 64))
    layer = Dropout(0.1)
    y = np.asarray(layer.apply({}, x, DropoutKey(jax.random.key(0), jnp.arange(64))))
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.9)}
    assert y.mean() == pytest.approx(1.0, abs=4 * np.sqrt(0.1 / 0.9 / y.size))
    np.testing.assert_array_equal(layer.apply({}, x, None), x)


def test_initializer_is_cut_at_two_deviations():
    x = np.asarray(truncated_normal(0.02)(jax.random.key(0), (400, 400)))
    assert np.abs(x).max() <= 0.04
    expected = stats.truncnorm(-2, 2, scale=0.02)
    assert stats.kstest(x.ravel(), expected.cdf).pvalue > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_of_layer_norm(dtype):
    """By hand in the module, by JAX of the formula here."""
    random = np.random.default_rng(0)
    x, weights = (jnp.asarray(random.normal(size=(3, 5, 16)), dtype) for _ in range(2))
    scale, bias = (jnp.asarray(random.normal(size=16), jnp.float32) for _ in range(2))
    module = LayerNorm(ModelConfig(dtype=dtype, layer_norm_eps=1e-3))

    def loss(x, scale, bias):
        return (module.apply({"params": {"scale": scale, "bias": bias}}, x) * weights).sum()

    def plain(x, scale, bias):
        x = x.astype(jnp.float32)
        normal = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3)
        return ((normal * scale + bias) * weights).sum()

    found, expected = (jax.grad(f, (0, 1, 2))(x, scale, bias) for f in (loss, plain))
    for ours, right in zip(found, expected, strict=True):
        close = 1e-5 if ours.dtype == jnp.float32 else 2**-7
        np.testing.assert_allclose(
            ours.astype(jnp.float32), right.astype(jnp.float32), atol=close, rtol=close
        )
