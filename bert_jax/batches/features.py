"""Fine-tuning examples as token ids and labels, from which batches are made."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

NO_LABEL = -1  # of an example or a token that is not scored


@dataclasses.dataclass
class Features:
    """Token ids and labels; a feature is what the head scores at once, one or more an example."""

    # int32 token ids, special tokens included; `choices` consecutive ones a feature.
    sequences: list[np.ndarray] = dataclasses.field(default_factory=list)
    # Where the second text of each sequence starts; its length if there is none.
    second_starts: list[int] = dataclasses.field(default_factory=list)
    example_indices: list[int] = dataclasses.field(default_factory=list)  # of each feature
    # Of each feature, a number or an array; NO_LABEL, or NaN for a regression, if unknown.
    labels: list[Any] = dataclasses.field(default_factory=list)
    choices: int = 1
    per_token: bool = False  # whether `labels` has a number for each token
    # What a task needs to read the predictions of each feature.
    spans: list[Any] = dataclasses.field(default_factory=list)
    truncated: int = 0  # number of texts, or words of a sentence
    # Where each example is whose label cannot be used, and why.
    skipped: list[str] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.example_indices)

    def add(
        self, index: int, label: Any, sequences: Iterable[tuple[np.ndarray, int]], span: Any = None
    ) -> None:
        """Add a feature of example `index`, each sequence with the start of its second text."""
        self.example_indices.append(index)
        self.labels.append(label)
        self.spans.append(span)
        for sequence, second_start in sequences:
            self.sequences.append(sequence)
            self.second_starts.append(second_start)
