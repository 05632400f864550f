"""Lines, records of JSON and rows of tables; a malformed one is an error that names its line."""

import csv
import dataclasses
import errno
import functools
import gzip
import importlib
import io
import json
import lzma
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bert_jax.console import counted, show
from bert_jax.errors import UserError, first_line, nearest
from bert_jax.storage import paths, remote

# Longer lines are refused, so that a small .gz of one long line cannot fill the memory.
MAX_LINE_BYTES = 1 << 26
_BLOCK_BYTES = 1 << 22
# Of TFDS, with datasets for our tasks.
_TFDS_GROUPS = ("question_answering", "summarization", "text", "translate")
STDIN = "-"  # in place of the path of a file
OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}  # of compressed files


@dataclasses.dataclass(frozen=True)
class Record:
    """A line, sentence or question of a file: where it is, for messages, and its fields."""

    where: str
    fields: Mapping[str, Any]
    position: int = 0  # in the file on disk, after it

    def field(self, name: str, setting: str) -> Any:
        """Return the field that `setting` of the config names; UserError without one."""
        if name not in self.fields:
            hint = nearest(name, list(self.fields), "")
            kind = file_type(self.where.rpartition(":")[0])
            if not hint and kind in (".csv", ".tsv"):
                hint = "or add the line of column names if the file has none"
            elif kind == ".jsonl":
                hint = hint or "or mend this record, if others have it"
            every = f"set {setting} to one of {', '.join(self.fields) or 'no columns'}"
            remedy = "; ".join(filter(None, (every, hint)))
            raise UserError(f"{self.where} has no column {name!r}; {remedy}")
        return self.fields[name]


def file_type(path: str | Path) -> str:
    """Return the suffix of a file, ignoring .gz and .xz: ".tsv" of "a.TSV.gz"."""
    path = Path(path)
    return (Path(path.stem) if path.suffix in (".gz", ".xz") else path).suffix.lower()


