"""Read raw text as a stream of documents, each a list of sentences.

A new kind of source is a subclass of `Source` and a line in `open_source`.
"""

import abc
import csv
import errno
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bert_jax.config import DataConfig
from bert_jax.errors import UserError
from bert_jax.text import builtin, sentences

# Longer lines are refused, so that a small .gz of one long line cannot fill the memory.
MAX_LINE_BYTES = 1 << 26


class Source(abc.ABC):
    """Documents that can be read any number of times."""

    name: str
    form: str = "split into sentences"  # for messages
    size: int  # the amount of work, in bytes, records or per cent
    position: int = 0  # how much of it the current reading has done

    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return JSON that is equal if, and only if, the text is."""

    @abc.abstractmethod
    def texts(self) -> Iterator[list[str]]:
        """Yield documents as lists of sentences, of any size."""

    def documents(self) -> Iterator[list[str]]:
        """Yield documents as lists of sentences, both of bounded size, none of them empty."""
        for text in self.texts():
            document = [part for s in text for part in sentences.split_long_sentence(s)]
            for start in range(0, len(document), sentences.MAX_DOCUMENT_SENTENCES):
                yield document[start : start + sentences.MAX_DOCUMENT_SENTENCES]


def open_source(name: str, data: DataConfig) -> Source:
    """Return the text that `data.source` or `data.eval_source` names."""
    if name == "builtin":
        return BuiltinSource()
    if name.startswith("tfds:"):
        return TfdsSource(name, data.text_field)
    return FileSource(name, data)


class BuiltinSource(Source):
    """English that every Python has: its language reference and its docstrings."""

    name = "the documentation of Python's standard library"
    size = 100  # per cent: the number of texts is unknown before they are read

    def identity(self) -> dict[str, Any]:
        return {"builtin": builtin.fingerprint()}

    def texts(self) -> Iterator[list[str]]:
        texts = builtin.documents()
        for number, text in enumerate(texts, start=1):
            self.position = self.size * number // len(texts)
            yield sentences.split_text(text)


class TfdsSource(Source):
    """The text field of a TensorFlow dataset, `tfds:NAME[/CONFIG][:VERSION][@SPLIT]`."""

    def __init__(self, name: str, text_field: str):
        self.name = name
        self._records = open_tfds(name)
        self._split = name.partition("@")[2]
        self.size = len(self._records)
        fields = list(self._records[0]) if self.size else [text_field]
        if text_field not in fields:
            raise UserError(
                f"{name} has no field {text_field!r}; set data.text_field to one of "
                f"{', '.join(fields)}"
            )
        self._text_field = text_field

    def identity(self) -> dict[str, Any]:
        dataset = self._records.dataset_info.full_name
        return {"tfds": dataset, "split": self._split, "rows": self.size}

    def texts(self) -> Iterator[list[str]]:
        for index in range(self.size):
            self.position = index + 1
            text = self._records[index][self._text_field]
            text = text.decode() if isinstance(text, bytes) else str(text)
            yield sentences.split_text(text)


def open_tfds(source: str) -> Any:
    """Return the records of `tfds:NAME[/CONFIG][:VERSION][@SPLIT]`, by default of "train"."""
    # Imported in the function: it takes longer than all other imports of this module.
    import tensorflow_datasets as tfds

    dataset, _, split = source.removeprefix("tfds:").partition("@")
    try:
        # Array records need no TensorFlow.
        builder: Any = tfds.builder(dataset, file_format="array_record")
        builder.download_and_prepare(file_format="array_record")
        records = builder.as_data_source(split=split or "train")
        if len(records):
            records[0]  # raises if a file is missing or damaged
    except Exception as error:  # TFDS raises nearly every type for a name that it cannot serve
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(
            f"{source} cannot be read ({reason}); check its name, split and files"
        ) from error
    return records


class FileSource(Source):
    """Files of plain text, of JSON lines (`.jsonl`) or of a table (`.csv`, `.tsv`).

    Each may be `.gz` or `.xz`. A record of JSON or of a table is a document: its `text_field`.
    """

    def __init__(self, name: str, data: DataConfig):
        self.name = name
        self.paths = _expand(name)
        self._states = {path: _state(path) for path in self.paths}
        self.size = sum(size for size, *_ in self._states.values())
        self._text_field = data.text_field
        self._split = data.sentences == "split"
        self._is_document = data.sentences == "documents"  # each line
        if data.sentences == "auto":
            self._split = sentences.is_prose(self._first_lines())
        if not self._split and any(_reader(path) is None for path in self.paths):
            self.form = f"one {'document' if self._is_document else 'sentence'} a line"

    def _first_lines(self) -> list[str]:
        paths = (path for path in self.paths if file_type(path) not in _TABLES)
        lines = (line for path in paths for line, _ in read_lines(path) if line)
        first, characters = [], 0
        for line in itertools.islice(lines, 1000):
            first.append(line)
            characters += len(line)
            if characters > sentences.MAX_DOCUMENT_CHARACTERS:
                break
        return first

    def identity(self) -> dict[str, Any]:
        files = []
        for path in self.paths:
            with open_file(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            files.append({"bytes": self._check_unchanged(path), "sha256": digest})
        identity = {"files": files, "text_field": self._text_field, "split": self._split}
        return identity | ({"lines": "documents"} if self._is_document else {})

    def texts(self) -> Iterator[list[str]]:
        previous_files = 0
        for path in self.paths:
            self._check_unchanged(path)
            reader = _reader(path)
            read = reader(path, self._text_field) if reader else self._plain(path)
            for document, position in read:
                self.position = previous_files + position
                yield document
            previous_files += self._check_unchanged(path)

    def _check_unchanged(self, path: Path) -> int:
        """Return the size of a file, which must be the same in every reading of it."""
        if _state(path) != self._states[path]:
            raise UserError(
                f"{path} was changed while it was read; repeat the command once it is complete"
            )
        return self._states[path][0]

    def _plain(self, path: Path) -> Iterator[tuple[list[str], int]]:
        lines: list[str] = []
        characters = 0
        for line, position in itertools.chain(read_lines(path), [("", self._states[path][0])]):
            if line:
                lines.append(line)
                characters += len(line)
            is_full = (
                self._is_document
                or len(lines) == sentences.MAX_DOCUMENT_SENTENCES
                or characters > sentences.MAX_DOCUMENT_CHARACTERS
            )
            if lines and (not line or is_full):
                joined = sentences.split_sentences(" ".join(lines)) if self._split else lines
                yield joined, position
                lines, characters = [], 0


def _read_json(path: Path, text_field: str) -> Iterator[tuple[list[str], int]]:
    for number, (line, position) in enumerate(read_lines(path), start=1):
        if not line:
            continue
        where = f"{path}: line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON ({error}); fix or remove it") from error
        text = record.get(text_field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UserError(f"{where} has no text in {text_field!r}; set data.text_field")
        yield sentences.split_text(text), position


def _read_table(path: Path, text_field: str) -> Iterator[tuple[list[str], int]]:
    header: list[str] = []
    for number, row, position in read_rows(path):
        where = f"{path}: line {number}"
        if not header:
            header = row
            if header.count(text_field) != 1:
                columns = ", ".join(header)
                raise UserError(
                    f"{where}, the header, needs one column {text_field!r}; set data.text_field "
                    f"to one of {columns}"
                )
        elif len(row) == len(header):
            yield sentences.split_text(row[header.index(text_field)]), position
        elif row != [""]:
            raise UserError(
                f"{where} has {len(row)} fields and the header {len(header)}; fix or remove it"
            )


_TABLES = (".csv", ".tsv")


def _reader(path: Path) -> Any:
    """Return the function that reads the records of a file; None for plain text."""
    if ".jsonl" in path.suffixes or ".json" in path.suffixes:
        return _read_json
    return _read_table if file_type(path) in _TABLES else None


def file_type(path: str | Path) -> str:
    """Return the suffix of a file, ignoring .gz and .xz: ".tsv" of "a.TSV.gz"."""
    path = Path(path)
    return (Path(path.stem) if path.suffix in (".gz", ".xz") else path).suffix.lower()


def _expand(paths: str) -> list[Path]:
    expanded = []
    for pattern in filter(None, map(str.strip, paths.split(","))):
        name = os.path.expanduser(pattern)
        # A name that exists is no pattern, even with brackets in it.
        exists = os.path.lexists(name)
        matches = [name] if exists else sorted(glob.glob(name, recursive=True))
        files = [match for match in matches if exists or not os.path.isdir(match)]
        for file in files or [name]:
            if fault := file_fault(file):
                raise UserError(
                    f"data source {file} {fault}; give files or a glob such as 'text/*.txt'"
                )
            expanded.append(Path(file))
    if not expanded:
        raise UserError("data.source is empty; give files, a glob, tfds:NAME or builtin")
    return expanded


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


def open_file(path: Path) -> io.BufferedReader:
    """Open a file for reading; UserError if that fails."""
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path} {file_fault(path) or error.strerror}; restore it") from error


def _state(path: Path) -> tuple[int, int, int]:
    """Return the size, the time of the last change, and the inode of a file."""
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"{path} {file_fault(path) or error.strerror}; restore it") from error
    return found.st_size, found.st_mtime_ns, found.st_ino


def read_rows(path: Path) -> Iterator[tuple[int, list[str], int]]:
    """Yield each row of a .csv or .tsv: its first line, its fields, the position on disk after it.

    A .tsv has no quotes and no escapes; a .csv is of RFC 4180, and its fields may hold newlines.
    """
    if file_type(path) == ".tsv":
        for number, (line, position) in enumerate(read_lines(path, strip=False), start=1):
            yield number, line.rstrip("\r\n").split("\t"), position
        return
    position, number = 0, 1

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


def read_lines(
    path: Path, *, strip: bool = True, longest: int = MAX_LINE_BYTES
) -> Iterator[tuple[str, int]]:
    """Yield each line, stripped by default, with the position in the file on disk.

    A line of more than `longest` bytes is refused before it is read.
    """
    with open_file(path) as raw:
        decompress = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix)
        file: BinaryIO = decompress(raw) if decompress else raw  # pyright: ignore[reportAssignmentType]
        lines = iter(functools.partial(file.readline, longest + 1), b"")
        number = position = 0
        try:
            for number, line in enumerate(lines, start=1):
                if len(line) > longest:
                    raise UserError(
                        f"{path}: line {number} is longer than {longest >> 20} MiB; break it into "
                        "lines"
                    )
                if b"\0" in line:
                    raise UserError(
                        f"{path}: line {number} has a NUL byte, as UTF-16 has; convert it to "
                        "UTF-8, or fetch it again"
                    )
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                position = position if number % 64 else raw.tell()
                yield text.strip() if strip else text, position
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}: line {number} is not UTF-8 (byte 0x{error.object[error.start]:02x} at "
                f"{error.start}); convert it, for example with iconv"
            ) from error
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise UserError(
                f"{path} is damaged after line {number} ({error}); fetch it again"
            ) from error
