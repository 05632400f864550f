"""Cache the token ids of words, because most words of a text have occurred before."""

import collections
import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np

# A million English words: with their token ids they take 150 MB.
_MAX_CHARACTERS = 1 << 23


class WordCache:
    """Encode texts word by word, each new word with `encode`.

    A word is what is between two spaces; its token ids must not depend on its neighbours.
    """

    def __init__(self, encode: Callable[[list[str]], Sequence[Sequence[int]]]):
        self._encode = encode
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._indices = collections.defaultdict[str, int]()
        self._indices.default_factory = self._indices.__len__  # words are numbered as they occur
        self._characters = 0
        self._ids = np.zeros(0, np.int32)  # of all words, in the order of their indices
        self._lengths = np.zeros(0, np.int64)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, int32."""
        words = " ".join(texts).split(" ")
        with self._lock:
            if self._characters > _MAX_CHARACTERS:
                self._clear()
            try:
                indices = np.fromiter(map(self._indices.__getitem__, words), np.int64, len(words))
                self._encode_new()
            except BaseException:  # a word may have an index by now, but no token ids
                self._clear()
                raise
            starts, lengths = np.cumsum(self._lengths) - self._lengths, self._lengths[indices]
            ends = np.cumsum(lengths)
            positions = np.repeat(starts[indices] - (ends - lengths), lengths) + np.arange(ends[-1])
            ids = self._ids[positions]
        last_words = np.cumsum([text.count(" ") + 1 for text in texts], dtype=np.int64) - 1
        bounds = [0, *ends[last_words].tolist()]
        return [ids[start:end] for start, end in itertools.pairwise(bounds)]

    def _encode_new(self) -> None:
        count = len(self._indices) - len(self._lengths)
        if count:
            new = list(itertools.islice(reversed(self._indices), count))[::-1]
            encoded = self._encode(new)
            self._characters += sum(map(len, new))
            joined = np.fromiter(itertools.chain.from_iterable(encoded), np.int32)
            self._ids = np.concatenate([self._ids, joined])
            self._lengths = np.concatenate([self._lengths, [len(ids) for ids in encoded]])
