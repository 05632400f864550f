"""The token store: text, tokenized once, in flat files that are memory-mapped.

A store is a folder:

    store.json         what it was made of and how much it holds; written last
    tokenizer/         the tokenizer
    train/, eval/      tokens.bin (uint16, or uint32 for over 65,536 pieces), sentences.bin
                       (int64, where each sentence begins among the tokens, and their number),
                       documents.bin (int64, the same of documents among the sentences)
    progress.json      while it is being made: how far it is; a run that was killed goes on there
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from bert_jax.config import DataConfig, TokenizerConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.text import sources as text_lib
from bert_jax.text import tokenizer as tokenizer_lib
from bert_jax.text import tokenizer_training
from bert_jax.text.tokenizer import Tokenizer

_FORMAT = 1
_FILES = ("tokens", "sentences", "documents")
# Large enough to keep every core busy, small enough to hold several in memory.
_BATCH_CHARACTERS = 2_000_000


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """Tokenized text, memory-mapped.

    Attributes:
      tokens: [T] unsigned, all pieces, one document after the other.
      sentences: [S + 1] int64, where each sentence begins in `tokens`, and T.
      documents: [N + 1] int64, where each document begins in `sentences`, and S.
    """

    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray

    @property
    def num_sentences(self) -> int:
        """Number of sentences, S."""
        return len(self.sentences) - 1

    @property
    def num_documents(self) -> int:
        """Number of documents, N."""
        return len(self.documents) - 1

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """Returns how often each piece occurs, [vocab_size] int64."""
        counts = np.zeros(vocab_size, np.int64)
        for start in range(0, len(self.tokens), 1 << 24):
            counts += np.bincount(self.tokens[start : start + (1 << 24)], minlength=vocab_size)
        return counts


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A prepared store: tokenizer, text to train on and held-out text."""

    tokenizer: Tokenizer
    train: TokenStore
    eval: TokenStore
    fingerprint: str = ""  # of the text, the tokenizer and how the one was made into tokens


def is_store(path: str | Path) -> bool:
    """Whether `path` is the folder of a store, complete or begun."""
    # Not Path.exists, which raises for a list of files that is too long for a path.
    return any(os.path.exists(os.path.join(path, f"{name}.json")) for name in ("store", "progress"))


def read(config: TrainConfig, given: Tokenizer | None, folder: Path) -> Corpus:
    """Returns the text of a run, and its tokenizer: given, loaded, or trained on the text.

    Args:
      config: of the run.
      given: the tokenizer of a checkpoint that the run begins with.
      folder: where the text is prepared, if that has not been done.

    Raises:
      UserError: as `prepare`, or the tokenizer has more pieces than the model.
    """
    tokenizer, size = given or config.tokenizer, config.model.vocab_size
    if config.tokenizer.path:
        lowercase = config.tokenizer.lowercase
        tokenizer = tokenizer_lib.load(config.tokenizer.path, lowercase=lowercase)
        tokenizer_lib.check_vocab_size(tokenizer, size)  # before it is used
    corpus = prepare(config.data, tokenizer, size, folder)
    tokenizer_lib.check_vocab_size(corpus.tokenizer, size)
    return corpus


def prepare(
    data: DataConfig, tokenizer: Tokenizer | TokenizerConfig, vocab_size: int, folder: Path
) -> Corpus:
    """Returns the store of `data.source`, made in `folder` unless it is already there.

    Args:
      data: the text, and how it is split into documents, sentences and held-out documents.
      tokenizer: for the text, or how to train one on it.
      vocab_size: the number of pieces of a tokenizer trained here.
      folder: where the store is made. Making one that was interrupted goes on where it stopped.

    Raises:
      UserError: the text cannot be read, or `folder` holds a store of other text.
    """
    if is_store(data.source):
        corpus = open_corpus(Path(data.source))
        given = tokenizer if isinstance(tokenizer, Tokenizer) else corpus.tokenizer
        if given.fingerprint != corpus.tokenizer.fingerprint:
            raise UserError(
                f"the tokenizer given, by tokenizer.path or --init, is not the one that "
                f"{data.source} was prepared with; leave it out, or prepare the text with it: "
                "bert-jax prepare SOURCE STORE --tokenizer=CHECKPOINT"
            )
        return corpus
    source = text_lib.open_source(data.source, data)
    held_out = text_lib.open_source(data.eval_source, data) if data.eval_source else None
    identity = {
        "format": _FORMAT,
        "text": source.identity(),
        "held_out": held_out.identity() if held_out else data.eval_fraction,
        "tokenizer": _tokenizer_identity(tokenizer, vocab_size),
    }
    if (folder / "store.json").exists():
        _check_identity(folder / "store.json", identity)
        return open_corpus(folder)
    # What was begun from other text, or with another tokenizer, is begun again.
    begun = (folder / "progress.json").exists()
    goes_on = begun and _read_json(folder / "progress.json")["identity"] == identity
    made = None if goes_on else _tokenizer(source, held_out, data, tokenizer, vocab_size)
    try:
        if made is not None:
            shutil.rmtree(folder / "tokenizer", ignore_errors=True)  # one of another kind
            made.save(folder / "tokenizer")
            _write_json(folder / "progress.json", {"identity": identity, "splits": {}})
        _tokenize(source, held_out, data, folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); choose another") from error
    return open_corpus(folder)


