"""GLUE's nine tasks in its own files and in TFDS. Source: Wang et al. 2019, table 1."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from bert_jax.config import DataFiles, TaskConfig
from bert_jax.errors import UserError, nearest
from bert_jax.tasks import readers
from bert_jax.tasks.foreign import UnknownColumns
from bert_jax.text.records import Record, read_records

_IDS = ("index", "id", "idx")  # in GLUE's files, QQP's, and TFDS
_HIGHEST_SCORE = 5  # of two sentences that mean the same, in STS-B


@dataclasses.dataclass(frozen=True)
class Layout:
    """The format of a task."""

    labels: tuple[str, ...]  # the classes, in the order of their numbers; empty for a regression
    texts: tuple[str, ...]  # the columns of the texts in GLUE's own .tsv files
    fields: tuple[str, ...]  # their names in TFDS and Hugging Face's datasets
    label: str = "label"  # its column in the .tsv files; elsewhere it is "label"
    metrics: tuple[str, ...] = ("accuracy",)  # the scores whose mean is the task's score
    headless: tuple[str, ...] = ()  # the columns of .tsv files without a header
    parts: tuple[str, ...] = ()  # the subsets of evaluation and test
    skips_ragged: bool = False  # whether the usual readers skip lines of more or fewer fields


_ONE, _PAIR, _STRINGS = ("sentence",), ("sentence1", "sentence2"), ("#1 String", "#2 String")
_QUESTIONS, _ANSWER = ("question1", "question2"), ("question", "sentence")
_DUPLICATE, _PREMISE = ("not_duplicate", "duplicate"), ("premise", "hypothesis")
_INFERENCE = ("entailment", "neutral", "contradiction")
_ACCEPTABLE, _COLUMNS = ("unacceptable", "acceptable"), ("source", "label", "mark", "sentence")
_ENTAILMENT, _BOTH = ("entailment", "not_entailment"), ("accuracy", "f1")

LAYOUTS = {
    "cola": Layout(_ACCEPTABLE, _ONE, _ONE, metrics=("matthews",), headless=_COLUMNS),
    "sst2": Layout(("negative", "positive"), _ONE, _ONE),
    "mrpc": Layout(("not_equivalent", "equivalent"), _STRINGS, _PAIR, "Quality", _BOTH),
    "stsb": Layout((), _PAIR, _PAIR, "score", ("pearson", "spearman")),
    "qqp": Layout(_DUPLICATE, _QUESTIONS, _QUESTIONS, "is_duplicate", _BOTH, skips_ragged=True),
    "mnli": Layout(_INFERENCE, _PAIR, _PREMISE, "gold_label", parts=("matched", "mismatched")),
    "qnli": Layout(_ENTAILMENT, _ANSWER, _ANSWER),
    "rte": Layout(_ENTAILMENT, _PAIR, _PAIR),
    "wnli": Layout(_ENTAILMENT[::-1], _PAIR, _PAIR),
}


def layout(name: str) -> Layout:
    """Return the task of a name; UserError without one."""
    if name not in LAYOUTS:
        hint = nearest(name.lower(), list(LAYOUTS), f"choose one of {', '.join(LAYOUTS)}")
        raise UserError(f"GLUE has no task {name!r}; {hint}")
    return LAYOUTS[name]


def text_columns(task: TaskConfig, data: DataFiles) -> tuple[str, ...]:
    """Return the columns of the texts that a model was trained on; none where it is unknown."""
    if task.glue and data.text == DataFiles().text:
        return layout(task.glue).fields
    return () if isinstance(data, UnknownColumns) else tuple(readers.text_columns(data))


def task(name: str) -> TaskConfig:
    """Return the config of a task; UserError if there is none of that name."""
    task = layout(name)
    kind = "classification" if task.labels else "regression"
    return TaskConfig(kind, name, task.labels, task.metrics)


def completed(task: TaskConfig) -> TaskConfig:
    """Return a config with the labels and metrics of its task of GLUE, unless it has its own."""
    if not task.glue:
        return task
    usual = layout(task.glue)
    labels, metrics = task.labels or usual.labels, task.metrics or usual.metrics
    return dataclasses.replace(task, labels=labels, metrics=metrics)


def has_own_sources(name: str, train: str) -> bool:
    """Return whether a task's usual files are read, which `train` is a folder of, or TFDS's."""
    return bool(name) and (not train or os.path.isdir(os.path.expanduser(train)))


def sources(name: str, folder: str = "") -> tuple[str, dict[str, str], dict[str, str]]:
    """Return the training, held-out and test sources, in a folder (test optional) or TFDS."""
    parts = layout(name).parts

    def source(split: str) -> str:
        return os.path.join(folder, f"{split}.tsv") if folder else f"tfds:glue/{name}@{split}"

    def named(split: str, default: str, prefix: str = "") -> dict[str, str]:
        several = {f"{prefix}{part}": source(f"{split}_{part}") for part in parts}
        return several or {default: source(split)}

    tests = named("test", "test", "test_")
    has_tests = any(os.path.exists(os.path.expanduser(file)) for file in tests.values())
    evals = named("dev" if folder else "validation", "eval")
    return source("train"), evals, tests if has_tests or not folder else {}


def read(name: str, source: str, data: DataFiles) -> Iterator[Record]:
    """Yield the examples of a task, with the fields of `fields`."""
    task = layout(name)
    for record in read_records(source, task.headless, skips_ragged=task.skips_ragged):
        yield Record(record.where, fields(name, record, data))


def fields(name: str, record: Record, data: DataFiles) -> dict[str, Any]:
    """Return the fields of a task; none without an agreed label, or for a ragged row.

    Columns that `data` names are read in place of the task's own.
    """
    task, values, default = layout(name), record.fields, DataFiles()
    label = values.get(data.label)
    if data.label == default.label:
        label = values.get(task.label, label)
    if not values or label == "-":
        return {}
    columns = task.texts if set(task.texts) <= values.keys() else task.fields
    if data.text != default.text:
        columns = tuple(readers.text_columns(data))
    missing = next((column for column in columns if column not in values), None)
    if missing:
        raise UserError(
            f"{record.where} has no column {missing!r}, as {name} has; give that task's file, "
            "or set data.text and data.label to its columns"
        )
    number = next((values[column] for column in _IDS if column in values), None)
    return {
        "id": int(number) if isinstance(number, str) and number.isdecimal() else number,
        "texts": tuple(values[column] for column in columns),
        "label": _label(task, label, record.where),
    }


def _label(task: Layout, label: Any, where: str) -> str | float | None:
    """Return a label by its name or number; None without one, or with -1, which hides it."""
    if label in (None, ""):
        return None
    if label in task.labels:
        return label
    number = readers.to_number(label)
    if number == -1:
        return None
    if not task.labels and 0 <= number <= _HIGHEST_SCORE:
        return number
    if number in range(len(task.labels)):
        return task.labels[int(number)]
    names = f"{', '.join(task.labels)}, or its number" if task.labels else "a number from 0 to 5"
    raise UserError(f"{where}: the label is {label!r}; it must be {names}")
