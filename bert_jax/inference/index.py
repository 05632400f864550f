"""An index: the embeddings of the texts of files, in a folder, to search by meaning.

`vectors.npy` is [N, D] float16, of unit length; `texts.bin` the N texts, one after the other;
`entries.npy` [N, 3] int64: where each text ends there, its file and its line. `index.json` says
which model and files they are of, the sizes and the checksums. The folder gets its name when all
are written.
"""

import dataclasses
import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, overload

import numpy as np

from bert_jax import console
from bert_jax.convert import hub
from bert_jax.errors import UserError
from bert_jax.inference.embeddings import TextEncoder, embedding_identity
from bert_jax.inference.loading import LoadedModel, load_model
from bert_jax.inference.runner import chunks
from bert_jax.inference.tokenization import own_prompt, text_list, warn_truncated
from bert_jax.retrieval import search
from bert_jax.storage import checksums, daemon_thread, json_files, locks, replacement
from bert_jax.storage.paths import absolute, as_path
from bert_jax.text import builtin
from bert_jax.text.files import existing
from bert_jax.text.readers import read_records
from bert_jax.text.records import reader

_FORMAT = 1
_RECORD, _FILES = "index.json", ("vectors.npy", "texts.bin", "entries.npy")
_REMEDY = "remove the folder and build it again"
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


class TextIndex:
    """The texts of files, to be searched by the meaning that a model gives them; see `Index`."""

    def __init__(self, path: Path, record: dict[str, Any], model: LoadedModel | None):
        self._path, self._record, self._model = path, record, model
        self.num_truncated: int = record["truncated"]
        for name in _FILES:
            size = (path / name).stat().st_size if (path / name).exists() else 0
            if size != record["bytes"][name]:
                raise UserError(
                    f"{path / name} has {size} bytes instead of {record['bytes'][name]}; {_REMEDY}"
                )
        self.vectors: np.ndarray = np.load(path / "vectors.npy", mmap_mode="r")
        self._entries = np.load(path / "entries.npy", mmap_mode="r")
        self._texts = np.memmap(path / "texts.bin", np.uint8, mode="r")
        self._verified = daemon_thread.start(self._verify)
        if model:
            self._check_model(model)

    @classmethod
    def build(
        cls,
        bert: LoadedModel,
        files: str | Path | Sequence[str | Path],
        output: str | Path,
        *,
        column: str = "text",
        force: bool = False,
    ) -> Self:
        """Embed the texts of files, and write the index, all of it or nothing.

        Args:
          bert: the model. Texts that exceed its positions are truncated, and counted.
          files: with a text a line, or .tsv, .csv or .jsonl with a text in `column`; plain, .gz or
            .xz. Empty lines and fields are skipped. "builtin": the functions of Python's library.
          output: the folder, which must not exist.
          column: of the text in tables.
          force: whether to replace an index that is there, and nothing else.

        Raises:
          UserError: the files have no texts, or cannot be read; or `output` exists or cannot be
            written.
        """
        files = [str(file) for file in ([files] if isinstance(files, str | Path) else files)]
        output, may_replace = Path(output), _is_index if force else None
        replacement.check_replaceable(output, may_replace)
        with console.working("reading", says_end=False):
            count = sum(1 for _ in _read(files, column))
        if not count:
            raise UserError(f"{', '.join(files)}: no texts; give files with a text a line")
        partial = output.with_name(f"{output.name}.partial")
        try:
            with locks.locked(partial):
                if {*os.listdir(partial)} - {locks.NAME, _RECORD, *_FILES}:
                    raise UserError(f"{partial} is not empty and no unfinished index; remove it")
                try:
                    replacement.check_replaceable(output, may_replace)
                    _write(bert, files, column, count, partial)
                    (partial / locks.NAME).unlink()
                    replacement.replace(partial, output)
                except BaseException:
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
        except OSError as error:
            raise UserError(
                f"{output} cannot be written ({error.strerror or error}); choose another path"
            ) from error
        return cls.load(output, bert)

    @classmethod
    def load(cls, path: str | Path, bert: LoadedModel | None = None) -> Self:
        """Open an index; its texts and vectors stay on disk.

        Args:
          path: the folder.
          bert: the model that it was built with; by default the checkpoint that it names is loaded
            for the first search.

        Raises:
          UserError: there is no index, or it is damaged, or of another model.
        """
        path = Path(path)
        record_path = path / _RECORD
        if not os.path.exists(record_path):
            raise UserError(
                f"{path} is no index; build one by bert-jax index CHECKPOINT FILES --output=INDEX"
            )
        record = json_files.read_json(record_path, _REMEDY)
        if record.get("format") != _FORMAT:
            raise UserError(f"{path} is of another version of this package; {_REMEDY}")
        try:
            with json_files.refusing_malformed(record_path, _REMEDY):
                return cls(path, record, bert)
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
            [self._hit(int(number), float(score)) for number, score in zip(*each, strict=True)]
            for each in zip(found.indices, found.scores, strict=True)
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
        encoder, prompt = TextEncoder(self.model), own_prompt(self.model, "query")
        vectors, num_truncated = _embed(encoder, [prompt + query for query in queries])
        warn_truncated(num_truncated, len(queries), encoder.max_length)
        return vectors

    @functools.cached_property
    def model(self) -> LoadedModel:
        """The content of the checkpoint that the index was built with."""
        if self._model:
            return self._model
        name = self._record["checkpoint"]
        if not name:
            raise UserError(f"{self._path} names no checkpoint; give its model as --checkpoint")
        try:
            with console.working("loading the model", says_end=False):
                model = load_model(name)
        except UserError as error:
            raise UserError(
                f"the checkpoint that {self._path} was built with cannot be loaded ({error}); give "
                "the model as --checkpoint"
            ) from error
        self._check_model(model)
        return model

    def text(self, number: int) -> str:
        """Return a text by its number in the index."""
        start = int(self._entries[number - 1, 0]) if number else 0
        return self._texts[start : int(self._entries[number, 0])].tobytes().decode()

    def __len__(self) -> int:
        return len(self.vectors)

    def _hit(self, number: int, score: float) -> Hit:
        _, file, line = map(int, self._entries[number])
        name = self._record["identity"]["files"][file]
        return Hit(self.text(number), score, name, line, number)

    def _check_model(self, model: LoadedModel) -> None:
        if embedding_identity(model) != self._record["identity"]["model"]:
            built = self._record["checkpoint"] or "a model without a checkpoint"
            raise UserError(
                f"{self._path} is of another model, {built}; search with that, or build an index "
                "with this one"
            )

    def _verify(self) -> None:
        try:
            damage = checksums.find_damage(self._path, self._record["checksums"])
        except OSError as error:
            damage = f"it cannot be read ({error})"
        if damage:
            raise UserError(f"{self._path}: {damage}; {_REMEDY}")


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