def open_corpus(folder: Path) -> Corpus:
    """Opens a complete store.

    Raises:
      UserError: it is not complete, or damaged.
    """
    if not (folder / "store.json").exists():
        raise UserError(f"{folder} is an unfinished store; run the command that began it again")
    record = _read_json(folder / "store.json")
    tokenizer = tokenizer_lib.load(folder / "tokenizer")
    if tokenizer.vocab_size != record["vocab_size"]:
        raise UserError(f"{folder / 'tokenizer'} is not the one the store was made with; {_AGAIN}")
    splits = {name: _open_split(folder / name, sizes) for name, sizes in record["splits"].items()}
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    digest.update(tokenizer.fingerprint.encode())
    return Corpus(tokenizer, splits["train"], splits["eval"], digest.hexdigest())


_AGAIN = "remove the folder to prepare it again"


def _open_split(folder: Path, sizes: dict[str, Any]) -> TokenStore:
    arrays = {}
    for name in _FILES:
        path = folder / f"{name}.bin"
        found = path.stat().st_size if path.exists() else 0
        if found != sizes[name]:
            raise UserError(f"{path} has {found} bytes and not {sizes[name]}; {_AGAIN}")
        dtype = np.int64 if name != "tokens" else np.dtype(sizes["dtype"])
        # A plain array over the map: the subclass costs time at every index.
        arrays[name] = np.asarray(np.memmap(path, dtype, mode="r"))
    return TokenStore(**arrays)


def _tokenizer_identity(tokenizer: Tokenizer | TokenizerConfig, vocab_size: int) -> dict[str, Any]:
    if isinstance(tokenizer, Tokenizer):
        return {"fingerprint": tokenizer.fingerprint}
    trained = dataclasses.asdict(tokenizer)
    del trained["path"]
    return {**trained, "vocab_size": vocab_size}


def _tokenizer(
    source: text_lib.Source,
    held_out: text_lib.Source | None,
    data: DataConfig,
    tokenizer: Tokenizer | TokenizerConfig,
    vocab_size: int,
) -> Tokenizer:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    documents = (d for name, d in _split(source, held_out, data) if name == "train")
    return tokenizer_training.train((s for d in documents for s in d), tokenizer, vocab_size)


def _split(
    source: text_lib.Source, held_out: text_lib.Source | None, data: DataConfig
) -> Iterator[tuple[str, list[str]]]:
    """Yields every document with the split it belongs to: at even distances, so none is missed."""
    fraction = 0.0 if held_out else data.eval_fraction
    for index, document in enumerate(source.documents()):
        is_held_out = math.floor((index + 1) * fraction) > math.floor(index * fraction)
        yield "eval" if is_held_out else "train", document
    if held_out:
        for document in held_out.documents():
            yield "eval", document


class _SplitWriter:
    """The three files of a split, appended to; what an interrupted run left over is cut off."""

    def __init__(self, folder: Path, dtype: np.dtype, sizes: dict[str, int] | None):
        folder.mkdir(exist_ok=True)
        self._dtype = dtype
        self._files: dict[str, BinaryIO] = {}
        paths = {name: folder / f"{name}.bin" for name in _FILES}
        for name, path in paths.items():  # which truncate would fill up with zeros
            if sizes and (not path.exists() or path.stat().st_size < sizes[name]):
                raise UserError(f"{path} has lost part of what was written; {_AGAIN}")
        for name, path in paths.items():
            self._files[name] = path.open("ab")
            self._files[name].truncate(sizes[name] if sizes else 0)
        if sizes is None:
            for name in _FILES[1:]:
                self._files[name].write(np.int64(0).tobytes())
        size = self.sizes()
        self._tokens = size["tokens"] // dtype.itemsize
        self._sentences = size["sentences"] // 8 - 1

    def sizes(self) -> dict[str, Any]:
        """Flushes, and returns the size of each file in bytes."""
        for file in self._files.values():
            file.flush()
            file.seek(0, os.SEEK_END)
        sizes = {name: file.tell() for name, file in self._files.items()}
        return {**sizes, "dtype": self._dtype.name}

    def append(self, pieces: list[list[Any]]) -> None:
        """Adds documents of sentences of pieces; an empty sentence or document leaves no trace."""
        pieces = [kept for d in pieces if (kept := [s for s in d if len(s)])]
        if not pieces:
            return
        sentences = [sentence for document in pieces for sentence in document]
        self._files["tokens"].write(np.concatenate(sentences).astype(self._dtype).tobytes())
        ends = self._tokens + np.cumsum([len(s) for s in sentences], dtype=np.int64)
        self._files["sentences"].write(ends.tobytes())
        document_ends = self._sentences + np.cumsum([len(d) for d in pieces], dtype=np.int64)
        self._files["documents"].write(document_ends.tobytes())
        self._tokens, self._sentences = int(ends[-1]), int(document_ends[-1])

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()