def file_fault(path: str | Path) -> str:
    """Return the fault of an unreadable path, such as "does not exist"; "" if it has none."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:  # ValueError for a NUL byte
        if getattr(error, "errno", None) != errno.ENOENT:
            return f"cannot be read ({getattr(error, 'strerror', error)})"
        return "is a link to a missing file" if os.path.islink(path) else "does not exist"
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        return f"is a {kinds.get(stat.S_IFMT(mode), 'device')}, not a file"
    return "" if os.access(path, os.R_OK) else "cannot be read (its permissions)"


def open_file(path: Path | str, block_bytes: int = _BLOCK_BYTES) -> io.BufferedReader:
    """Open a file, a URL or standard input for reading; UserError if that fails.

    Of a URL, each request reads `block_bytes`.
    """
    if isinstance(path, str) and paths.is_remote(path):
        return remote.open_file(path, block_bytes)
    try:
        # Not `sys.stdin`, whose lock a thread that waits for a line would hold at exit.
        return open(0, "rb", closefd=False) if path == STDIN else Path(path).open("rb")
    except OSError as error:
        if path == STDIN:
            raise UserError(f"stdin cannot be read ({error.strerror}); give a file") from error
        raise UserError(f"{path} {file_fault(path) or error.strerror}; restore it") from error


def read_lines(
    path: Path | str,
    start: int = 0,
    end: int | None = None,
    *,
    strip: bool = True,
    longest: int = MAX_LINE_BYTES,
) -> Iterator[tuple[str, int]]:
    """Yield each line of at most `longest` bytes, and the position in the file on disk after it.

    Of a file that is not compressed, only the lines that start at the byte `start` or later, where
    a line must start, and before `end`.
    """
    with open_file(path) as raw:
        decompress = OPENERS.get(Path(path).suffix)
        end = None if decompress else end
        path = "stdin" if path == STDIN else path
        file: BinaryIO = decompress(raw) if decompress else raw
        if start:
            raw.seek(start)
        lines = iter(functools.partial(file.readline, longest + 1), b"")
        number, position, offset = 0, start, start
        try:
            for number, line in enumerate(lines, start=1):
                if len(line) > longest:
                    raise ValueError(f"is longer than {longest >> 20} MiB; break it into lines")
                if b"\0" in line:
                    raise ValueError("has a NUL byte, as UTF-16 has; convert it, or fetch it again")
                text = line.decode("utf-8" if start or number > 1 else "utf-8-sig")
                position = position if number % 64 or not raw.seekable() else raw.tell()
                yield text.strip() if strip else text, position
                offset += len(line)
                if end is not None and offset >= end:
                    return
        except UnicodeDecodeError as error:
            byte = f"byte 0x{error.object[error.start]:02x} at {error.start}"
            fault = f"is not UTF-8 ({byte}); convert it"
            raise UserError(f"{path}: line {_line(number, start)} {fault}") from error
        except ValueError as error:
            raise UserError(f"{path}: line {_line(number, start)} {error}") from error
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            where = f"{path} is damaged after line {_line(number, start)}"
            raise UserError(f"{where} ({error}); fetch it again") from error


def _line(number: int, start: int) -> str:
    return f"{number} after byte {start}" if start else str(number)


def line_start(path: Path | str, offset: int, blank_within: int) -> int:
    """Return where the first line at or after a byte starts, or else where a document does.

    That is after a blank line, or the end of the file, at most `blank_within` bytes after it.
    """
    with open_file(path, 1 << 16) as file:
        file.seek(offset - 1)
        line = file.readline(MAX_LINE_BYTES + 1)
        if len(line) > MAX_LINE_BYTES:
            fault = f"is longer than {MAX_LINE_BYTES >> 20} MiB; break it into lines"
            raise UserError(f"{path}: the line at byte {offset} {fault}")
        start = position = offset - 1 + len(line)
        while position < offset + blank_within:
            line = file.readline(blank_within + 1)
            position += len(line)
            if not line.strip() and position <= offset + blank_within:
                return position
        return start


def json_lines(path: Path | str, start: int = 0, end: int | None = None) -> Iterator[Record]:
    """Yield the JSON objects of a file, one a line; empty lines are skipped."""
    for number, (line, position) in enumerate(read_lines(path, start, end), start=1):
        if line:
            value = parse_json(line, where := f"{path}:{_line(number, start)}")
            if not isinstance(value, dict):
                raise UserError(f"{where} is no JSON object; give one such as {{...}} a line")
            yield Record(where, value, position)


def parse_json(text: str, where: str) -> Any:
    """Return the value of a JSON text; UserError if it is not JSON, or has a name twice."""
    try:
        return _plain(json.loads(text, object_pairs_hook=_object))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); fix or remove it") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = _repeated([name for name, _ in pairs])
    if repeated is not None:
        raise ValueError(f"{repeated!r} occurs twice")
    return dict(pairs)


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)


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


def table_rows(
    path: Path | str, columns: Sequence[str] = (), *, skips_ragged: bool = False
) -> Iterator[Record]:
    """Yield the rows of a .csv or .tsv; empty ones are skipped, but for a .tsv of one column."""
    header = list(columns)  # of a file whose first row has none of them
    for index, (number, row, position) in enumerate(_rows(path)):
        where = f"{path}:{number}"
        if not header or (index == 0 and not set(columns).isdisjoint(row)):
            header, columns = [] if row == [""] else row, ()
            repeated = _repeated(header)
            if repeated is not None:
                raise UserError(f"{where}: two columns are named {repeated!r}; rename one of them")
        elif len(row) == len(header):
            yield Record(where, dict(zip(header, row, strict=True)), position)
        elif row == [""]:
            continue
        elif skips_ragged:
            yield Record(where, {})  # which the task skips, and counts
        else:
            than = f"{len(header)} are expected" if columns else f"the header has {len(header)}"
            count = counted(len(row), "field")
            raise UserError(f"{where}: {count} where {than}; fix or remove the line")


def _rows(path: Path | str) -> Iterator[tuple[int, list[str], int]]:
    """Yield the first line of each row, its fields, and the position on disk after it."""
    position, number = 0, 1
    if file_type(path) == ".tsv":  # without quotes and escapes
        for number, (line, position) in enumerate(read_lines(path, strip=False), start=1):
            yield number, line.rstrip("\r\n").split("\t"), position
        return

    def lines() -> Iterator[str]:
        nonlocal position
        for line, position in read_lines(path, strip=False):  # noqa: B007 (it is read below)
            yield line

    reader = csv.reader(lines(), strict=True)  # so that a quote that is never closed is an error
    try:
        for row in reader:
            if row:
                yield number, row, position
            number = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}:{number}: {error}; fix its quotes, or the line") from error


def open_tfds(source: str) -> Any:
    """Return the rows of `tfds:NAME[/CONFIG][:VERSION][@SPLIT]`, by default of "train"."""
    # Imported in the function: it takes longer than all other imports of this module.
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import constants, registered

    for group in _TFDS_GROUPS:  # whose older datasets TFDS knows once they are imported
        importlib.import_module(f"tensorflow_datasets.{group}")
    folder = os.environ.get("TFDS_DATA_DIR") or constants.DATA_DIR
    elsewhere = "--data-dir or TFDS_DATA_DIR names another folder"
    dataset, _, split = source.removeprefix("tfds:").partition("@")
    try:
        # Array records need no TensorFlow.
        options: dict[str, Any] = {"file_format": "array_record"}
        builder: Any = tfds.builder(dataset, data_dir=folder, **options)
        is_prepared = builder.is_prepared()
    except registered.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        hint = nearest(re.split("[/:]", dataset)[0], known, "check the name;")
        fault = f"is no dataset of TFDS, and is not in {folder}"
        raise UserError(f"{source} {fault}; {hint} {elsewhere}") from error
    except Exception as error:  # TFDS raises nearly every type for a name that it cannot serve
        raise UserError(f"{source} cannot be read ({first_line(error)}); check it") from error
    try:
        if not is_prepared:
            show(f"preparing {source} in {folder}; without a network this fails after some minutes")
        builder.download_and_prepare(**options)
    except Exception as error:
        call = f"tfds.builder({dataset!r}, data_dir=DIR, file_format='array_record')"
        fault = f"is not in {folder} and cannot be prepared ({first_line(error)})"
        remedy = f"prepare it on another machine, by {call}.download_and_prepare(), and copy DIR"
        raise UserError(f"{source} {fault}; {remedy}; {elsewhere}") from error
    try:
        rows = builder.as_data_source(split=split or "train")
        if len(rows):
            rows[0]  # raises if a file is missing or damaged
    except Exception as error:
        fault = f"cannot be read from {folder} ({first_line(error)})"
        raise UserError(f"{source} {fault}; check the split; {elsewhere}") from error
    return rows


def tfds_records(source: str, rows: Any) -> Iterator[Record]:
    """Yield the rows of a TensorFlow dataset; a class is its name, None for -1."""
    for index in range(len(rows)):
        where = f"{source} #{index}"
        try:
            fields = _named(_plain(rows[index]), rows.dataset_info.features)
        except Exception as error:  # TFDS raises nearly every kind for a file that is damaged
            reason = " ".join(str(error).split()) or repr(error)
            raise UserError(f"{where} cannot be read ({reason}); prepare it again") from error
        yield Record(where, fields, index + 1)


def _named(value: Any, feature: Any) -> Any:
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
