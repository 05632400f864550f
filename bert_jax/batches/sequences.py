"""Rows for pretraining, drawn from a token store by index: no copies, no state, no epoch in memory.

Google's `create_pretraining_data.py` walks through each document and writes rows to disk. Here the
same walk is taken again in every epoch, over one group of the corpus at a time: an epoch shuffles
blocks of about a thousand sentences, a group is a run of those blocks, and its rows are shuffled
over the whole group. Any batch can be had at once by walking through its group, in about half a
second, and memory is that of one group. A corpus of up to two million sentences is a single group,
and so is shuffled as a whole.

The walk gives a slightly different number of rows each time. Every group is given the same number,
that of the first: a group with more leaves some of its rows out in that epoch (which ones is
random), and one with fewer goes on with a second walk.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from bert_jax.batches import Batch
from bert_jax.text.store import TokenStore
from bert_jax.text.tokenizer import Tokenizer

_BLOCK_SENTENCES = 1024
_GROUP_BLOCKS = 2048

# What a generator is for, so that no two draw the same numbers.
_WALK, _BLOCKS, _ORDER, _MORE, _SHIFT, _BATCH, SEGMENTS, PLACES = range(8)


def keyed_generator(*key: int) -> np.random.Generator:
    """Returns a generator whose numbers depend on the key alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def permute(index: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Returns where a random permutation of range(size) sends each index, in constant memory.

    A Feistel network of four rounds over the next even number of bits; what falls outside the range
    is sent on until it falls inside (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains").

    Args:
      index: [n] int64 in range(size).
      size: size of the range.
      key: which permutation.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    rounds = keyed_generator(*key).integers(1 << 63, size=4, dtype=np.uint64)
    value = index.astype(np.uint64)
    outside = np.ones(value.shape, bool)
    while outside.any():
        left, right = value[outside] >> np.uint64(half), value[outside] & mask
        for constant in rounds:
            left, right = right, left ^ (_mix(right ^ constant) & mask)
        value[outside] = (left << np.uint64(half)) | right
        outside = value >= np.uint64(size)
    return value.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclasses.dataclass(frozen=True)
class Pairs:
    """What the walk decides about each pair; sentences are counted over the whole store.

    Attributes:
      start, split, end: [n] int64; A is sentences start to split, what follows it split to end.
      target: [n] int64, the tokens that the pair was to have.
      is_random: [n] bool, whether segment B comes from another document.
    """

    start: np.ndarray
    split: np.ndarray
    end: np.ndarray
    target: np.ndarray
    is_random: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    def take(self, index: np.ndarray) -> "Pairs":
        return Pairs(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))

    def join(self, *others: "Pairs") -> "Pairs":
        names = [field.name for field in dataclasses.fields(self)]
        return Pairs(*(np.concatenate([getattr(r, n) for r in (self, *others)]) for n in names))


@dataclasses.dataclass(frozen=True)
class SentencePairs:
    """Rows `[CLS] A [SEP] B [SEP]` of sentence pairs, as Google's and ALBERT's code makes them.

    Source: `create_instances_from_document` in google-research/bert `create_pretraining_data.py`,
    and in google-research/albert's file of the same name for "sop".

    Attributes:
      store: the text.
      tokenizer: for its special pieces.
      length: tokens a row, L.
      seed: of everything that is drawn.
      order: True for ALBERT's sentence order, False for next sentence.
      short_fraction: the share of documents that are cut to a random shorter target.
    """

    store: TokenStore
    tokenizer: Tokenizer
    length: int
    seed: int
    order: bool
    short_fraction: float

    @functools.cached_property
    def _blocks(self) -> int:
        return -(-self.store.num_sentences // _BLOCK_SENTENCES)

    @functools.cached_property
    def _groups(self) -> int:
        return -(-self._blocks // _GROUP_BLOCKS)

    @functools.cached_property
    def _group_rows(self) -> int:
        return len(self._rows(0, 0, 0))

    @property
    def sequences_per_epoch(self) -> int:
        """Rows in one pass over the text."""
        return self._groups * self._group_rows

    @functools.cached_property
    def _cache(self) -> dict[tuple[int, int], Any]:
        return {}

    def _group(self, epoch: int, group: int) -> Any:
        """Returns the rows of a group in their order; the latest two groups are kept."""
        cache = self._cache
        if (epoch, group) not in cache:
            rows, walks = self._rows(epoch, group, 0), 1
            order = keyed_generator(self.seed, _ORDER, epoch, group).permutation(len(rows))
            rows = rows.take(order[: self._group_rows])
            while len(rows) < self._group_rows:
                more = self._rows(epoch, group, walks)
                generator = keyed_generator(self.seed, _MORE, epoch, group, walks)
                order = generator.permutation(len(more))
                rows = rows.join(more.take(order[: self._group_rows - len(rows)]))
                walks += 1
            while len(cache) > 1:
                del cache[next(iter(cache))]
            cache[epoch, group] = rows
        return cache[epoch, group]

    def _pieces(self, epoch: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first and the end sentence of each document of a group.

        A block begins with the first document that starts in its thousand sentences. Where none
        does, a document longer than a block is cut.
        """
        documents, sentences = self.store.documents, self.store.num_sentences
        slots = np.arange(
            group * self._blocks // self._groups, (group + 1) * self._blocks // self._groups
        )
        blocks = permute(slots, self._blocks, (self.seed, _BLOCKS, epoch))

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

    def _rows(self, epoch: int, group: int, walk: int) -> Any:
        """Returns the rows that a walk gives; `data.packing` has others."""
        return self._walk(epoch, group, walk)

    def _walk(self, epoch: int, group: int, walk: int) -> Pairs:
        """Takes Google's walk through every document of a group, all documents at once."""
        generator = keyed_generator(self.seed, _WALK, epoch, group, walk)
        position, end = self._pieces(epoch, group)
        offsets, budget = self.store.sentences, self.length - 3
        shorter = 2 + np.floor(generator.random(len(position)) * (budget - 1)).astype(np.int64)
        target = np.where(generator.random(len(position)) < self.short_fraction, shorter, budget)
        found = []
        while len(position):
            reach = np.searchsorted(offsets, offsets[position] + target)
            stop = np.minimum(reach, end)
            count = stop - position
            u, v = generator.random((2, len(position)))
            # One of the ends of the chunk's sentences but the last, or its only one.
            split = position + 1 + np.floor(u * np.maximum(count - 1, 0)).astype(np.int64)
            is_random = count == 1
            if not self.order:
                is_random |= v < 0.5
            found.append(Pairs(position, split, stop, target, is_random))
            position = np.where(is_random, split, stop)  # what B did not use is put back
            going = position < end
            position, end, target = position[going], end[going], target[going]
        return found[0].join(*found[1:])

    def batch(self, index: int, size: int, low: int = 0, high: int | None = None) -> Batch:
        """Returns rows `low` to `high` of the batch of `size` rows that has this index.

        Returns:
          input_ids, token_type_ids, attention_mask: [high - low, L] int32.
          next_sentence_label: [high - low] int32; 1 where B is random, or the order is swapped.
          row: [high - low] int32, the row's place in the whole batch.
        """
        rows = self._chosen(index * size + np.arange(size))
        # The whole batch is drawn, so that a row does not depend on which part is asked for.
        first, count, label = self._segments(rows, keyed_generator(self.seed, _BATCH, index))
        places = np.arange(low, size if high is None else high, dtype=np.int32)
        row = assemble_pairs(
            self.store, self.tokenizer, self.length, first[:, places], count[:, places]
        )
        return {**row, "next_sentence_label": label[places].astype(np.int32), "index": places}

    def _chosen(self, places: np.ndarray) -> Any:
        """Returns the rows at some rising places, counted over all epochs."""
        epochs, within = np.divmod(places, self.sequences_per_epoch)
        groups, slots = np.divmod(within, self._group_rows)
        # A batch may run from one group into the next.
        parts = []
        for epoch, group in sorted({*zip(epochs.tolist(), groups.tolist(), strict=True)}):
            here = (epochs == epoch) & (groups == group)
            parts.append(self._group(epoch, group).take(slots[here]))
        return functools.reduce(lambda rows, more: rows.join(more), parts)

    def _segments(
        self, rows: Pairs, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the first token and the number of tokens of A and B, both [2, n], and labels."""
        offsets = self.store.sentences
        size_a = offsets[rows.split] - offsets[rows.start]
        other, other_end = self._random_segment(rows, rows.target - size_a, generator)
        start_b = offsets[np.where(rows.is_random, other, rows.split)]
        size_b = offsets[np.where(rows.is_random, other_end, rows.end)] - start_b
        first = np.stack([offsets[rows.start], start_b])
        count = np.stack([size_a, size_b])
        cut = _truncation(size_a, size_b, self.length - 3)
        # Each token that is dropped goes from the front or from the back with equal chance.
        first += generator.binomial(cut, 0.5)
        count -= cut
        if not self.order:
            return first, count, rows.is_random
        swapped = ~rows.is_random & (generator.random(len(size_a)) < 0.5)
        first, count = (np.where(swapped, pair[::-1], pair) for pair in (first, count))
        return first, count, rows.is_random | swapped

    def _random_segment(
        self, rows: Pairs, missing: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws a sentence of another document for each row, and fills up with what follows it."""
        documents, offsets = self.store.documents, self.store.sentences
        others = self.store.num_documents - 1
        u, v = generator.random((2, len(missing)))
        other = np.floor(u * max(others, 1)).astype(np.int64)
        if others:
            other += other >= np.searchsorted(documents, rows.start, "right") - 1
        low, high = documents[other], documents[other + 1]
        start = low + np.floor(v * (high - low)).astype(np.int64)
        return start, np.clip(np.searchsorted(offsets, offsets[start] + missing), start + 1, high)


@dataclasses.dataclass(frozen=True)
class FullBlocks:
    """Rows `[CLS] text [SEP]` of consecutive text with a [SEP] between documents, all of them full.

    Source: RoBERTa (Liu et al. 2019), section 4.2, FULL-SENTENCES, but cut at tokens, so that there
    is no padding. A row's place in the text does not depend on what went before it: the room for
    each [SEP] inside a row is taken from that row's end. Each epoch begins at another token and
    takes the rows in another order.

    Attributes:
      store: the text.
      tokenizer: for its special pieces.
      length: tokens a row, L.
      seed: of everything that is drawn.
    """

    store: TokenStore
    tokenizer: Tokenizer
    length: int
    seed: int

    @property
    def sequences_per_epoch(self) -> int:
        """Rows in one pass over the text."""
        # Less nearly a row, so that an epoch can begin at any token of the first row.
        budget = self.length - 2
        return max(1, (len(self.store.tokens) - budget + 1) // budget)

    def batch(self, index: int, size: int, low: int = 0, high: int | None = None) -> Batch:
        """Returns rows `low` to `high` of a batch: `SentencePairs.batch` without its label."""
        places = np.arange(low, size if high is None else high, dtype=np.int32)
        epochs, within = np.divmod(index * size + places.astype(np.int64), self.sequences_per_epoch)
        budget = self.length - 2
        spare = max(0, len(self.store.tokens) - self.sequences_per_epoch * budget)
        first = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            order = permute(within[here], self.sequences_per_epoch, (self.seed, _ORDER, epoch))
            shift = int(keyed_generator(self.seed, _SHIFT, epoch).random() * (spare + 1))
            first[here] = order * budget + shift
        return {**self._assemble(first), "index": places}

    def _assemble(self, first: np.ndarray) -> dict[str, np.ndarray]:
        """Reads the text from each first token on, [n], with [SEP] where a document ends."""
        tokens, sentences, documents = self.store.tokens, self.store.sentences, self.store.documents
        column = np.arange(self.length - 2)
        sentence = np.searchsorted(sentences, first, "right") - 1
        document = np.searchsorted(documents, sentence, "right") - 1
        separators = np.zeros((len(first), 1), np.int64)  # so far, at each column
        is_separator = np.zeros((len(first), len(column)), bool)
        while True:
            document = np.minimum(document + 1, self.store.num_documents)
            # The column after the last token of the document before this one.
            boundary = (sentences[documents[document]] - first)[:, None] + separators[:, -1:]
            inside = (boundary < len(column)) & (document < self.store.num_documents)[:, None]
            if not inside.any():
                break
            is_separator |= (column == boundary) & inside
            separators = separators + ((column > boundary) & inside)
        place = first[:, None] + column - separators
        inside = (place < len(tokens)) & ~is_separator
        ids = np.full((len(first), self.length), self.tokenizer.pad_id, np.int32)
        ids[:, 0] = self.tokenizer.cls_id
        ids[:, 1:-1][inside] = tokens[place[inside]]
        ids[:, 1:-1][is_separator] = self.tokenizer.sep_id
        size = 1 + (inside | is_separator).sum(axis=1)
        ids[np.arange(len(first)), size] = self.tokenizer.sep_id
        mask = np.arange(self.length) <= size[:, None]
        return {
            "input_ids": ids,
            "token_type_ids": np.zeros_like(ids),
            "attention_mask": mask.astype(np.int32),
        }


def _truncation(size_a: np.ndarray, size_b: np.ndarray, budget: int) -> np.ndarray:
    """Returns how many tokens A and B lose, [2, n].

    Google's code drops one token at a time from the longer segment, and from B where they are
    equal.
    """
    excess = np.maximum(size_a + size_b - budget, 0)
    alone = np.minimum(excess, np.abs(size_a - size_b))
    both = excess - alone
    is_longer = size_a > size_b
    return np.stack(
        [np.where(is_longer, alone, 0) + both // 2, np.where(is_longer, 0, alone) + (both + 1) // 2]
    )


def assemble_pairs(
    store: TokenStore, tokenizer: Tokenizer, length: int, first: np.ndarray, count: np.ndarray
) -> dict[str, np.ndarray]:
    """Lays `[CLS] A [SEP] B [SEP]` out, given the first token and the number of tokens, [2, n]."""
    column = np.arange(length)
    count_a, count_b = count[:, :, None]
    separator_a, separator_b = count_a + 1, count_a + count_b + 2
    in_a = (column > 0) & (column < separator_a)
    in_b = (column > separator_a) & (column < separator_b)
    place = np.where(in_a, first[0][:, None] - 1, first[1][:, None] - 1 - separator_a) + column
    ids = store.tokens[np.where(in_a | in_b, place, 0)].astype(np.int32)
    ids[~(in_a | in_b)] = tokenizer.pad_id
    ids[:, 0] = tokenizer.cls_id
    for separator in (separator_a, separator_b):
        np.put_along_axis(ids, separator, tokenizer.sep_id, axis=1)
    return {
        "input_ids": ids,
        "token_type_ids": ((column > separator_a) & (column <= separator_b)).astype(np.int32),
        "attention_mask": (column <= separator_b).astype(np.int32),
    }