def _tokenize(
    source: text_lib.Source, held_out: text_lib.Source | None, data: DataConfig, folder: Path
) -> None:
    progress = _read_json(folder / "progress.json")
    tokenizer = tokenizer_lib.load(folder / "tokenizer")
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    done, started, characters = progress.get("documents", 0), time.monotonic(), 0
    batches = _batches(_split(source, held_out, data), done)
    total = source.size + (held_out.size if held_out else 0)
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(
                closing(_SplitWriter(folder / name, dtype, progress["splits"].get(name)))
            )
            for name in ("train", "eval")
        }
        reader = stack.enter_context(ThreadPoolExecutor(1))
        bar = stack.enter_context(
            tqdm(total=total, desc="tokenizing", unit_scale=True, disable=None, leave=False)
        )
        # The tokenizers run in threads of their own and hold no lock: reading goes on meanwhile.
        following = reader.submit(next, batches, None)
        while batch := following.result():
            following = reader.submit(next, batches, None)
            pieces = iter(tokenizer.encode([s for _, document in batch for s in document]))
            tokenized = [(name, [next(pieces) for _ in document]) for name, document in batch]
            for name, writer in writers.items():
                writer.append([document for split, document in tokenized if split == name])
            done += len(batch)
            characters += sum(len(s) for _, document in batch for s in document)
            progress["documents"] = done
            progress["splits"] = {name: writer.sizes() for name, writer in writers.items()}
            _write_json(folder / "progress.json", progress)
            bar.update(source.position + (held_out.position if held_out else 0) - bar.n)
    _finish(folder, progress, tokenizer, source, data)
    seconds = time.monotonic() - started
    print(
        f"prepared {source.name} ({source.form}): {done:,} documents, {characters / 1e6:.1f} MB of "
        f"text in {seconds:.1f} s ({characters / 1e6 / seconds:.1f} MB/s)",
        flush=True,
    )


def _finish(
    folder: Path,
    progress: dict[str, Any],
    tokenizer: Tokenizer,
    source: text_lib.Source,
    data: DataConfig,
) -> None:
    """Turns the record of progress into that of a complete store, if both splits have text."""
    empty = [
        name for name in ("train", "eval") if not progress["splits"].get(name, {}).get("tokens")
    ]
    if empty:
        (folder / "progress.json").unlink()
    if "train" in empty:
        raise UserError(f"{source.name} has no text to train on; give more text")
    if empty:
        raise UserError(
            f"{source.name} has {progress['documents']} documents, of which data.eval_fraction "
            f"{data.eval_fraction} holds out none; raise it, or give data.eval_source"
        )
    del progress["documents"]
    _write_json(folder / "store.json", {**progress, "vocab_size": tokenizer.vocab_size})
    (folder / "progress.json").unlink()


def _batches(
    documents: Iterator[tuple[str, list[str]]], skip: int
) -> Iterator[list[tuple[str, list[str]]]]:
    batch, characters = [], 0
    for index, item in enumerate(documents):
        if index < skip:
            continue
        batch.append(item)
        characters += sum(map(len, item[1]))
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_identity(path: Path, identity: dict[str, Any]) -> None:
    found = _read_json(path)["identity"]
    for name, value in identity.items():
        if found.get(name) != value:
            what = {"text": "other text", "held_out": "other held-out text"}.get(
                name, f"another {name}"
            )
            raise UserError(
                f"{path.parent} was prepared from {what} than this run asks for; choose another "
                "folder, or remove it to prepare it again"
            )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1))
    os.replace(temporary, path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); {_AGAIN}") from error
