"""Raw text as documents, lists of sentences. A new source is a subclass, and in `open_source`."""

import abc
import glob
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_jax.config import DataConfig
from bert_jax.errors import UserError
from bert_jax.text import builtin, records, sentences
from bert_jax.text.records import Record, read_lines


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
        self.name, self._text_field = name, text_field
        self._rows = records.open_tfds(name)
        self.size = len(self._rows)

    def identity(self) -> dict[str, Any]:
        dataset, split = self._rows.dataset_info.full_name, self.name.partition("@")[2]
        return {"tfds": dataset, "split": split, "rows": self.size}

    def texts(self) -> Iterator[list[str]]:
        for record in records.tfds_records(self.name, self._rows):
            self.position = record.position
            yield _sentences(record, self._text_field)


def _sentences(record: Record, text_field: str) -> list[str]:
    text = record.field(text_field, "data.text_field")
    if not isinstance(text, str):
        raise UserError(f"{record.where} has no text in {text_field!r}; set data.text_field")
    return sentences.split_text(text)


class FileSource(Source):
    """Files of plain text, or of records with a document in `text_field`; or .gz or .xz of them."""

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
        paths = (path for path in self.paths if _reader(path) is not records.table_rows)
        lines = (line for path in paths for line, _ in read_lines(path) if line)
        # Their beginnings, to bound the memory.
        return [s[: sentences.MAX_SENTENCE_CHARACTERS] for s in itertools.islice(lines, 1000)]

    def identity(self) -> dict[str, Any]:
        files = []
        for path in self.paths:
            with records.open_file(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            files.append({"bytes": self._check_unchanged(path), "sha256": digest})
        identity = {"files": files, "text_field": self._text_field, "split": self._split}
        return identity | ({"lines": "documents"} if self._is_document else {})

    def texts(self) -> Iterator[list[str]]:
        previous_files = 0
        for path in self.paths:
            self._check_unchanged(path)
            if reader := _reader(path):
                read = ((_sentences(r, self._text_field), r.position) for r in reader(path))
            else:
                read = self._plain(path)
            for document, position in read:
                self.position = previous_files + position
                yield document
            previous_files += self._check_unchanged(path)

    def _check_unchanged(self, path: Path) -> int:
        """Return the size of a file, which must be the same in every reading of it."""
        if _state(path) != self._states[path]:
            raise UserError(f"{path} was changed while it was read; repeat the command")
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
                yield sentences.split_sentences(" ".join(lines)) if self._split else lines, position
                lines, characters = [], 0


def _reader(path: Path) -> Any:
    """Return the function that reads the records of a file; None for plain text."""
    if ".jsonl" in path.suffixes or ".json" in path.suffixes:
        return records.json_lines
    return records.table_rows if records.file_type(path) in (".csv", ".tsv") else None


def _expand(paths: str) -> list[Path]:
    expanded = []
    for pattern in filter(None, map(str.strip, paths.split(","))):
        name = os.path.expanduser(pattern)
        # A name that exists is no pattern, even with brackets in it.
        exists = os.path.lexists(name)
        matches = [name] if exists else sorted(glob.glob(name, recursive=True))
        files = [match for match in matches if exists or not os.path.isdir(match)]
        for file in files or [name]:
            if fault := records.file_fault(file):
                raise UserError(f"data source {file} {fault}; give files or a glob 'text/*.txt'")
            expanded.append(Path(file))
    if not expanded:
        raise UserError("data.source is empty; give files, a glob, tfds:NAME or builtin")
    return expanded


def _state(path: Path) -> tuple[int, int, int]:
    with records.open_file(path) as file:
        found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ino
