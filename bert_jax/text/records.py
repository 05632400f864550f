"""Records of tables, JSON lines, plain lines and datasets of TensorFlow.

A malformed record is an error with its line. No other module imports TensorFlow Datasets.
"""

import csv
import dataclasses
import importlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.console import counted, show
from bert_jax.errors import UserError, first_line, nearest, refuse
from bert_jax.text.classes import class_names, table_features
from bert_jax.text.files import STDIN, existing, file_type, line_name, open_file, read_lines, suffix
from bert_jax.text.sentences import MAX_DOCUMENT_CHARACTERS
from bert_jax.text.values import arrow_rows, check_columns, parse_json, plain_value

_TABLES = {".csv": "commas", ".tsv": "tabs"}  # and what separates their columns
_OTHER = {".csv": {";", "\t"}, ".tsv": {";", ","}}  # that other programs write between them
_MAX_FIELD = 1 << 26  # characters: a text may be longer than the csv module's 131,072
JSON_LINES = (".jsonl", ".json", ".ndjson")
FASTA, FASTA_MARK = (".fasta", ".fa", ".faa", ".fna"), ">"
_PARQUET, _PARQUET_ROWS = ".parquet", 1024  # rows that are read at once
_TFDS = "tfds:"
REMEDY = "give a file, or tfds:NAME@SPLIT"  # for a file that does not exist
DEFAULT_SPLIT = "train"  # of a dataset of TFDS
# The groups of TFDS that have datasets for the tasks of this package.
_GROUPS = ("question_answering", "summarization", "text", "translate")


@dataclasses.dataclass(frozen=True)
class Record:
    """A line, row, sentence or question of a file.

    Attributes:
      where: "FILE:LINE", or a name that is as exact, for messages.
      fields: the values by column or name.
      position: in the file on disk, after the record.
    """

    where: str
    fields: Mapping[str, Any]
    position: int = 0

    @property
    def line(self) -> int:
        """The number of the first line of a record of a file, from 1."""
        return int(self.where.rpartition(":")[2])

    def field(self, name: str, setting: str) -> Any:
        """Return the field that `setting` of the config names; UserError without one."""
        if name in self.fields:
            return self.fields[name]
        kind = file_type(self.where.rpartition(":")[0])
        hint = nearest(name, list(self.fields), "")
        if other := _other_separator([*self.fields], kind):
            hint = other
        elif kind == ".tsv" and f'"{name}"' in self.fields:
            hint = "a .tsv has no quotes; remove them, or write a .csv"
        elif not hint and kind in _TABLES:
            hint = "or add the line of column names if the file has none"
        elif not hint and kind in JSON_LINES:
            hint = "or fix this record, if others have it"
        columns = ", ".join(self.fields) or "no columns"
        raise UserError(
            f"{self.where} has no column {name!r}; set {setting} to one of {columns}"
            f"{'; ' if hint else ''}{hint}"
        )


def _other_separator(header: Sequence[str], kind: str) -> str:
    """Return advice where the one column of a table has the separator of another kind; else ""."""
    is_other = kind in _TABLES and len(header) == 1 and set(*header) & _OTHER[kind]
    return f"the columns of a {kind} are separated by {_TABLES[kind]}" if is_other else ""


def is_dataset(source: str) -> bool:
    """Return whether a source is a dataset of TensorFlow Datasets."""
    return source.startswith(_TFDS)


def read_records(
    source: str, columns: Sequence[str] = (), *, skips_ragged: bool = False
) -> Iterator[Record]:
    """Return the records of a file or of a dataset.

    Args:
      source: a .tsv, .csv or .jsonl, or .gz or .xz of it; a .parquet; or tfds:NAME@SPLIT.
      columns: names for the fields of a table whose first row has none of these names.
      skips_ragged: whether a row of a table with another number of fields is a record without
        fields, rather than an error.

    Raises:
      UserError: the source does not exist, or is of an unknown kind. A malformed record raises it
        when it is read.

    >>> path = getfixture("tmp_path") / "a.tsv"
    >>> _ = path.write_text("text\\tlabel\\na river\\twater\\n")
    >>> [record.fields for record in read_records(str(path))]
    [{'text': 'a river', 'label': 'water'}]
    """
    if is_dataset(source):
        if not source.partition("@")[2]:
            raise UserError(f"{source} names no split; add one, such as {source.rstrip('@')}@train")
        return read_dataset(source, open_dataset(source))
    path = existing(source, REMEDY)
    read = reader(path)
    if read is table_rows:
        return table_rows(path, columns, skips_ragged=skips_ragged)
    if read:
        return read(path)
    raise UserError(
        f"{source} is of an unknown kind; give a .tsv, .csv or .jsonl, or .gz or .xz, or a .parquet"
    )


