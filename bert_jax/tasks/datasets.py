"""Load a task's training, held-out and test examples, split and check them."""

import dataclasses
import hashlib
import itertools
import json
import os
import unicodedata
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from bert_jax import console
from bert_jax.config import DataFiles, FinetuneConfig, TaskConfig
from bert_jax.errors import UserError, refuse
from bert_jax.tasks import glue, make_task
from bert_jax.tasks.base import Task
from bert_jax.tasks.examples import Example
from bert_jax.text import builtin, memory
from bert_jax.text.records import Record, is_dataset

_RELABEL = "correct it, or give all in task.labels, and --config.new_head=True beside a head"
_SPLIT_SEED = 0  # the same held-out examples for every seed of a run


@dataclasses.dataclass(frozen=True)
class Datasets:
    """A task's examples."""

    train: list[Example]
    evals: dict[str, list[Example]]  # held out, by name; the first chooses the best checkpoint
    tests: dict[str, list[Example]]  # to predict, by name, with or without labels

    def fingerprint(self, *, of_tests: bool = False) -> str:
        """Return a hash of the training and held-out examples, or of the test examples."""
        digest = hashlib.sha256()
        for examples in self.tests.values() if of_tests else (self.train, *self.evals.values()):
            for example in examples:
                digest.update(json.dumps([example.texts, example.label], default=repr).encode())
            digest.update(b"\0")
        return digest.hexdigest()


def load_datasets(
    config: FinetuneConfig, labels: Sequence[str] = (), *, train: Any = None, held_out: Any = None
) -> tuple[Task, Datasets]:
    """Read all examples of a task.

    Its labels are the config's, or `labels`, or those of its task of GLUE, or those of training.
    `train` and `held_out` are examples in memory, in place of the files of the config.
    """
    data = config.data
    train_source, eval_sources, test_sources = _sources(config, train, held_out)
    for name in (eval_sources or {"eval"}) & test_sources.keys():
        other = "data.eval has" if eval_sources else "the held-out examples are"
        raise UserError(f"data.test has a set {name}, and {other} one too; give one another name")
    task = make_task(glue.completed(config.task), config.task.labels or labels)
    for name in (*eval_sources, *test_sources):
        refuse(
            any(f".{name}{suffix}" in task.file_suffixes for suffix in task.file_suffixes),
            f"a set is named {name}, and another file of predictions has its name",
            fix="give it another one",
        )
    task.check_columns(data, [train_source, *eval_sources.values(), *test_sources.values()])
    read = partial(read_examples, task, data=data)
    # Without a held-out set, some of the training examples are held out, and need labels.
    is_labelled = not (task.trains_without_labels and eval_sources)
    train = read(train_source, labelled=is_labelled, name="train")
    evals = {
        name: read(source, labelled=True, name="eval") for name, source in eval_sources.items()
    }
    tests = {name: read(source, labelled=False) for name, source in test_sources.items()}
    names = task.labels or task.label_names(train)  # before some are held out
    if not evals:
        refuse(
            not data.eval_fraction,
            "data.eval_fraction is 0, and there are no other held-out examples",
            fix="raise it, or set data.eval",
        )
        is_held_out = _hold_out(task, train, data.eval_fraction)
        evals = {"eval": list(itertools.compress(train, is_held_out))}
        train = list(itertools.compress(train, ~is_held_out))
    if not train:
        what = "groups, such as those of one query" if task.has_queries else "examples"
        raise UserError(
            f"{_name_of(train_source, 'train')} has too few {what} to hold out "
            f"data.eval_fraction {data.eval_fraction} of them and train on others; lower it, give "
            "data.eval, or more examples"
        )
    if len(names) < task.min_labels:
        refuse(
            task.labels,
            f"task.labels has fewer than {task.min_labels} labels: {', '.join(task.labels)}",
            fix="give all, or leave it out",
        )
        counts = f"fewer than {task.min_labels} labels" if names else "no labels"
        raise UserError(
            f"{_name_of(train_source, 'train')} has {counts}; there is nothing to tell apart"
        )
    task = make_task(task.config, names)
    for examples in (train, *evals.values(), *tests.values()):
        check_labels(task, examples, _RELABEL)
    evals = {name: list(task.held_out_examples(examples)) for name, examples in evals.items()}
    return task, Datasets(list(task.training_examples(train)), evals, tests)


def _hold_out(task: Task, examples: Sequence[Example], fraction: float) -> np.ndarray:
    """Return which examples are held out: a share of them, or of their groups."""
    groups = groups_of(task, examples)
    count = int(groups.max()) + 1
    order = np.random.default_rng(_SPLIT_SEED).permutation(count)
    return np.isin(groups, order[: max(1, round(fraction * count))])


def groups_of(task: Task, examples: Sequence[Example]) -> np.ndarray:
    """Return the number of each example's group, from 0: those of one are held out together."""
    numbers: dict[Any, int] = {}
    names = (each.texts[0] if task.has_queries else i for i, each in enumerate(examples))
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)


