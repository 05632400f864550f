"""Classification and regression of texts and pairs of texts."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import softmax

from bert_jax import console
from bert_jax.batches.buckets import NO_LABEL, Features
from bert_jax.config import DataFiles, ModelConfig
from bert_jax.console import counted
from bert_jax.errors import UserError, refuse
from bert_jax.models.heads import SequenceScores, TaskModel
from bert_jax.objectives.labels import RegressionObjective
from bert_jax.retrieval import bm25
from bert_jax.tasks import glue, readers
from bert_jax.tasks.base import Task
from bert_jax.tasks.examples import Example
from bert_jax.tasks.foreign import read_labels
from bert_jax.tasks.readers import Record
from bert_jax.tasks.sequences import build_sequence, max_text_tokens, text_windows, truncate
from bert_jax.text import builtin
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.curves import save_figure
from bert_jax.training.objective import PredictionObjective

_NUMBER = "LABEL_0"  # the default name of a single output in `transformers`
_ROUNDING = 5e-6  # of the largest prediction: that of float32, over a model's layers
_MAX_VALUE = float(np.finfo(np.float32).max)
_MAX_INCHES, _MAX_NAMED = 36.0, 60  # of the confusion matrix, and labels with a name there
_LONGEST_SHOWN = 25  # characters of a name there
_MAX_CONSTANT = 20  # classes of a constant prediction that are tried, the most frequent
_LEVELS = np.linspace(0.1, 0.9, 9)  # quantiles of the windows' confidence that are tried


class TextTask(Task):
    """A task whose examples are texts or pairs of texts."""

    model_class = SequenceScores
    transformers_class = "ForSequenceClassification"
    pipeline_tag = "text-classification"
    value_form = "a text, a pair of texts, or a dict of the columns of data.text"
    empty_is_missing: ClassVar[bool] = True  # an example with an empty label is not labelled

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        if split := builtin.split_of(source):
            for index, (text, area) in enumerate(builtin.docstring_areas(split)):
                yield Record(f"{source} #{index}", {"texts": (text,), "label": area})
        elif self.config.glue:
            yield from glue.read(self.config.glue, source, data)
        else:
            yield from super().read_records(source, data)

    def select_fields(self, record: Record, data: DataFiles) -> Mapping[str, Any]:
        if self.config.glue:
            return glue.fields(self.config.glue, record, data)
        columns = readers.text_columns(data)
        texts = tuple(record.field(name, "data.text") for name in columns)
        values = record.fields
        label = values.get(data.label)
        fields = {"id": values.get("id"), "columns": columns, "texts": texts, "label": label}
        return fields | {"row": record}

    def plain_fields(self, value: Any) -> Mapping[str, Any] | None:
        texts = (value,) if isinstance(value, str) else value
        is_text = isinstance(texts, Sequence) and 1 <= len(texts) <= 2
        return {"texts": tuple(texts), "label": None} if is_text else None

    def value_of_texts(self, texts: Sequence[str], data: DataFiles) -> Any:
        columns = glue.text_columns(self.config, data)
        return texts if not columns or len(columns) == len(texts) else None

    def example_code(self, data: DataFiles) -> tuple[str, str]:
        if len(glue.text_columns(self.config, data)) != 2:
            return super().example_code(data)
        return '("A text.", "Another.")', '"A text.", "Another."'

    def example_from(self, value: Any, index: int | str, data: DataFiles) -> Example:
        example = super().example_from(value, index, data)
        columns = glue.text_columns(self.config, data)
        if columns and len(example.texts) != len(columns):
            names = " and ".join(columns)
            raise UserError(
                f"{example.where} has {counted(len(example.texts), 'text')} and the model was "
                f"trained on {len(columns)} ({names}); give as many (a tab in a line separates two)"
            )
        return example

    def make_example(self, record: Record) -> Example | None:
        if not record.fields:
            return None
        texts, label, where = record.fields["texts"], record.fields["label"], record.where
        if not 1 <= len(texts) <= 2:
            raise UserError(f"data.text names {len(texts)} columns; one text or two are classified")
        readers.check_texts(texts, where)
        is_empty = isinstance(label, str) and not label.strip()
        is_missing = label is None or (is_empty and self.empty_is_missing)
        label = None if is_missing else self.read_label(label, where)
        return Example(record.fields.get("id"), where, texts, label)

    def read_label(self, label: Any, where: str) -> Any:
        """Return the label of an example from the value in its file."""
        label = readers.whole(label)
        is_number = isinstance(label, float | Decimal) and math.isfinite(readers.to_number(label))
        # True is "True", as pandas writes it to a .csv.
        if not is_number and not isinstance(label, str | int):
            raise UserError(f"{where}: the label {label!r} is no name; give a text or a number")
        return str(label).strip()

    def sequence_texts(self, example: Example) -> list[tuple[str, ...]]:
        """Return the one or two texts of each sequence of an example."""
        return [example.texts]

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        groups = [self.sequence_texts(example) for example in examples]
        encoded = iter(tokenizer.encode([t for group in groups for texts in group for t in texts]))
        features = Features(choices=len(groups[0]) if groups else 1)
        for index, (example, group) in enumerate(zip(examples, groups, strict=True)):
            refuse(
                len(group) != features.choices,
                f"{example.where} has {len(group)} choices, and the first example "
                f"{features.choices}",
                fix="give each as many",
            )
            choices, is_truncated = [], False
            for texts in group:
                ids = [next(encoded) for _ in texts]
                truncated = truncate(ids, max_text_tokens(len(ids), model, max_length))
                is_truncated |= sum(map(len, truncated)) < sum(map(len, ids))
                windows = self._windows(truncated, model, example.where)
                choices.append([build_sequence(each, tokenizer, model) for each in windows])
            # Several choices have one window each.
            features_of_example = list(zip(*choices, strict=True))
            for number, sequences in enumerate(features_of_example):
                span = number, len(features_of_example)
                features.add(index, self.target(example), sequences, note=span)
            features.truncated += is_truncated
            features.windowed += len(features_of_example) > 1
        return features

    def _windows(
        self, texts: list[list[int]], model: ModelConfig, where: str
    ) -> Sequence[Sequence[Sequence[int]]]:
        """Return the texts of each window: as they are where the model has positions for them."""
        room = max_text_tokens(len(texts), model, model.max_position_embeddings)
        if sum(map(len, texts)) <= room:
            return [texts]
        if len(texts) > 1:
            raise UserError(
                f"{where}: a pair of texts has more tokens than the model's "
                f"{model.max_position_embeddings} positions, and only single texts are read in "
                "windows; shorten it, or fine-tune with a lower data.max_length, which truncates"
            )
        return [[window] for window in text_windows(texts[0], room, self.config.stride)]

    def collect(self, before: Any, features: Features, index: int, logits: np.ndarray) -> Any:
        """Return the logits of an example: the mean over the windows of its text."""
        _, count = features.notes[index]
        return logits.copy() if count == 1 else (0 if before is None else before) + logits / count

    def target(self, example: Example) -> float | np.ndarray:
        """Return the label for the loss: the number of the class, or the value."""
        return NO_LABEL if example.label is None else self.labels.index(example.label)


class Classification(TextTask):
    """Each text or pair has one of several classes.

    A prediction is the logits, [N]; of a text that is read in windows, those of each, [W, N].
    """

    default_metrics = ("accuracy",)
    known_metrics = ("accuracy", "f1", "matthews")
    min_labels = 2
    has_windows = True
    has_deciding_windows = True
    problem_type = "single_label_classification"

    @classmethod
    def transformers_labels(cls, values: Mapping[str, Any], where: str) -> Sequence[str] | None:
        labels = super().transformers_labels(values, where)
        is_regression = not values.get("problem_type") and labels is not None and len(labels) == 1
        return None if is_regression else labels

    def collect(self, before: Any, features: Features, index: int, logits: np.ndarray) -> Any:
        """Return the logits of an example, or of each window so far."""
        number, count = features.notes[index]
        if count == 1:
            return logits.copy()
        windows = np.zeros((count, *logits.shape), logits.dtype) if before is None else before
        windows[number] = logits
        return windows

    def answer(self, prediction: np.ndarray) -> np.ndarray:
        """Return the logits of a text, [N]: of its first confident window, or else the mean."""
        if prediction.ndim == 1:
            return prediction
        if 0 < self.config.window_confidence < 1:
            is_confident = _confidence(prediction) >= self.config.window_confidence
            if is_confident.any():
                return prediction[is_confident.argmax()]
        return prediction.mean(0)

    def tune(
        self, examples: Sequence[Example], predictions: Sequence[Any], scores: Mapping[str, float]
    ) -> None:
        """Choose the confidence from which a window decides alone.

        It has to be better than the mean by more than chance: two standard errors of a share.
        """
        windows = [each for each in predictions if each.ndim > 1]
        if self.config.window_confidence or not windows:
            return
        levels = np.quantile(np.concatenate([_confidence(each) for each in windows]), _LEVELS)
        tried = {}
        for level in (1.0, *levels.tolist()):
            self.config = dataclasses.replace(self.config, window_confidence=level)
            tried[level] = self.mean_score(self.score(examples, predictions))
        best, mean = max(tried, key=lambda level: tried[level]), tried[1.0]
        chance = 2 * math.sqrt(max(0.0, mean * (1 - mean)) / len(examples))
        level = best if tried[best] - mean > chance else 1.0
        self.config = dataclasses.replace(self.config, window_confidence=level)

    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """Return accuracy, Matthews's correlation and F1 of the second class of two, or all."""
        from sklearn import metrics

        actual = [self.labels.index(example.label) for example in examples]
        predicted = [int(self.answer(each).argmax()) for each in predictions]
        # Of more than two, the mean over the classes that are actual or predicted.
        average: Any = "binary" if len(self.labels) == 2 else "macro"
        options: dict[str, Any] = {"average": average, "zero_division": 0}
        varied = len({*actual, *predicted}) > 1
        scores = {
            "accuracy": float(metrics.accuracy_score(actual, predicted)),
            "f1": float(metrics.f1_score(actual, predicted, **options)),
            "matthews": float(metrics.matthews_corrcoef(actual, predicted)) if varied else 0.0,
        }
        return {name: scores[name] for name in self.known_metrics}

    @console.working("fitting the TF-IDF baseline")
    def baselines(
        self, train: Sequence[Example], held_out: Sequence[Example]
    ) -> dict[str, dict[str, float]]:
        """Return the scores of logistic regression on TF-IDF of words and pairs of words."""
        from sklearn.linear_model import LogisticRegression

        known, asked = tfidf(train, held_out)
        model = LogisticRegression(max_iter=1000).fit(known, [each.label for each in train])
        logits, labels = np.eye(len(self.labels)), self.labels
        predictions = [logits[labels.index(label)] for label in model.predict(asked)]
        return {"TF-IDF, logistic regression": self.score(held_out, predictions)}

    def constant_score(self, examples: Sequence[Example]) -> float:
        counts = np.bincount(
            [self.labels.index(example.label) for example in examples], minlength=len(self.labels)
        )
        frequent = np.argsort(-counts, kind="stable")[:_MAX_CONSTANT]
        constants = ([logits] * len(examples) for logits in np.eye(len(self.labels))[frequent])
        return max(self.mean_score(self.score(examples, each)) for each in constants)

    def to_json(self, example: Example, prediction: Any) -> dict[str, Any]:
        logits = self.answer(prediction)
        best, probabilities = int(logits.argmax()), softmax(logits).tolist()
        return {
            "label": self.labels[best],
            "probability": probabilities[best],
            "probabilities": dict(zip(self.labels, probabilities, strict=True)),
        }

    def draw(self, path: Path, examples: Sequence[Example], predictions: Sequence[Any]) -> None:
        """Draw the confusion matrix, as shares of each actual class, whose examples are counted."""
        # Imported here: it takes longer than reading the data.
        from matplotlib.figure import Figure
        from sklearn.metrics import ConfusionMatrixDisplay

        actual = [self.labels.index(example.label) for example in examples]
        counts = np.bincount(actual, minlength=len(self.labels))
        shown = [_shown(label) for label in self.labels]
        size = min(3 + 0.55 * len(self.labels), _MAX_INCHES)
        figure = Figure(figsize=(size + 1, size), layout="constrained")
        ConfusionMatrixDisplay.from_predictions(
            actual,
            [int(self.answer(each).argmax()) for each in predictions],
            labels=range(len(self.labels)),
            display_labels=shown,
            normalize="true",
            include_values=len(self.labels) <= 30,
            values_format=".0%",
            xticks_rotation="vertical",
            cmap="Blues",
            im_kw={"vmin": 0, "vmax": 1},
            ax=figure.subplots(),
        )
        counted = [f"{label} ({count:,})" for label, count in zip(shown, counts, strict=True)]
        figure.axes[0].set_yticklabels(counted)
        if len(self.labels) > _MAX_NAMED:
            figure.axes[0].set(xticks=[], yticks=[])
        save_figure(figure, path)


