"""Predictions of a task for examples, with scores where these have labels."""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax import console
from bert_jax.batches.buckets import Batcher
from bert_jax.config import DataFiles, settings
from bert_jax.distributed import hosts
from bert_jax.errors import UserError, check_count
from bert_jax.inference.loading import LoadedModel
from bert_jax.inference.runner import Step, run_batches
from bert_jax.inference.tokenization import check_unicode, warn_skipped, warn_unknown
from bert_jax.models.heads import TaskModel
from bert_jax.storage.paths import on_disk
from bert_jax.tasks import make_task, task_class
from bert_jax.tasks.base import Task
from bert_jax.tasks.datasets import check_labels, read_examples
from bert_jax.tasks.examples import Example
from bert_jax.tasks.sequences import make_batcher
from bert_jax.text.memory import has_splits, plain_row, rows
from bert_jax.training.metrics import add_up, means
from bert_jax.training.objective import Metrics
from bert_jax.training.step import PREDICT_OUTPUTS, make_predict_step


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Predictions(Sequence[dict[str, Any]]):
    """A sequence of dictionaries, one an example, with what its task predicts.

    Of classes these are labels and probabilities.

    Attributes:
      task: what was predicted.
      examples: of the task.
      scores: of the predictions, where all examples have labels; else empty.
      num_truncated: texts, or words of a sentence, that were truncated.

    >>> predictions = getfixture("tiny_classifier").predict(["A river bank.", "A bank."])
    >>> [each["label"] in ("first", "second") for each in predictions]
    [True, True]
    """

    task: Task
    examples: Sequence[Example]
    _predictions: Sequence[Any]
    scores: dict[str, float]
    num_truncated: int

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.task.to_json(self.examples[index], self._predictions[index])

    def save(self, stem: str | Path) -> list[Path]:
        """Write the predictions in the forms of the task, and return the files.

        Args:
          stem: the files' path without its ending. Files that are there are replaced.

        Raises:
          UserError: a file cannot be written.

        >>> predictions = getfixture("tiny_classifier").predict(["A river bank."])
        >>> [path.name for path in predictions.save(getfixture("tmp_path") / "predictions")]
        ['predictions.jsonl']
        """
        path = on_disk(stem)
        try:
            return write_predictions(self.task, self.examples, self._predictions, path)
        except (OSError, ValueError) as error:  # ValueError for a NUL byte
            raise UserError(f"{stem} cannot be written ({error}); choose another path") from error


def predict_examples(
    step: Step, task: Task, examples: Sequence[Example], batcher: Batcher, batch_size: int
) -> tuple[list[Any], dict[str, float]]:
    """Return the prediction of each example and, if all have labels, the loss and the scores.

    Args:
      step: runs a batch of the `batcher`, and returns the logits of the whole batch, which every
        process can read, and the metrics; as `make_predict_step`.
      task: of the examples.
      examples: in the order of the predictions.
      batcher: of their features.
      batch_size: features at a time, over all devices.
    """
    started, features = time.monotonic(), batcher.features
    predictions: list[Any] = [None] * len(examples)
    metrics: list[Metrics] = []
    for indices, (logits, batch_metrics) in run_batches(step, batcher, batch_size):
        metrics.append(jax.device_get(batch_metrics))
        console.advance(len(metrics) * batch_size, len(features) + batch_size)
        # After the logits of the features are those of padding.
        for index, values in zip(indices.tolist(), np.asarray(logits), strict=False):
            example = features.example_indices[index]
            predictions[example] = task.collect(predictions[example], features, index, values)
    values = {"sequences_per_second": len(features) / (time.monotonic() - started)}
    if examples and all(example.label is not None for example in examples):
        sums = add_up(metrics)
        can_use = any(weight for _, weight in sums.values())  # some label
        has_loss = can_use and task.has_loss(examples)
        loss = {"loss": means(sums, {})["loss"]} if has_loss else {}
        values = {**loss, **task.score(examples, predictions), **values}
    return predictions, values


