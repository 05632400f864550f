"""Write a token store: tokenize text once, resumable after a kill.

The files of a store are appended to batch by batch, and `progress.json` records their sizes after
each. A run that was killed resumes after the last batch recorded.
"""

import dataclasses
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax import console
from bert_jax.config import DataConfig, TokenizerConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.text import tokenizer as tokenizer_lib
from bert_jax.text import tokenizer_training
from bert_jax.text.sources import open_source
from bert_jax.text.store import FILES, REMEDY, Corpus, is_store, open_store, read_json
from bert_jax.text.tokenizer import Tokenizer, check_vocab_size

DEFAULT_VOCAB_SIZE = 32_000  # of a tokenizer trained where model.vocab_size is 0
_FORMAT = 1
# Large enough to keep all cores busy, small enough to hold several in memory.
_BATCH_CHARACTERS = 2_000_000


def read(config: TrainConfig, init_tokenizer: Tokenizer | None, folder: Path) -> Corpus:
    """Return the text of a run, prepared in `folder` where that has not been done.

    Args:
      config: of the run.
      init_tokenizer: of the checkpoint that the run starts from, if there is one.
      folder: of the store, unless `data.source` is a store.

    Raises:
      UserError: as `prepare`, or the model has fewer embeddings than the tokenizer has tokens.
    """
    tokenizer = choose_tokenizer(config, init_tokenizer)
    if isinstance(tokenizer, Tokenizer):
        check_vocab_size(tokenizer, config.model.vocab_size)  # before the long work
    corpus = prepare(config.data, tokenizer, config.model.vocab_size, folder)
    check_vocab_size(corpus.tokenizer, config.model.vocab_size)
    return corpus


def choose_tokenizer(
    config: TrainConfig, init_tokenizer: Tokenizer | None
) -> Tokenizer | TokenizerConfig:
    """Return the tokenizer of a run, or how to train it: `tokenizer.path` comes first."""
    if config.tokenizer.path:
        return tokenizer_lib.load(config.tokenizer.path, lowercase=config.tokenizer.lowercase)
    return init_tokenizer or config.tokenizer


def resolve_vocab_size(config: TrainConfig, init_tokenizer: Tokenizer | None) -> int:
    """Return `model.vocab_size`, or where it is 0 the size of the run's tokenizer."""
    if config.model.vocab_size:
        return config.model.vocab_size
    if is_store(config.data.source):
        return open_store(Path(config.data.source)).tokenizer.vocab_size
    tokenizer = choose_tokenizer(config, init_tokenizer)
    return tokenizer.vocab_size if isinstance(tokenizer, Tokenizer) else DEFAULT_VOCAB_SIZE


def prepare(
    data: DataConfig, tokenizer: Tokenizer | TokenizerConfig, vocab_size: int, folder: Path
) -> Corpus:
    """Return the store of `data.source`, and write it to `folder` where that has not been done.

    Args:
      data: the text, and how it is split into sentences and held-out documents.
      tokenizer: for the text, or how to train one on it.
      vocab_size: of a tokenizer that is trained; 0 for `DEFAULT_VOCAB_SIZE`.
      folder: of the store. An interrupted one is resumed.

    Raises:
      UserError: the text cannot be read, or `folder` holds a store of other text.
    """
    if is_store(data.source):
        return _open_source(data.source, tokenizer)
    text, vocab_size = _Text(data), vocab_size or DEFAULT_VOCAB_SIZE
    identity = {
        "format": _FORMAT,
        **text.identity(),
        "tokenizer": _tokenizer_identity(tokenizer, vocab_size),
    }
    if (folder / "store.json").exists():
        _check_identity(folder, identity)
        return open_store(folder)
    progress = folder / "progress.json"
    # A store that was started from other text, or with another tokenizer, is started again.
    is_resumed = progress.exists() and read_json(progress)["identity"] == identity
    if not is_resumed and isinstance(tokenizer, TokenizerConfig):
        documents = (document for split, document in text.documents() if split == "train")
        sentences = itertools.chain.from_iterable(documents)
        tokenizer = tokenizer_training.train(sentences, tokenizer, vocab_size)
    try:
        if not is_resumed and isinstance(tokenizer, Tokenizer):
            shutil.rmtree(folder / "tokenizer", ignore_errors=True)  # of another kind
            tokenizer.save(folder / "tokenizer")
            _write_json(progress, {"identity": identity, "splits": {}})
        _tokenize(text, folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); choose another") from error
    return open_store(folder)


def _open_source(source: str, tokenizer: Tokenizer | TokenizerConfig) -> Corpus:
    """Open a store that is `data.source`; a tokenizer that was loaded must be its own."""
    corpus = open_store(Path(source))
    if isinstance(tokenizer, Tokenizer) and tokenizer.fingerprint != corpus.tokenizer.fingerprint:
        raise UserError(
            f"the tokenizer of tokenizer.path or --init is not the one that {source} was prepared "
            "with; omit it, or prepare the text with it: "
            "bert-jax prepare SOURCE STORE --tokenizer=CHECKPOINT"
        )
    return corpus


def _tokenizer_identity(tokenizer: Tokenizer | TokenizerConfig, vocab_size: int) -> dict[str, Any]:
    if isinstance(tokenizer, Tokenizer):
        return {"fingerprint": tokenizer.fingerprint}
    options = dataclasses.asdict(tokenizer)
    del options["path"]
    return {**options, "vocab_size": vocab_size}


def _check_identity(folder: Path, identity: dict[str, Any]) -> None:
    stored = read_json(folder / "store.json")["identity"]
    names = {"text": "other text", "held_out": "other held-out text"}
    for name, value in identity.items():
        if stored.get(name) != value:
            raise UserError(
                f"{folder} was prepared from {names.get(name, f'another {name}')} than this "
                f"command asks for; choose another folder, or {REMEDY}"
            )


