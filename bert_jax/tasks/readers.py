"""File readers of tasks: .tsv, .csv, .jsonl, CoNLL columns, SQuAD's JSON, TFDS.

Nothing is dropped silently: a malformed record is an error that names file and line.
"""

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.text.sources import file_fault, file_type, open_tfds, read_lines, read_rows


@dataclasses.dataclass(frozen=True)
class Record:
    """A line, sentence or question of a file: where it is, for messages, and its fields."""

    where: str
    fields: Mapping[str, Any]

    def field(self, name: str, setting: str) -> Any:
        """Return the field that `setting` of the config names; UserError without one."""
        if name not in self.fields:
            names = ", ".join(self.fields) or "no columns"
            raise UserError(f"{self.where} has no column {name!r}; set {setting} to one of {names}")
        return self.fields[name]


def to_number(value: Any) -> float:
    """Return a number of a file as a float, NaN for any other value."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def table(
    source: str, columns: Sequence[str] = (), *, skips_ragged: bool = False
) -> Iterator[Record]:
    """Return the rows of a .tsv, .csv or .jsonl file (or .gz, .xz of it), or of tfds:NAME@SPLIT.

    A .tsv has no quotes and no escapes, as in GLUE; a .csv is of RFC 4180, and its fields may hold
    newlines; both have text alone. A line of a .jsonl is an object with JSON's values. A class of a
    TensorFlow dataset is its name, None for -1. Empty lines are skipped, except in a .tsv with a
    single column.

    `columns` are those of a .tsv or .csv whose first row has none of them, and so is no header.
    With `skips_ragged`, a row with more or fewer fields than the header is a record without fields.
    """
    if source.startswith("tfds:"):
        return _tfds(source)
    path = _file(source)
    if file_type(path) == ".jsonl":
        return _json_lines(path)
    if file_type(path) in (".tsv", ".csv"):
        return _delimited(path, columns, skips_ragged)
    raise UserError(
        f"{source} is of an unknown kind; give a .tsv, .csv or .jsonl, or .gz or .xz of it"
    )


def conll(source: str) -> Iterator[Record]:
    """Yield the sentences of a CoNLL file: {"tokens": [...], "tags": [...] or None}.

    Each line has columns, separated by tabs or else by spaces: the first is a word, the last of
    several its tag. A blank line or `-DOCSTART-` ends a sentence. There are no comments, as any
    sign may be a word.
    """
    path, width, start = _file(source), 0, 0
    words: list[list[str]] = []
    # The blank line after the last sentence may be missing.
    # Not held by a name, so that the file is closed as soon as an error is raised.
    for number, (line, _) in enumerate(
        itertools.chain(read_lines(path, strip=False), [("", 0)]), start=1
    ):
        # Other white space than tabs and spaces may be a word, or part of one.
        separator = "\t" if "\t" in line else " +"
        columns = [column.strip(" ") for column in re.split(separator, line.strip(" \r\n"))]
        if not any(columns) or columns[0] == "-DOCSTART-":
            if words:
                tokens, tags = ([columns[i] for columns in words] for i in (0, -1))
                yield Record(
                    f"{path}:{start}", {"tokens": tokens, "tags": tags if width > 1 else None}
                )
            words = []
            continue
        width = width or len(columns)
        if len(columns) != width:
            raise UserError(
                f"{path}:{number}: {len(columns)} columns where the first word has {width}; give "
                "every word the same, and a line of its own"
            )
        if not all(columns):
            raise UserError(f"{path}:{number}: an empty column; fill it in or remove the tab")
        start = start if words else number
        words.append(columns)


def squad(source: str) -> Iterator[Record]:
    """Yield the questions of a SQuAD file, version 1.1 or 2.0, or of tfds:squad/...@SPLIT.

    The fields are those of the file, and the context. A .jsonl has a question a line, with the
    fields of the TensorFlow dataset.
    """
    is_flat = source.startswith("tfds:") or file_type(source) == ".jsonl"
    seen = set()
    for record in table(source) if is_flat else _nested_questions(source):
        name = record.fields.get("id")
        if not isinstance(name, str | int) or name == "":
            raise UserError(f"{record.where} has no id; give each question its own")
        where = f"{source}: question {name}"
        if str(name) in seen:
            raise UserError(f"{where}: its id occurs twice; give each question its own")
        seen.add(str(name))
        yield Record(where, record.fields)


def _file(source: str) -> Path:
    path = Path(os.path.expanduser(source))
    if fault := file_fault(path):
        raise UserError(f"{source} {fault}; give a file, or tfds:NAME@SPLIT")
    return path


def _delimited(path: Path, columns: Sequence[str], skips_ragged: bool) -> Iterator[Record]:
    header = list(columns)
    for index, (number, row, _) in enumerate(read_rows(path)):
        where = f"{path}:{number}"
        if not header or (index == 0 and not set(columns).isdisjoint(row)):
            header, columns = [] if row == [""] else row, ()
            repeated = _repeated(header)
            if repeated is not None:
                raise UserError(f"{where}: two columns are named {repeated!r}; rename one of them")
        elif len(row) == len(header):
            yield Record(where, dict(zip(header, row, strict=True)))
        elif row == [""]:
            continue
        elif skips_ragged:
            yield Record(where, {})
        else:
            than = f"{len(header)} are expected" if columns else f"the header has {len(header)}"
            count = "1 field" if len(row) == 1 else f"{len(row)} fields"
            raise UserError(f"{where}: {count} where {than}; fix or remove the line")


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)


def _json_lines(path: Path) -> Iterator[Record]:
    for number, (line, _) in enumerate(read_lines(path), start=1):
        if line:
            value = _json(line, where := f"{path}:{number}")
            if not isinstance(value, dict):
                raise UserError(f"{where} is no JSON object; give one such as {{...}} a line")
            yield Record(where, value)


def _json(text: str, where: str) -> Any:
    try:
        return _plain(json.loads(text, object_pairs_hook=_object))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); fix or remove it") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = _repeated([name for name, _ in pairs])
    if repeated is not None:
        raise ValueError(f"{repeated!r} occurs twice")
    return dict(pairs)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: bytes as text, arrays as lists."""
    if isinstance(value, str):
        # JSON may escape half of a surrogate pair, which UTF-8, and so every tokenizer, has not.
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, Iterable) else value