def _sources(
    config: FinetuneConfig, given_train: Any, given_eval: Any
) -> tuple[Any, dict[str, Any], dict[str, str]]:
    data, train = config.data, config.data.train
    evals: dict[str, Any] = parse_sources(data.eval, "eval")
    tests = parse_sources(data.test, "test")
    for given, setting in ((given_train, "train"), (given_eval, "eval")):
        if given is not None and getattr(data, setting):
            raise UserError(
                f"data.{setting} is {getattr(data, setting)!r}, and {setting} is given too; leave "
                "one"
            )
    is_own = given_train is not None or (train and not builtin.split_of(train))
    if is_own and any(map(builtin.split_of, evals.values())):
        raise UserError(
            f"data.eval is {data.eval}, the recipe's own examples, and the training examples are "
            'others; give a file, or --config.data.eval=none (from code "") to hold out a part of '
            "them"
        )
    is_not_tfds = is_own and not is_dataset(str(train))
    if is_not_tfds and any(map(is_dataset, evals.values())):
        console.warn(
            f"data.eval is {data.eval}, perhaps the recipe's own, and the training examples are "
            "others; with --config.data.eval=none a part of these is held out"
        )
    evals = evals if given_eval is None else {"eval": given_eval}
    glue_kind = glue.task(config.task.glue).kind if config.task.glue else config.task.kind
    refuse(
        glue_kind != config.task.kind,
        f"task.glue is {config.task.glue}, a {glue_kind}, and task.kind is {config.task.kind}",
        fix=f"set task.kind={glue_kind}, or leave task.glue empty",
    )
    if given_train is not None:
        return given_train, evals, tests
    if glue.has_own_sources(config.task.glue, train):
        train, usual_evals, usual_tests = glue.sources(config.task.glue, train)
        evals, tests = evals or usual_evals, tests or usual_tests
    if not train:
        raise UserError("data.train is empty; give a file, or tfds:NAME@SPLIT")
    return train, evals, tests


def _name_of(source: Any, name: str) -> str:
    """Return the name of a source, which of data in memory is that of the argument."""
    return source if isinstance(source, str) else name


def read_examples(
    task: Task, source: Any, data: DataFiles, *, labelled: bool, name: str = "examples"
) -> list[Example]:
    """Return the examples of a file, and show how many records the format's tools skip.

    A source that is no str is data in memory, and `name` is that of its argument.
    """
    examples, num_skipped = [], 0
    if isinstance(source, str):
        records = task.read_records(source, data)
    else:
        records = task.task_records(memory.records(source, name), data)
    source = _name_of(source, name)
    for record in records:
        example = task.make_example(record)
        example = example and task.complete(example, data, labelled=labelled)
        if example is None:
            num_skipped += 1
        elif example.label is None:
            examples.append(_without_label(task, example, record, data, labelled=labelled))
        else:
            examples.append(example)
    if num_skipped:
        skipped = console.counted(num_skipped, "record")
        console.show(f"skipped    {skipped} of {source}, as the format's own readers do")
    if not examples:
        raise UserError(
            f"{source} has no examples; give one or more (a generator is read once, and lines end "
            "in LF or CRLF)"
        )
    return examples


def _without_label(
    task: Task, example: Example, record: Record, data: DataFiles, *, labelled: bool
) -> Example:
    """Return an example without a label, with the column that is absent; refuse a labelled one."""
    row = record.fields.get("row")
    row = row if isinstance(row, Record) else None  # and no column that the user calls so
    if labelled:
        if row:
            row.field(data.label, "data.label")
        raise UserError(f"{example.where} has {task.missing_label}")
    is_absent = row and data.label not in row.fields
    return dataclasses.replace(example, absent_column=data.label) if is_absent else example


def check_same_head(task: Task, head: TaskConfig) -> None:
    """Raise UserError if a head is of another kind of task, or has other labels or order."""
    remedy = "replace the head with --config.new_head=True"
    if head.kind != task.config.kind:
        raise UserError(f"--init is for {head.kind}, the config for {task.config.kind}; {remedy}")
    if head.labels and head.labels != task.labels:
        both = f"{', '.join(head.labels)}, and the task {', '.join(task.labels)}"
        remedy = f"the order counts; set task.labels to the former, or {remedy}"
        raise UserError(f"--init has the labels {both}: {remedy}")


def check_labels(task: Task, examples: Sequence[Example], fix: str) -> None:
    """Raise UserError, with file and line, at a label that is no output of the head."""
    known = set(task.labels)
    for example in examples:
        labels = task.example_labels(example)
        unknown = next((i for i, label in enumerate(labels) if label not in known), None)
        if unknown is not None:
            label = labels[unknown]
            alike = unicodedata.normalize("NFC", label) in {
                unicodedata.normalize("NFC", each) for each in known
            }
            spelled = ", but for how Unicode composes its characters" if alike else ""
            raise UserError(
                f"{task.label_place(example, unknown)}: the label {label!r} is none of those of "
                f"the training data, or of the head: {', '.join(task.labels[:20])}{spelled}; {fix}"
            )


def parse_sources(sources: str, default: str) -> dict[str, str]:
    """Return the sources of "NAME=SOURCE,NAME=SOURCE", or of one without a name."""
    if os.path.isfile(os.path.expanduser(sources)):
        return {default: sources}
    parts = [part.strip() for part in sources.split(",") if part.strip()]
    is_empty = sources.strip() and not parts
    refuse(is_empty, f"data.{default} is {sources!r}", fix="name a file, or leave it out")
    if len(parts) == 1:
        name, equals, _ = parts[0].partition("=")
        if not equals or not name.isidentifier():
            return {default: parts[0]}
    named = {}
    for part in parts:
        name, _, source = part.partition("=")
        if not source or not name.isidentifier():
            raise UserError(f"{sources}: several sources are given as NAME=FILE,NAME=FILE")
        refuse(name in named, f"{sources}: two sources have the name {name}", fix="rename one")
        if name == "train":
            raise UserError(f"{sources}: train is what is trained on; choose another name")
        named[name] = source
    return named
