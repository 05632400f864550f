"""The vectors of an index in files, by what a text becomes: a vector, one a token, or a sparse one.

Each kind has the names of its files, appends vectors to them, and searches them exactly.
"""

import abc
import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy import sparse

from bert_jax.retrieval import search
from bert_jax.retrieval.search import TopK

_MOST_TOKENS = 1 << 24  # of a vocabulary


class Vectors(abc.ABC):
    """The vectors of N texts, which stay on disk.

    Attributes:
      files: their names in the folder of an index.
      matrix: [N, D]; of vectors for tokens [T, D]; of sparse vectors one of scipy, [N, V].
    """

    files: ClassVar[tuple[str, ...]]
    matrix: Any

    @abc.abstractmethod
    def __init__(self, folder: Path, size: int):
        """Open the files of a folder, whose vectors have `size` numbers."""

    @abc.abstractmethod
    def __len__(self) -> int: ...  # of texts

    @abc.abstractmethod
    def top_k(self, queries: Sequence[Any], k: int) -> TopK:
        """Return the k best texts of each query, by its vectors."""

    @staticmethod
    @abc.abstractmethod
    def arrays(vectors: Sequence[Any]) -> Iterable[np.ndarray]:
        """Return what the vectors of some texts add to each file."""


class DenseVectors(Vectors):
    """A vector for each text, float16 of unit length."""

    files = ("vectors.npy",)

    def __init__(self, folder: Path, size: int):
        self.matrix = _open(folder / self.files[0])

    def __len__(self) -> int:
        return len(self.matrix)

    def top_k(self, queries: Sequence[Any], k: int) -> TopK:
        return search.top_k(self.matrix, np.asarray(queries, np.float32), k)

    @staticmethod
    def arrays(vectors: Sequence[Any]) -> Iterable[np.ndarray]:
        return (np.asarray(vectors, np.float16),)


class TokenVectors(Vectors):
    """A vector for each token of a text, float16; a text's score is `search.token_top_k`'s."""

    files = ("vectors.npy", "counts.npy")

    def __init__(self, folder: Path, size: int):
        self.matrix, counts = (_open(folder / name) for name in self.files)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        if counts.min(initial=0) < 0 or self._starts[-1] != len(self.matrix):
            raise ValueError("texts of other vectors than there are")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def top_k(self, queries: Sequence[Any], k: int) -> TopK:
        return search.flat_token_top_k(self.matrix, self._starts, queries, k)

    @staticmethod
    def arrays(vectors: Sequence[Any]) -> Iterable[np.ndarray]:
        counts = np.array([len(each) for each in vectors], np.int64)
        return np.concatenate(vectors).astype(np.float16), counts


class SparseVectors(Vectors):
    """The weights of a text that are not 0, float32, and the ids of their tokens."""

    files = ("weights.npy", "tokens.npy", "counts.npy")

    def __init__(self, folder: Path, size: int):
        weights, tokens, counts = (_open(folder / name) for name in self.files)
        starts = np.concatenate([[0], np.cumsum(counts)])
        if starts[-1] < 1 << 31:  # of the type of `tokens`, which are else copied
            starts = starts.astype(np.int32)
        if size > _MOST_TOKENS:
            raise ValueError(f"a vocabulary of {size} tokens")
        self.matrix = sparse.csr_array((weights, tokens, starts), shape=(len(counts), size))
        self.matrix.check_format(full_check=True)  # or a search could write outside its memory

    def __len__(self) -> int:
        return self.matrix.shape[0]

    def top_k(self, queries: Sequence[Any], k: int) -> TopK:
        return search.sparse_top_k(self._by_column, sparse.vstack(queries), k)

    @functools.cached_property
    def _by_column(self) -> Any:
        """The matrix as `search.sparse_top_k` reads it, in memory from the first search on."""
        return self.matrix.tocsc()

    @staticmethod
    def arrays(vectors: Sequence[Any]) -> Iterable[np.ndarray]:
        rows = sparse.csr_array(sparse.vstack(vectors))
        return (
            rows.data.astype(np.float32),
            rows.indices.astype(np.int32),
            np.diff(rows.indptr).astype(np.int64),
        )


KINDS: dict[str, type[Vectors]] = {
    "dense": DenseVectors,
    "tokens": TokenVectors,
    "sparse": SparseVectors,
}


def check_entries(entries: np.ndarray, num_vectors: int, num_bytes: int, num_files: int) -> None:
    """Raise ValueError for entries, [N, 3], that are not of these vectors, texts and files."""
    if entries.shape != (num_vectors, 3) or entries.dtype != np.int64:
        raise ValueError(f"entries of shape {entries.shape} for {num_vectors} vectors")
    ends, files = entries[:, 0], entries[:, 1]
    if np.diff(ends, prepend=0).min(initial=0) < 0 or ends.max(initial=0) > num_bytes:
        raise ValueError("texts that end before they start, or after their file")
    if files.min(initial=0) < 0 or files.max(initial=0) >= num_files:
        raise ValueError("texts of a file that is not named")


class ArrayWriter(AbstractContextManager["ArrayWriter"]):
    """Appends rows to an .npy file, whose number is known at the end."""

    def __init__(self, path: Path):
        self._file, self._array, self._count = path.open("wb"), None, 0

    def append(self, rows: np.ndarray) -> None:
        """Append rows, all of one type and width."""
        if self._array is None:
            self._array = rows[:0]
            self._write_header()
        self._file.write(np.ascontiguousarray(rows).data)
        self._count += len(rows)

    def _write_header(self) -> None:
        # NumPy leaves room in a header for a larger number of rows.
        assert self._array is not None
        dtype, shape = self._array.dtype, (self._count, *self._array.shape[1:])
        described = {"descr": np.lib.format.dtype_to_descr(dtype), "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, {**described, "fortran_order": False})

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._array is not None and kind is None:
            self._file.seek(0)
            self._write_header()
        self._file.close()


def _open(path: Path) -> np.ndarray:
    array = np.load(path, mmap_mode="r")
    return array if array.size else np.array(array)
