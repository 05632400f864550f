"""What `Bert.predict` returns: labels and probabilities of examples, to be read or saved."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax import console
from bert_jax.batches.buckets import Batcher
from bert_jax.config import DataFiles, TaskConfig
from bert_jax.distributed.mesh import compile_step, make_mesh, replicated_layout
from bert_jax.errors import UserError
from bert_jax.models.heads import TaskModel
from bert_jax.tasks import make_task
from bert_jax.tasks.base import Example, Task
from bert_jax.tasks.datasets import check_labels, read_examples
from bert_jax.text.tokenizer import Tokenizer, warn_unknown
from bert_jax.training import evaluation
from bert_jax.training.embedding_loss import task_objective
from bert_jax.training.step import make_predict_step


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Predictions(Sequence[dict[str, Any]]):
    """A sequence of dictionaries, one an example, with labels and probabilities.

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
          stem: the files' path without its ending.

        >>> predictions = getfixture("tiny_classifier").predict(["A river bank."])
        >>> [path.name for path in predictions.save(getfixture("tmp_path") / "predictions")]
        ['predictions.jsonl']
        """
        return evaluation.write(self.task, self.examples, self._predictions, Path(stem))


class Predictor:
    """The head of a task with its encoder, which keeps what it has compiled, on all devices."""

    def __init__(self, model: TaskModel, params: Any, tokenizer: Tokenizer, task: TaskConfig):
        self._config, self._tokenizer, self._mesh = model.config, tokenizer, make_mesh()
        layout = replicated_layout(self._mesh)
        step = make_predict_step(task_objective(model, task))
        self._step = compile_step(step, "mesh", layout, ("per_example", "metrics"))
        self._params = jax.device_put(params, layout.params)

    @console.working("predicting", says_end=False)
    def __call__(
        self, config: TaskConfig, data: DataFiles, examples: Iterable[Any] | Path, batch_size: int
    ) -> Predictions:
        """Return what `Bert.predict` does, for examples of a task."""
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be at least 1")
        task = make_task(config)
        if isinstance(examples, Path):
            examples = read_examples(task, str(examples), data, labelled=False)
        elif isinstance(examples, str | Mapping):
            examples = [examples]
        examples = [
            value if isinstance(value, Example) else task.example_from(value, index, data)
            for index, value in enumerate(examples)
        ]
        if not examples:
            raise UserError("there are no examples; give one or more")
        if not task.labels:  # of a foreign multiple choice, whose choices have no names
            task = type(task)(task.config, task.label_names(examples))
        check_labels(task, examples)
        features = task.features(examples, self._tokenizer, self._config, data.max_length)
        types, size = self._config.type_vocab_size, batch_size * self._mesh.size
        batcher = Batcher(features, self._tokenizer, types, data.max_length)
        options = self._params, examples, batcher
        warn_unknown(*batcher.unknown)
        predictions, scores = evaluation.predict(self._step, task, size, np.arange, *options)
        scores.pop("sequences_per_second")
        return Predictions(task, examples, predictions, scores, features.truncated)


def predict_texts(
    predict: Callable[[Any], Any], task: TaskConfig, data: DataFiles, texts: Sequence[str]
) -> Any:
    """Return the prediction of a task for a text or a pair; None where it has none."""
    value = make_task(task).value_of_texts(texts, data)
    return None if value is None else predict([value])[0]
