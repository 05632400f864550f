"""Classification of texts that have any number of labels, or none."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import expit, logit

from bert_jax import console
from bert_jax.config import FinetuneConfig, TaskConfig
from bert_jax.config.ranges import POSITIVE_SHARE
from bert_jax.config.settings import setting
from bert_jax.errors import UserError, refuse
from bert_jax.models.heads import TaskModel
from bert_jax.objectives.labels import BinaryObjective
from bert_jax.tasks.classification import TextTask, tfidf
from bert_jax.tasks.examples import Example
from bert_jax.training.objective import PredictionObjective

_MIN_POSITIVE = 10  # held-out examples of a label, from which it has a threshold of its own
_MAX_CONSTANT = 20  # labels of a constant prediction that is tried, or else all


@dataclasses.dataclass(slots=True)
class MultiLabelConfig(TaskConfig):
    """Settings of multi-label classification.

    >>> MultiLabelConfig(labels=("drama", "western")).separator
    ','
    """

    kind: str = setting("multi_label_classification", "kind of task")
    separator: str = setting(",", "what is between the labels of an example in a table")
    thresholds: tuple[float, ...] = setting(
        (),
        "probability from which each label is predicted; none: tuned on held-out examples",
        POSITIVE_SHARE,
    )


class MultiLabelClassification(TextTask):
    """Each text or pair has any number of labels. A prediction is the logits, [N].

    In a table the labels of an example are separated by `task.separator`, in JSON they are a list
    or such a text. An empty field says that no label applies; an example without the field is not
    labelled.
    """

    settings = MultiLabelConfig
    config: MultiLabelConfig
    min_labels = 1
    has_windows = True
    default_metrics = ("mean_average_precision",)
    known_metrics = ("micro_f1", "macro_f1", "mean_average_precision")
    problem_type = "multi_label_classification"
    empty_is_missing = False
    missing_label = "no label; give '' or [] where none applies, or set data.label"

    @classmethod
    def check(cls, config: FinetuneConfig) -> None:
        super().check(config)
        task: Any = config.task
        refuse(
            len(task.thresholds) not in (0, len(task.labels)),
            f"task.thresholds has {len(task.thresholds)} numbers, and task.labels "
            f"{len(task.labels)} labels",
            fix="set task.labels too, with one threshold for each, or leave task.thresholds empty",
        )
        refuse(not task.separator, "task.separator is empty", fix="give one, such as ','")

    @classmethod
    def transformers_labels(cls, values: Mapping[str, Any], where: str) -> Sequence[str] | None:
        is_own = values.get("problem_type") == cls.problem_type
        return super().transformers_labels(values, where) if is_own else None

    def objective(self, model: TaskModel) -> PredictionObjective:
        return BinaryObjective(model)

    def read_label(self, label: Any, where: str) -> tuple[str, ...]:
        names = label
        if isinstance(label, str):
            names = filter(str.strip, label.split(self.config.separator))
        elif not isinstance(label, Sequence) or not all(
            isinstance(name, str) and name.strip() for name in label
        ):
            raise UserError(
                f"{where}: the label is {label!r}; give a list of names, or a text of names with "
                f"{self.config.separator!r} between them"
            )
        return tuple(dict.fromkeys(name.strip() for name in names))

    def target(self, example: Example) -> np.ndarray:
        if example.label is None:
            return np.full(len(self.labels), np.nan, np.float32)
        return np.isin(self.labels, example.label).astype(np.float32)

    def _thresholds(self) -> np.ndarray:
        """Return the logit from which each label is predicted, [N]."""
        return logit(np.array(self.config.thresholds or [0.5] * len(self.labels)))

    def _actual(self, examples: Sequence[Example]) -> np.ndarray:
        return np.stack([self.target(example) for example in examples]).astype(bool)

    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """Return F1 of all labels together, the mean F1, and the mean average precision.

        The average precision is of labels that an example has; F1 also of those that are predicted.
        """
        from sklearn.metrics import average_precision_score, f1_score

        actual, logits = self._actual(examples), np.stack(predictions)
        predicted = logits >= self._thresholds()
        # Column by column: scikit-learn reads a single column as two classes.
        columns = list(zip(actual.T, predicted.T, logits.T, strict=True))
        options: dict[str, Any] = {"zero_division": 0}
        f1 = [f1_score(a, p, **options) for a, p, _ in columns if (a | p).any()]
        precision = [average_precision_score(a, x) for a, _, x in columns if a.any()]
        return {
            "micro_f1": float(f1_score(actual.ravel(), predicted.ravel(), **options)),
            "macro_f1": float(np.mean(f1)) if f1 else 0.0,
            "mean_average_precision": float(np.mean(precision)) if precision else 0.0,
        }

    def tune(
        self,
        examples: Sequence[Example],
        predictions: Sequence[Any],
        scores: Mapping[str, float],
    ) -> None:
        """Set each label's threshold to that of the best F1; of rare ones, of the best micro F1."""
        if self.config.thresholds:  # the user's
            return
        actual, logits = self._actual(examples), np.stack(predictions)
        common = _best_threshold(actual.ravel(), logits.ravel())
        thresholds = [
            _best_threshold(actual[:, label], logits[:, label])
            if actual[:, label].sum() >= _MIN_POSITIVE
            else common
            for label in range(len(self.labels))
        ]
        self.config = dataclasses.replace(self.config, thresholds=tuple(thresholds))

    @console.working("fitting the TF-IDF baseline")
    def baselines(
        self, train: Sequence[Example], held_out: Sequence[Example]
    ) -> dict[str, dict[str, float]]:
        """Return the scores of a logistic regression on TF-IDF for each label."""
        from sklearn.linear_model import LogisticRegression

        known, asked = tfidf(train, held_out)
        logits = np.full((len(held_out), len(self.labels)), -100.0)
        for label, has_label in enumerate(self._actual(train).T):
            if has_label.all():
                logits[:, label] = 100.0
            elif has_label.any():
                model = LogisticRegression(max_iter=1000).fit(known, has_label)
                logits[:, label] = model.decision_function(asked)
        return {"TF-IDF, logistic regression": self.score(held_out, list(logits))}

    def constant_score(self, examples: Sequence[Example]) -> float:
        # The best are the most frequent labels, some number of them.
        order = np.argsort(-self._actual(examples).sum(0), kind="stable")
        scores = []
        for count in {*range(1, min(len(order), _MAX_CONSTANT) + 1), len(order)}:
            logits = np.full(len(order), -100.0)
            logits[order[:count]] = 100.0
            scores.append(self.mean_score(self.score(examples, [logits] * len(examples))))
        return max(scores)

    def to_json(self, example: Example, prediction: Any) -> dict[str, Any]:
        predicted = np.flatnonzero(prediction >= self._thresholds())
        # In float64: in float32 one just below its threshold may round to above it.
        probabilities = expit(np.asarray(prediction, np.float64)).tolist()
        return {
            "labels": [self.labels[label] for label in predicted],
            "probabilities": dict(zip(self.labels, probabilities, strict=True)),
        }

    def as_line(self, example: Example, result: Mapping[str, Any]) -> str:
        listed = [f"{label} {result['probabilities'][label]:.1%}" for label in result["labels"]]
        return f"{', '.join(listed) or 'no label':<24}  {self.shown_text(example)}"


def _best_threshold(actual: np.ndarray, logits: np.ndarray) -> float:
    """Return the probability from which predicting gives the best F1; both arrays are [n]."""
    if not actual.any():  # any threshold has an F1 of 0
        return 0.5
    order = np.argsort(-logits, kind="stable")
    logits, found = logits[order].astype(np.float64), np.cumsum(actual[order])
    f1 = 2 * found / (np.arange(1, len(found) + 1) + found[-1])
    f1[:-1][logits[:-1] == logits[1:]] = 0.0  # equal logits are predicted together
    best = int(f1.argmax())
    # Between the last that is predicted and the next.
    following = logits[best + 1] if best + 1 < len(logits) else logits[best] - 1.0
    return float(
        np.clip(expit((logits[best] + following) / 2), np.finfo(float).tiny, np.nextafter(1, 0))
    )
