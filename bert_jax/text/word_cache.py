"""Cache the token ids of words, because most words of a text have occurred before."""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Half a million English words: with their token ids they take 150 MB.
_MAX_CHARACTERS = 1 << 22


class WordCache:
    """Encode texts word by word, each new word with `encode`.

    A word is what is between two spaces; its token ids must not depend on its neighbours.
    """

    def __init__(self, encode: Callable[[list[str]], Sequence[Sequence[int]]]):
        self._encode = encode
        self._lock = threading.Lock()
        self._ids: dict[str, tuple[int, ...]] = {}
        self._characters = 0

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """Return the token ids of each text, an int32 array."""
        words = " ".join(texts).split(" ")
        with self._lock:
            if self._characters > _MAX_CHARACTERS:
                self._ids, self._characters = {}, 0
            new = list(dict.fromkeys(word for word in words if word not in self._ids))
            self._ids.update(zip(new, map(tuple, self._encode(new)), strict=True))
            self._characters += sum(map(len, new))
            encoded = list(map(self._ids.__getitem__, words))
        ids = np.fromiter(itertools.chain.from_iterable(encoded), np.int32)
        ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        last_words = np.cumsum([text.count(" ") + 1 for text in texts], dtype=np.int64) - 1
        bounds = [0, *ends[last_words].tolist()]
        return [ids[start:end] for start, end in itertools.pairwise(bounds)]
