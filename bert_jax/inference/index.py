"""An index: the embeddings of texts, in a folder, to search by meaning.

`vectors.npy` is [N, D] float16, of unit length, or what `retrieval.vectors` says of another kind of
model; `texts.bin` the N texts, one after the other; `entries.npy` [N, 3] int64: where each text
ends there, its file and its line. `index.json` says which model and files they are of, and the
checksums. The folder gets its name when all are written.
"""

import contextlib
import dataclasses
import functools
import os
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

import numpy as np

from bert_jax import console
from bert_jax.errors import UserError, check_count, refuse
from bert_jax.inference.embeddings import TextEncoder, embedding_identity
from bert_jax.inference.loading import LoadedModel, load_model
from bert_jax.inference.predictions import check_reranker, relevance
from bert_jax.inference.task_vectors import RetrievalEncoder, kind_of_vectors, text_encoder
from bert_jax.inference.tokenization import text_list, warn_truncated
from bert_jax.retrieval import search
from bert_jax.retrieval.vectors import KINDS, ArrayWriter, check_entries
from bert_jax.storage import checksums, json_files
from bert_jax.storage.paths import AnyPath, absolute, as_path, is_on_hub, is_remote, on_disk
from bert_jax.storage.replacement import replacing
from bert_jax.text import builtin, records
from bert_jax.text.files import existing
from bert_jax.text.memory import chunks

_FORMAT = 1
_RECORD, _FILES = "index.json", ("texts.bin", "entries.npy")
_REMEDY = "remove the folder and build it again"
_BUILTIN = "builtin"  # in place of a file: the functions of Python's library
_LISTED = "texts"  # in place of a file's name: the texts of a list


@dataclasses.dataclass(frozen=True, repr=False)
class Hit:
    """A text that `Index.search` found.

    Attributes:
      text: the text as it was indexed.
      score: the cosine of its embedding and that of the query, 1 for the same direction to within
        5e-4, as vectors are stored in 16 bits; of late interaction a sum of such, of sparse vectors
        their product; or the score of a reranker.
      file, line: where it is from; the first line of a row of a table.
      number: its number in the index, from 0: the row of `Index.vectors`, where a text has one.

    >>> Hit("A river bank.", 0.5, "texts.txt", 3, number=2)
    Hit(0.500, texts.txt:3, 'A river bank.')
    """

    text: str
    score: float
    file: str
    line: int
    number: int

    def __repr__(self) -> str:
        return f"Hit({self.score:.3f}, {self.file}:{self.line}, {reprlib.repr(self.text)})"


