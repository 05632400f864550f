"""Exact search: against a full sort, with ties, in blocks, and of either precision."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from bert_jax.retrieval import search
from bert_jax.retrieval.search import best, top_k


def unit(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@hypothesis.given(
    count=st.integers(1, 60),
    size=st.integers(1, 5),
    number=st.integers(1, 4),
    k=st.integers(1, 70),
    block=st.integers(1, 40),
    dtype=st.sampled_from([np.float16, np.float32]),
    seed=st.integers(0, 1000),
)
@hypothesis.settings(max_examples=80, deadline=None)
def test_equal_to_a_full_sort(count, size, number, k, block, dtype, seed):
    """Of small whole numbers, whose products are exact and often equal."""
    generator = np.random.default_rng(seed)
    matrix = generator.integers(-2, 3, (count, size)).astype(dtype)
    queries = generator.integers(-2, 3, (number, size)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_BLOCK", block)
        patch.setattr(search, "_THREAD", 30)
        found = top_k(matrix, queries, k)
    scores = queries @ matrix.astype(np.float32).T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(found.indices, order)
    np.testing.assert_array_equal(found.scores, np.take_along_axis(scores, order, 1))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_same_vector_has_the_same_score_wherever_it_is(dtype):
    """A matrix product would round rows of a block differently, and so order them at random."""
    matrix = unit((1, 384)).repeat(1500, 0)
    matrix[::2] = unit((750, 384), 1)
    matrix, queries = matrix.astype(dtype), unit((40, 384), 2) * 0.1 + unit((1, 384))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    found = top_k(matrix, queries, 5)
    assert found.indices.tolist() == [[1, 3, 5, 7, 9]] * 40
    assert (found.scores == found.scores[:, :1]).all()
    alone = top_k(matrix, queries[3:4], 5)
    np.testing.assert_array_equal(alone.scores, found.scores[3:4])
    expected = queries.astype(np.float64) @ matrix[1].astype(np.float64)
    np.testing.assert_allclose(found.scores[:, 0], expected, rtol=1e-5)


def test_every_number_of_float16_is_converted_exactly():
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    numbers = numbers[np.isfinite(numbers)][None]
    converted = search._as_float32(numbers, np.empty(numbers.shape, np.float32))
    np.testing.assert_array_equal(converted.view(np.int32), numbers.astype(np.float32).view("i4"))


def test_few_and_no_results():
    assert top_k(unit((2, 4)), unit((3, 4)), 5).indices.shape == (3, 2)
    assert top_k(unit((2, 4)), unit((3, 4))[:0], 5).indices.shape == (0, 2)
    assert best(np.zeros(0), 3).tolist() == []
