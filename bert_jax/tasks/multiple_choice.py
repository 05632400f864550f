"""Multiple choice: which of several endings follows a context, as in SWAG."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.batches.features import Features
from bert_jax.config import DataFiles, ModelConfig
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForMultipleChoice
from bert_jax.tasks import readers
from bert_jax.tasks.base import (
    Example,
    build_sequence,
    choose_metrics,
    max_text_tokens,
    softmax,
    truncate,
)
from bert_jax.tasks.classification import Classification
from bert_jax.tasks.readers import Record
from bert_jax.text.tokenizer import Tokenizer


class MultipleChoice(Classification):
    """A class is the number of a choice, from 0. Source: Devlin et al. 2019, section 4.4.

    `data.text` names the columns: the context, the start of every choice, and each choice.
    """

    model_class = BertForMultipleChoice
    num_outputs = 1
    value_form = "a dict with context, choices and perhaps start, or the columns of data.text"

    @property
    def metrics(self) -> Sequence[str]:
        return choose_metrics(self.config.metrics, ("accuracy",), ("accuracy",))

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        for record in readers.table(source):
            yield Record(record.where, _fields(record, data))

    def fields_from(self, value: Any, where: str, data: DataFiles) -> Mapping[str, Any] | None:
        if not isinstance(value, Mapping):
            return None
        if "choices" not in value:
            return _fields(Record(where, value), data)
        choices = value["choices"]
        if not isinstance(choices, Sequence) or isinstance(choices, str):
            return None
        texts = {"context": value.get("context"), "start": value.get("start", "")}
        return {"texts": texts | {f"choices[{i}]": text for i, text in enumerate(choices)}}

    def make_example(self, record: Record, data: DataFiles) -> Example | None:
        texts, label = record.fields["texts"], record.fields.get("label")
        if len(texts) < 4:
            raise UserError(
                f"{record.where} has {len(texts)} texts; data.text names a context, the start of "
                "the choices, and two choices or more"
            )
        for position, (name, text) in enumerate(texts.items()):
            if not isinstance(text, str) or (position != 1 and not text.strip()):
                raise UserError(f"{record.where}: {name} is empty; fill it in or remove the line")
        label = None if label in ("", "-1", -1) else label  # Hugging Face's test set has -1
        choices = tuple(str(number) for number in range(len(texts) - 2))
        if self.labels and self.labels != choices:
            raise UserError(
                f"{record.where} has {len(choices)} choices, and the head's labels are "
                f"{', '.join(self.labels)}; they must be {', '.join(choices)}"
            )
        if label is not None and str(label) not in choices:
            raise UserError(
                f"{record.where}: the label {label!r} is none of the {len(choices)} choices, which "
                f"are 0 to {len(choices) - 1}"
            )
        known = None if label is None else str(label)
        return Example(record.fields.get("id"), record.where, tuple(texts.values()), known)

    def label_names(self, examples: Iterable[Example]) -> tuple[str, ...]:
        return tuple(str(number) for number in range(len(next(iter(examples)).texts) - 2))

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        choices = len(self.labels)
        features = Features([], [], np.arange(len(examples)), [], choices=choices)
        texts = (
            text
            for context, start, *ends in (example.texts for example in examples)
            for text in (context, *(f"{start} {end}".strip() for end in ends))
        )
        encoded = iter(tokenizer.encode(list(texts)))
        size = max_text_tokens(2, model, max_length)
        for example in examples:
            context, is_truncated = next(encoded), False
            for _ in range(choices):
                pair = [context, next(encoded)]
                truncated = truncate(pair, size)
                is_truncated |= sum(map(len, truncated)) < sum(map(len, pair))
                sequence, second_start = build_sequence(truncated, tokenizer, model)
                features.sequences.append(sequence)
                features.second_starts.append(second_start)
            features.labels.append(self.target(example))
            features.truncated += is_truncated
        return features

    def class_scores(
        self, examples: Sequence[Example], predicted: Sequence[int]
    ) -> dict[str, float]:
        right = [int(e.label) == choice for e, choice in zip(examples, predicted, strict=True)]
        return {"accuracy": float(np.mean(right))}

    def to_json(self, example: Example, prediction: Any) -> dict[str, Any]:
        best, probabilities = int(prediction.argmax()), softmax(prediction).tolist()
        return {"choice": best, "probability": probabilities[best], "probabilities": probabilities}

    def draw(self, path: Path, examples: Sequence[Example], predictions: Sequence[Any]) -> None:
        """Draw nothing: a confusion matrix of choices says little."""


def _fields(record: Record, data: DataFiles) -> dict[str, Any]:
    """Return the id, texts by column, and label of a record."""
    columns = [name.strip() for name in data.text.split(",")]
    texts = {name: record.field(name, "data.text") for name in columns}
    return {
        "id": record.fields.get("id"),
        "texts": texts,
        "label": record.fields.get(data.label),
    }