class TextIndex:
    """An index whose model has no methods; `bert_jax.Index` has one of the class `Bert`."""

    def __init__(self, path: Path, record: dict[str, Any], bert: LoadedModel | None):
        identity = record["identity"]
        self._path, self._identity, self._files = path, identity["model"], list(identity["files"])
        self._checkpoint, self.num_truncated = str(record["checkpoint"]), int(record["truncated"])
        kind = KINDS[record.get("vectors", "dense")]
        names = (*_FILES, *kind.files)
        checksums.check(path, {name: record["checksums"][name] for name in names}, _REMEDY)
        # Open from here on, as another index may get the name.
        self._vectors = kind(path, int(record.get("size", 0)))
        self.vectors = self._vectors.matrix
        self._entries = np.load(path / "entries.npy", mmap_mode="r")
        self._texts = np.memmap(path / "texts.bin", np.uint8, mode="r")
        check_entries(self._entries, len(self._vectors), len(self._texts), len(self._files))
        if bert is not None:
            self.bert = self._checked(bert)

    @classmethod
    def build(
        cls,
        bert: LoadedModel | str | Path,
        files: str | Path | Sequence[str | Path] = (),
        output: str | Path = "",
        *,
        texts: Sequence[str] = (),
        column: str = "text",
        force: bool = False,
    ) -> Self:
        """Embed texts, and write the index, all of it or nothing.

        Args:
          bert: the model, or its checkpoint. Texts longer than what it reads are truncated, and
            counted.
          files: with a text a line, or .tsv, .csv, .jsonl or .parquet with one in `column`; but for
            the last, plain, .gz or .xz. Empty lines and fields are skipped. "builtin": the
            functions of Python's library.
          output: the folder, which must not exist.
          texts: further texts; the `file` of their hits is "texts", and the first has line 1.
          column: of the text in tables.
          force: whether to replace an index that is there, and nothing else.

        Raises:
          UserError: there are no texts, or they cannot be read; or `output` exists or cannot be
            written.
        """
        files = [files] if isinstance(files, str | Path) else files or ()
        files = [str(file) for file in files]
        listed = text_list(texts)
        read = functools.partial(_read, files, listed, column)
        with replacing(output, _is_index if force else None) as folder:
            with console.working("reading", says_end=False):
                count = sum(1 for _ in read())
            names = [*files, *[_LISTED][: len(listed)]]
            refuse(
                not count,
                f"{', '.join(names) or 'an index'} has no texts",
                fix=f"give files with a text a line, or tables with a text in column {column!r}",
            )
            folder.mkdir()
            bert = cls._loaded(bert)
            num_truncated = _write(bert, read(), count, folder)
            kind = kind_of_vectors(bert)
            paths = [folder / name for name in (*_FILES, *KINDS[kind].files)]
            source = str(bert.source or "")
            is_path = source and not is_on_hub(source)
            record = {
                "format": _FORMAT,
                "identity": {
                    "model": embedding_identity(bert),
                    "files": names,
                    "column": column,
                    "texts": count,
                },
                "vectors": kind,
                "size": bert.config.vocab_size,
                "checkpoint": str(absolute(as_path(source))) if is_path else source,
                "truncated": num_truncated,
                "checksums": checksums.of_files(folder, paths),
            }
            json_files.write_record(folder / _RECORD, record)
        return cls.load(output, bert)

    @classmethod
    def load(cls, path: str | Path, bert: LoadedModel | str | Path | None = None) -> Self:
        """Open an index; its texts and vectors stay on disk.

        Args:
          path: the folder.
          bert: the model that it was built with, or its checkpoint; by default the folder that the
            index names is loaded for the first search. One of a hub or of memory must be given.

        Raises:
          UserError: there is no index, or it is damaged, or of another model.
        """
        refuse(
            is_remote(str(path)),
            f"{path} is not on a disk",
            fix="copy the index to one, and give that folder",
        )
        path, bert = on_disk(path), None if bert is None else cls._loaded(bert)
        record_path = path / _RECORD
        if not os.path.exists(record_path):
            raise UserError(
                f"{path} is no index; build one by bert-jax index CHECKPOINT FILES --output=INDEX"
            )
        record = json_files.read_record(record_path, _REMEDY)
        if record.get("format") != _FORMAT:
            raise UserError(f"{path} is of another version of this package; {_REMEDY}")
        try:
            with json_files.refusing_malformed(record_path, _REMEDY):
                return cls(path, record, bert)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror or error})") from error

    @overload
    def search(  # pyright: ignore
        self, query: str, top_k: int = 10, *, reranker: Any = None, candidates: int = 100
    ) -> list[Hit]: ...
    @overload
    def search(
        self, query: Sequence[str], top_k: int = 10, *, reranker: Any = None, candidates: int = 100
    ) -> list[list[Hit]]: ...
    def search(
        self, query: Any, top_k: int = 10, *, reranker: Any = None, candidates: int = 100
    ) -> Any:
        """Return the texts whose embeddings are nearest to that of a query, the nearest first.

        Args:
          query: one query or several. What exceeds what the model reads is truncated, with a
            warning.
          top_k: hits of each query; all texts where there are fewer.
          reranker: a model that reads a query and a text together, or its checkpoint. It ranks the
            `candidates` nearest texts anew, and the scores of the hits are its own.
          candidates: texts that a reranker reads for each query, at least `top_k`.

        Returns:
          The hits of the query; a list of such for several. Of equal ones the first is first.

        Raises:
          UserError: a query is empty, `top_k` or `candidates` is less than 1, the index is of
            another model, or the reranker is none.
        """
        check_count(top_k, "top_k")
        check_count(candidates, "candidates")
        queries = text_list(query, "queries")  # once, as it may be a generator
        if reranker is not None:
            reranker = self._loaded(reranker, "reranker")
            check_reranker(reranker)
        count = top_k if reranker is None else max(top_k, candidates)
        if not queries:
            return []
        found = self._vectors.top_k(self.encode(queries), count)
        hits = [
            [self._hit(int(number), float(score)) for number, score in zip(*each, strict=True)]
            for each in zip(found.indices, found.scores, strict=True)
        ]
        if reranker is not None:
            hits = _reranked(reranker, queries, hits, top_k)
        return hits[0] if isinstance(query, str) else hits

    def encode(self, queries: str | Sequence[str]) -> Any:
        """Return the embeddings of queries, [Q, D] float32 of unit length.

        Of late interaction and of sparse vectors, a list of what each query becomes. What exceeds
        what the model reads is truncated, with a warning.

        Raises:
          UserError: a query is empty, or the index is of another model.
        """
        queries = text_list(queries, "queries")
        for number, query in enumerate(queries, start=1):
            if not query.strip():
                which = f"query {number} of {len(queries)}" if len(queries) > 1 else "the query"
                raise UserError(f"{which} is empty; give a text to search for")
        encoder = text_encoder(self.bert, prompt="query")
        vectors, num_truncated = _embed(encoder, queries)
        warn_truncated(num_truncated, len(queries), encoder.max_length)
        return vectors

    def text(self, number: int) -> str:
        """Return a text by its number in the index; UserError where there is none."""
        is_whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
        if not is_whole or not 0 <= number < len(self):
            raise UserError(f"number is {number!r}; the index has 0 to {len(self) - 1}")
        start = int(self._entries[number - 1, 0]) if number else 0
        return self._texts[start : int(self._entries[number, 0])].tobytes().decode(errors="replace")

    @functools.cached_property
    def bert(self) -> LoadedModel:
        """The model that the index was built with."""
        name = self._checkpoint
        told = f"give its model: --checkpoint={name or 'CHECKPOINT'}, or Index.load(INDEX, MODEL)"
        refuse(not name, f"{self._path} names no checkpoint", fix=told)
        is_far = is_on_hub(name) or is_remote(name)
        refuse(is_far, f"{self._path} is of {name}, maybe a download", fix=told)
        try:
            bert = self._load(name)
        except UserError as error:
            raise UserError(
                f"the checkpoint that {self._path} was built with cannot be loaded ({error}); "
                "give the model as --checkpoint, or Index.load(INDEX, MODEL)"
            ) from error
        return self._checked(bert)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        texts = console.counted(len(self), "text")
        return f"Index({self._path.name}, {texts}, vectors of {self.vectors.shape[1]})"

    def _hit(self, number: int, score: float) -> Hit:
        _, file, line = map(int, self._entries[number])
        return Hit(self.text(number), score, self._files[file], line, number)

    def _checked(self, bert: LoadedModel) -> LoadedModel:
        if embedding_identity(bert) != self._identity:
            built = self._checkpoint or "a model without a checkpoint"
            refuse(
                self._checkpoint != "" and str(bert.source) == self._checkpoint,
                f"{self._path} is of {built} as it was; it has other weights now",
                fix="build the index again",
            )
            raise UserError(
                f"{self._path} is of another model, {built}; search with that, or build an index "
                "with this one"
            )
        return bert

    @staticmethod
    def _load(path: str | AnyPath) -> LoadedModel:
        return load_model(path)

    @classmethod
    def _loaded(cls, bert: Any, name: str = "bert") -> LoadedModel:
        """Return a model, which may be given as its checkpoint."""
        if isinstance(bert, str | Path):
            return cls._load(bert)
        if not isinstance(bert, LoadedModel):
            raise UserError(
                f"{name} is {reprlib.repr(bert)}; give a model, or the path of a checkpoint"
            )
        return bert


