"""Run a fine-tuned model over a dataset once, score its predictions, and write them."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bert_jax import console
from bert_jax.batches import loader
from bert_jax.batches.buckets import FILL, Batcher, eval_batches
from bert_jax.tasks.base import Example, Task
from bert_jax.training import workdir
from bert_jax.training.metrics import add_up, means
from bert_jax.training.objectives import Metrics


def predict(
    step: Callable[[Any, Mapping[str, np.ndarray]], tuple[jax.Array, Metrics]],
    task: Task,
    batch_size: int,
    process_indices: loader.ProcessIndices,
    params: Any,
    examples: Sequence[Example],
    batcher: Batcher,
) -> tuple[list[Any], dict[str, float]]:
    """Return the prediction of each example and, if all have labels, the loss and the scores."""
    started, features = time.monotonic(), batcher.features
    predictions: list[Any] = [None] * len(examples)
    metrics: list[Metrics] = []
    batches = eval_batches(batcher, batch_size)
    outputs = ((i, *step(params, loader.take_indices(x, process_indices))) for i, x in batches)
    # In pairs, so that the logits of a batch are read while the device runs the next one.
    for (indices, logits, batch_metrics), _ in pairwise(chain[Any](outputs, [None])):
        metrics.append(jax.device_get(batch_metrics))
        console.advance(len(metrics) * batch_size, len(features) + batch_size)
        host_logits = multihost_utils.process_allgather(logits, tiled=True)
        for index, values in zip(indices.tolist(), host_logits, strict=True):
            if index != FILL:
                example = features.example_indices[index]
                predictions[example] = task.collect(predictions[example], features, index, values)
    values = {"sequences_per_second": len(features) / (time.monotonic() - started)}
    if examples and all(example.label is not None for example in examples):
        loss = means(add_up(metrics))["loss"]
        values = {"loss": loss, **task.score(examples, predictions), **values}
    return predictions, values


def write(
    task: Task, examples: Sequence[Example], predictions: Sequence[Any], stem: Path
) -> list[Path]:
    """Write the files of predictions, `stem` with each suffix, and return them."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix, content in task.files(examples, predictions).items():
        paths.append(stem.with_name(stem.name + suffix))
        workdir.write(paths[-1], content)
    return paths