def tfidf(train: Sequence[Example], held_out: Sequence[Example]) -> tuple[Any, Any]:
    """Return the TF-IDF of the words and pairs of words of examples."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    options: dict[str, Any] = {"analyzer": bm25.words_and_pairs}
    vectorizer = TfidfVectorizer(sublinear_tf=True, **options)
    texts, asked = ([" ".join(each.texts) for each in part] for part in (train, held_out))
    return vectorizer.fit_transform(texts), vectorizer.transform(asked)


def _shown(label: str) -> str:
    """Return a label as Matplotlib shows it beside a matrix: without formulas, and not too long."""
    text = label if len(label) <= _LONGEST_SHOWN else f"{label[:_LONGEST_SHOWN]}…"
    return text.replace("$", r"\$")


class Regression(TextTask):
    """Each text or pair has a number, such as a similarity. So has a prediction."""

    num_outputs = 1
    has_windows = True
    default_metrics = known_metrics = ("pearson", "spearman")
    problem_type = "regression"

    def transformers_config(self) -> dict[str, Any]:
        (name,) = self.labels or (_NUMBER,)
        return super().transformers_config() | {"id2label": {0: name}, "label2id": {name: 0}}

    @classmethod
    def transformers_labels(cls, values: Mapping[str, Any], where: str) -> Sequence[str] | None:
        """Return the name of the number, for an export; none where it is the default."""
        names = read_labels(values, where)  # a text may have several numbers
        is_score = "sentence_transformers" in values  # of a `CrossEncoder`, which is a reranker
        if len(names) > 1 or is_score or super().transformers_labels(values, where) is None:
            return None
        return () if names == (_NUMBER,) else names

    def objective(self, model: TaskModel) -> PredictionObjective:
        return RegressionObjective(model)

    def read_label(self, label: Any, where: str) -> float:
        value = readers.to_number(label)
        if not abs(value) <= _MAX_VALUE:
            raise UserError(f"{where}: the label {label!r} is no number; correct it, or the column")
        return value

    def target(self, example: Example) -> float:
        return float("nan") if example.label is None else example.label

    def collect(self, before: Any, features: Features, index: int, logits: np.ndarray) -> Any:
        return float(np.ravel(super().collect(before, features, index, logits))[0])

    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """Return the MSE and the correlations, which are 0 for constant predictions."""
        actual, predicted = np.array([example.label for example in examples]), np.array(predictions)
        scores = {"mse": float(np.square(actual - predicted).mean())}
        return scores | correlations(actual, predicted)

    def constant_score(self, examples: Sequence[Example]) -> float:
        return 0.0

    def to_json(self, example: Example, prediction: Any) -> dict[str, Any]:
        return {"value": prediction}


def _confidence(logits: np.ndarray) -> np.ndarray:
    """Return the probability of the best class of each window, [W], from logits [W, N]."""
    return softmax(logits, axis=1).max(1)


def correlations(actual: ArrayLike, predicted: ArrayLike) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation, 0 where one side is constant.

    What a model predicts is constant if it differs by no more than rounding.
    """
    from scipy import stats

    rounding = _ROUNDING * np.abs(predicted).max()
    varied = len(np.unique(actual)) > 1 and not np.ptp(predicted) <= rounding  # NaN stays
    measures: dict[str, Any] = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
    return {
        name: float(correlate(actual, predicted)[0]) if varied else 0.0
        for name, correlate in measures.items()
    }