def _reranked(
    reranker: LoadedModel, queries: Sequence[str], hits: Sequence[Sequence[Hit]], top_k: int
) -> list[list[Hit]]:
    """Return the best hits of each query by a reranker, with its scores."""
    scores = relevance(reranker, queries, [[hit.text for hit in own] for own in hits])
    return [
        [
            dataclasses.replace(own[index], score=float(values[index]))
            for index in search.best(values, top_k)
        ]
        for own, values in zip(hits, scores, strict=True)
    ]


class _Entry(NamedTuple):
    text: str
    file: int
    line: int


def _read(files: Sequence[str], texts: Sequence[str], column: str) -> Iterator[_Entry]:
    """Yield the texts of files and of a list; UserError first if a file cannot be opened."""
    for file in files:
        if file != _BUILTIN:
            existing(file, remedy="give files with a text a line, or tables")
    listed = ((text, number) for number, text in enumerate(texts, start=1))
    sources = [*(_read_file(file, column) for file in files), listed]
    for number, source in enumerate(sources):
        for text, line in source:
            if text.strip():
                yield _Entry(text, number, line)


def _read_file(file: str, column: str) -> Iterator[tuple[str, int]]:
    """Yield each text of a file, and its line."""
    if file == _BUILTIN:
        yield from ((text, number) for number, text in enumerate(builtin.functions(), start=1))
        return
    for text, record in records.texts(file, column, "column"):
        yield text, record.line