def _embed(encoder: TextEncoder, texts: Sequence[str]) -> tuple[np.ndarray, int]:
    """Return the embeddings of texts, [N, D] of unit length, and how many were truncated."""
    vectors, num_truncated = np.empty((len(texts), encoder.size), np.float32), 0
    for index, embedding in enumerate(encoder(texts)):
        vectors[index] = embedding.vectors
        num_truncated += embedding.is_truncated
    if not np.isfinite(vectors).all():
        raise UserError("the model's embeddings are not finite numbers; train it again")
    return search.normalize(vectors), num_truncated


def _write(model: LoadedModel, files: Sequence[str], column: str, count: int, folder: Path) -> None:
    """Embed the texts of files, and write the files of an index to a folder."""
    encoder, prompt = TextEncoder(model), own_prompt(model, "passage")
    done = end = num_truncated = 0
    with (
        (folder / "vectors.npy").open("wb") as vectors,
        (folder / "entries.npy").open("wb") as entries,
        (folder / "texts.bin").open("wb") as texts,
        console.working("embedding"),
    ):
        _write_header(vectors, np.float16, (count, encoder.size))
        _write_header(entries, np.int64, (count, 3))
        for chunk in chunks(_read(files, column), lambda entry: len(entry.text)):
            embedded, truncated = _embed(encoder, [prompt + entry.text for entry in chunk])
            vectors.write(embedded.astype(np.float16).tobytes())
            for entry in chunk:
                end += texts.write(entry.text.encode())
                entries.write(np.array([end, entry.file, entry.line], np.int64).tobytes())
            done, num_truncated = done + len(chunk), num_truncated + truncated
            console.advance(done, count)
    if done != count:
        raise UserError(f"{', '.join(files)} was changed while it was read; repeat the command")
    source, paths = model.source or "", [folder / name for name in _FILES]
    is_path = source and not hub.is_name(source)
    identity = {
        "model": embedding_identity(model),
        "files": files,
        "column": column,
        "texts": count,
    }
    record = {
        "format": _FORMAT,
        "identity": identity,
        "checkpoint": str(absolute(as_path(source)) if is_path else source),
        "truncated": num_truncated,
        "bytes": {path.name: path.stat().st_size for path in paths},
        "checksums": checksums.of_files(folder, paths),
    }
    json_files.write_record(folder / _RECORD, record)


def _write_header(file: BinaryIO, dtype: type, shape: tuple[int, int]) -> None:
    """Write how an .npy file begins."""
    described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "shape": shape}
    np.lib.format.write_array_header_1_0(file, {**described, "fortran_order": False})


def _is_index(path: Path) -> bool:
    return os.path.exists(path / _RECORD) and {*os.listdir(path)} <= {_RECORD, *_FILES}
