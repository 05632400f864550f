"""An index: the embeddings of the texts of files, in a folder, to search by meaning.

`vectors.npy` is [N, D] float16, of unit length; `texts.bin` the N texts, one after the other;
`entries.npy` [N, 3] int64: where each text ends there, its file and its line. `index.json` says
which model and files they are of, the sizes and the checksums. Until all are written the folder has
another name, and `progress.json` says how many texts are embedded.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import google_crc32c
import numpy as np

from bert_jax import console
from bert_jax.bert import Bert
from bert_jax.convert import hub
from bert_jax.errors import UserError
from bert_jax.inference.embeddings import chunks, own_prompt, text_list, warn_truncated
from bert_jax.inference.loading import load
from bert_jax.models.heads import BertForEmbedding
from bert_jax.retrieval import search
from bert_jax.storage import checksums, daemon_thread, json_files, locks, replacement
from bert_jax.storage.paths import absolute, as_path
from bert_jax.text import builtin
from bert_jax.text.files import existing
from bert_jax.text.readers import read_records
from bert_jax.text.records import reader
from bert_jax.training import workdir

_FORMAT = 1
_RECORD, _PROGRESS = "index.json", "progress.json"
_VECTORS, _TEXTS, _ENTRIES = "vectors.npy", "texts.bin", "entries.npy"
_FILES = (_VECTORS, _TEXTS, _ENTRIES)
_BUILDING = (_PROGRESS, locks.NAME)  # beside them until the folder has its name
_REMEDY = "remove the folder and build it again"
# What the vectors of a model of embeddings depend on, beside its parameters.
_OWN = ("pooling", "dense_activation", "query_prompt", "passage_prompt", "max_length")
_BUILTIN = "builtin"  # in place of a file: the functions of Python's library


@dataclasses.dataclass(frozen=True)
class Hit:
    """A text that `Index.search` found.

    Attributes:
      text: the text as it was indexed.
      score: the cosine of its embedding and that of the query, 1 for the same direction.
      file, line: where it is from; the first line of a row of a table.
      number: its number in the index, from 0: the row of `Index.vectors`.

    >>> Hit("A river bank.", 0.5, "texts.txt", 3, number=2).line
    3
    """

    text: str
    score: float
    file: str
    line: int
    number: int


class Index:
    """The texts of files, to be searched by the meaning that a model gives them.

    Attributes:
      vectors: [N, D] float16 of unit length, memory-mapped.
      num_truncated: how many of the N texts are longer than the model's positions.

    >>> folder = getfixture("tmp_path")
    >>> _ = (folder / "texts.txt").write_text("The river bank.\\nA model reads.\\n")
    >>> bert = getfixture("tiny_bert")
    >>> index = Index.build(bert, folder / "texts.txt", folder / "my.index")
    >>> hit = index.search("The river bank.", top_k=1)[0]
    >>> hit.text, hit.line, round(hit.score, 2)
    ('The river bank.', 1, 1.0)
    >>> len(index), index.vectors.shape
    (2, (2, 16))
    """

    def __init__(self, path: Path, record: dict[str, Any], bert: Bert | None):
        self._path, self._record, self._bert = path, record, bert
        self.num_truncated: int = record["truncated"]
        for name in _FILES:
            size = (path / name).stat().st_size if (path / name).exists() else 0
            if size != record["bytes"][name]:
                wrong = f"{path / name} has {size} bytes instead of {record['bytes'][name]}"
                raise UserError(f"{wrong}; {_REMEDY}")
        self.vectors: np.ndarray = np.load(path / _VECTORS, mmap_mode="r")
        self._entries = np.load(path / _ENTRIES, mmap_mode="r")
        self._texts = np.memmap(path / _TEXTS, np.uint8, mode="r")
        self._verified = daemon_thread.start(self._verify)
        if bert:
            self._check_model(bert)

    @staticmethod
    def build(
        bert: Bert,
        files: str | Path | Sequence[str | Path],
        output: str | Path,
        *,
        column: str = "text",
        force: bool = False,
    ) -> "Index":
        """Embed the texts of files, and write the index.

        A call that was interrupted resumes after its last chunk, of some thousands of texts, when
        it is repeated, and writes the same bytes.

        Args:
          bert: the model. Texts that exceed its positions are truncated, and counted.
          files: with a text a line, or .tsv, .csv or .jsonl with a text in `column`; plain, .gz or
            .xz. Empty lines and fields are skipped. "builtin": the functions of Python's library.
          output: the folder, which must not exist.
          column: of the text in tables.
          force: whether to replace an index that is there, and nothing else.

        Raises:
          UserError: the files have no texts, or cannot be read; `output` exists or cannot be
            written; or it was begun with another model or other texts.
        """
        files = [str(file) for file in ([files] if isinstance(files, str | Path) else files)]
        output = Path(output)
        replacement.check_replaceable(output, _is_only_index if force else None)
        with console.working("reading", says_end=False):
            count = sum(1 for _ in _read(files, column))
        if not count:
            raise UserError(f"{', '.join(files)}: no texts; give files with a text a line")
        partial = output.with_name(f"{output.name}.partial")
        try:
            with locks.locked(partial):
                _write(bert, files, column, count, partial)
                replacement.replace(partial, output)
                for name in _BUILDING:
                    (output / name).unlink(missing_ok=True)
        except OSError as error:
            wrong = f"{partial} cannot be written ({error.strerror or error})"
            raise UserError(f"{wrong}; mend that, then repeat it to resume") from error
        return Index.load(output, bert)

    @staticmethod
    def load(path: str | Path, bert: Bert | None = None) -> "Index":
        """Open an index; its texts and vectors stay on disk.

        Args:
          path: the folder.
          bert: the model that it was built with; by default the checkpoint that it names is loaded
            for the first search.

        Raises:
          UserError: there is no index, or it is unfinished, damaged, or of another model.
        """
        path = Path(path)
        record_path = path / _RECORD
        if not os.path.exists(record_path):
            wrong = "is no index; build one by bert-jax index CHECKPOINT FILES --output=INDEX"
            if os.path.exists(path.with_name(f"{path.name}.partial")):
                wrong = "is unfinished; repeat the command that was writing it"
            raise UserError(f"{path} {wrong}")
        record = json_files.read_json(record_path, _REMEDY)
        if record.get("format") != _FORMAT:
            raise UserError(f"{path} is of another version of this package; {_REMEDY}")
        try:
            with json_files.refusing_malformed(record_path, _REMEDY):
                return Index(path, record, bert)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror or error})") from error

    @overload
    def search(self, query: str, top_k: int = 10) -> list[Hit]: ...  # pyright: ignore
    @overload
    def search(self, query: Sequence[str], top_k: int = 10) -> list[list[Hit]]: ...
    def search(self, query: Any, top_k: int = 10) -> Any:
        """Return the texts whose embeddings are nearest to that of a query, the nearest first.

        Args:
          query: one query or several. What exceeds the model's positions is truncated, with a
            warning.
          top_k: hits of each query; all texts where there are fewer.

        Returns:
          The hits of the query; a list of such for several. Of equal ones the first is first.

        Raises:
          UserError: a query is empty, `top_k` is less than 1, or the index is damaged or of another
            model.
        """
        queries = [query] if isinstance(query, str) else list(query)
        search.check_k(top_k)
        vectors = self.encode(queries)
        self._verified.result()
        found = search.top_k(self.vectors, vectors, top_k)
        hits = [
            list(map(self._hit, *both)) for both in zip(found.indices, found.scores, strict=True)
        ]
        return hits[0] if isinstance(query, str) else hits

    def encode(self, queries: str | Sequence[str]) -> np.ndarray:
        """Return the embeddings of queries, [Q, D] float32 of unit length.

        What exceeds the model's positions is truncated, with a warning.

        Raises:
          UserError: a query is empty, or the index is of another model.
        """
        queries = text_list(queries, "queries")
        for number, query in enumerate(queries, start=1):
            if not query.strip():
                which = f"query {number} of {len(queries)}" if len(queries) > 1 else "the query"
                raise UserError(f"{which} is empty; give a text to search for")
        vectors, truncated = [np.empty((0, self.vectors.shape[1]), np.float32)], 0
        for chunk in chunks(queries):
            embedded, number = _embed(self.bert, chunk, "query")
            vectors.append(embedded)
            truncated += number
        warn_truncated(truncated, len(queries), self.bert.encoder(None, None).max_length)
        return np.concatenate(vectors)

    @functools.cached_property
    def bert(self) -> Bert:
        """The model that the index was built with."""
        if self._bert:
            return self._bert
        name = self._record["checkpoint"]
        if not name:
            raise UserError(f"{self._path} names no checkpoint; give its model as --checkpoint")
        try:
            bert = load(name)
        except UserError as error:
            wrong = f"the checkpoint that {self._path} was built with cannot be loaded ({error})"
            raise UserError(f"{wrong}; give the model as --checkpoint") from error
        self._check_model(bert)
        return bert

    def text(self, number: int) -> str:
        """Return a text by its number in the index."""
        start = int(self._entries[number - 1, 0]) if number else 0
        return self._texts[start : int(self._entries[number, 0])].tobytes().decode()

    def __len__(self) -> int:
        return len(self.vectors)

    def _hit(self, number: np.int64, score: np.float32) -> Hit:
        _, file, line = map(int, self._entries[number])
        name = self._record["identity"]["files"][file]
        return Hit(self.text(int(number)), float(score), name, line, int(number))

    def _check_model(self, bert: Bert) -> None:
        if _model_identity(bert) != self._record["identity"]["model"]:
            built = self._record["checkpoint"] or "a model without a checkpoint"
            wrong = f"{self._path} is of another model, {built}"
            raise UserError(f"{wrong}; search with that, or build an index with this one")

    def _verify(self) -> None:
        try:
            found = checksums.find_damage(self._path, self._record["checksums"])
        except OSError as error:
            found = f"it cannot be read ({error})"
        if found:
            raise UserError(f"{self._path}: {found}; {_REMEDY}")


class _Entry(NamedTuple):
    text: str
    file: int
    line: int


def _read(files: Sequence[str], column: str) -> Iterator[_Entry]:
    """Yield the texts of files; UserError before the first if a file cannot be opened."""
    for file in files:
        if file != _BUILTIN:
            existing(file, remedy="give files with a text a line, or tables")
    for number, file in enumerate(files):
        for text, line in _read_file(file, column):
            if text.strip():
                yield _Entry(text, number, line)


def _read_file(file: str, column: str) -> Iterator[tuple[str, int]]:
    """Yield each text of a file, and its line."""
    if file == _BUILTIN:
        yield from ((text, number) for number, text in enumerate(builtin.functions(), start=1))
        return
    is_plain = reader(file) is None
    for record in read_records(file, lines=True):
        text = record.field("text" if is_plain else column, "column")
        if not isinstance(text, str | None):
            raise UserError(f"{record.where} has no text in {column!r}; set column to another")
        yield text or "", record.line


def _embed(bert: Bert, texts: Sequence[str], kind: str) -> tuple[np.ndarray, int]:
    """Return the embeddings of texts, [N, D] of unit length, and how many were truncated.

    `kind` is "query" or "passage", whose prompts a model of embeddings may have.
    """
    prompt = own_prompt(bert.task, kind)
    embeddings = bert.encoder(None, None).encode_chunk([prompt + text for text in texts])
    vectors = search.normalize(np.stack([embedding.vectors for embedding in embeddings]))
    if not np.isfinite(vectors).all():
        raise UserError("the model's embeddings are not finite numbers; train it again")
    return vectors, sum(embedding.is_truncated for embedding in embeddings)


def _model_identity(bert: Bert) -> dict[str, Any]:
    """Return JSON that is equal if, and only if, the embeddings of texts are."""
    # Without what is before the heads of tasks, which some checkpoints of a model lack.
    modules = bert.params["bert"].items()
    params = {name: value for name, value in modules if name not in ("pooler", "head")}
    own: Any = "mean of the last layer"
    if bert.task and isinstance(bert.model, BertForEmbedding):
        params = {"bert": params, "dense": bert.params.get("dense", {})}
        own = {**dataclasses.asdict(bert.task.embedding), "max_length": bert.data.max_length}
        own = {name: own[name] for name in _OWN}
    tokenizer = bert.tokenizer.fingerprint
    return {"parameters": workdir.checksum(params), "tokenizer": tokenizer, "pooling": own}


def _write(bert: Bert, files: Sequence[str], column: str, count: int, folder: Path) -> None:
    """Write the files of an index to a folder; embeddings that are there are kept."""
    size = bert.encoder(None, None).size
    identity = {"model": _model_identity(bert), "files": files, "column": column, "texts": count}
    progress_path = folder / _PROGRESS
    progress: dict[str, Any] = {"texts": 0, "text_crc32c": 0, "truncated": 0}
    if progress_path.exists():
        progress = json_files.read_json(progress_path, f"remove {folder}")
    elif {*os.listdir(folder)} - {locks.NAME, f"{_PROGRESS}.tmp"}:
        raise UserError(f"{folder} is not empty and no unfinished index; remove it")
    other = f"{folder} was begun with another model or other texts; repeat that, or remove it"
    if begun := progress["texts"]:
        if progress["identity"] != identity:
            raise UserError(other)
        console.show(f"resuming: {begun:,} of {count:,} texts are embedded")
    progress["identity"] = identity
    json_files.write_record(progress_path, progress)
    done = end = checksum = 0
    with (
        _open_array(folder / _VECTORS, np.float16, (count, size), begun) as vectors,
        _open_array(folder / _ENTRIES, np.int64, (count, 3)) as entries,
        (folder / _TEXTS).open("wb") as texts,
        console.working("embedding"),
    ):
        for chunk in chunks(_read(files, column), lambda entry: len(entry.text)):
            encoded = [entry.text.encode() for entry in chunk]
            ends = end + np.cumsum([len(text) for text in encoded])
            places = [(entry.file, entry.line) for entry in chunk]
            entries.write(np.column_stack([ends, places]).astype(np.int64).tobytes())
            texts.write(joined := b"".join(encoded))
            checksum = google_crc32c.extend(checksum, joined)
            start, done, end = done, done + len(chunk), int(ends[-1])
            if start < begun <= done and (done, checksum) != (begun, progress["text_crc32c"]):
                raise UserError(other)
            if done > begun:
                embeddings, truncated = _embed(bert, [entry.text for entry in chunk], "passage")
                vectors.write(embeddings.astype(np.float16).tobytes())
                vectors.flush()
                os.fsync(vectors.fileno())
                total = progress["truncated"] + truncated
                progress |= {"texts": done, "text_crc32c": checksum, "truncated": total}
                json_files.write_record(progress_path, progress)
                console.advance(done - begun, count - begun)
    if done != count:
        raise UserError(f"{', '.join(files)} was changed while it was read; repeat the command")
    source, paths = bert.source or "", [folder / name for name in _FILES]
    is_path = source and not hub.is_name(source)
    record = {
        "format": _FORMAT,
        "identity": identity,
        "checkpoint": str(absolute(as_path(source)) if is_path else source),
        "truncated": progress["truncated"],
        "bytes": {path.name: path.stat().st_size for path in paths},
        "checksums": checksums.of_files(folder, paths),
    }
    json_files.write_record(folder / _RECORD, record)


@contextlib.contextmanager
def _open_array(path: Path, dtype: type, shape: tuple[int, int], kept: int = 0) -> Iterator[Any]:
    """Open an .npy file to write the rows of an array, after those that are kept."""
    path.touch()
    with path.open("r+b") as file:
        described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "shape": shape}
        np.lib.format.write_array_header_1_0(file, {**described, "fortran_order": False})
        end = file.tell() + kept * shape[1] * np.dtype(dtype).itemsize
        if path.stat().st_size < end and kept:
            raise UserError(f"{path} is damaged; remove {path.parent}")
        file.truncate(end)
        file.seek(end)
        yield file


def _is_only_index(path: Path) -> bool:
    return os.path.exists(path / _RECORD) and {*os.listdir(path)} <= {_RECORD, *_FILES, *_BUILDING}
