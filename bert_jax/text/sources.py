"""Raw text as a stream of documents, each a list of sentences."""

import abc
import glob
import gzip
import hashlib
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bert_jax.config import DataConfig
from bert_jax.errors import UserError
from bert_jax.text import builtin

# Longer ones are cut, so that a text without blank lines does not have to fit in memory, and no
# sentence of the token store is out of all proportion.
MAX_SENTENCE_CHARACTERS = 10_000
MAX_DOCUMENT_SENTENCES = 1_000

# What may end a sentence: in scripts with spaces before a space, in Chinese and Japanese anywhere.
_SENTENCE_END = re.compile(r"([.!?…؟।]+[\"'”’»)\]]*)\s+|[。！？]+[」』”’）]*\s*")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'])(?:[^\W\d_]|e\.g|i\.e|cf|vs|etc|al|approx|no|nos|vol|fig|eq|sec|ch|pp|ed|eds"
    r"|mr|mrs|ms|dr|prof|rev|gen|col|lt|sgt|capt|sen|rep|gov|pres|st|jr|sr|inc|ltd|co|corp"
    r"|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec)\.$",
    re.IGNORECASE,
)


def split_sentences(paragraph: str) -> list[str]:
    """Returns the sentences of a paragraph, by punctuation and the letter that follows it."""
    sentences, start = [], 0
    for match in _SENTENCE_END.finditer(paragraph):
        if match[1] is not None:
            follows = paragraph[match.end() : match.end() + 1]
            before = paragraph[max(0, match.end(1) - 12) : match.end(1)]
            if follows.islower() or _ABBREVIATION.search(before):
                continue
        sentences.append(paragraph[start : match.end()].strip())
        start = match.end()
    return [s for s in (*sentences, paragraph[start:].strip()) if s]


def split_text(text: str) -> list[str]:
    """Returns the sentences of a text whose paragraphs are parted by blank lines."""
    paragraphs = re.split(r"\n\s*\n", text)
    return [s for p in paragraphs for s in split_sentences(" ".join(p.split()))]


def _bounded(sentence: str) -> Iterator[str]:
    """Cuts an over-long sentence at spaces, where it has any."""
    start = 0
    while len(sentence) - start > MAX_SENTENCE_CHARACTERS:
        end = start + MAX_SENTENCE_CHARACTERS
        cut = sentence.rfind(" ", start + 1, end)
        cut = cut if cut > 0 else end
        yield sentence[start:cut]
        start = cut
    if rest := sentence[start:].strip():
        yield rest


class Source(abc.ABC):
    """Documents that can be read again from the start.

    Attributes:
      name: what to call it in a line to the user.
      form: how its sentences are found.
      size: the amount of work that a reading is, in the unit of `position`.
      position: how much of `size` the present reading has passed.
    """

    name: str
    form: str = "split into sentences"
    size: int
    position: int = 0

    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """Returns JSON that is equal if, and only if, the text is."""

    @abc.abstractmethod
    def texts(self) -> Iterator[list[str]]:
        """Yields documents as lists of sentences, of any size."""

    def documents(self) -> Iterator[list[str]]:
        """Yields documents as lists of sentences, both of bounded size, none of them empty."""
        for text in self.texts():
            document = [piece for sentence in text for piece in _bounded(sentence)]
            for start in range(0, len(document), MAX_DOCUMENT_SENTENCES):
                yield document[start : start + MAX_DOCUMENT_SENTENCES]


class BuiltinSource(Source):
    """English that every Python carries: its language reference and its docstrings."""

    name = "the documentation of Python's standard library"
    size = 100  # per cent: how many texts there are is not known before they are read

    def identity(self) -> dict[str, Any]:
        return {"builtin": builtin.fingerprint()}

    def texts(self) -> Iterator[list[str]]:
        texts = builtin.documents()
        for number, text in enumerate(texts, start=1):
            self.position = self.size * number // len(texts)
            yield split_text(text)


class TfdsSource(Source):
    """The text field of a TensorFlow dataset, read from array records without TensorFlow.

    `name` is `tfds:NAME`, with `/CONFIG`, `:VERSION` and `@SPLIT` where wanted; the dataset is
    looked for, or else prepared, in `TFDS_DATA_DIR` or TFDS's own default folder.
    """

    def __init__(self, name: str, text_field: str):
        self.name = name
        self._rows = open_tfds(name)
        self._split = name.partition("@")[2]
        self._dataset = self._rows.dataset_info.full_name
        self.size = len(self._rows)
        fields = list(self._rows[0]) if self.size else [text_field]
        if text_field not in fields:
            raise UserError(
                f"{name} has no field {text_field!r}; set data.text_field to one of "
                f"{', '.join(fields)}"
            )
        self._text_field = text_field

    def identity(self) -> dict[str, Any]:
        return {"tfds": self._dataset, "split": self._split, "rows": self.size}

    def texts(self) -> Iterator[list[str]]:
        for index in range(self.size):
            self.position = index + 1
            text = self._rows[index][self._text_field]
            yield split_text(_valid(text.decode() if isinstance(text, bytes) else str(text)))


