"""Checkpoint directories for the tests: the golden ones, copied and changed."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import safetensors.numpy
from make_golden import GOLDEN

import bert_jax
from bert_jax.config import TaskConfig
from bert_jax.convert import names
from bert_jax.tasks import make_task
from bert_jax.tasks.question_answering import QuestionAnsweringConfig

WEIGHTS = "model.safetensors"
NAMES = ("no", "yes", 'Ωb "c"')
TASKS = [
    TaskConfig(labels=NAMES, glue="mnli", metrics=("accuracy",)),
    TaskConfig(labels=("one",)),
    TaskConfig("regression"),
    TaskConfig("token_classification", labels=tuple(f"B-{i}" for i in range(12))),
    QuestionAnsweringConfig(with_unanswerable=True, null_threshold=-1.25, doc_stride=7),
    TaskConfig("multiple_choice", labels=("0", "1")),
]


def copied(name: str, to: Path) -> Path:
    """Copy a golden directory, without the numbers that are expected of it."""
    shutil.copytree(GOLDEN / name, to)
    (to / "expected.safetensors").unlink(missing_ok=True)
    return to


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / WEIGHTS)


def write(folder: Path, tensors: dict[str, np.ndarray], name: str = WEIGHTS) -> None:
    safetensors.numpy.save_file(tensors, folder / name)


def change_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def same(actual, expected) -> None:
    """Check that parameters are equal bit for bit."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), actual, expected)


def fine_tuned(bert: bert_jax.Bert, task: TaskConfig, probe: str = "") -> bert_jax.Bert:
    """Return a model of the same shape, with random parameters and a task's head."""
    model = make_task(task).model(bert.config, probe)
    shapes = names.param_shapes(model)  # traced once
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes)
    return dataclasses.replace(bert, model=model, params=params, task=task)
