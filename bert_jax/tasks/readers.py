"""Formats of tasks, such as CoNLL's columns and SQuAD's JSON, and the checks of what they hold."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bert_jax.config import DataFiles
from bert_jax.console import counted
from bert_jax.errors import UserError, refuse
from bert_jax.text import builtin
from bert_jax.text.classes import ClassName
from bert_jax.text.files import existing, file_type, read_lines
from bert_jax.text.records import REMEDY, Record, is_dataset, read_records
from bert_jax.text.values import parse_json


def text_columns(data: DataFiles) -> list[str]:
    """Return the columns that `data.text` names."""
    return [name.strip() for name in data.text.split(",")]


def whole(value: Any) -> Any:
    """Return the integer of a float that is one, as pandas has numbers beside NaN, or `value`."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def to_number(value: Any) -> float:
    """Return a number of a file as a float, also of a class by name; NaN for any other value."""
    if isinstance(value, ClassName):  # whose name may be another number
        return float(value.number)
    try:
        # Python's own notation, 1_000, is no number of a file.
        is_none = isinstance(value, bool) or (isinstance(value, str) and "_" in value)
        return math.nan if is_none else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def to_relevance(value: Any) -> float:
    """Return how relevant a passage is to a query: a number, or 1 for true and 0 for false."""
    word = str(value).strip().lower()  # pandas writes truths as words to a .csv
    return float(word == "true") if word in ("true", "false") else to_number(value)


def builtin_pairs(source: str) -> Iterator[Record] | None:
    """Return what functions of Python's library do with their signatures; None of a file.

    The source is "builtin@train" or "builtin@eval".
    """
    split = builtin.split_of(source)
    if not split:
        return None
    pairs = enumerate(builtin.described(split))
    return (Record(f"{source} #{index}", {"texts": texts}) for index, texts in pairs)


def conll(source: str) -> Iterator[Record]:
    """Yield the sentences of a CoNLL file: {"tokens": [...], "tags": [...] or None}."""
    # The first column is a word, the last of several its tag; no sign starts a comment.
    path, width = existing(source, REMEDY), 0
    if file_type(path) == ".csv":
        raise UserError(
            f"{source} is a table with commas; give a word and its tag a line, with a tab or a "
            "space between, or a .jsonl with lists of them"
        )
    # Not held by a name, so that the file is closed as soon as an error is raised.
    for is_sentence, lines in itertools.groupby(
        ((n, _columns(line)) for n, (line, _) in enumerate(read_lines(path, strip=False), start=1)),
        key=lambda numbered: any(numbered[1]) and numbered[1][0] != "-DOCSTART-",
    ):
        sentence = list(lines) if is_sentence else []
        for number, columns in sentence:
            width = width or len(columns)
            if len(columns) != width:
                counts = f"{counted(len(columns), 'column')} where the first word has {width}"
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
    is_flat = is_dataset(source) or file_type(source) in (".jsonl", ".ndjson", ".parquet")
    records = read_records(source) if is_flat else _nested_questions(source)
    for record in questions(records):
        yield Record(f"{source}: question {record.fields['id']}", record.fields)


def questions(records: Iterable[Record], *, need_ids: bool = True) -> Iterator[Record]:
    """Yield records of questions, which predictions are written by: no two have one id."""
    seen = set()
    for record in records:
        name = record.fields.get("id")
        if need_ids and (not isinstance(name, str | int) or name == ""):
            raise UserError(f"{record.where} has no id; give each question its own")
        if name is not None:
            if str(name) in seen:
                raise UserError(
                    f"{record.where}: the id {name} occurs twice; give each question its own"
                )
            seen.add(str(name))
        yield record


def answers(value: Any, where: str) -> tuple[tuple[str, int], ...] | None:
    """Return each answer's text and start, of SQuAD's list of objects or TFDS's lists."""
    if value is None:
        return None
    names = ("text", "answer_start")
    if isinstance(value, dict) and all(isinstance(value.get(name), list) for name in names):
        pairs: Any = tuple(itertools.zip_longest(*(value[name] for name in names)))
    else:
        items = value if isinstance(value, list) else [value]
        pairs = tuple(tuple(map(i.get, names)) if isinstance(i, dict) else (i, None) for i in items)
    for text, start in pairs:
        if not isinstance(text, str) or not text.strip() or type(start) is not int or start < 0:
            remedy = "give a text, and an answer_start from 0; without an answer, an empty list"
            raise UserError(f"{where}: an answer is {text!r} at {start!r}; {remedy}")
    return pairs


def _nested_questions(source: str) -> Iterator[Record]:
    path = existing(source, REMEDY)
    refuse(
        file_type(path) in (".csv", ".tsv"),
        f"{source} is a table, in which answers have no form",
        fix="give SQuAD's .json, or a .jsonl or .parquet of id, question, context and answers",
    )
    lines = read_lines(path, strip=False, longest=1 << 30, refuses_cr=False)
    text = "".join(line for line, _ in lines)
    if not text.strip():
        return
    # Not splitlines, which splits at characters that a string may have.
    first, *others = [line.strip() for line in text.split("\n") if line.strip()]
    is_lines = others and first.endswith("}") and others[0].startswith("{")
    refuse(is_lines, f"{source} has JSON lines", fix="give it a name that ends in .jsonl")
    for article_at, article in _items(parse_json(text, source), "data", source, ": "):
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


def check_texts(texts: Iterable[Any], where: str) -> None:
    """Refuse a text of an example that is none, or empty."""
    for text in texts:
        refuse_number(text, where)
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{where}: a text is {text!r}; fill it in or remove the line")


def refuse_number(text: Any, where: str) -> None:
    """Refuse a number where a text is expected, but for NaN, which pandas has for none."""
    refuse(
        isinstance(text, int | float) and not isinstance(text, bool) and text == text,
        f"{where}: the number {text} is where a text is expected",
        fix="put it in quotes, as a text",
    )


def text_field(fields: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field that must have a text."""
    refuse_number(value := fields.get(name), where)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where} has no {name}; fill it in or remove the entry")
    return value