class _Text:
    """Documents to train on and held-out documents, in one stream."""

    def __init__(self, data: DataConfig):
        self.source = open_source(data.source, data)
        self._held_out = open_source(data.eval_source, data) if data.eval_source else None
        self._eval_fraction = data.eval_fraction
        self._sources = [source for source in (self.source, self._held_out) if source]
        self.size = sum(source.size for source in self._sources)

    @property
    def position(self) -> int:
        """How much of `size` the current reading has done."""
        return sum(source.position for source in self._sources)

    def identity(self) -> dict[str, Any]:
        held_out = self._held_out.identity() if self._held_out else self._eval_fraction
        return {"text": self.source.identity(), "held_out": held_out}

    def documents(self) -> Iterator[tuple[str, list[str]]]:
        """Yield every document with its split; held-out ones are at even distances."""
        fraction = 0.0 if self._held_out else self._eval_fraction
        for index, document in enumerate(self.source.documents()):
            is_held_out = math.floor((index + 1) * fraction) > math.floor(index * fraction)
            yield "eval" if is_held_out else "train", document
        for document in self._held_out.documents() if self._held_out else ():
            yield "eval", document

    def batches(self, start: int) -> Iterator[list[tuple[str, list[str]]]]:
        """Yield the documents from number `start` on, in batches of `_BATCH_CHARACTERS`."""
        batch, characters = [], 0
        for split, document in itertools.islice(self.documents(), start, None):
            batch.append((split, document))
            characters += sum(map(len, document))
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch


def _tokenize(text: _Text, folder: Path) -> None:
    """Tokenize the text that `progress.json` does not record yet, and complete the store."""
    progress = read_json(folder / "progress.json")
    tokenizer = tokenizer_lib.load(folder / "tokenizer")
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    num_documents, characters, start_time = progress.get("documents", 0), 0, time.monotonic()
    batches, splits = text.batches(num_documents), progress["splits"]
    for name in ("train", "eval"):
        splits[name] = _open_split(folder / name, splits.get(name), dtype)
    with (
        ThreadPoolExecutor(1) as reader,
        console.progress_bar(
            total=text.size, desc="tokenizing", unit_scale=True, leave=False
        ) as bar,
    ):
        # Tokenizers release the interpreter's lock, so that the next batch is read meanwhile.
        next_batch = reader.submit(next, batches, None)
        while batch := next_batch.result():
            next_batch = reader.submit(next, batches, None)
            ids = iter(tokenizer.encode([s for _, document in batch for s in document]))
            tokenized = [(split, [next(ids) for _ in document]) for split, document in batch]
            for name, sizes in splits.items():
                _append(folder / name, sizes, [d for split, d in tokenized if split == name])
            num_documents += len(batch)
            characters += sum(len(s) for _, document in batch for s in document)
            progress["documents"] = num_documents
            _write_json(folder / "progress.json", progress)
            bar.update(text.position - bar.n)
    name = text.source.name
    if not (splits["train"]["tokens"] and splits["eval"]["tokens"]):
        (folder / "progress.json").unlink()
        if not splits["train"]["tokens"]:
            raise UserError(f"{name} has no text to train on; give more text")
        raise UserError(
            f"data.eval_fraction holds out none of the {num_documents} documents of {name}; raise "
            "it, or give data.eval_source"
        )
    del progress["documents"]
    _write_json(folder / "store.json", {**progress, "vocab_size": tokenizer.vocab_size})
    (folder / "progress.json").unlink()
    seconds = time.monotonic() - start_time
    console.show(
        f"prepared {name} ({text.source.form}): {num_documents:,} documents, "
        f"{characters / 1e6:.1f} MB of text in {seconds:.1f} s "
        f"({characters / 1e6 / seconds:.1f} MB/s)"
    )


def _open_split(folder: Path, sizes: dict[str, Any] | None, dtype: np.dtype) -> dict[str, Any]:
    """Return the size of each file of a split, without what was written but not recorded."""
    folder.mkdir(exist_ok=True)
    if sizes is None:
        (folder / "tokens.bin").write_bytes(b"")
        for name in FILES[1:]:
            (folder / f"{name}.bin").write_bytes(np.int64(0).tobytes())
        return {"tokens": 0, "sentences": 8, "documents": 8, "dtype": dtype.name}
    for name in FILES:
        path = folder / f"{name}.bin"
        if not path.exists() or path.stat().st_size < sizes[name]:
            raise UserError(f"{path} is shorter than progress.json records; {REMEDY}")
        os.truncate(path, sizes[name])
    return sizes


def _append(folder: Path, sizes: dict[str, Any], documents: list[list[Any]]) -> None:
    """Append documents of sentences of token ids, without the empty ones, and update `sizes`."""
    documents = [kept for d in documents if (kept := [s for s in d if len(s)])]
    if not documents:
        return
    sentences = [sentence for document in documents for sentence in document]
    tokens = np.concatenate(sentences).astype(sizes["dtype"])
    num_tokens, num_sentences = sizes["tokens"] // tokens.itemsize, sizes["sentences"] // 8 - 1
    arrays = {
        "tokens": tokens,
        "sentences": num_tokens + np.cumsum([len(s) for s in sentences], dtype=np.int64),
        "documents": num_sentences + np.cumsum([len(d) for d in documents], dtype=np.int64),
    }
    for name, array in arrays.items():
        with (folder / f"{name}.bin").open("ab") as file:
            file.write(array.tobytes())
        sizes[name] += array.nbytes


def _write_json(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1))
    os.replace(temporary, path)
