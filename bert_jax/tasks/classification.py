"""Classification and regression of texts and pairs of texts."""

import abc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bert_jax.batches.features import NO_LABEL, Features
from bert_jax.config import DataFiles, ModelConfig
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForSequenceClassification
from bert_jax.tasks import glue, readers
from bert_jax.tasks.base import (
    Example,
    Task,
    build_sequence,
    choose_metrics,
    max_text_tokens,
    softmax,
    truncate,
)
from bert_jax.tasks.readers import Record
from bert_jax.text import builtin
from bert_jax.text.tokenizer import Tokenizer

_MAX_VALUE = float(np.finfo(np.float32).max)


class TextTask(Task):
    """A task whose examples are texts or pairs of texts."""

    model_class = BertForSequenceClassification
    value_form = "a text, a pair of texts, or a dict of the columns of data.text"

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        name, _, split = source.partition("@")
        if name == "builtin":
            for index, (text, area) in enumerate(builtin.docstring_areas(split or "train")):
                yield Record(f"{source} #{index}", {"texts": (text,), "label": area})
        elif self.config.glue:
            yield from glue.read(self.config.glue, source)
        else:
            for record in readers.table(source):
                yield Record(record.where, _fields(record, data))

    def fields_from(self, value: Any, where: str, data: DataFiles) -> Mapping[str, Any] | None:
        if isinstance(value, Mapping):
            record = Record(where, value)
            return (
                glue.fields(self.config.glue, record) if self.config.glue else _fields(record, data)
            )
        texts = (value,) if isinstance(value, str) else value
        if isinstance(texts, Sequence) and 1 <= len(texts) <= 2:
            return {"texts": tuple(texts), "label": None}
        return None

    def make_example(self, record: Record, data: DataFiles) -> Example | None:
        if not record.fields:
            return None
        texts, label = record.fields["texts"], record.fields["label"]
        if not 1 <= len(texts) <= 2:
            raise UserError(f"data.text names {len(texts)} columns; one text or two are classified")
        for text in texts:
            if not isinstance(text, str):
                raise UserError(f"{record.where}: a text is wanted, and there is {text!r}")
            if not text.strip():
                raise UserError(f"{record.where}: the text is empty; fill it in or remove the line")
        label = label.strip() if isinstance(label, str) else label
        known = None if label is None or label == "" else self.read_label(label, record.where)
        return Example(record.fields.get("id"), record.where, texts, known)

    def read_label(self, label: Any, where: str) -> Any:
        """Return the label of an example from the value in its file."""
        if isinstance(label, bool) or not isinstance(label, str | int):
            raise UserError(f"{where}: the label {label!r} is no name; give a text or a number")
        return str(label)

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        encoded = iter(tokenizer.encode([text for example in examples for text in example.texts]))
        features = Features([], [], np.arange(len(examples)), [])
        for example in examples:
            texts = [next(encoded) for _ in example.texts]
            truncated = truncate(texts, max_text_tokens(len(texts), model, max_length))
            sequence, second_start = build_sequence(truncated, tokenizer, model)
            features.sequences.append(sequence)
            features.second_starts.append(second_start)
            features.labels.append(self.target(example))
            features.truncated += sum(map(len, truncated)) < sum(map(len, texts))
        return features

    def target(self, example: Example) -> float:
        """Return the label for the loss: the number of the class, or the value."""
        return NO_LABEL if example.label is None else self.labels.index(example.label)

    @abc.abstractmethod
    def line(self, prediction: Any) -> dict[str, Any]:
        """Return what a file of predictions has of one."""

    def write(self, file: TextIO, examples: Sequence[Example], predictions: Sequence[Any]) -> None:
        for number, (example, prediction) in enumerate(zip(examples, predictions, strict=True)):
            line = {"id": number if example.id is None else example.id, **self.line(prediction)}
            line |= {} if example.label is None else {"label": example.label}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _fields(record: Record, data: DataFiles) -> dict[str, Any]:
    """Return the id, texts and label of a record by the columns that `data` names."""
    columns = [name.strip() for name in data.text.split(",")]
    texts = tuple(record.field(name, "data.text") for name in columns)
    label = record.fields.get(data.label)
    return {"id": record.fields.get("id"), "texts": texts, "label": label}