def _embed(encoder: TextEncoder | RetrievalEncoder, texts: Sequence[str]) -> tuple[Any, int]:
    """Return the vectors of texts, as `Index.encode` does, and how many were truncated."""
    is_task = isinstance(encoder, RetrievalEncoder)
    encode = encoder.encode_native if is_task else encoder.encode_chunk
    embeddings = [each for chunk in chunks(texts) for each in encode(chunk)]
    vectors = [each.vectors for each in embeddings]
    num_truncated = sum(each.is_truncated for each in embeddings)
    if not is_task:
        array = np.array(vectors, np.float32).reshape(len(vectors), encoder.size)
        vectors = search.normalize(array)
    return vectors, num_truncated


def _write(bert: LoadedModel, read: Iterator[_Entry], count: int, folder: Path) -> int:
    """Embed texts, and write the arrays of an index; return how many were truncated."""
    encoder, kind = text_encoder(bert, prompt="passage"), KINDS[kind_of_vectors(bert)]
    done = end = num_truncated = 0
    with contextlib.ExitStack() as files:
        arrays = [files.enter_context(ArrayWriter(folder / name)) for name in kind.files]
        entries = files.enter_context(ArrayWriter(folder / "entries.npy"))
        texts = files.enter_context((folder / "texts.bin").open("wb"))
        files.enter_context(console.working("embedding"))
        for chunk in chunks(read, lambda entry: len(entry.text)):
            embedded, truncated = _embed(encoder, [entry.text for entry in chunk])
            for array, part in zip(arrays, kind.arrays(embedded), strict=True):
                array.append(part)
            for entry in chunk:
                end += texts.write(entry.text.encode())
                entries.append(np.array([[end, entry.file, entry.line]], np.int64))
            done, num_truncated = done + len(chunk), num_truncated + truncated
            console.advance(done, count)
    refuse(done != count, "a file was changed while it was read", fix="repeat the command")
    return num_truncated


def _is_index(path: Path) -> bool:
    return os.path.exists(path / _RECORD) and {*os.listdir(path)} <= {
        _RECORD,
        *_FILES,
        *(name for kind in KINDS.values() for name in kind.files),
    }