def texts(source: str, column: str, setting: str) -> Iterator[tuple[str, Record]]:
    """Yield each text of a file with its record; of a record where it is null, "".

    Args:
      source: a file of plain lines, or of records with a text in `column`; or "-" for stdin.
      column: its name, which `setting` sets.
    """
    read = reader(source)
    path = source if source == STDIN else existing(source, REMEDY)
    for record in (read or text_lines)(path):
        text = record.field(column if read else "text", setting)
        if not isinstance(text, str | None):
            raise UserError(f"{record.where} has no text in {column!r}; set {setting} to another")
        yield text or "", record


def reader(path: Path | str) -> Callable[..., Iterator[Record]] | None:
    """Return what reads a table, Parquet, JSON or FASTA; None for plain text.

    Stores have the names of these functions.
    """
    if file_type(path) in _TABLES:
        return table_rows
    if suffix(path) == _PARQUET:
        return parquet_rows
    if file_type(path) in FASTA:
        return fasta_sequences
    return json_lines if file_type(path) in JSON_LINES else None


def is_undivided(path: Path | str) -> bool:
    """Return whether a file of this format can only be read from its beginning.

    A record of a table may have several lines, and Parquet is binary.
    """
    return reader(path) in (table_rows, parquet_rows)


def text_lines(path: Path | str) -> Iterator[Record]:
    """Yield {"text": LINE} for each line of a file or of standard input, also for an empty one."""
    name = "stdin" if path == STDIN else path
    lines = read_lines(path, refuses_cr=path != STDIN)  # where another program may have put one
    for number, (line, position) in enumerate(lines, start=1):
        yield Record(f"{name}:{number}", {"text": line}, position)


def json_lines(path: Path | str, start: int = 0, end: int | None = None) -> Iterator[Record]:
    """Yield the JSON objects of a file, one a line; empty lines are skipped."""
    lines = read_lines(path, start, end, refuses_cr=False)  # white space of JSON
    for number, (line, position) in enumerate(lines, start=1):
        if not line:
            continue
        where = f"{path}:{line_name(number, start)}"
        if line.startswith("["):  # of an array on one line or on several
            raise UserError(
                f"{where} begins a JSON array; write each of its objects on a line of its own, "
                "without the brackets around all"
            )
        value = parse_json(line, where)
        if not isinstance(value, dict):
            raise UserError(f"{where} is no JSON object; give one such as {{...}} a line")
        yield Record(where, value, position)


def fasta_sequences(path: Path | str, start: int = 0, end: int | None = None) -> Iterator[Record]:
    """Yield {"text": SEQUENCE} for each sequence of a FASTA file, without its ">" line.

    A sequence that is longer than a document may be is several.
    """
    where, parts, size, after = "", [], 0, start
    lines = read_lines(path, start, end)
    for number, (line, position) in enumerate(itertools.chain(lines, [(FASTA_MARK, 0)]), start=1):
        if line.startswith(FASTA_MARK):
            if parts:
                yield Record(where, {"text": "".join(parts)}, after)
            where, parts, size = f"{path}:{line_name(number, start)}", [], 0
        elif not line or line.startswith(";"):  # a remark
            continue
        elif not where:
            raise UserError(
                f"{path}:{line_name(number, start)} is of no sequence; begin each with a line "
                f"{FASTA_MARK!r} and its name, or rename a file of other text to .txt"
            )
        else:
            parts.append("".join(line.split()))
            size += len(line)
        if size > MAX_DOCUMENT_CHARACTERS:
            yield Record(where, {"text": "".join(parts)}, position)
            parts, size = [], 0
        after = position


def table_rows(
    path: Path | str, columns: Sequence[str] = (), *, skips_ragged: bool = False
) -> Iterator[Record]:
    """Yield the rows of a .csv or .tsv; empty ones are skipped, except in a .tsv of one column.

    Args:
      path: the file.
      columns: names for the fields of a file whose first row has none of these names.
      skips_ragged: whether a row with another number of fields is a record without fields, rather
        than an error.
    """
    header = list(columns)
    for index, (number, row, position) in enumerate(_rows(path)):
        where, names = f"{path}:{number}", [name.strip() for name in row]
        if not header or (index == 0 and not set(columns).isdisjoint(names)):
            header, columns = [] if row == [""] else names, ()
            check_columns(header, where)
        elif len(row) == len(header):
            yield Record(where, dict(zip(header, row, strict=True)), position)
        elif row == [""]:
            continue
        elif skips_ragged:
            yield Record(where, {})
        else:
            expected = f"{len(header)} are expected" if columns else f"the header has {len(header)}"
            fix = _other_separator(header, file_type(path)) or "fix or remove the line"
            raise UserError(f"{where}: {counted(len(row), 'field')} where {expected}; {fix}")


