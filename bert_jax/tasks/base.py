"""The interface of a fine-tuning task: examples, features, predictions and scores."""

import abc
import dataclasses
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO

import numpy as np

from bert_jax.batches.features import Features
from bert_jax.config import DataFiles, ModelConfig, TaskConfig
from bert_jax.errors import UserError
from bert_jax.models.heads import TaskModel
from bert_jax.tasks import readers
from bert_jax.tasks.readers import Record
from bert_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Example:
    """What is to be labelled.

    Attributes:
      id: its name in the predictions; None for its index.
      where: file and line, for messages.
      texts: one text or several; the words of a sentence.
      label: of the task's own type; None if it is unknown.
    """

    id: Any
    where: str
    texts: tuple[str, ...]
    label: Any


class Task(abc.ABC):
    """A kind of task.

    Args:
      config: of the task.
      labels: the names of the head's outputs; empty for those of `config`.

    Attributes:
      config: with the labels, and with what `tune` has chosen.
    """

    model_class: ClassVar[type[TaskModel]]
    num_outputs: ClassVar[int | None] = None  # of the head; None: one for each label
    suffix: ClassVar[str] = ".jsonl"  # of a file of predictions
    value_form: ClassVar[str]  # what `example_from` takes, for messages
    known_metrics: Sequence[str]
    default_metrics: Sequence[str]

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()):
        self.config = dataclasses.replace(config, labels=tuple(labels or config.labels))

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the head's outputs, in their order."""
        return self.config.labels

    @property
    def metrics(self) -> Sequence[str]:
        """The scores whose mean chooses the best checkpoint; UserError if `config` has others."""
        unknown = sorted(set(self.config.metrics) - set(self.known_metrics))
        if unknown:
            known = ", ".join(self.known_metrics)
            raise UserError(f"task.metrics has {unknown[0]!r}; this task has {known}")
        return self.config.metrics or self.default_metrics

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        """Yield the records of a file or a TensorFlow dataset, with the fields of a task."""
        for record in readers.table(source):
            yield Record(record.where, self.select_fields(record, data))

    @abc.abstractmethod
    def select_fields(self, record: Record, data: DataFiles) -> Mapping[str, Any]:
        """Return the fields of a task from the columns of a record, by the names in `data`."""

    @abc.abstractmethod
    def make_example(self, record: Record, data: DataFiles) -> Example | None:
        """Return the example of a record of the task; None if the format's own tools skip it.

        Raises:
          UserError: a field is missing, empty or malformed.
        """

    def fields_from(self, value: Any, where: str, data: DataFiles) -> Mapping[str, Any] | None:
        """Return the fields of a task from a Python value; None if it is of another form."""
        is_mapping = isinstance(value, Mapping)
        return self.select_fields(Record(where, value), data) if is_mapping else None

    def example_from(self, value: Any, index: int = 0, data: DataFiles | None = None) -> Example:
        """Return the example of a Python value.

        Args:
          value: of the form that `value_form` says.
          index: among the values, for messages.
          data: its `text` and `label` name the keys of a dict.

        Raises:
          UserError: the value is of another form, or malformed.
        """
        where, data = f"examples[{index}]", data or DataFiles()
        fields = self.fields_from(value, where, data)
        example = self.make_example(Record(where, fields), data) if fields else None
        if example is None:
            raise UserError(f"{where} is {reprlib.repr(value)}; give {self.value_form}")
        return example

    def example_labels(self, example: Example) -> Sequence[str]:
        """Return the labels of an example that are outputs of the head."""
        return ()

    def label_location(self, example: Example, label: str) -> str:
        """Return where a label of an example is, for messages."""
        return example.where

    def label_names(self, examples: Iterable[Example]) -> tuple[str, ...]:
        """Return the names of all labels, in the order of the head's outputs."""
        return tuple(sorted({label for each in examples for label in self.example_labels(each)}))

    @abc.abstractmethod
    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        """Return the features of examples, with at most `max_length` tokens a sequence."""

    def model(self, config: ModelConfig, probe: str = "") -> TaskModel:
        """Return the encoder with the head of this task; `probe` is that of `FinetuneConfig`.

        Raises:
          UserError: the probed layer does not exist, or a label is missing or repeated.
        """
        if not self.num_outputs and not 0 < len(set(self.labels)) == len(self.labels):
            raise UserError(f"task.labels are {list(self.labels)}; name every label once")
        layers = [str(layer) for layer in range(config.num_hidden_layers + 1)]
        if probe not in ("", "mix", *layers):
            raise UserError(f"probe is {probe!r}; it is 'mix', or a layer from 0 to {layers[-1]}")
        return self.model_class(config, self.num_outputs or len(self.labels), probe)

    @abc.abstractmethod
    def collect(self, before: Any, features: Features, index: int, logits: np.ndarray) -> Any:
        """Return the prediction of an example from the logits of a feature.

        Args:
          before: the prediction from other features of the same example; None at first.
          features: of all examples.
          index: of the feature.
          logits: of the feature: [N]; [L, N] of tokens; [2, L] of starts and ends.
        """

    @abc.abstractmethod
    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """Return the metrics of the predictions for examples that all have labels."""

    @abc.abstractmethod
    def constant_score(self, examples: Sequence[Example]) -> float:
        """Return the best mean of `metrics` of any constant prediction."""

    @abc.abstractmethod
    def to_json(self, example: Example, prediction: Any) -> dict[str, Any]:
        """Return a prediction as plain values: what is predicted, and its probability."""

    def draw(  # noqa: B027 - not every kind of task has a picture
        self, path: Path, examples: Sequence[Example], predictions: Sequence[Any]
    ) -> None:
        """Draw a picture of the predictions, if this kind of task has one."""

    @abc.abstractmethod
    def write(self, file: TextIO, examples: Sequence[Example], predictions: Sequence[Any]) -> None:
        """Write the predictions in the format of this kind of task."""

    def writers(self) -> dict[str, Callable[[TextIO, Sequence[Example], Sequence[Any]], None]]:
        """Return a function for each file of predictions, by its suffix."""
        return {self.suffix: self.write}

    def tune(self, scores: Mapping[str, float]) -> None:  # noqa: B027 - few kinds have any
        """Choose settings of `config` by the scores of held-out examples."""

    def mean_score(self, scores: Mapping[str, float]) -> float:
        """Return the mean of `metrics` among the scores."""
        return float(np.mean([scores[name] for name in self.metrics]))

    def rank(self, values: Mapping[str, float]) -> float:
        """Return the mean score of an evaluation, less a little of the loss.

        Scores of small sets are often equal; the loss then chooses the best checkpoint.
        """
        return self.mean_score(values) - 1e-9 * values["loss"]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities over the last dimension."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def build_sequence(
    texts: Sequence[Sequence[int]], tokenizer: Tokenizer, model: ModelConfig
) -> tuple[np.ndarray, int]:
    """Return the sequence of one or two texts of token ids, and where the second starts.

    `[CLS] A [SEP] B [SEP]`; a RoBERTa has two [SEP] between the texts (fairseq's `</s></s>`).
    """
    first, *rest = texts
    ids = [tokenizer.cls_id, *first, tokenizer.sep_id]
    between = [tokenizer.sep_id] * (model.model_type == "roberta")
    second_start = len(ids) + len(between) if rest else len(ids)
    for text in rest:
        ids += [*between, *text, tokenizer.sep_id]
    return np.array(ids, np.int32), second_start


def max_text_tokens(texts: int, model: ModelConfig, max_length: int) -> int:
    """Return how many tokens one or two texts may have in a sequence of `max_length`."""
    return max_length - 1 - texts - (model.model_type == "roberta") * (texts - 1)


def truncate(texts: Sequence[Sequence[int]], size: int) -> list[Sequence[int]]:
    """Truncate one or two texts to `size` tokens in all, the longer one first.

    Source: `_truncate_seq_pair` in google-research/bert `run_classifier.py`.
    """
    if len(texts) == 1:
        return [texts[0][:size]]
    sizes = [len(text) for text in texts]
    excess = max(0, sum(sizes) - size)
    # The longer is truncated to the other's length, then both in turn, the second one first.
    gap = min(excess, abs(sizes[0] - sizes[1]))
    sizes[0 if sizes[0] > sizes[1] else 1] -= gap
    sizes[1] -= (excess - gap + 1) // 2
    sizes[0] -= (excess - gap) // 2
    return [text[:length] for text, length in zip(texts, sizes, strict=True)]
