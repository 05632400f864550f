"""The sources of text: files, TensorFlow datasets and built-in text, as documents of sentences.

Files are one text, which is divided into chunks of 64 MiB. No document spans two chunks, so that
the shards of a text have the documents of the whole.
"""

import abc
import bisect
import hashlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from bert_jax.config import DataConfig
from bert_jax.errors import UserError, refuse
from bert_jax.text import builtin, files, records, sentences, store
from bert_jax.text.files import read_lines
from bert_jax.text.records import Record

# Do not change it: the documents of a larger text, and which are held out, depend on it.
_CHUNK_BYTES = 1 << 26
# Within which a chunk starts after a blank line, as documents do, rather than at any line.
_BLANK_LINE_WITHIN = 1 << 20
_BLOCK_BYTES = 1 << 20
_Path = Path | str  # a URL is a str

Shard = tuple[int, int]  # its number, from 0, and the number of shards


class Source(abc.ABC):
    """Documents that can be read any number of times.

    A text of several chunks can be divided into shards, each of which reads some of the chunks.

    Attributes:
      name: of the text, for messages.
      chunks: those that this reads; the documents of one do not depend on the others.
      form: how documents are found in the text, for messages.
      size: the amount of work, in bytes, records or per cent.
      position: how much of it the current reading has done.
      is_divisible: whether there are shards of such a text.
    """

    name: str
    chunks: range = range(1)
    form: str = "split into sentences"
    size: int = 1
    position: int = 0
    is_divisible: bool = False

    def __init__(self, name: str, data: DataConfig, shard: Shard | None = None):
        """Open the text that `data.source` names, or a shard of it; UserError if that fails."""
        self.name = name

    @property
    def origins(self) -> list[str]:
        """Where the text is from; no two texts of a run have one in common."""
        return [self.name]

    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return JSON that is equal if, and only if, the text and its settings are."""

    @property
    def formats(self) -> list[str]:
        """How each file of the text is read, which its name says."""
        return []

    def check_unchanged(self) -> None:  # noqa: B027 - few kinds are of files
        """Refuse a text that has changed while what has been read of it was read."""

    @abc.abstractmethod
    def texts(self, chunk: int = 0) -> Iterator[list[str]]:
        """Yield the documents of a chunk as lists of sentences, of any size."""

    def documents(self, chunks: Iterable[int] | None = None) -> Iterator[list[str]]:
        """Yield documents as lists of sentences, both of bounded size, none of them empty."""
        chunks = self.chunks if chunks is None else chunks
        for text in itertools.chain.from_iterable(map(self.texts, chunks)):
            document = [part for s in text for part in sentences.split_long_sentence(s)]
            for start in range(0, len(document), sentences.MAX_DOCUMENT_SENTENCES):
                yield document[start : start + sentences.MAX_DOCUMENT_SENTENCES]

    def sample(self, number: int) -> dict[int, float]:
        """Return as much text as `number` chunks have, from chunks at even distances.

        It is the chunks to read, and the position after which each is not read on.
        """
        return {self.chunks[i]: math.inf for i in _at_even_distances(number, len(self.chunks))}


class FileSource(Source):
    """Files of plain text, or of records with a document in `text_field`; or .gz or .xz of them."""

    is_divisible = True

    def __init__(self, name: str, data: DataConfig, shard: Shard | None = None):
        self.name = name
        found = files.find(name)
        self.paths, self._states = [path for path, _ in found], dict(found)
        # Where each file starts in the text, and where the last one ends.
        self._starts = [0, *itertools.accumulate(self._states[path][0] for path in self.paths)]
        self._num_chunks = max(1, -(-self._starts[-1] // _CHUNK_BYTES))
        number, count = shard or (0, 1)
        first, end = (n * self._num_chunks // count for n in (number, number + 1))
        self.chunks = range(first, end)
        self._start = min(first * _CHUNK_BYTES, self._starts[-1])
        self.size = min(end * _CHUNK_BYTES, self._starts[-1]) - self._start
        self._reading: _Path | None = None  # of a file, up to its end
        self._text_field = data.text_field
        self._split = data.sentences == "split"
        self._is_document = data.sentences == "documents"  # each line
        self._by_line = data.sentences == "lines"
        if data.sentences == "auto":
            self._split = sentences.is_prose(self._first_lines())
        readers = set(map(records.reader, self.paths))
        self._has_sequences = records.fasta_sequences in readers
        self.form = self._describe(readers)

    def _describe(self, readers: Set[Any]) -> str:
        """Return how documents are found in files of these readers, by kind where that differs."""
        line = f"one {'document' if self._is_document else 'sentence'} a line"
        forms = {}
        if None in readers:
            forms["plain text"] = self.form if self._split else line
        if readers - {None, records.fasta_sequences}:
            forms["records"] = line if self._by_line else self.form
        if self._has_sequences:
            forms["FASTA"] = "one document a sequence"
        if len({*forms.values()}) == 1:
            return next(iter(forms.values()))
        return "; ".join(f"{kind}: {form}" for kind, form in forms.items())

    @property
    def origins(self) -> list[str]:
        return [os.path.realpath(path) if isinstance(path, Path) else path for path in self.paths]

    @property
    def formats(self) -> list[str]:
        readers = map(records.reader, self.paths)
        return [reader.__name__ if reader else "plain" for reader in readers]

    def _first_lines(self) -> list[str]:
        paths = [path for path in self.paths if records.reader(path) is None]
        paths = paths or [path for path in self.paths if not records.is_undivided(path)]
        lines = (line for path in paths for line, _ in read_lines(path) if line)
        # Their beginnings, to bound the memory.
        return [s[: sentences.MAX_SENTENCE_CHARACTERS] for s in itertools.islice(lines, 1000)]

    def identity(self) -> dict[str, Any]:
        """Return a digest of each file of a text of one chunk, or of each chunk of a larger one."""
        settings: dict[str, Any] = {"text_field": self._text_field, "split": self._split}
        settings |= {"lines": "documents"} if self._is_document else {}
        if self._by_line and any(map(records.reader, self.paths)):
            settings["lines"] = "of records"
        settings |= {"fasta": "sequences"} if self._has_sequences else {}
        if self._num_chunks == 1:
            digests = []
            for path in self.paths:
                with files.open_file(path) as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                digests.append({"bytes": self._check_unchanged(path), "sha256": digest})
            return {"files": digests, **settings}
        layout = {"bytes": self._starts[-1], "starts": digest_json(self._starts)}
        digests = [self._chunk_sha256(chunk) for chunk in self.chunks]
        return {**layout, "chunk_bytes": _CHUNK_BYTES, "sha256": digests, **settings}

    def _chunk_sha256(self, chunk: int) -> str:
        digest = hashlib.sha256()
        for path, _, start, end in self._sections(chunk):
            self._check_unchanged(path)
            digest.update(b"%d\n" % (left := end - start))
            with files.open_file(path) as file:
                file.seek(start)
                while left and (block := file.read(min(left, _BLOCK_BYTES))):
                    digest.update(block)
                    left -= len(block)
            self._check_unchanged(path)
        return digest.hexdigest()

    def texts(self, chunk: int = 0) -> Iterator[list[str]]:
        for path, file_start, start, end in self._sections(chunk):
            self._check_unchanged(path)
            self._reading = path
            if reader := records.reader(path):
                if reader is records.parquet_rows:
                    rows = reader(path, self._text_field)
                else:
                    rows = reader(path) if records.is_undivided(path) else reader(path, start, end)
                field, by_line = self._text_field, self._by_line
                read = ((_record_sentences(r, field, by_line=by_line), r.position) for r in rows)
            else:
                read = self._plain(path, start, end)
            for document, position in read:
                self.position = min(max(file_start + position - self._start, 0), self.size)
                yield document
            self._check_unchanged(path)
            self._reading = None

    def check_unchanged(self) -> None:
        if self._reading:
            self._check_unchanged(self._reading)

    def sample(self, number: int) -> dict[int, float]:
        chosen = _at_even_distances(number, len(self.chunks))
        texts = Counter(self._nearest_text(self.chunks[i]) for i in chosen)
        return {chunk: start + n * _CHUNK_BYTES for (chunk, start), n in texts.items()}

    def _nearest_text(self, chunk: int) -> tuple[int, int]:
        """Return the chunk, up to this one, that has its text, and the position where it starts.

        A chunk within a file that can only be read from its beginning has no text of its own.
        """
        low, high = chunk * _CHUNK_BYTES, (chunk + 1) * _CHUNK_BYTES
        index = bisect.bisect_right(self._starts, low) - 1
        file_start = self._starts[index]
        if file_start == low or not _is_undivided(self.paths[index]):
            return chunk, low
        if self._starts[index + 1] < min(high, self._starts[-1]):  # another file begins in it
            return chunk, self._starts[index + 1]
        return self._nearest_text(file_start // _CHUNK_BYTES)

    def _sections(self, chunk: int) -> Iterator[tuple[_Path, int, int, int]]:
        """Yield the files of a chunk: where each starts in the text, and its bytes in the chunk."""
        low, high = chunk * _CHUNK_BYTES, (chunk + 1) * _CHUNK_BYTES
        first = bisect.bisect_left(self._starts, low)
        for index in range(max(0, first - 1), len(self.paths)):
            path, file_start = self.paths[index], self._starts[index]
            if file_start >= high:
                break
            if _is_undivided(path):
                # It can only be read from its beginning, and is in the chunk of its first byte.
                start, end = 0, self._states[path][0] if file_start >= low else 0
            else:
                start, end = (self._line_start(path, at - file_start) for at in (low, high))
            if start < end:
                yield path, file_start, start, end

    def _line_start(self, path: _Path, offset: int) -> int:
        size = self._states[path][0]
        if not 0 < offset < size:
            return min(max(offset, 0), size)
        if records.reader(path) is records.fasta_sequences:
            return files.marked_line_start(path, offset, records.FASTA_MARK)
        is_plain = not self._is_document and records.reader(path) is None
        blank_within = min(_BLANK_LINE_WITHIN, _CHUNK_BYTES) if is_plain else 0
        return files.line_start(path, offset, blank_within)

    def _check_unchanged(self, path: _Path) -> int:
        """Return the size of a file, which must be the same in every reading of it."""
        known, found = self._states[path], files.state(path)
        if found[: len(known)] != known:  # of a URL, only the size is known before it is read
            raise UserError(f"{path} was changed while it was read; repeat the command")
        self._states[path] = found
        return found[0]

    def _plain(self, path: _Path, start: int, end: int) -> Iterator[tuple[list[str], int]]:
        lines: list[str] = []
        characters = 0
        for line, position in itertools.chain(read_lines(path, start, end), [("", end)]):
            if line:
                lines.append(line)
                characters += len(line)
            is_full = (
                self._is_document
                or len(lines) == sentences.MAX_DOCUMENT_SENTENCES
                or characters > sentences.MAX_DOCUMENT_CHARACTERS
            )
            if lines and (not line or is_full):
                if self._split:
                    lines = sentences.split_sentences(sentences.join_lines("\n".join(lines)))
                yield lines, position
                lines, characters = [], 0


class TfdsSource(Source):
    """The text field of a TensorFlow dataset, `tfds:NAME[/CONFIG][:VERSION][@SPLIT]`."""

    def __init__(self, name: str, data: DataConfig, shard: Shard | None = None):
        self.name, self._text_field = name, data.text_field
        self._by_line = data.sentences == "lines"
        self.form = "one sentence a line" if self._by_line else self.form
        self._rows = records.open_dataset(name)
        self.size = len(self._rows)

    @property
    def origins(self) -> list[str]:
        return [self.name if "@" in self.name else f"{self.name}@{records.DEFAULT_SPLIT}"]

    def identity(self) -> dict[str, Any]:
        dataset, split = self._rows.dataset_info.full_name, self.name.partition("@")[2]
        settings = {"text_field": self._text_field}
        settings |= {"lines": "of records"} if self._by_line else {}
        return {"tfds": dataset, "split": split, "rows": self.size, **settings}

    def texts(self, chunk: int = 0) -> Iterator[list[str]]:
        for record in records.read_dataset(self.name, self._rows):
            self.position = record.position
            yield _record_sentences(record, self._text_field, by_line=self._by_line)


class BuiltinSource(Source):
    """Python's language reference and the docstrings of its standard library."""

    size = 100  # per cent: the number of texts is unknown before they are read

    def __init__(self, name: str, data: DataConfig, shard: Shard | None = None):
        refuse(name != "builtin", f"there is no text {name}", fix="name it builtin")
        self.name = "the documentation of Python's standard library"

    def identity(self) -> dict[str, Any]:
        return {"builtin": builtin.fingerprint()}

    def texts(self, chunk: int = 0) -> Iterator[list[str]]:
        texts = builtin.documents()
        for number, text in enumerate(texts, start=1):
            self.position = self.size * number // len(texts)
            yield sentences.split_text(text)


