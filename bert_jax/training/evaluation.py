"""What a model with a task's head says of a set of examples, each of them once."""

import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bert_jax.batches import loader
from bert_jax.batches.buckets import FILL, Batcher, eval_batches
from bert_jax.tasks.base import Example, Task
from bert_jax.training import workdir
from bert_jax.training.metrics import means
from bert_jax.training.objectives import Metrics

Predict = Callable[[Any, Mapping[str, np.ndarray]], tuple[jax.Array, Metrics]]


def predict(
    step: Predict,
    params: Any,
    task: Task,
    examples: Sequence[Example],
    batcher: Batcher,
    batch_size: int,
    process_slices: loader.ProcessSlices = loader.single_process,
) -> tuple[list[Any], dict[str, float]]:
    """Returns the prediction of each example and, where all have labels, the loss and the scores.

    A batch's logits are read, and let go, while the device runs the next one: none but two batches'
    are held at a time.

    Args:
      step: (params, batch) -> (logits, sums), from `step.make_predict_step`.
      params: of the model.
      task: what the logits mean.
      examples: whose rows are predicted.
      batcher: of these rows.
      batch_size: rows at a time, over all devices.
      process_slices: which of them this process computes; it is given the predictions of all.
    """
    started = time.monotonic()
    found: list[Any] = [None] * len(examples)
    sums: list[Metrics] = []

    def take(indices: np.ndarray, logits: Any, of_batch: Metrics) -> None:
        host = multihost_utils.process_allgather(logits, tiled=True)
        sums.append(jax.device_get(of_batch))
        for index, row in zip(indices.tolist(), host, strict=True):
            if index != FILL:
                example = batcher.features.example_indices[index]
                found[example] = task.collect(found[example], batcher.features, index, row)

    running: list[tuple[np.ndarray, Any, Metrics]] = []
    for indices, batch in eval_batches(batcher, batch_size):
        running.append((indices, *step(params, loader.take_slices(batch, process_slices))))
        if len(running) > 1:
            take(*running.pop(0))
    for rest in running:
        take(*rest)
    values = {"sequences_per_second": len(batcher.features) / (time.monotonic() - started)}
    if all(example.label is not None for example in examples):
        values = {"loss": means(sums)["loss"], **task.score(examples, found), **values}
    return found, values


def write(task: Task, examples: Sequence[Example], found: Sequence[Any], stem: Path) -> list[Path]:
    """Writes predictions, each kind of file at once or not at all, and returns the files.

    Args:
      task: whose predictions they are.
      examples: that were predicted.
      found: what `predict` gave.
      stem: of the files, to which their endings are added.
    """
    paths = []
    for suffix, write_to in task.writers().items():
        text = io.StringIO()
        write_to(text, examples, found)
        paths.append(stem.with_name(stem.name + suffix))
        workdir.write(paths[-1], text.getvalue())
    return paths
