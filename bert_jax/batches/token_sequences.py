"""Sequences of token ids in memory, and the arrays that a model reads of them."""

from collections.abc import Sequence

import numpy as np

# The index that stands for no sequence or example: all padding, which no loss or score counts.
FILL = -1
_OF_PACKED = ("position_ids", "segment_starts")  # what packed sequences alone have


class Ragged:
    """Arrays of different lengths, stored one after the other."""

    def __init__(self, arrays: Sequence[Sequence[int] | np.ndarray]):
        self.sizes = np.array([len(array) for array in arrays], np.int64)  # [n]
        self._starts = np.cumsum(self.sizes) - self.sizes
        self._values = np.concatenate(arrays) if len(arrays) else np.zeros(0, np.int32)

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the values of the arrays at some indices, concatenated, [m].

        Also, for each value, the position in `indices` of its array, and its own in that array.
        """
        sizes = self.sizes[indices]
        owners = np.repeat(np.arange(len(indices)), sizes)
        positions = np.arange(len(owners)) - (np.cumsum(sizes) - sizes)[owners]
        return self._values[self._starts[indices][owners] + positions], owners, positions


class TokenSequences:
    """Sequences of token ids, each of one text or of two.

    Attributes:
      lengths: the number of tokens of each sequence, [n].
    """

    def __init__(
        self,
        token_ids: Sequence[Sequence[int] | np.ndarray],
        second_starts: Sequence[int],
        *,
        pad_id: int,
        num_types: int,
        roles: Sequence[np.ndarray] = (),
    ):
        """Store the sequences.

        Args:
          token_ids: of each sequence, with special tokens.
          second_starts: of each sequence, where its second text starts; its length if it has none.
          pad_id: of the tokenizer.
          num_types: the number of the model's token types; 1 if it does not tell texts apart.
          roles: of each token, where the model tells tokens apart by numbers of its own, such as
            those of late interaction that have no vector.
        """
        self._token_ids = Ragged(token_ids)
        self._second_starts = np.array(second_starts, np.int64)
        self._roles = Ragged(roles) if len(roles) else None
        self._pad_id, self._num_types = pad_id, num_types
        self.lengths = self._token_ids.sizes

    def padded(self, indices: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Return the sequences of some indices, [B], padded to `length`; FILL is padding alone.

        That is `input_ids`, `token_type_ids` and `attention_mask`, and where tokens have roles
        `token_roles`, [B, length] int32.
        """
        packed = self.packed(indices[:, None], length)
        return {name: packed[name] for name in packed if name not in _OF_PACKED}

    def packed(self, indices: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Pack the sequences of each row of `indices`, [B, T], into one of `length` tokens.

        Besides the arrays of `padded`, return `position_ids`, [B, length], and `segment_starts`,
        [B, T]. `attention_mask` has the number of the segment of each token, from 1.
        """
        sizes = np.where(indices == FILL, 0, self.lengths[indices])
        starts = np.where(indices == FILL, 0, np.cumsum(sizes, axis=1) - sizes)
        rows, columns = np.nonzero(indices != FILL)
        sequences = indices[rows, columns]
        tokens, owners, positions = self._token_ids.take(sequences)
        where = rows[owners], starts[rows, columns][owners] + positions

        def write(values: np.ndarray, empty: int = 0) -> np.ndarray:
            array = np.full((len(indices), length), empty, np.int32)
            array[where] = values
            return array

        is_second = positions >= self._second_starts[sequences][owners]
        batch = {
            "input_ids": write(tokens, self._pad_id),
            "token_type_ids": write(is_second if self._num_types > 1 else np.zeros_like(tokens)),
            "attention_mask": write(1 + columns[owners]),
            "position_ids": write(positions),
            "segment_starts": starts.astype(np.int32),
        }
        if self._roles:
            batch["token_roles"] = write(self._roles.take(sequences)[0])
        return batch