def open_tfds(source: str) -> Any:
    """Returns the rows of a TensorFlow dataset, `tfds:NAME[/CONFIG][:VERSION][@SPLIT]`.

    They are a `tensorflow_datasets` data source, which has a `dataset_info` besides. The split is
    "train" where none is named.

    Raises:
      UserError: TFDS does not know it, or cannot prepare it.
    """
    # Imported here: it takes longer than everything else in this module together.
    import tensorflow_datasets as tfds

    dataset, _, split = source.removeprefix("tfds:").partition("@")
    try:
        builder = tfds.builder(dataset, file_format="array_record")
        builder.download_and_prepare(file_format="array_record")
        read: Any = builder.as_data_source
        rows = read(split=split or "train")
        if len(rows):
            rows[0]  # a file that is missing or damaged shows here
    except Exception as error:  # TFDS raises nearly every kind for a name it cannot serve
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise UserError(
            f"{source} cannot be read ({reason}); see its name, split and files"
        ) from error
    return rows


class FileSource(Source):
    """Files of plain text or JSON lines, compressed or not.

    Args:
      paths: files and globs, comma separated. `.gz` and `.xz` are unpacked; `.jsonl` is JSON lines.
      text_field: the field of a JSON line that holds the text.
      sentences: "lines" where a line is a sentence and a blank line ends a document, "split" where
        lines are to be joined and split, "auto" to tell from the text.

    Attributes:
      paths: of the files, globs resolved.
    """

    def __init__(self, paths: str, text_field: str, sentences: str):
        self.name = paths
        self.paths = _expand(paths)
        self._text_field = text_field
        self.size = sum(path.stat().st_size for path in self.paths)
        self._split = sentences == "split" or (sentences == "auto" and self._has_paragraphs())
        if not self._split:
            self.form = "one sentence a line"

    def identity(self) -> dict[str, Any]:
        files = [{"bytes": path.stat().st_size, "sha256": _digest(path)} for path in self.paths]
        return {"files": files, "text_field": self._text_field, "split": self._split}

    def texts(self) -> Iterator[list[str]]:
        passed = 0
        for path in self.paths:
            jsonl = ".jsonl" in path.suffixes or ".json" in path.suffixes
            for document, position in self._json(path) if jsonl else self._plain(path):
                self.position = passed + position
                yield document
            passed += path.stat().st_size

    def _plain(self, path: Path) -> Iterator[tuple[list[str], int]]:
        lines: list[str] = []
        position = 0
        for line, position in read_lines(path):
            if line:
                lines.append(line)
            if lines and (not line or len(lines) == MAX_DOCUMENT_SENTENCES):
                yield self._sentences(lines), position
                lines = []
        if lines:
            yield self._sentences(lines), position

    def _sentences(self, lines: list[str]) -> list[str]:
        return split_sentences(" ".join(lines)) if self._split else lines

    def _json(self, path: Path) -> Iterator[tuple[list[str], int]]:
        for number, (line, position) in enumerate(read_lines(path), start=1):
            if not line:
                continue
            where = f"{path}: line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where} is not JSON ({error}); mend or remove it") from error
            text = record.get(self._text_field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise UserError(f"{where} has no text in {self._text_field!r}; set data.text_field")
            yield split_text(_valid(text)), position

    def _has_paragraphs(self) -> bool:
        """Whether the lines at the start of the text hold several sentences, or parts of them."""
        lines: list[str] = []
        for path in self.paths:
            for line, _ in read_lines(path):
                if len(lines) == 1000:
                    break
                if line:
                    lines.append(line)
        sentences = sum(len(split_sentences(line)) for line in lines)
        # Wrapped prose has sentences that end inside a line, and lines that end inside a sentence.
        ended = sum(bool(_SENTENCE_END.search(line[-4:] + " ")) for line in lines)
        is_wrapped = sentences > 1.05 * len(lines) and ended < 0.5 * len(lines)
        return is_wrapped or sentences > 1.5 * len(lines)


def open_source(source: str, config: DataConfig) -> Source:
    """Returns the text that `data.source` or `data.eval_source` names.

    Raises:
      UserError: there is none, or it cannot be read.
    """
    if source == "builtin":
        return BuiltinSource()
    if source.startswith("tfds:"):
        return TfdsSource(source, config.text_field)
    return FileSource(source, config.text_field, config.sentences)


def _expand(paths: str) -> list[Path]:
    found = []
    for part in filter(None, (part.strip() for part in paths.split(","))):
        matches = sorted(glob.glob(os.path.expanduser(part), recursive=True))
        files = [Path(match) for match in matches if os.path.isfile(match)]
        if not files:
            reason = "is a folder" if matches else "does not exist"
            raise UserError(
                f"data source {part} {reason}; give files or a glob such as 'text/*.txt'"
            )
        unreadable = next((path for path in files if not os.access(path, os.R_OK)), None)
        if unreadable:
            raise UserError(f"data source {unreadable} cannot be read; see its permissions")
        found += files
    if not found:
        raise UserError("data.source is empty; give files, a glob, tfds:NAME or builtin")
    return found


def _valid(text: str) -> str:
    """Replaces halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_lines(path: Path, *, strip: bool = True) -> Iterator[tuple[str, int]]:
    """Yields each line, stripped unless told not to, with the position in the file on disk.

    Raises:
      UserError: the file is damaged or is not UTF-8.
    """
    with path.open("rb") as raw:
        unpack = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix)
        lines: BinaryIO = unpack(raw) if unpack else raw  # pyright: ignore[reportAssignmentType]
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
