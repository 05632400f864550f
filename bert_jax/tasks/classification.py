"""Texts, and pairs of texts, by class or by a number."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from flax import linen as nn

from bert_jax.batches.features import NO_LABEL, Features
from bert_jax.config import DataFiles, ModelConfig
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForSequenceClassification
from bert_jax.tasks import glue
from bert_jax.tasks import readers as records
from bert_jax.tasks.base import Example, Task, choose_metrics, join, room_for, shorten
from bert_jax.tasks.readers import Record
from bert_jax.text import builtin
from bert_jax.text.tokenizer import Tokenizer

_GREATEST = float(np.finfo(np.float32).max)  # of a number to be learned


class TextTask(Task):
    """What is said of a text or of a pair of texts as a whole."""

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        if source.partition("@")[0] == "builtin":
            found = builtin.docstring_areas(source.partition("@")[2] or "train")
            for index, (text, area) in enumerate(found):
                yield Record(f"{source} #{index}", {"texts": (text,), "label": area})
        elif self.config.glue:
            yield from glue.read(self.config.glue, source)
        else:
            columns = [name.strip() for name in data.text.split(",")]
            for record in records.table(source):
                texts = tuple(record.field(name, "data.text") for name in columns)
                fields = {"texts": texts, "label": record.fields.get(data.label)}
                yield Record(record.where, {"id": record.fields.get("id"), **fields})

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
        """Returns the label of an example from what its file has for it."""
        if isinstance(label, bool) or not isinstance(label, str | int):
            raise UserError(f"{where}: the label {label!r} is no name; give a text or a number")
        return str(label)

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        texts = [text for example in examples for text in example.texts]
        pieces = iter(tokenizer.encode(texts))
        rows = Features([], [], np.arange(len(examples)), [])
        for example in examples:
            whole = [next(pieces) for _ in example.texts]
            cut = shorten(whole, room_for(len(whole), model, max_length))
            sequence, second = join(cut, tokenizer, model)
            rows.sequences.append(sequence)
            rows.second_starts.append(second)
            rows.labels.append(self.target(example))
            rows.truncated += sum(map(len, cut)) < sum(map(len, whole))
        return rows

    def target(self, example: Example) -> float:
        """Returns the label as the loss takes it."""
        return NO_LABEL if example.label is None else self.labels.index(example.label)


class Classification(TextTask):
    """Each text has one of several classes."""

    @property
    def metrics(self) -> Sequence[str]:
        return choose_metrics(self.config.metrics, ("accuracy",), ("accuracy", "f1", "matthews"))

    def example_labels(self, example: Example) -> Sequence[str]:
        return () if example.label is None else (example.label,)

    def model(self, config: ModelConfig, probe: str) -> nn.Module:
        return BertForSequenceClassification(config, len(self.labels), probe)

    def collect(self, found: list[Any], rows: Features, index: int, logits: np.ndarray) -> None:
        best = int(logits.argmax())
        found[rows.example_indices[index]] = best, float(1 / np.exp(logits - logits[best]).sum())

    def score(self, examples: Sequence[Example], found: Sequence[Any]) -> dict[str, float]:
        """Returns the accuracy, Matthews's correlation and F1.

        F1 is of the second class where there are two, as in GLUE, and else the mean of all.
        """
        predicted = [best for best, _ in found]
        return self.scores_of(examples, predicted)

    def scores_of(self, examples: Sequence[Example], predicted: Sequence[int]) -> dict[str, float]:
        """Returns the scores of some classes, by their numbers."""
        from sklearn import metrics

        actual = [self.labels.index(example.label) for example in examples]
        classes = list(range(len(self.labels)))
        # Both take the classes that there are, whether or not these examples have them.
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
        each = range(len(self.labels))
        return max(self.mean_score(self.scores_of(examples, [c] * len(examples))) for c in each)

    def write(self, file: TextIO, examples: Sequence[Example], found: Sequence[Any]) -> None:
        for number, (example, (best, probability)) in enumerate(zip(examples, found, strict=True)):
            line = {"id": number if example.id is None else example.id}
            line |= {"prediction": self.labels[best], "probability": round(probability, 6)}
            line |= {} if example.label is None else {"label": example.label}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def draw(self, path: Path, examples: Sequence[Example], found: Sequence[Any]) -> None:
        """Draws the confusion matrix: the share of each class that is taken for each."""
        # Imported here: it takes longer than reading the data.
        from matplotlib.figure import Figure

        counts = np.zeros((len(self.labels), len(self.labels)), int)
        for example, (best, _) in zip(examples, found, strict=True):
            counts[self.labels.index(example.label), best] += 1
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
    """Each text, or pair, has a number, such as how similar the two are."""

    @property
    def metrics(self) -> Sequence[str]:
        known = ("pearson", "spearman")
        return choose_metrics(self.config.metrics, known, known)

    def read_label(self, label: Any, where: str) -> float:
        try:
            value = float("nan") if isinstance(label, bool) else float(label)
        except (TypeError, ValueError, OverflowError):
            value = float("nan")
        if not abs(value) <= _GREATEST:
            raise UserError(f"{where}: the label {label!r} is no number; mend it, or the column")
        return value

    def target(self, example: Example) -> float:
        return float("nan") if example.label is None else example.label

    def model(self, config: ModelConfig, probe: str) -> nn.Module:
        return BertForSequenceClassification(config, 1, probe)

    def collect(self, found: list[Any], rows: Features, index: int, logits: np.ndarray) -> None:
        found[rows.example_indices[index]] = float(logits[0])

    def score(self, examples: Sequence[Example], found: Sequence[Any]) -> dict[str, float]:
        """Returns Pearson's and Spearman's correlation (0 for constant predictions), and MSE."""
        from scipy import stats

        actual, predicted = np.array([example.label for example in examples]), np.array(found)
        scores = {"mse": float(np.square(actual - predicted).mean())}
        varied = len(set(actual.tolist())) > 1 and len(set(predicted.tolist())) > 1
        measures: dict[str, Any] = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
        for name, correlate in measures.items():
            scores[name] = float(correlate(actual, predicted)[0]) if varied else 0.0
        return scores

    def constant_score(self, examples: Sequence[Example]) -> float:
        return 0.0

    def write(self, file: TextIO, examples: Sequence[Example], found: Sequence[Any]) -> None:
        for number, (example, value) in enumerate(zip(examples, found, strict=True)):
            line = {"id": number if example.id is None else example.id, "prediction": value}
            line |= {} if example.label is None else {"label": example.label}
            file.write(json.dumps(line) + "\n")