# A name is one of these, or one of these with ":" and what the source makes of the rest.
SOURCES: dict[str, type[Source]] = {"builtin": BuiltinSource, "tfds": TfdsSource}


def open_source(name: str, data: DataConfig, shard: Shard | None = None) -> Source:
    """Return the text that `data.source` or `data.eval_source` names, or a shard of it."""
    refuse(
        store.is_store(name),
        f"{name} is a store, whose text has been tokenized",
        fix="give the text itself",
    )
    source = SOURCES.get(name.partition(":")[0], FileSource)
    if shard and not source.is_divisible:
        raise UserError(
            f"{name} cannot be divided into shards, as files can; drop --shard or --runner"
        )
    return source(name, data, shard)


def check_apart(sources: Iterable[Source]) -> None:
    """Refuse texts that have a file in common: what one holds out, another would be trained on."""
    names: dict[str, str] = {}
    for source in sources:
        for origin in source.origins:
            if origin in names:
                raise UserError(
                    f"{origin} is a part of {names[origin]} and of {source.name}, so that what is "
                    "held out would be trained on; name each text once"
                )
        names |= dict.fromkeys(source.origins, source.name)


def _is_undivided(path: _Path) -> bool:
    """Return whether a file can only be read from its beginning."""
    return files.suffix(path) in files.OPENERS or records.is_undivided(path)


def _at_even_distances(number: int, total: int) -> list[int]:
    return [i * total // number for i in range(number)]


def merge_identities(shards: Sequence[Any]) -> Any:
    """Return the identity of a text from those of all its shards in order; None if they differ."""
    digests, common = [], []
    for identity in shards:
        if isinstance(identity, dict) and "chunk_bytes" in identity:
            digests += identity["sha256"]
            identity = {**identity, "sha256": None}
        common.append(identity)
    if any(identity != common[0] for identity in common):
        return None
    return {**common[0], "sha256": digest_json(digests)} if digests else common[0]


def _record_sentences(record: Record, text_field: str, *, by_line: bool) -> list[str]:
    """Return the sentences of a field of a record, or its lines; UserError if it has no text."""
    text = record.field(text_field, "data.text_field")
    if text is None:
        raise UserError(f"{record.where} is null in {text_field!r}; remove the record")
    if not isinstance(text, str):
        raise UserError(f"{record.where} has no text in {text_field!r}; set data.text_field")
    if by_line:
        return [line for line in map(str.strip, text.split("\n")) if line]
    return sentences.split_text(text)


def digest_json(value: Any) -> str:
    """Return the SHA-256 of a value of JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