@console.working("predicting", says_end=False)
def predict(
    model: LoadedModel,
    examples: Iterable[Any] | Path,
    *,
    text: str | None = None,
    label: str | None = None,
    batch_size: int = 32,
) -> Predictions:
    """Apply a fine-tuned model to examples of its task; see `Bert.predict`."""
    if model.task is None or not isinstance(model.model, TaskModel):
        raise UserError("the model has no head of a task; fine-tune it first")
    check_count(batch_size, "batch_size")
    named = {name: value for name, value in (("text", text), ("label", label)) if value}
    data = dataclasses.replace(model.data, **named)
    settings.check(data, "data.")
    task = make_task(model.task)
    changed = {name: named[name] for name in named if named[name] != getattr(model.data, name)}
    sources = [str(examples)] if isinstance(examples, Path) else []
    task.check_columns(dataclasses.replace(DataFiles(), **changed), sources)
    examples = _examples_of(task, data, examples)
    if not task.labels:  # of a foreign multiple choice, whose choices have no names
        task = type(task)(task.config, task.label_names(examples))
    is_named = label not in (None, DataFiles().label)  # the default column may be absent
    if is_named and all(each.label is None or each.absent_column == label for each in examples):
        raise UserError(f"no example has a label in {label!r}; name another column, or none")
    check_labels(task, examples, "correct it, or name another column of labels")
    features = task.features(examples, model.tokenizer, model.config, data.max_length)
    batcher = make_batcher(features, model.tokenizer, model.config, data.max_length)
    warn_unknown(*batcher.unknown)
    warn_skipped(features.skipped)
    # One batch of few examples, of a power of two, has few sizes to compile.
    batch_size = min(batch_size * model.runner.num_devices, 1 << (len(features) - 1).bit_length())
    batch_size += -batch_size % model.runner.num_devices
    step = make_predict_step(make_task(model.task).objective(model.model))
    step = model.runner.compile_step("prediction", step, PREDICT_OUTPUTS)
    predictions, scores = predict_examples(step, task, examples, batcher, batch_size)
    scores.pop("sequences_per_second")
    return Predictions(task, examples, predictions, scores, features.truncated)


def _examples_of(task: Task, data: DataFiles, examples: Iterable[Any] | Path) -> list[Example]:
    """Return the examples of a file or of Python values."""
    if isinstance(examples, Path):
        examples = read_examples(task, str(examples), data, labelled=False)
    elif isinstance(examples, str) or (isinstance(examples, Mapping) and not has_splits(examples)):
        examples = [examples]
    else:
        examples = rows(examples, "examples")
    result = [
        value
        if isinstance(value, Example)
        else task.example_from(plain_row(value, f"examples[{index}]"), index, data)
        for index, value in enumerate(examples)
    ]
    if not result:
        raise UserError("there are no examples; give one or more")
    for example in result:
        for text in example.texts:
            check_unicode(text, example.where)
    return result


def write_predictions(
    task: Task, examples: Sequence[Example], predictions: Sequence[Any], stem: Path
) -> list[Path]:
    """Write the files of predictions, `stem` with each suffix, and return them."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix, content in task.files(examples, predictions).items():
        paths.append(stem.with_name(stem.name + suffix))
        hosts.write_on_main(paths[-1], content)
    return paths


def predict_texts(model: LoadedModel, texts: Sequence[str]) -> Any:
    """Return the prediction of the model's task for a text or a pair; None where it has none."""
    if model.task is None:
        return None
    value = make_task(model.task).value_of_texts(texts, model.data)
    if value is None:
        return None
    positions = model.config.max_position_embeddings
    if len(texts) > 1 and model.data.max_length > positions:  # a pair is not read in windows
        data = dataclasses.replace(model.data, max_length=positions)
        model = dataclasses.replace(model, data=data)
    return predict(model, [value])[0]


def check_reranker(model: LoadedModel) -> None:
    """Refuse a model that gives no score to a query and a passage."""
    if model.task is None or not task_class(model.task.kind).is_ranking_passages:
        what = f"was trained for {model.task.kind}" if model.task else "has no head of a task"
        raise UserError(
            f"the reranker {model.source or ''} {what}; train one with "
            "bert-jax finetune --config=finetune/reranker"
        )


def relevance(
    model: LoadedModel, queries: Sequence[str], passages: Sequence[Sequence[str]]
) -> list[np.ndarray]:
    """Return the score of each passage of each query.

    Args:
      model: a reranker, as `check_reranker` says.
      queries: Q texts.
      passages: Q lists of texts, each of any length.
    """
    pairs = [
        (query, passage) for query, own in zip(queries, passages, strict=True) for passage in own
    ]
    scores = iter([each["score"] for each in predict(model, pairs)] if pairs else ())
    return [np.array([next(scores) for _ in own]) for own in passages]