class Classification(TextTask):
    """Each text or pair has one of several classes. A prediction is the logits, [N]."""

    @property
    def metrics(self) -> Sequence[str]:
        return choose_metrics(self.config.metrics, ("accuracy",), ("accuracy", "f1", "matthews"))

    def example_labels(self, example: Example) -> Sequence[str]:
        return () if example.label is None else (example.label,)

    def collect(self, before: Any, features: Features, index: int, logits: np.ndarray) -> Any:
        return logits.copy()  # a view would keep the batch

    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """Return the accuracy, Matthews's correlation and F1.

        F1 is of the second class if there are two, as in GLUE, and else the mean of all.
        """
        return self.class_scores(examples, [int(logits.argmax()) for logits in predictions])

    def class_scores(
        self, examples: Sequence[Example], predicted: Sequence[int]
    ) -> dict[str, float]:
        """Return the scores of predicted classes, by their numbers."""
        from sklearn import metrics

        actual = [self.labels.index(example.label) for example in examples]
        classes = list(range(len(self.labels)))
        # The mean is over all classes, whether or not these examples have them.
        options: dict[str, Any] = {"average": "macro", "labels": classes, "zero_division": 0}
        if len(classes) == 2:
            options = {"average": "binary", "zero_division": 0}
        varied = len({*actual, *predicted}) > 1
        return {
            "accuracy": float(metrics.accuracy_score(actual, predicted)),
            "f1": float(metrics.f1_score(actual, predicted, **options)),
            "matthews": float(metrics.matthews_corrcoef(actual, predicted)) if varied else 0.0,
        }

    def constant_score(self, examples: Sequence[Example]) -> float:
        constants = ([number] * len(examples) for number in range(len(self.labels)))
        return max(self.mean_score(self.class_scores(examples, each)) for each in constants)

    def to_json(self, example: Example, prediction: Any) -> dict[str, Any]:
        best, probabilities = int(prediction.argmax()), softmax(prediction).tolist()
        return {
            "label": self.labels[best],
            "probability": probabilities[best],
            "probabilities": dict(zip(self.labels, probabilities, strict=True)),
        }

    def line(self, prediction: Any) -> dict[str, Any]:
        best = int(prediction.argmax())
        probability = round(float(softmax(prediction)[best]), 6)
        return {"prediction": self.labels[best], "probability": probability}

    def draw(self, path: Path, examples: Sequence[Example], predictions: Sequence[Any]) -> None:
        """Draw the confusion matrix, as shares of each actual class."""
        # Imported here: it takes longer than reading the data.
        from matplotlib.figure import Figure

        counts = np.zeros((len(self.labels), len(self.labels)), int)
        for example, logits in zip(examples, predictions, strict=True):
            counts[self.labels.index(example.label), logits.argmax()] += 1
        size = 2.5 + 0.55 * len(self.labels)
        figure = Figure(figsize=(size + 1, size), layout="constrained")
        axes = figure.subplots()
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for actual, predicted in np.ndindex(*counts.shape if len(self.labels) <= 30 else (0, 0)):
            shade = "white" if shares[actual, predicted] > 0.5 else "black"
            number = str(counts[actual, predicted])
            axes.text(predicted, actual, number, ha="center", va="center", color=shade)
        ticks = range(len(self.labels))
        axes.set_xticks(ticks, self.labels, rotation=45, ha="right", parse_math=False)
        axes.set_yticks(ticks, self.labels, parse_math=False)
        axes.set(xlabel="predicted", ylabel="actual")
        figure.colorbar(picture, label="share of the actual class")
        temporary = path.with_suffix(".tmp")
        figure.savefig(temporary, format="png", dpi=120)
        os.replace(temporary, path)


class Regression(TextTask):
    """Each text or pair has a number, such as how similar the two are. So has a prediction."""

    num_outputs = 1

    @property
    def metrics(self) -> Sequence[str]:
        known = ("pearson", "spearman")
        return choose_metrics(self.config.metrics, known, known)

    def read_label(self, label: Any, where: str) -> float:
        try:
            value = float("nan") if isinstance(label, bool) else float(label)
        except (TypeError, ValueError, OverflowError):
            value = float("nan")
        if not abs(value) <= _MAX_VALUE:
            raise UserError(f"{where}: the label {label!r} is no number; mend it, or the column")
        return value

    def target(self, example: Example) -> float:
        return float("nan") if example.label is None else example.label

    def collect(self, before: Any, features: Features, index: int, logits: np.ndarray) -> Any:
        return float(logits[0])

    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """Return the MSE and the correlations, which are 0 for constant predictions."""
        from scipy import stats

        actual, predicted = np.array([example.label for example in examples]), np.array(predictions)
        scores = {"mse": float(np.square(actual - predicted).mean())}
        varied = len(set(actual.tolist())) > 1 and len(set(predicted.tolist())) > 1
        measures: dict[str, Any] = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
        for name, correlate in measures.items():
            scores[name] = float(correlate(actual, predicted)[0]) if varied else 0.0
        return scores

    def constant_score(self, examples: Sequence[Example]) -> float:
        return 0.0

    def to_json(self, example: Example, prediction: Any) -> dict[str, Any]:
        return {"value": prediction}

    def line(self, prediction: Any) -> dict[str, Any]:
        return {"prediction": prediction}
