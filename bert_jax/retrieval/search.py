"""Exact search: the rows of a matrix with the largest inner products with each query.

Shapes: N rows of D dimensions, Q queries, K results of each.
"""

import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bert_jax.storage.machine import num_cores

_BLOCK = 1 << 20  # numbers of the matrix that a thread searches at once: few enough for its caches
_THREAD = 1 << 22  # products that a thread should have to do
_SCORES = 1 << 24  # scores of sparse vectors that are in memory at once


@dataclasses.dataclass(frozen=True)
class TopK:
    """The best results of each query, the best first; of equal ones the lower index first."""

    indices: np.ndarray  # [Q, K] int64
    scores: np.ndarray  # [Q, K] float32


def top_k(matrix: np.ndarray, queries: np.ndarray, k: int) -> TopK:
    """Return the rows of a matrix with the largest inner products with each query.

    Args:
      matrix: [N, D] float16 or float32, finite; it may be memory-mapped, and is read once.
      queries: [Q, D] float32.
      k: results of each query; all N where there are fewer.

    >>> found = top_k(np.eye(3, dtype=np.float16), np.array([[0.0, 0.0, 1.0]], np.float32), k=2)
    >>> found.indices.tolist(), found.scores.tolist()
    ([[2, 0]], [[1.0, 0.0]])
    """
    count, size = matrix.shape
    cores = min(num_cores(), 1 + count * size * len(queries) // _THREAD)
    edges = [count * core // cores for core in range(cores + 1)]
    with ThreadPoolExecutor(cores) as pool:
        search = functools.partial(_search, matrix, np.asarray(queries, np.float32), k)
        parts = list(pool.map(search, edges[:-1], edges[1:]))
    indices = np.concatenate([part.indices for part in parts], axis=1)
    scores = np.concatenate([part.scores for part in parts], axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return TopK(np.take_along_axis(indices, order, 1), np.take_along_axis(scores, order, 1))


def _search(matrix: np.ndarray, queries: np.ndarray, k: int, first: int, end: int) -> TopK:
    """Return the best of the rows from `first` to `end`."""
    shape = len(queries), min(k, end - first)
    found = TopK(np.zeros(shape, np.int64), np.full(shape, -np.inf, np.float32))
    rows = max(1, _BLOCK // max(1, matrix.shape[1]))
    buffer = np.empty((min(rows, end - first), matrix.shape[1]), np.float32)
    for start in range(first, end, rows):
        block = _as_float32(matrix[start : min(start + rows, end)], buffer)
        for query, indices, scores in zip(queries, found.indices, found.scores, strict=True):
            # Not a matrix product, whose threads wait for each other at every block, and which
            # rounds equal rows differently, by where they are.
            values = np.vecdot(block, query)
            if len(new := np.flatnonzero(values > scores[-1])):
                both = np.concatenate([scores, values[new]])
                order = best(both, shape[1])
                indices[:] = np.concatenate([indices, start + new])[order]
                scores[:] = both[order]
    return found


def token_top_k(passages: Sequence[np.ndarray], queries: Sequence[np.ndarray], k: int) -> TopK:
    """Return the passages with the largest sum, over a query's tokens, of the best product.

    Args:
      passages: of each the vectors of its tokens, [n, D]; at least one.
      queries: of each the same.
      k: results of each query; all passages where there are fewer.

    >>> found = token_top_k([np.eye(2), np.eye(2)[:1]], [np.array([[0.0, 1.0]])], k=2)
    >>> found.indices.tolist(), found.scores.tolist()
    ([[0, 1]], [[1.0, 0.0]])
    """
    starts = np.cumsum([0, *map(len, passages)])
    return flat_token_top_k(np.concatenate(passages), starts, queries, k)


def flat_token_top_k(
    vectors: np.ndarray, starts: np.ndarray, queries: Sequence[np.ndarray], k: int
) -> TopK:
    """Return what `token_top_k` does, of passages one after the other.

    Args:
      vectors: of the tokens of N passages, [T, D] float16 or float32; may be memory-mapped.
      starts: where each passage starts, and where the last one ends, [N + 1].
      queries: of each the vectors of its tokens, [n, D].
      k: results of each query.
    """
    count, size = len(starts) - 1, vectors.shape[1]
    most = max(1, _SCORES // count)  # queries whose scores are in memory at once
    parts = []
    for number in range(0, max(1, len(queries)), most):
        asked = [np.asarray(query, np.float32).T for query in queries[number : number + most]]
        scores = np.empty((len(asked), count), np.float32)
        first = 0
        while first < count:  # blocks of whole passages
            limit = starts[first] + max(1, _BLOCK // size)
            end = max(first + 1, int(np.searchsorted(starts, limit, side="right")) - 1)
            block = vectors[starts[first] : starts[end]]
            block = _as_float32(block, np.empty(block.shape, np.float32))
            edges = starts[first:end] - starts[first]
            for row, query in zip(scores, asked, strict=True):
                row[first:end] = np.maximum.reduceat(block @ query, edges).sum(1)
            first = end
        parts.append(_best_of(scores, k))
    return _joined(parts)


def sparse_top_k(matrix: Any, queries: Any, k: int) -> TopK:
    """Return the rows of a sparse matrix with the largest inner products with each query.

    Args:
      matrix: [N, V] of scipy; if it is stored by column (CSC), it is not copied.
      queries: [Q, V] of scipy.
      k: results of each query; all N where there are fewer.

    >>> from scipy.sparse import csr_array
    >>> found = sparse_top_k(csr_array(np.eye(3)), csr_array([[0.0, 0.0, 1.0]]), k=2)
    >>> found.indices.tolist(), found.scores.tolist()
    ([[2, 0]], [[1.0, 0.0]])
    """
    by_column, size = matrix.T.tocsr(), max(1, _SCORES // matrix.shape[0])
    parts = [
        _best_of((queries[start : start + size] @ by_column).toarray(), k)
        for start in range(0, max(1, queries.shape[0]), size)
    ]
    return _joined(parts)


def _joined(parts: Sequence[TopK]) -> TopK:
    """Return the results of several parts of the queries."""
    return TopK(
        np.concatenate([part.indices for part in parts]),
        np.concatenate([part.scores for part in parts]),
    )


def _best_of(scores: np.ndarray, k: int) -> TopK:
    """Return the best of each row of scores, [Q, N]."""
    shape = len(scores), min(k, scores.shape[1])
    indices = np.array([best(row, k) for row in scores], np.int64).reshape(shape)
    return TopK(indices, np.take_along_axis(scores, indices, 1).astype(np.float32))


def normalize(vectors: np.ndarray) -> np.ndarray:
    """Return vectors, [..., D], of unit length; those of zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths == 0, 1, lengths)


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """Return the indices of the k largest of [N] numbers, the largest first; then the lower.

    >>> best(np.array([1.0, 3.0, 2.0, 3.0]), 3).tolist()
    [1, 3, 2]
    """
    if not (k := min(k, len(scores))):
        return np.empty(0, np.int64)
    candidates = np.flatnonzero(scores >= np.partition(scores, -k)[-k])
    return candidates[np.argsort(-scores[candidates], kind="stable")[:k]]


def _as_float32(block: np.ndarray, buffer: np.ndarray) -> np.ndarray:
    """Return a block of the matrix as float32, in the buffer if it is of float16."""
    if block.dtype != np.float16:
        return np.asarray(block, np.float32)
    # In three passes of integers, four times as fast as NumPy's conversion, which is no SIMD code:
    # the exponent and the fraction to where float32 has them, and what float16's exponent lacks.
    values = buffer[: len(block)]
    bits = values.view(np.int32)
    np.copyto(bits, block.view(np.int16))
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, np.int32(-0x70000001), out=bits)  # but one of the copies of the sign
    return np.multiply(values, np.float32(2.0**112), out=values)
