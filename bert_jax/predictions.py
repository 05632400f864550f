"""What `Bert.predict` returns: labels and probabilities of examples, to be read or saved."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.batches.buckets import Batcher
from bert_jax.config import DataFiles, TaskConfig
from bert_jax.distributed.mesh import compile_step, make_mesh, replicated_layout
from bert_jax.models.heads import TaskModel
from bert_jax.tasks import make_task
from bert_jax.tasks.base import Example, Task
from bert_jax.tasks.datasets import check_labels, read_examples
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import evaluation
from bert_jax.training.objectives import TaskObjective
from bert_jax.training.step import make_predict_step


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Predictions(Sequence[dict[str, Any]]):
    """A sequence of dictionaries, one an example, with labels and probabilities.

    Attributes:
      task: what was predicted.
      examples: of the task.
      scores: of the predictions, where all examples have labels; else empty.
      num_truncated: texts, or words of a sentence, that were truncated.
      num_skipped: records of a file that the format's own readers skip.

    >>> predictions = getfixture("tiny_classifier").predict(["A river bank.", "A bank."])
    >>> [each["label"] in ("first", "second") for each in predictions]
    [True, True]
    """

    task: Task
    examples: Sequence[Example]
    _predictions: Sequence[Any]
    scores: dict[str, float]
    num_truncated: int
    num_skipped: int

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


def predict(
    model: TaskModel,
    params: Any,
    tokenizer: Tokenizer,
    config: TaskConfig,
    data: DataFiles,
    examples: Sequence[Any] | Path,
    batch_size: int,
) -> Predictions:
    """Return the predictions of a model on all devices; the arguments are those of `Bert`."""
    task, skipped = make_task(config), Counter[str]()
    if isinstance(examples, Path):
        examples = read_examples(task, str(examples), data, skipped, labelled=False)
    examples = [
        value if isinstance(value, Example) else task.example_from(value, index, data)
        for index, value in enumerate(examples)
    ]
    if not task.labels:  # of a foreign multiple choice, whose choices have no names
        task = type(task)(task.config, task.label_names(examples))
    check_labels(task, examples)
    features = task.features(examples, tokenizer, model.config, data.max_length)
    batcher = Batcher(features, tokenizer, model.config.type_vocab_size, data.max_length)
    mesh = make_mesh()
    layout = replicated_layout(mesh)
    objective = TaskObjective(model, is_regression=config.kind == "regression")
    step = compile_step(make_predict_step(objective), "mesh", layout, ("per_example", "metrics"))
    params = jax.device_put(params, layout.params)
    size = batch_size * mesh.size
    predictions, scores = evaluation.predict(step, task, size, np.arange, params, examples, batcher)
    scores.pop("sequences_per_second")
    return Predictions(task, examples, predictions, scores, features.truncated, skipped.total())
