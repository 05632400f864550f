"""What every kind of task has: examples, rows of pieces, predictions and scores."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO

import numpy as np
from flax import linen as nn

from bert_jax.batches.features import Features
from bert_jax.config import DataFiles, ModelConfig, TaskConfig
from bert_jax.errors import UserError
from bert_jax.tasks.readers import Record
from bert_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Example:
    """What is to be labelled.

    Attributes:
      id: its name in the predictions.
      where: file and line, for messages.
      texts: one, or several that belong together; the words of a sentence.
      label: of the task's kind; None where it is not known.
    """

    id: Any
    where: str
    texts: tuple[str, ...]
    label: Any


class Task(abc.ABC):
    """A kind of task.

    Args:
      config: what is asked for.
      labels: names of the head's outputs, where they are not those of `config`.

    Attributes:
      config: with the labels, and with what `tune` has chosen.
    """

    suffix: ClassVar[str] = ".jsonl"  # of a file of predictions

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()):
        self.config = dataclasses.replace(config, labels=tuple(labels or config.labels))

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the head's outputs, in their order."""
        return self.config.labels

    @property
    @abc.abstractmethod
    def metrics(self) -> Sequence[str]:
        """The scores whose mean tells which checkpoint is best: those of `config`, or the usual."""

    @abc.abstractmethod
    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        """Yields what a file, or a TensorFlow dataset, holds."""

    @abc.abstractmethod
    def make_example(self, record: Record, data: DataFiles) -> Example | None:
        """Returns a record as an example; None for one that the format's own tools skip.

        Raises:
          UserError: a field is missing, empty or malformed.
        """

    def example_labels(self, example: Example) -> Sequence[str]:
        """Returns the labels of an example that have an output of the head each."""
        return ()

    def label_location(self, example: Example, label: str) -> str:
        """Returns where a label of an example is, for messages."""
        return example.where

    def label_names(self, examples: Iterable[Example]) -> tuple[str, ...]:
        """Returns the names of the labels of some examples, in the order of the head's outputs."""
        return tuple(
            sorted({label for example in examples for label in self.example_labels(example)})
        )

    @abc.abstractmethod
    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        """Returns the rows of some examples, of at most `max_length` pieces a sequence."""

    @abc.abstractmethod
    def model(self, config: ModelConfig, probe: str) -> nn.Module:
        """Returns the encoder with the head of this task; `probe` is that of `FinetuneConfig`."""

    @abc.abstractmethod
    def collect(self, found: list[Any], rows: Features, index: int, logits: np.ndarray) -> None:
        """Takes a row's logits into `found`, the prediction of each example, None at first.

        Args:
          found: what this changes, at the row's example.
          rows: all of them.
          index: of the row.
          logits: of it, without those of padding: [N]; [L, N] for pieces, [2, L] for spans.
        """

    @abc.abstractmethod
    def score(self, examples: Sequence[Example], found: Sequence[Any]) -> dict[str, float]:
        """Returns the metrics of the predictions for examples that all have labels."""

    @abc.abstractmethod
    def constant_score(self, examples: Sequence[Example]) -> float:
        """Returns the best mean of `metrics` that any constant prediction gets."""

    def draw(  # noqa: B027 - not every kind of task has a picture
        self, path: Path, examples: Sequence[Example], found: Sequence[Any]
    ) -> None:
        """Draws a picture of the predictions, for a kind of task that has one."""

    @abc.abstractmethod
    def write(self, file: TextIO, examples: Sequence[Example], found: Sequence[Any]) -> None:
        """Writes the predictions, in the form that this kind of task has."""

    def writers(self) -> dict[str, Callable[[TextIO, Sequence[Example], Sequence[Any]], None]]:
        """Returns what is written of predictions, by the ending of the file."""
        return {self.suffix: self.write}

    def tune(self, scores: Mapping[str, float]) -> None:  # noqa: B027 - few kinds have any
        """Datasets in `config` what is to be chosen on held-out examples, by their scores."""

    def mean_score(self, scores: Mapping[str, float]) -> float:
        """Returns the mean of `metrics` among some scores: what the best checkpoint is best by."""
        return float(np.mean([scores[name] for name in self.metrics]))

    def rank(self, values: Mapping[str, float]) -> float:
        """Returns how good an evaluation is: by its mean score and, where that is equal, its loss.

        Scores of small sets are often equal, and which checkpoint is best must not be left open.
        """
        return self.mean_score(values) - 1e-9 * values["loss"]


def choose_metrics(
    asked: Sequence[str], usual: Sequence[str], known: Sequence[str]
) -> Sequence[str]:
    """Returns the metrics that were asked for, or else the usual ones.

    Raises:
      UserError: one is not known for the task.
    """
    unknown = sorted(set(asked) - set(known))
    if unknown:
        raise UserError(f"task.metrics has {unknown[0]!r}; this task has {', '.join(known)}")
    return asked or usual


def join(
    texts: Sequence[Sequence[int]], tokenizer: Tokenizer, model: ModelConfig
) -> tuple[np.ndarray, int]:
    """Returns one or two texts of pieces as a sequence, and where the second begins.

    `[CLS] A [SEP] B [SEP]`; a RoBERTa's has two [SEP] between them (fairseq's `</s></s>`).
    """
    first, *rest = texts
    pieces = [tokenizer.cls_id, *first, tokenizer.sep_id]
    between = [tokenizer.sep_id] * (model.model_type == "roberta")
    second = len(pieces) + len(between) if rest else len(pieces)
    for text in rest:
        pieces += [*between, *text, tokenizer.sep_id]
    return np.array(pieces, np.int32), second


def room_for(texts: int, model: ModelConfig, max_length: int) -> int:
    """Returns how many pieces of text a sequence of one or two has room for."""
    return max_length - 1 - texts - (model.model_type == "roberta") * (texts - 1)


def shorten(texts: Sequence[Sequence[int]], room: int) -> list[Sequence[int]]:
    """Cuts the ends of one or two texts to `room` pieces together, of the longer one first.

    Source: `_truncate_seq_pair` in google-research/bert `run_classifier.py`.
    """
    sizes = [len(text) for text in texts]
    if len(sizes) == 2:
        over = sum(sizes) - room
        if over > 0:
            # The longer is cut to the other's length, then both in turn, the second one first.
            gap = min(over, abs(sizes[0] - sizes[1]))
            sizes[0 if sizes[0] > sizes[1] else 1] -= gap
            sizes[1] -= (over - gap + 1) // 2
            sizes[0] -= (over - gap) // 2
    else:
        sizes = [min(size, room) for size in sizes]
    return [text[:size] for text, size in zip(texts, sizes, strict=True)]
