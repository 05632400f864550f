"""Examples as sequences of tokens, which the batches of a task are made of."""

import dataclasses
from typing import Any

import numpy as np

NO_LABEL = -1  # of a sequence or a token that is not scored


@dataclasses.dataclass
class Features:
    """Examples as pieces: a row is what the head scores at once.

    Attributes:
      sequences: int32 pieces of each sequence, special ones included; a row has `choices` of them,
        one after the other.
      second_starts: where the second text of each sequence begins; its length where there is none.
      example_indices: [n], which example each row is of.
      labels: for each row a number, or an array of numbers; for `per_token` one for each piece.
        NO_LABEL, or not a number, where there is none.
      choices: sequences of a row.
      per_token: whether labels are of pieces, and as many as these.
      spans: what a task needs to read its predictions, of each row.
      truncated: how many texts, or words of a sentence, lost pieces to the greatest length.
      skipped: where an example is that has no usable label although it should, and why not.
    """

    sequences: list[np.ndarray]
    second_starts: list[int]
    example_indices: np.ndarray
    labels: list[Any]
    choices: int = 1
    per_token: bool = False
    spans: list[Any] = dataclasses.field(default_factory=list)
    truncated: int = 0
    skipped: list[str] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.example_indices)
