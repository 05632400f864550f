"""Keyed permutations: bijections without a visible order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bert_jax.batches.shuffle import permute


@given(st.integers(1, 5000), st.integers(0, 2**32))
def test_permute_is_a_bijection(size, key):
    np.testing.assert_array_equal(np.sort(permute(np.arange(size), size, (key,))), np.arange(size))


def test_permute_leaves_no_order():
    index = np.arange(100_000)
    image = permute(index, 100_000, (1,))
    assert abs(stats.spearmanr(index, image).statistic) < 0.02
    assert abs(stats.spearmanr(image[1:], image[:-1]).statistic) < 0.02
    assert abs(stats.spearmanr(image, permute(index, 100_000, (2,))).statistic) < 0.02