def _rows(path: Path | str) -> Iterator[tuple[int, list[str], int]]:
    """Yield the number of each row's first line, its fields, and the position after the row."""
    position, number = 0, 1
    if file_type(path) == ".tsv":  # without quotes and escapes
        for number, (line, position) in enumerate(read_lines(path, strip=False), start=1):
            yield number, line.rstrip("\r\n").split("\t"), position
        return

    def lines() -> Iterator[str]:
        nonlocal position
        # The csv module has a message of its own for a CR, which may be in quotes.
        for line, position in read_lines(path, strip=False, refuses_cr=False):  # noqa: B007
            yield line

    csv.field_size_limit(max(csv.field_size_limit(), _MAX_FIELD))
    reader = csv.reader(lines(), strict=True)  # so that a quote that is never closed is an error
    try:
        for row in reader:
            if row:
                yield number, row, position
            number = reader.line_num + 1
    except csv.Error as error:
        refuse(
            str(error).startswith("new-line"),
            f"{path}:{number}: a line ends in CR alone, and only LF and CRLF are read",
            fix="convert the line ends, or put quotes around a field with a CR",
        )
        raise UserError(f"{path}:{number}: {error}; fix its quotes, or the line") from error


def parquet_rows(path: Path | str, column: str = "") -> Iterator[Record]:
    """Yield the rows of a Parquet file; a row that is null in a column has None there.

    Of a file with `column`, that alone is read. A name with a dot is pyarrow's for a part of one.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"{path} needs pyarrow, which is not installed; pip install 'bert-jax[parquet]'"
        ) from error
    with open_file(path) as file:
        size, index = file.seek(0, os.SEEK_END), 0
        file.seek(0)
        try:
            table = parquet.ParquetFile(file)
            num_rows = table.metadata.num_rows
            check_columns(table.schema_arrow.names, str(path))
            features = table_features(table.schema_arrow)
            is_there = column in table.schema_arrow.names and "." not in column
            columns = [column] if is_there else None
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=columns):
                for row in arrow_rows(batch, f"{path}:{index + 1}"):
                    index += 1
                    fields = class_names(plain_value(row), features)
                    yield Record(f"{path}:{index}", fields, size * index // num_rows)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}:{index} has bytes that are not UTF-8; remove or decode their column"
            ) from error
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(
                f"{path} cannot be read after row {index} ({first_line(error)}); fetch it again"
            ) from error


def open_dataset(source: str) -> Any:
    """Return the rows of `tfds:NAME[/CONFIG][:VERSION][@SPLIT]`, by default of "train"."""
    # Imported in the function: it takes longer than all other imports of this module.
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import constants

    for group in _GROUPS:  # whose older datasets TFDS knows once they are imported
        importlib.import_module(f"tensorflow_datasets.{group}")
    folder = os.environ.get("TFDS_DATA_DIR") or constants.DATA_DIR
    dataset, _, split = source.removeprefix(_TFDS).partition("@")
    try:
        # Array records need no TensorFlow.
        options: dict[str, Any] = {"file_format": "array_record"}
        builder: Any = tfds.builder(dataset, data_dir=folder, **options)
        if not builder.is_prepared():
            show(f"preparing {source} in {folder}; without a network this fails after some minutes")
        builder.download_and_prepare(**options)
        rows = builder.as_data_source(split=split or DEFAULT_SPLIT)
        if len(rows):
            rows[0]  # raises if a file is missing or damaged
    except Exception as error:  # of nearly every type
        call = f"tfds.builder({dataset!r}, data_dir=DIR, file_format='array_record')"
        raise UserError(
            f"{source} cannot be read from {folder} ({first_line(error)}); check its name and its "
            f"split, or prepare it on another machine, by {call}.download_and_prepare(), and copy "
            "DIR; --data-dir or TFDS_DATA_DIR names another folder"
        ) from error
    return rows


def read_dataset(source: str, rows: Any) -> Iterator[Record]:
    """Yield the rows of a TensorFlow dataset; a class is its name, None for -1."""
    for index in range(len(rows)):
        where = f"{source} #{index}"
        try:
            fields = class_names(plain_value(rows[index]), rows.dataset_info.features)
        except Exception as error:  # TFDS raises nearly every kind for a file that is damaged
            reason = " ".join(str(error).split()) or repr(error)
            raise UserError(f"{where} cannot be read ({reason}); prepare it again") from error
        yield Record(where, fields, index + 1)
