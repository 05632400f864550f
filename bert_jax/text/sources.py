"""Read raw text as a stream of documents, each a list of sentences.

A new kind of source is a subclass of `Source` and a line in `open_source`.
"""

import abc
import glob
import gzip
import hashlib
import itertools
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bert_jax.config import DataConfig
from bert_jax.errors import UserError
from bert_jax.text import builtin, sentences


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
    """Files of plain text, or of JSON lines (`.jsonl`), which may be `.gz` or `.xz`."""

    def __init__(self, name: str, data: DataConfig):
        self.name = name
        self.paths = _expand(name)
        self.size = sum(path.stat().st_size for path in self.paths)
        self._text_field = data.text_field
        self._split = data.sentences == "split"
        if data.sentences == "auto":
            lines = (line for path in self.paths for line, _ in read_lines(path) if line)
            self._split = sentences.is_prose(list(itertools.islice(lines, 1000)))
        if not self._split:
            self.form = "one sentence a line"

    def identity(self) -> dict[str, Any]:
        files = []
        for path in self.paths:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            files.append({"bytes": path.stat().st_size, "sha256": digest})
        return {"files": files, "text_field": self._text_field, "split": self._split}

    def texts(self) -> Iterator[list[str]]:
        previous_files = 0
        for path in self.paths:
            is_json = ".jsonl" in path.suffixes or ".json" in path.suffixes
            for document, position in self._json(path) if is_json else self._plain(path):
                self.position = previous_files + position
                yield document
            previous_files += path.stat().st_size

    def _plain(self, path: Path) -> Iterator[tuple[list[str], int]]:
        lines: list[str] = []
        for line, position in itertools.chain(read_lines(path), [("", path.stat().st_size)]):
            if line:
                lines.append(line)
            if lines and (not line or len(lines) == sentences.MAX_DOCUMENT_SENTENCES):
                joined = sentences.split_sentences(" ".join(lines)) if self._split else lines
                yield joined, position
                lines = []

    def _json(self, path: Path) -> Iterator[tuple[list[str], int]]:
        for number, (line, position) in enumerate(read_lines(path), start=1):
            if not line:
                continue
            where = f"{path}: line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where} is not JSON ({error}); fix or remove it") from error
            text = record.get(self._text_field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise UserError(f"{where} has no text in {self._text_field!r}; set data.text_field")
            yield sentences.split_text(text), position


def _expand(paths: str) -> list[Path]:
    expanded = []
    for pattern in filter(None, map(str.strip, paths.split(","))):
        matches = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        files = [Path(match) for match in matches if os.path.isfile(match)]
        if not files:
            reason = "is a folder" if matches else "does not exist"
            raise UserError(
                f"data source {pattern} {reason}; give files or a glob such as 'text/*.txt'"
            )
        for path in files:
            if not os.access(path, os.R_OK):
                raise UserError(f"data source {path} cannot be read; check its permissions")
        expanded += files
    if not expanded:
        raise UserError("data.source is empty; give files, a glob, tfds:NAME or builtin")
    return expanded


def read_lines(path: Path, *, strip: bool = True) -> Iterator[tuple[str, int]]:
    """Yield each line, stripped by default, with the position in the file on disk."""
    with path.open("rb") as raw:
        decompress = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix)
        lines: BinaryIO = decompress(raw) if decompress else raw  # pyright: ignore[reportAssignmentType]
        number = position = 0
        try:
            for number, line in enumerate(lines, start=1):
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
