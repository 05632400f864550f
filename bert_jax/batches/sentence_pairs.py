"""Sentence pairs for NSP and SOP, drawn from a token store by index: no copies and no state.

Every epoch splits documents again, a group at a time: a run of shuffled blocks of 1,024 sentences,
up to two million. The sequences of a group are shuffled. All groups have the size of the first
one, so that an index is found without drawing those before it: others lose or repeat some text.
"""

import dataclasses
import functools

import numpy as np

from bert_jax.batches import Batch
from bert_jax.batches.shuffle import BATCH, BLOCKS, EXTRA, ORDER, PAIRS, keyed_generator, permute
from bert_jax.text.store import TokenStore
from bert_jax.text.tokenizer import Tokenizer

_BLOCK_SENTENCES = 1024
_GROUP_BLOCKS = 2048
# A is the sentences from `start` to `split`, B those to `end` or random; `target` tokens of both.
_PAIR = np.dtype([*((n, int) for n in ("start", "split", "end", "target")), ("is_random", bool)])


@dataclasses.dataclass
class SentencePairs:
    """`[CLS] A [SEP] B [SEP]`: `create_instances_from_document` of google-research/bert, albert."""

    store: TokenStore
    tokenizer: Tokenizer
    length: int  # tokens of a sequence, L
    seed: int
    sentence_order: bool  # ALBERT's sentence order (SOP) instead of next sentence (NSP)
    short_fraction: float  # share of documents whose pairs have a random shorter target length

    is_full = False  # a pair is as long as its sentences

    def __post_init__(self):
        self._num_blocks = -(-self.store.num_sentences // _BLOCK_SENTENCES)
        self._num_groups = -(-self._num_blocks // _GROUP_BLOCKS)
        self._group = functools.lru_cache(maxsize=2)(self._shuffled_group)

    @functools.cached_property
    def _group_size(self) -> int:
        return len(self._draw_sequences(0, 0, 0))

    @property
    def sequences_per_epoch(self) -> int:
        """Number of sequences in one pass over the text, of later passes approximately."""
        return self._num_groups * self._group_size

    def batch(
        self, number: int, size: int, indices: np.ndarray | None = None, skipped: int = 0
    ) -> Batch:
        """Return the sequences at some indices of a batch; label 1: B is random or swapped.

        Args:
          number: of the batch.
          size: sequences of a batch.
          indices: of the sequences to return; all by default.
          skipped: the number of sequences before batch 0.
        """
        indices = np.arange(size) if indices is None else indices
        batch = self.assemble(self.draw(number, size, indices, skipped))
        return {**batch, "index": indices.astype(np.int32)}

    def draw(self, number: int, size: int, indices: np.ndarray, skipped: int = 0) -> np.ndarray:
        """Return the first token of A and B, their numbers of tokens and the label, [n, 5]."""
        # The whole batch is drawn, so that a sequence does not depend on the others of its process.
        pairs = self._batch_sequences(skipped + number * size, size)
        segments = self._segments(pairs, keyed_generator(self.seed, BATCH, number))
        return np.vstack(segments).T[indices]

    def assemble(self, drawn: np.ndarray) -> Batch:
        """Return the arrays of drawn sequences."""
        first, count, label = drawn.T[:2], drawn.T[2:4], drawn[:, 4].astype(np.int32)
        arrays = assemble_pairs(self.store, self.tokenizer, self.length, first, count)
        return {**arrays, "next_sentence_label": label}

    def _batch_sequences(self, first: int, size: int) -> np.ndarray:
        """Return the drawn sequences of a batch, which may span groups and epochs, [size]."""
        epochs, within = np.divmod(first + np.arange(size), self.sequences_per_epoch)
        groups, slots = np.divmod(within, self._group_size)
        keys = sorted({*zip(epochs.tolist(), groups.tolist(), strict=True)})
        return np.concatenate(
            [self._group(e, g)[slots[(epochs == e) & (groups == g)]] for e, g in keys]
        )

    def _shuffled_group(self, epoch: int, group: int) -> np.ndarray:
        """Return the sequences of a group in their order, [group_size]; splits vary in size."""
        missing, chosen = self._group_size, []
        while missing:
            draw = len(chosen)
            sequences = self._draw_sequences(epoch, group, draw)
            key = (EXTRA, epoch, group, draw) if draw else (ORDER, epoch, group)
            order = keyed_generator(self.seed, *key).permutation(len(sequences))
            chosen.append(sequences[order[:missing]])
            missing -= len(chosen[-1])
        return np.concatenate(chosen)

    def _draw_sequences(self, epoch: int, group: int, draw: int) -> np.ndarray:
        """Split every document of a group into pairs by Google's procedure, all at once, [n]."""
        generator = keyed_generator(self.seed, PAIRS, epoch, group, draw)
        start, end = self._documents(epoch, group)
        offsets, budget = self.store.sentences, self.length - 3
        shorter = 2 + np.floor(generator.random(len(start)) * (budget - 1)).astype(np.int64)
        target = np.where(generator.random(len(start)) < self.short_fraction, shorter, budget)
        pairs = []
        while len(start):
            stop = np.minimum(np.searchsorted(offsets, offsets[start] + target), end)
            count = stop - start
            u, v = generator.random((2, len(start)))
            # After any sentence of the chunk but the last, or after its only one.
            split = start + 1 + np.floor(u * np.maximum(count - 1, 0)).astype(np.int64)
            is_random = count == 1
            if not self.sentence_order:
                is_random |= v < 0.5
            pairs.append(np.rec.fromarrays([start, split, stop, target, is_random], dtype=_PAIR))
            start = np.where(is_random, split, stop)  # a random B leaves its sentences to the next
            unfinished = start < end
            start, end, target = start[unfinished], end[unfinished], target[unfinished]
        return np.concatenate(pairs)

    def _documents(self, epoch: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first sentence of each document of a group, and the one after its last."""
        documents, sentences = self.store.documents, self.store.num_sentences
        bounds = np.arange(group, group + 2) * self._num_blocks // self._num_groups
        blocks = permute(np.arange(*bounds), self._num_blocks, (self.seed, BLOCKS, epoch))

        # A block starts with the first document in its sentences, or without one divides another.
        def edges(block: np.ndarray) -> np.ndarray:
            edge = np.minimum(block * _BLOCK_SENTENCES, sentences)
            first = documents[np.searchsorted(documents, edge)]
            return np.where(first < edge + _BLOCK_SENTENCES, first, edge)

        starts, ends = [], []
        for low, high in zip(edges(blocks), edges(blocks + 1), strict=True):
            if low < high:
                inner = documents[
                    np.searchsorted(documents, low, "right") : np.searchsorted(documents, high)
                ]
                starts += [[low], inner]
                ends += [inner, [high]]
        return np.concatenate(starts).astype(np.int64), np.concatenate(ends).astype(np.int64)

    def _segments(
        self, pairs: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the first token and the number of tokens of A and B, both [2, n], and labels."""
        offsets, is_random = self.store.sentences, pairs["is_random"]
        size_a = offsets[pairs["split"]] - offsets[pairs["start"]]
        random, random_end = self._random_segment(pairs, pairs["target"] - size_a, generator)
        start_b = offsets[np.where(is_random, random, pairs["split"])]
        size_b = offsets[np.where(is_random, random_end, pairs["end"])] - start_b
        first = np.stack([offsets[pairs["start"]], start_b])
        count = np.stack([size_a, size_b])
        dropped = _num_truncated(size_a, size_b, self.length - 3)
        # Each dropped token comes from the front or from the back with equal chance.
        first += generator.binomial(dropped, 0.5)
        count -= dropped
        if not self.sentence_order:
            return first, count, is_random
        swapped = ~is_random & (generator.random(len(size_a)) < 0.5)
        first, count = (np.where(swapped, pair[::-1], pair) for pair in (first, count))
        return first, count, is_random | swapped

    def _random_segment(
        self, pairs: np.ndarray, missing: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return for each pair a run of sentences of another document, of `missing` tokens."""
        documents, offsets = self.store.documents, self.store.sentences
        others = self.store.num_documents - 1
        u, v = generator.random((2, len(missing)))
        other = np.floor(u * max(others, 1)).astype(np.int64)
        if others:
            other += other >= np.searchsorted(documents, pairs["start"], "right") - 1
        low, high = documents[other], documents[other + 1]
        start = low + np.floor(v * (high - low)).astype(np.int64)
        return start, np.clip(np.searchsorted(offsets, offsets[start] + missing), start + 1, high)


def _num_truncated(size_a: np.ndarray, size_b: np.ndarray, budget: int) -> np.ndarray:
    """Return how many tokens A and B lose, [2, n]: one at a time of the longer, B if equal."""
    kept_a = np.maximum((budget + 1) // 2, budget - size_b)
    kept_b = np.maximum(budget // 2, budget - size_a)
    return np.maximum(np.stack([size_a - kept_a, size_b - kept_b]), 0)


def assemble_pairs(
    store: TokenStore, tokenizer: Tokenizer, length: int, first: np.ndarray, count: np.ndarray
) -> Batch:
    """Return `[CLS] A [SEP] B [SEP]` from the first token and the number of tokens, [2, n]."""
    column = np.arange(length)
    count_a, count_b = count[:, :, None]
    separator_a, separator_b = count_a + 1, count_a + count_b + 2
    in_a = (column > 0) & (column < separator_a)
    in_b = (column > separator_a) & (column < separator_b)
    offset = np.where(in_a, first[0][:, None] - 1, first[1][:, None] - 1 - separator_a) + column
    ids = store.tokens[np.where(in_a | in_b, offset, 0)].astype(np.int32)
    ids[~(in_a | in_b)] = tokenizer.pad_id
    ids[:, 0] = tokenizer.cls_id
    for separator in (separator_a, separator_b):
        np.put_along_axis(ids, separator, tokenizer.sep_id, axis=1)
    return {
        "input_ids": ids,
        "token_type_ids": ((column > separator_a) & (column <= separator_b)).astype(np.int32),
        "attention_mask": (column <= separator_b).astype(np.int32),
    }
