"""Several sentence pairs in a sequence: best fit, by the histogram of sizes (Krell et al. 2021)."""

import dataclasses
from typing import NamedTuple

import numpy as np

from bert_jax.batches import Batch
from bert_jax.batches.sentence_pairs import SentencePairs, assemble_pairs
from bert_jax.batches.shuffle import PACKING, SEGMENTS, keyed_generator

NO_PAIR = -1  # the label where a sequence has no further pair
_TOKENS_PER_PAIR = 16
_BLOCKS, _BLOCK = 16, 1 << 16  # of sentences, enough for a share of all


def max_pairs(length: int) -> int:
    """Return the largest number of pairs in a sequence, T: 32 at length 512."""
    return max(1, length // _TOKENS_PER_PAIR)


def pack_sizes(counts: np.ndarray, length: int, limit: int) -> list[tuple[tuple[int, ...], int]]:
    """Return, for each kind of sequence, the sizes of its pairs and how many there are of it."""
    # For each remaining room, the number of sequences of each content that are not full.
    unfinished: list[dict[tuple[int, ...], int]] = [{} for _ in range(length + 1)]
    full = []

    def add(content: tuple[int, ...], size: int, repeat: int, number: int, room: int) -> None:
        content, room = content + (size,) * repeat, room - size * repeat
        if len(content) == limit or not room:
            full.append((content, number))
        else:
            unfinished[room][content] = unfinished[room].get(content, 0) + number

    for size in np.flatnonzero(counts)[::-1].tolist():
        remaining = int(counts[size])
        for room in range(size, length):
            sequences = unfinished[room]
            while sequences and remaining:
                content, available = sequences.popitem()
                number = min(available, remaining)
                if available > number:
                    sequences[content] = available - number
                repeat = min(room // size, limit - len(content), remaining // number)
                add(content, size, repeat, number, room)
                remaining -= number * repeat
        repeat = min(length // size, limit)
        for times, number in ((repeat, remaining // repeat), (remaining % repeat, 1)):
            if times and number:
                add((), size, times, number, length)
    return full + [item for sequences in unfinished for item in sequences.items()]


def pack(sizes: np.ndarray, length: int, limit: int, order: np.ndarray) -> np.ndarray:
    """Return the pairs of each sequence, [sequences, limit], -1 where there are no more."""
    contents = pack_sizes(np.bincount(sizes, minlength=length + 1), length, limit)
    by_size = order[np.argsort(sizes[order], kind="stable")]
    following = np.searchsorted(sizes[by_size], np.arange(length + 1))
    members = np.full((sum(number for _, number in contents), limit), -1, np.int32)
    start = 0
    for content, number in contents:
        for slot, size in enumerate(content):
            first = following[size]
            members[start : start + number, slot] = by_size[first : first + number]
            following[size] += number
        start += number
    return members


class PackedPairs(SentencePairs):
    """The pairs of `SentencePairs`, several in a sequence; each is in one sequence."""

    def _draw_sequences(self, epoch: int, group: int, draw: int) -> np.ndarray:
        """Return records of T pairs: first token and number of tokens of A and B, and label."""
        key = (epoch, group, draw)
        pairs = super()._draw_sequences(*key)
        first, count, label = self._segments(pairs, keyed_generator(self.seed, SEGMENTS, *key))
        order = keyed_generator(self.seed, PACKING, *key).permutation(len(pairs))
        members = pack(_sizes(count.T), self.length, max_pairs(self.length), order)
        fields = [("first", np.int64, 2), ("count", np.int32, 2), ("label", np.int8)]
        sequences = np.empty(members.shape, fields)
        sequences["first"], sequences["count"] = first.T[members], count.T[members]
        sequences["label"] = np.where(members < 0, NO_PAIR, label[members])
        return sequences

    def draw(self, number: int, size: int, indices: np.ndarray, skipped: int = 0) -> np.ndarray:
        """Return the records of `_draw_sequences` at some indices of a batch."""
        return self._batch_sequences(skipped + number * size, size)[indices]

    def assemble(self, drawn: np.ndarray) -> Batch:
        """Return the arrays of `SentencePairs`, and those by which pairs are told apart."""
        is_pair = drawn["label"] != NO_PAIR
        first, count = (drawn[name][is_pair].T for name in ("first", "count"))
        pairs = assemble_pairs(self.store, self.tokenizer, self.length, first, count)
        is_token = pairs["attention_mask"] > 0
        sizes = np.where(is_pair, _sizes(drawn["count"]), 0).astype(np.int32)
        ends = sizes.cumsum(1, dtype=np.int32)
        # Tokens have the same order in `pairs` and in the packed arrays.
        inside = np.arange(self.length) < ends[:, -1:]

        def packed(value: np.ndarray, filler: int) -> np.ndarray:
            array = np.full(inside.shape, filler, np.int32)
            array[inside] = np.broadcast_to(value, is_token.shape)[is_token]
            return array

        return {
            "input_ids": packed(pairs["input_ids"], self.tokenizer.pad_id),
            "token_type_ids": packed(pairs["token_type_ids"], 0),
            # The segment ids: the pair's number in its sequence, from 1; 0 is padding.
            "attention_mask": packed(1 + np.nonzero(is_pair)[1][:, None], 0),
            "position_ids": packed(np.arange(self.length), 0),  # in the pair
            # [n, T], the first position of each pair, and its label; 0 and -1 for no further pair.
            "segment_starts": np.where(is_pair, ends - sizes, 0),
            "next_sentence_label": drawn["label"].astype(np.int32),
        }


class PairStatistics(NamedTuple):
    """What pairs of a length make of a text.

    Attributes:
      padding: its share of the positions.
      packed_padding: the share of padding with packing.
      majority: the share of the more frequent label.
      cut: the share of the tokens that no pair can have, as their sentence is too long.
    """

    padding: float
    packed_padding: float
    majority: float
    cut: float


def statistics(pairs: SentencePairs) -> PairStatistics:
    """Return the statistics of the first group of sequences."""
    fields = {field.name: getattr(pairs, field.name) for field in dataclasses.fields(pairs)}
    sequences = PackedPairs(**fields)._draw_sequences(0, 0, 0)
    is_pair = sequences["label"] != NO_PAIR
    sizes, labels = _sizes(sequences["count"])[is_pair], sequences["label"][is_pair]
    offsets = pairs.store.sentences
    starts = np.linspace(0, max(0, len(offsets) - _BLOCK), _BLOCKS).astype(np.int64)
    sentences = np.concatenate([np.diff(offsets[s : s + _BLOCK]) for s in np.unique(starts)])
    return PairStatistics(
        1 - sizes.mean() / pairs.length,
        1 - sizes.sum() / (len(sequences) * pairs.length),
        max(labels.mean(), 1 - labels.mean()),
        np.maximum(sentences - (pairs.length - 3), 0).sum() / max(1, sentences.sum()),
    )


def _sizes(count: np.ndarray) -> np.ndarray:
    """Return the tokens of each pair with [CLS] and two [SEP], from those of A and B, [..., 2]."""
    return count.sum(-1) + 3
