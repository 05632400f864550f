"""Reading a task's data: training examples, those to be chosen by, and those to be predicted."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bert_jax.config import DataFiles, FinetuneConfig, TaskConfig
from bert_jax.errors import UserError
from bert_jax.tasks import glue, make_task
from bert_jax.tasks.base import Example, Task

_SPLIT_SEED = 0  # of what is held out, the same whatever the run's own seed


@dataclasses.dataclass(frozen=True)
class Datasets:
    """A task's examples.

    Attributes:
      train: to learn from.
      evals: by name; the best checkpoint is chosen by the first of them.
      tests: by name, with or without labels.
      skipped: by source, how many records were left out, as the format's own tools do.
    """

    train: list[Example]
    evals: dict[str, list[Example]]
    tests: dict[str, list[Example]]
    skipped: dict[str, int]

    def fingerprint(self) -> str:
        """Returns a hash of all that a run learns from and is chosen by."""
        digest = hashlib.sha256()
        for examples in (self.train, *self.evals.values()):
            for example in examples:
                digest.update(json.dumps([example.texts, example.label]).encode())
            digest.update(b"\0")
        return digest.hexdigest()


def load_datasets(config: FinetuneConfig, labels: Sequence[str] = ()) -> tuple[Task, Datasets]:
    """Reads all files of a task, and settles the names of its labels.

    Args:
      config: whose `task.labels`, where given, are the labels.
      labels: those of the head that the run begins with, if any, which otherwise are.

    Raises:
      UserError: a file is missing or malformed, or holds a label that training has not.
    """
    data, skipped = _with_sources(config), {}
    if not data.train:
        raise UserError("data.train is empty; give a file, or tfds:NAME@SPLIT")
    names = config.task.labels or labels
    task = make_task(config.task, names)
    task.metrics  # noqa: B018 - refuses unknown ones before anything is read

    def read(source: str, *, labelled: bool) -> list[Example]:
        examples, left_out = read_examples(task, source, data, labelled=labelled)
        if left_out:
            skipped[source] = left_out
        return examples

    held_out, tested = named(data.eval, "eval"), named(data.test, "test")
    for name in held_out.keys() & tested.keys():
        raise UserError(f"data.eval and data.test both have a set {name}; give one another name")
    train = read(data.train, labelled=True)
    evals = {name: read(source, labelled=True) for name, source in held_out.items()}
    tests = {name: read(source, labelled=False) for name, source in tested.items()}
    names = task.labels or task.label_names(train)  # those held out included
    if not evals:
        order = np.random.default_rng(_SPLIT_SEED).permutation(len(train))
        held_out = set(order[: max(1, round(data.eval_fraction * len(train)))].tolist())
        evals = {"eval": [train[i] for i in sorted(held_out)]}
        train = [example for i, example in enumerate(train) if i not in held_out]
    if not train:
        raise UserError(f"{data.train} has too few examples to train on")
    if config.task.kind == "classification" and len(names) < 2:
        raise UserError(f"{data.train} has fewer than two labels; there is nothing to tell apart")
    task = make_task(task.config, names)
    task.metrics  # noqa: B018 - again: whether tags have an F1 is known by their names
    for examples in (train, *evals.values(), *tests.values()):
        check_labels(task, examples)
    return task, Datasets(train, evals, tests, skipped)


def _with_sources(config: FinetuneConfig) -> DataFiles:
    """Returns where the data is: of GLUE and of TFDS, with what is left open filled in."""
    data, glue_task = config.data, config.task.glue
    if glue_task and (not data.train or os.path.isdir(os.path.expanduser(data.train))):
        found = glue.sources(glue_task, data.train)
        given = {"eval": data.eval, "test": data.test}
        data = dataclasses.replace(data, **found | {k: v for k, v in given.items() if v})
    usual = {"train": "train", "eval": "validation", "test": "test"}
    return dataclasses.replace(
        data,
        **{
            name: f"{getattr(data, name)}@{split}"
            for name, split in usual.items()
            if getattr(data, name).startswith("tfds:") and "@" not in getattr(data, name)
        },
    )


def read_examples(
    task: Task, source: str, data: DataFiles, *, labelled: bool
) -> tuple[list[Example], int]:
    """Returns the examples of a file, and how many records the format's own tools would skip.

    Raises:
      UserError: it has none, one is malformed, or, where `labelled`, has no label.
    """
    examples, skipped = [], 0
    for record in task.read_records(source, data):
        example = task.make_example(record, data)
        if example is None:
            skipped += 1
        elif labelled and example.label is None:
            raise UserError(
                f"{example.where} has no label; fill it in, or name its column with data.label"
            )
        else:
            examples.append(example)
    if not examples:
        raise UserError(f"{source} has no examples; give a file that has")
    return examples, skipped


def check_same_head(task: Task, head: TaskConfig) -> None:
    """Refuses to begin with the head of another task.

    Raises:
      UserError: it is for another kind of task, or has other labels, or in another order.
    """
    remedy = "begin with a new head by --config.new_head=True"
    if head.kind != task.config.kind:
        raise UserError(f"--init is for {head.kind}, the config for {task.config.kind}; {remedy}")
    if head.labels and head.labels != task.labels:
        ours, theirs = ", ".join(task.labels), ", ".join(head.labels)
        raise UserError(
            f"--init has the labels {theirs}, and the task {ours}: the order counts; set "
            f"task.labels to the former, or {remedy}"
        )


def check_labels(task: Task, examples: Sequence[Example]) -> None:
    """Refuses a label that the head has not.

    Raises:
      UserError: naming the file and line.
    """
    known = set(task.labels)
    for example in examples:
        unknown = [label for label in task.example_labels(example) if label not in known]
        if unknown:
            shown = ", ".join(task.labels[:20])
            raise UserError(
                f"{task.label_location(example, unknown[0])}: the label {unknown[0]!r} is none of "
                f"those of the training data, or of the head: {shown}; mend it, or give all in "
                "task.labels"
            )


def named(sources: str, default: str) -> dict[str, str]:
    """Returns the sources of "NAME=SOURCE,NAME=SOURCE", or of one without a name."""
    parts = [part.strip() for part in sources.split(",") if part.strip()]
    if len(parts) == 1:
        name, equals, _ = parts[0].partition("=")
        if not equals or not name.isidentifier() or Path(parts[0]).is_file():
            return {default: parts[0]}
    found = {}
    for part in parts:
        name, _, source = part.partition("=")
        if not source or not name.isidentifier() or name in found:
            raise UserError(f"{sources}: several sources are given as NAME=FILE,NAME=FILE")
        found[name] = source
    return found
