"""Several pairs in a row: rows of one length that are full, where documents are short.

Pairs are put together by their sizes alone: rows with the same sizes in them are counted, not
looked at one by one, so it takes as long for a million pairs as for a thousand (Krell et al. 2021,
"Efficient sequence packing without cross-contamination"). The largest sizes come first, and each
goes where the least room is left.
"""

import dataclasses

import numpy as np

from bert_jax.batches import Batch
from bert_jax.batches.sequences import (
    PLACES,
    SEGMENTS,
    SentencePairs,
    assemble_pairs,
    keyed_generator,
)

NO_PAIR = -1  # as the label of a place that no pair has taken
_TOKENS_A_PAIR = 16  # a row has a place for a pair in so many tokens


def most_pairs(length: int) -> int:
    """Returns how many pairs a row may have at most, T: 32 at length 512."""
    return max(1, length // _TOKENS_A_PAIR)


def fill_rows(counts: np.ndarray, length: int, most: int) -> list[tuple[tuple[int, ...], int]]:
    """Returns the sizes that go into a row together, and in how many rows they do.

    Args:
      counts: [length + 1], the number of pairs of each size.
      length: tokens a row.
      most: pairs of a row.
    """
    # Of rows that are not full, by the room that is left, how many there are of each content.
    open_rows: list[dict[tuple[int, ...], int]] = [{} for _ in range(length + 1)]
    full = []

    def put(content: tuple[int, ...], size: int, each: int, rows: int, room: int) -> None:
        content, room = content + (size,) * each, room - size * each
        if len(content) == most or not room:
            full.append((content, rows))
        else:
            open_rows[room][content] = open_rows[room].get(content, 0) + rows

    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        for room in range(size, length):
            here = open_rows[room]
            while here and left:
                content, rows = here.popitem()
                taken = min(rows, left)
                if rows > taken:
                    here[content] = rows - taken
                each = min(room // size, most - len(content), left // taken)
                put(content, size, each, taken, room)
                left -= taken * each
        each = min(length // size, most)
        for number, rows in ((each, left // each), (left % each, 1)):
            if number and rows:
                put((), size, number, rows, length)
    return full + [row for here in open_rows for row in here.items()]


def pack(sizes: np.ndarray, length: int, most: int, order: np.ndarray) -> np.ndarray:
    """Returns which pairs each row has, [rows, most], -1 where there are no more.

    Args:
      sizes: [n], tokens of each pair.
      length: tokens a row.
      most: pairs of a row.
      order: [n], a permutation, in which pairs of equal size are taken.
    """
    contents = fill_rows(np.bincount(sizes, minlength=length + 1), length, most)
    by_size = order[np.argsort(sizes[order], kind="stable")]
    following = np.searchsorted(sizes[by_size], np.arange(length + 1))
    members = np.full((sum(rows for _, rows in contents), most), -1, np.int32)
    row = 0
    for content, rows in contents:
        for place, size in enumerate(content):
            first = following[size]
            members[row : row + rows, place] = by_size[first : first + rows]
            following[size] += rows
        row += rows
    return members


@dataclasses.dataclass(frozen=True)
class _Packed:
    """Rows of several pairs.

    Attributes:
      members: [n, T] int32, the pairs of each row, -1 where there are no more.
      first, count: [2, m] int64, the first token and the number of tokens of A and B of each pair.
      label: [m] bool.
    """

    members: np.ndarray
    first: np.ndarray
    count: np.ndarray
    label: np.ndarray

    def __len__(self) -> int:
        return len(self.members)

    def take(self, index: np.ndarray) -> "_Packed":
        return dataclasses.replace(self, members=self.members[index])

    def join(self, other: "_Packed") -> "_Packed":
        moved = np.where(other.members < 0, -1, other.members + len(self.label))
        return _Packed(
            np.concatenate([self.members, moved.astype(np.int32)]),
            np.concatenate([self.first, other.first], axis=1),
            np.concatenate([self.count, other.count], axis=1),
            np.concatenate([self.label, other.label]),
        )


@dataclasses.dataclass(frozen=True)
class PackedPairs(SentencePairs):
    """The pairs of `SentencePairs`, several in a row.

    What a walk gives is packed as a whole, and its rows are shuffled then. Every pair is in one
    row, and rows are left out or added as there, to have as many in each group.
    """

    def _rows(self, epoch: int, group: int, walk: int) -> _Packed:
        pairs, key = self._walk(epoch, group, walk), (epoch, group, walk)
        first, count, label = self._segments(pairs, keyed_generator(self.seed, SEGMENTS, *key))
        order = keyed_generator(self.seed, PLACES, *key).permutation(len(pairs))
        sizes = _sizes(count)
        return _Packed(
            pack(sizes, self.length, most_pairs(self.length), order), first, count, label
        )

    def batch(self, index: int, size: int, low: int = 0, high: int | None = None) -> Batch:
        """Returns rows `low` to `high` of the batch of `size` rows that has this index.

        Returns:
          input_ids, token_type_ids: [high - low, L] int32, of one pair after the other.
          attention_mask: the same, the number of the pair in its row from 1 on; 0 is padding.
          position_ids: the same, the place in the pair.
          segment_starts: [high - low, T] int32, where each pair begins; 0 where there are no more.
          next_sentence_label: the same, 1 where B is random, or the order is swapped; -1 where
            there are no more pairs.
          row: [high - low] int32, the row's place in the whole batch.
        """
        places = np.arange(low, size if high is None else high, dtype=np.int32)
        rows = self._chosen(index * size + places.astype(np.int64))
        is_pair = rows.members >= 0
        chosen = rows.members[is_pair]
        pairs = assemble_pairs(
            self.store, self.tokenizer, self.length, rows.first[:, chosen], rows.count[:, chosen]
        )
        is_piece = pairs["attention_mask"] > 0
        sizes = np.zeros(is_pair.shape, np.int32)
        sizes[is_pair] = is_piece.sum(1)
        ends = sizes.cumsum(1, dtype=np.int32)
        # Pieces stand in the same order here and there.
        inside = np.arange(self.length) < ends[:, -1:]

        def moved(value: np.ndarray, filler: int) -> np.ndarray:
            packed = np.full(inside.shape, filler, np.int32)
            packed[inside] = np.broadcast_to(value, is_piece.shape)[is_piece]
            return packed

        label = np.full(is_pair.shape, NO_PAIR, np.int32)
        label[is_pair] = rows.label[chosen]
        return {
            "input_ids": moved(pairs["input_ids"], self.tokenizer.pad_id),
            "token_type_ids": moved(pairs["token_type_ids"], 0),
            "attention_mask": moved(1 + np.nonzero(is_pair)[1][:, None], 0),
            "position_ids": moved(np.arange(self.length), 0),
            "segment_starts": np.where(is_pair, ends - sizes, 0),
            "next_sentence_label": label,
            "index": places,
        }


def padding(pairs: SentencePairs) -> tuple[float, float]:
    """Returns the share of padding in rows of one pair each, and in packed rows."""
    fields = dataclasses.fields(pairs)
    rows = PackedPairs(*(getattr(pairs, field.name) for field in fields))._rows(0, 0, 0)
    sizes = _sizes(rows.count)
    return 1 - sizes.mean() / pairs.length, 1 - sizes.sum() / (len(rows) * pairs.length)


def _sizes(count: np.ndarray) -> np.ndarray:
    """Returns the tokens of each pair, [CLS] and two [SEP] among them, of those of A and B."""
    return count.sum(0) + 3
