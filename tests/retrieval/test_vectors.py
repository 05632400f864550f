"""Vectors of an index that are not what they say: refused, not read outside of their memory."""

import numpy as np
import pytest
from scipy import sparse

from bert_jax.retrieval.vectors import KINDS


def write(folder, kind: str, vectors) -> None:
    for name, array in zip(KINDS[kind].files, KINDS[kind].arrays(vectors), strict=True):
        np.save(folder / name, array)


def test_those_that_were_written_are_read(tmp_path):
    write(tmp_path, "tokens", [np.ones((2, 3)), np.ones((1, 3))])
    assert len(KINDS["tokens"](tmp_path, 0)) == 2
    write(tmp_path, "sparse", [sparse.csr_array(np.eye(1, 9, k=token)) for token in (2, 8)])
    read = KINDS["sparse"](tmp_path, 9)
    assert len(read) == 2
    assert read.top_k([sparse.csr_array(np.eye(1, 9, k=8))], 1).indices.tolist() == [[1]]


@pytest.mark.parametrize(
    ("kind", "name", "values", "size"),
    [
        ("sparse", "tokens.npy", [2, 2**31 - 5], 9),
        ("sparse", "tokens.npy", [2, -1], 9),
        ("sparse", "counts.npy", [3, -1], 9),
        ("sparse", "counts.npy", [1, 9], 9),
        ("sparse", "counts.npy", [1, 1], 2**40),
        ("tokens", "counts.npy", [1, 1_000_000], 0),
        ("tokens", "counts.npy", [4, -1], 0),
    ],
)
def test_others_are_refused(tmp_path, kind, name, values, size):
    vectors = [np.ones((2, 3)), np.ones((1, 3))]
    if kind == "sparse":
        vectors = [sparse.csr_array(np.eye(1, 9, k=token)) for token in (2, 8)]
    write(tmp_path, kind, vectors)
    dtype = np.load(tmp_path / name).dtype
    np.save(tmp_path / name, np.array(values, dtype))
    with pytest.raises(ValueError):  # noqa: PT011 - of which the index makes one line
        KINDS[kind](tmp_path, size)
