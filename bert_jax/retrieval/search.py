"""Exact search: the rows of a matrix with the largest inner products with each query.

Shapes: N rows of D dimensions, Q queries, K results of each.
"""

import dataclasses
import functools
import numbers
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bert_jax.errors import UserError

_BLOCK = 1 << 20  # numbers of the matrix that a thread searches at once: few enough for its caches
_THREAD = 1 << 22  # products that a thread should have to do


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

    Raises:
      UserError: `k` is less than 1.

    >>> found = top_k(np.eye(3, dtype=np.float16), np.array([[0.0, 0.0, 1.0]], np.float32), k=2)
    >>> found.indices.tolist(), found.scores.tolist()
    ([[2, 0]], [[1.0, 0.0]])
    """
    check_count(k, "top_k")
    count, size = matrix.shape
    cores = min(os.cpu_count() or 1, 1 + count * size * len(queries) // _THREAD)
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


def check_count(count: Any, name: str) -> None:
    """Refuse an argument that is not a whole number of at least 1."""
    if not isinstance(count, numbers.Integral) or int(count) < 1:
        raise UserError(f"{name} is {count!r}; give a whole number, 1 or more")


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