def _tfds(source: str) -> Iterator[Record]:
    if not source.partition("@")[2]:
        raise UserError(f"{source} names no split; add one, such as {source.rstrip('@')}@train")
    rows = open_tfds(source)
    for index in range(len(rows)):
        where = f"{source} #{index}"
        try:
            fields = _named(_plain(rows[index]), rows.dataset_info.features)
        except Exception as error:  # TFDS raises nearly every kind for a file that is damaged
            reason = " ".join(str(error).split()) or repr(error)
            raise UserError(f"{where} cannot be read ({reason}); prepare it again") from error
        yield Record(where, fields)


def _named(value: Any, feature: Any) -> Any:
    """Return a value of a TensorFlow dataset with its classes by their names."""
    from tensorflow_datasets import features

    while isinstance(feature, features.Sequence):
        feature = feature.feature
    if isinstance(value, list):
        return [_named(item, feature) for item in value]
    if isinstance(value, dict):  # a sequence of dicts, too, is a dict of sequences in the file
        return {name: _named(item, feature[name]) for name, item in value.items()}
    if isinstance(feature, features.ClassLabel):
        return None if value < 0 else feature.int2str(value)
    return value


def _nested_questions(source: str) -> Iterator[Record]:
    text = "".join(line for line, _ in read_lines(_file(source), strip=False, longest=1 << 30))
    if not text.strip():
        return
    for article_at, article in _items(_json(text, source), "data", source, ": "):
        for at, paragraph in _items(article, "paragraphs", article_at):
            questions, context = _items(paragraph, "qas", at), text_field(paragraph, "context", at)
            for where, fields in questions:
                if not isinstance(fields, dict):
                    raise UserError(f"{where} is no JSON object; fix or remove it")
                yield Record(where, {**fields, "context": context})


def _items(value: Any, key: str, where: str, separator: str = ".") -> list[tuple[str, Any]]:
    """Return where each item of a list is, and the item."""
    items = value.get(key) if isinstance(value, dict) else None
    if not isinstance(items, list):
        raise UserError(f"{where} has no list {key!r}; SQuAD's form is data > paragraphs > qas")
    return [(f"{where}{separator}{key}[{i}]", item) for i, item in enumerate(items)]


def text_field(fields: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field that must have a text."""
    if not isinstance(value := fields.get(name), str) or not value.strip():
        raise UserError(f"{where} has no {name}; fill it in or remove the entry")
    return value
