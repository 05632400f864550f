"""Pieces of words, remembered: most words of a text have come before."""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Of the words that are remembered: a million English ones, which with their pieces are 150 MB.
_MOST_CHARACTERS = 1 << 23


class Words:
    """Makes texts into pieces word by word, each new word by another function.

    A word is what stands between two spaces, and must have the same pieces wherever it stands.

    Args:
      encode: returns the pieces of each of some words.
    """

    def __init__(self, encode: Callable[[list[str]], Sequence[Sequence[int]]]):
        self._encode = encode
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._numbers = _Numbers()
        self._characters = 0
        self._pieces = np.zeros(0, np.int32)  # of all words, in the order of their numbers
        self._sizes = np.zeros(0, np.int64)

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """Returns the pieces of each text, int32."""
        words = " ".join(texts).split(" ")
        with self._lock:
            if self._characters > _MOST_CHARACTERS:
                self._forget()
            try:
                numbers = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
                self._learn()
            except BaseException:  # a word may have a number by now, but no pieces
                self._forget()
                raise
            begins, sizes = np.cumsum(self._sizes) - self._sizes, self._sizes[numbers]
            ends = np.cumsum(sizes)
            places = np.repeat(begins[numbers] - (ends - sizes), sizes) + np.arange(ends[-1])
            pieces = self._pieces[places]
        last_words = np.cumsum([text.count(" ") + 1 for text in texts], dtype=np.int64) - 1
        bounds = [0, *ends[last_words].tolist()]
        return [pieces[low:high] for low, high in itertools.pairwise(bounds)]

    def _learn(self) -> None:
        """Finds the pieces of the words that are new."""
        new, self._numbers.new = self._numbers.new, []
        if new:
            found = self._encode(new)
            self._characters += sum(map(len, new))
            joined = np.array([piece for pieces in found for piece in pieces], np.int32)
            self._pieces = np.concatenate([self._pieces, joined])
            self._sizes = np.concatenate([self._sizes, [len(pieces) for pieces in found]])


class _Numbers(dict[str, int]):
    """Numbers words in the order in which they are first asked for."""

    def __init__(self) -> None:
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        self.new.append(word)
        return number
