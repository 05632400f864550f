"""File readers of tasks: .tsv, .csv, .jsonl, CoNLL columns, SQuAD's JSON, TFDS."""

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.text import records
from bert_jax.text.records import Record, read_lines


def to_number(value: Any) -> float:
    """Return a number of a file as a float, NaN for any other value."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def table(
    source: str, columns: Sequence[str] = (), *, skips_ragged: bool = False
) -> Iterator[Record]:
    """Return the records of a .tsv, .csv or .jsonl, or .gz or .xz of it, or of tfds:NAME@SPLIT."""
    if source.startswith("tfds:"):
        if not source.partition("@")[2]:
            raise UserError(f"{source} names no split; add one, such as {source.rstrip('@')}@train")
        return records.tfds_records(source, records.open_tfds(source))
    path = existing(source)
    if records.file_type(path) == ".jsonl":
        return records.json_lines(path)
    if records.file_type(path) in (".tsv", ".csv"):
        return records.table_rows(path, columns, skips_ragged=skips_ragged)
    raise UserError(f"{source} is of an unknown kind; give a .tsv, .csv or .jsonl, or .gz or .xz")


def conll(source: str) -> Iterator[Record]:
    """Yield the sentences of a CoNLL file: {"tokens": [...], "tags": [...] or None}."""
    # The first column is a word, the last of several its tag; no sign starts a comment.
    path, width = existing(source), 0
    # Not held by a name, so that the file is closed as soon as an error is raised.
    for is_sentence, lines in itertools.groupby(
        ((n, _columns(line)) for n, (line, _) in enumerate(read_lines(path, strip=False), start=1)),
        key=lambda numbered: any(numbered[1]) and numbered[1][0] != "-DOCSTART-",
    ):
        sentence = list(lines) if is_sentence else []
        for number, columns in sentence:
            width = width or len(columns)
            if len(columns) != width:
                counts = f"{len(columns)} columns where the first word has {width}"
                raise UserError(f"{path}:{number}: {counts}; give every word the same")
            if not all(columns):
                raise UserError(f"{path}:{number}: an empty column; fill it in or remove the tab")
        if sentence:
            tokens, tags = ([columns[i] for _, columns in sentence] for i in (0, -1))
            fields = {"tokens": tokens, "tags": tags if width > 1 else None}
            yield Record(f"{path}:{sentence[0][0]}", fields)


def _columns(line: str) -> list[str]:
    # Other white space than tabs and spaces may be a word, or part of one.
    separator = "\t" if "\t" in line else " +"
    return [column.strip(" ") for column in re.split(separator, line.strip(" \r\n"))]


def squad(source: str) -> Iterator[Record]:
    """Yield the questions of a SQuAD file, with the context, or of a .jsonl or tfds:... of them."""
    is_flat = source.startswith("tfds:") or records.file_type(source) == ".jsonl"
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


def existing(source: str) -> Path:
    """Return the path of a file; UserError, with what it is, if it cannot be read."""
    path = Path(os.path.expanduser(source))
    if fault := records.file_fault(path):
        raise UserError(f"{source} {fault}; give a file, or tfds:NAME@SPLIT")
    return path


def _nested_questions(source: str) -> Iterator[Record]:
    text = "".join(line for line, _ in read_lines(existing(source), strip=False, longest=1 << 30))
    if not text.strip():
        return
    for article_at, article in _items(records.parse_json(text, source), "data", source, ": "):
        for at, paragraph in _items(article, "paragraphs", article_at):
            questions, context = _items(paragraph, "qas", at), text_field(paragraph, "context", at)
            for where, fields in questions:
                if not isinstance(fields, dict):
                    raise UserError(f"{where} is no JSON object; fix or remove it")
                yield Record(where, {**fields, "context": context})


def _items(value: Any, key: str, where: str, separator: str = ".") -> list[tuple[str, Any]]:
    items = value.get(key) if isinstance(value, dict) else None
    if not isinstance(items, list):
        raise UserError(f"{where} has no list {key!r}; SQuAD's form is data > paragraphs > qas")
    return [(f"{where}{separator}{key}[{i}]", item) for i, item in enumerate(items)]


def text_field(fields: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field that must have a text."""
    if not isinstance(value := fields.get(name), str) or not value.strip():
        raise UserError(f"{where} has no {name}; fill it in or remove the entry")
    return value
