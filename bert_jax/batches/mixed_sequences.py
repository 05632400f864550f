"""Sequences of several texts, mixed by weights: the text of each follows from its index alone."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from bert_jax.batches import Batch
from bert_jax.batches.full_blocks import FullBlocks
from bert_jax.batches.sentence_pairs import SentencePairs
from bert_jax.batches.shuffle import MIXTURE, keyed_generator

_CHUNK = 1024  # sequences of a part that are drawn at once; it is part of every mixed batch
_BITS = 40  # of a share, so that counts are exact integers for batches of up to 2**22 sequences


def part_seeds(seed: int, count: int) -> list[int]:
    """Return a seed for each part, so that parts of one size are not shuffled alike."""
    if count == 1:
        return [seed]
    return [int(keyed_generator(seed, MIXTURE, i + 1).integers(1 << 62)) for i in range(count)]


@dataclasses.dataclass
class MixedSequences:
    """The sequences of each part in its own order, at indices that its weight decides.

    The first part takes every 1 / weight-th index, rounded; the next one its share of the others,
    and so on. So the number of sequences of a part among the first n is a formula, and differs
    from n × weight by less than the number of parts.
    """

    parts: Sequence[SentencePairs | FullBlocks]  # of one length
    weights: Sequence[float]  # which add up to 1
    seed: int

    def __post_init__(self):
        # Of each part but the last: its share of what those before it leave, and at which fraction
        # of a sequence its count begins, so that a text of weight 0.01 may be among the first 100.
        rest = np.cumsum(self.weights[::-1])[::-1]
        shares = [round(w / r * (1 << _BITS)) for w, r in zip(self.weights, rest, strict=True)]
        offsets = keyed_generator(self.seed, MIXTURE).integers(1 << _BITS, size=len(shares))
        self._chunk = functools.lru_cache(3 * len(self.parts))(self._draw_chunk)
        self._levels = list(zip(shares, offsets.tolist(), strict=True))[:-1]

    @property
    def sequences_per_epoch(self) -> int:
        """Number of sequences in one pass over the text of each part."""
        return sum(part.sequences_per_epoch for part in self.parts)

    @property
    def is_full(self) -> bool:
        """Whether no sequence of any part has padding."""
        return all(part.is_full for part in self.parts)

    def counts(self, number: int) -> list[int]:
        """Return how many of the first `number` sequences are of each part."""
        counts = []
        for share, offset in self._levels:
            counts.append((number * share + offset) >> _BITS)
            number -= counts[-1]
        return [*counts, number]

    def _owners(self, first: int, size: int) -> np.ndarray:
        """Return the part of each of `size` sequences from index `first` on, [size]."""
        owners, rest = np.full(size, len(self.parts) - 1), np.arange(size)
        for part, (share, offset) in enumerate(self._levels):
            start = first * share + offset  # a Python integer, of any size
            first -= start >> _BITS
            phase = start & ((1 << _BITS) - 1)
            counts = (phase + np.arange(len(rest) + 1) * share) >> _BITS
            is_of_part = np.diff(counts) > 0
            owners[rest[is_of_part]] = part
            rest = rest[~is_of_part]
        return owners

    def batch(
        self, number: int, size: int, indices: np.ndarray | None = None, skipped: int = 0
    ) -> Batch:
        """Return the sequences at some indices of a batch: `SentencePairs.batch` of each part."""
        if len(self.parts) == 1:
            return self.parts[0].batch(number, size, indices, skipped)
        indices = np.arange(size) if indices is None else indices
        before = skipped + number * size
        owners, batch = self._owners(before, size), {}
        for i, first in enumerate(self.counts(before)):
            is_part = owners == i
            where = np.flatnonzero(is_part[indices])
            if not len(where):
                continue
            chunks, within = np.divmod(first + np.cumsum(is_part)[indices[where]] - 1, _CHUNK)
            each = [(chunks == c, self._chunk(i, c)) for c in np.unique(chunks).tolist()]
            drawn = np.concatenate([chunk[within[is_of]] for is_of, chunk in each])
            where = np.concatenate([where[is_of] for is_of, _ in each])
            for name, value in self.parts[i].assemble(drawn).items():
                if name not in batch:
                    batch[name] = np.empty((len(indices), *value.shape[1:]), value.dtype)
                batch[name][where] = value
        return {**batch, "index": indices.astype(np.int32)}

    def _draw_chunk(self, part: int, number: int) -> np.ndarray:
        return self.parts[part].draw(number, _CHUNK, np.arange(_CHUNK))
