"""Exact search: the rows of a matrix with the largest inner products with each query.

Shapes: N rows of D dimensions, Q queries, K results of each.
"""

import dataclasses

import numpy as np

from bert_jax.errors import UserError

# Numbers of a block of the matrix and of its scores, at most: small enough for a core's cache.
_BLOCK, _SCORES = 1 << 20, 1 << 24
# How far float32 rounds the inner product of vectors of unit length, at most.
_ROUNDING = 1e-5


@dataclasses.dataclass(frozen=True)
class TopK:
    """The best results of each query, the best first; of equal ones the lower index first."""

    indices: np.ndarray  # [Q, K] int64
    scores: np.ndarray  # [Q, K] float32


def top_k(matrix: np.ndarray, queries: np.ndarray, k: int) -> TopK:
    """Return the rows of a matrix with the largest inner products with each query.

    Args:
      matrix: [N, D] float16 or float32, finite; it may be memory-mapped, and is read once. Scores
        that differ by float32's rounding are told apart by float64 where rows have unit length, so
        that equal rows have equal scores, wherever they are.
      queries: [Q, D] float32.
      k: results of each query; all N where there are fewer.

    Raises:
      UserError: `k` is less than 1.

    >>> found = top_k(np.eye(3, dtype=np.float16), np.array([[0.0, 0.0, 1.0]], np.float32), k=2)
    >>> found.indices.tolist(), found.scores.tolist()
    ([[2, 0]], [[1.0, 0.0]])
    """
    if k < 1:
        raise UserError(f"top_k is {k}; ask for one result or more")
    (count, size), k = matrix.shape, min(k, len(matrix))
    number = len(queries)
    rows = max(1, min(_BLOCK // max(1, size), _SCORES // max(1, number)))
    buffer = np.empty((min(rows, count), size), np.float32)
    slack = _ROUNDING * np.linalg.norm(queries, axis=1)
    floors = np.full(number, -np.inf)
    # Of each query, the indices that may be among the best, and their scores.
    kept = [(np.empty(0, np.int64), np.empty(0, np.float32))] * number
    for start in range(0, count, rows):
        scores = queries @ _as_float32(matrix[start : start + rows], buffer).T
        for query in np.flatnonzero(scores.max(1) >= floors):
            new = np.flatnonzero(scores[query] >= floors[query])
            indices = np.concatenate([kept[query][0], start + new])
            values = np.concatenate([kept[query][1], scores[query, new]])
            if len(values) > k:
                floors[query] = np.partition(values, -k)[-k] - slack[query]
                is_kept = values >= floors[query]
                indices, values = indices[is_kept], values[is_kept]
            kept[query] = indices, values
    found = TopK(np.empty((number, k), np.int64), np.empty((number, k), np.float32))
    for query, (indices, _) in enumerate(kept):
        exact = (matrix[indices].astype(np.float64) * queries[query]).sum(1).astype(np.float32)
        order = best(exact, k)
        found.indices[query], found.scores[query] = indices[order], exact[order]
    return found


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
