"""Write a token store: tokenize text once, resumable after the last batch of `progress.json`."""

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
from bert_jax.settings import read_json
from bert_jax.text import tokenizer as tokenizer_lib
from bert_jax.text import tokenizer_training
from bert_jax.text.sources import Source, open_source
from bert_jax.text.store import FILES, REMEDY, Corpus, is_store, open_store
from bert_jax.text.tokenizer import Tokenizer, check_vocab_size

DEFAULT_VOCAB_SIZE = 32_000  # of a tokenizer trained where model.vocab_size is 0
_FORMAT = 1
# Large enough to keep all cores busy, small enough to hold several in memory.
_BATCH_CHARACTERS = 2_000_000
_EMPTY = {"tokens": 0, "sentences": 8, "documents": 8}  # bytes: the first starts are 0
_Document = tuple[str, list[str]]  # the split and the sentences


def read(config: TrainConfig, init_tokenizer: Tokenizer | None, folder: Path) -> Corpus:
    """Return the text of a run, prepared in `folder` where that has not been done."""
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

    `vocab_size` is that of a tokenizer that is trained; 0 is `DEFAULT_VOCAB_SIZE`. An interrupted
    store is resumed.
    """
    if is_store(data.source):
        return _open_source(data.source, tokenizer)
    sources = [open_source(name, data) for name in (data.source, data.eval_source) if name]
    vocab_size = vocab_size or DEFAULT_VOCAB_SIZE
    if isinstance(tokenizer, Tokenizer):
        tokenizer_identity = {"fingerprint": tokenizer.fingerprint}
    else:
        tokenizer_identity = {**dataclasses.asdict(tokenizer), "vocab_size": vocab_size}
        del tokenizer_identity["path"]
    text, held_out, *_ = [*(source.identity() for source in sources), data.eval_fraction]
    identity = {"format": _FORMAT, "text": text, "held_out": held_out}
    identity["tokenizer"] = tokenizer_identity
    if os.path.exists(folder / "store.json"):
        _check_identity(folder, identity)
        return open_store(folder)
    progress = folder / "progress.json"
    try:
        # A store that was started from other text, or with another tokenizer, is started again.
        if not progress.exists() or read_json(progress, REMEDY)["identity"] != identity:
            if isinstance(tokenizer, TokenizerConfig):
                documents = _documents(sources, data.eval_fraction)
                sentences = (
                    s for split, document in documents if split == "train" for s in document
                )
                tokenizer = tokenizer_training.train(sentences, tokenizer, vocab_size)
            shutil.rmtree(folder / "tokenizer", ignore_errors=True)  # of another kind
            tokenizer.save(folder / "tokenizer")
            _write_json(progress, {"identity": identity, "splits": {}})
        _tokenize(sources, _documents(sources, data.eval_fraction), folder)
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


def _check_identity(folder: Path, identity: dict[str, Any]) -> None:
    stored = read_json(folder / "store.json", REMEDY)["identity"]
    names = {"text": "other text", "held_out": "other held-out text"}
    for name, value in identity.items():
        if stored.get(name) != value:
            raise UserError(
                f"{folder} was prepared from {names.get(name, f'another {name}')} than this "
                f"command asks for; choose another folder, or {REMEDY}"
            )


def _documents(sources: list[Source], eval_fraction: float) -> Iterator[_Document]:
    """Yield every document with its split; held-out ones are at even distances."""
    source, *held_out = sources
    fraction = 0.0 if held_out else eval_fraction
    for index, document in enumerate(source.documents()):
        is_held_out = math.floor((index + 1) * fraction) > math.floor(index * fraction)
        yield "eval" if is_held_out else "train", document
    for document in held_out[0].documents() if held_out else ():
        yield "eval", document


def _batches(documents: Iterator[_Document]) -> Iterator[list[_Document]]:
    batch, characters = [], 0
    for split, document in documents:
        batch.append((split, document))
        characters += sum(map(len, document))
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _tokenize(sources: list[Source], documents: Iterator[_Document], folder: Path) -> None:
    """Tokenize the documents that `progress.json` does not record yet, and complete the store."""
    progress = read_json(folder / "progress.json", REMEDY)
    tokenizer = tokenizer_lib.load(folder / "tokenizer")
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    num_documents, characters, start_time = progress.get("documents", 0), 0, time.monotonic()
    batches = _batches(itertools.islice(documents, num_documents, None))
    splits = progress["splits"]
    for name in ("train", "eval"):
        splits[name] = _open_split(folder / name, splits.get(name), dtype)
    size = sum(source.size for source in sources)
    bar = console.progress_bar(total=size, desc="tokenizing", unit_scale=True, leave=False)
    with ThreadPoolExecutor(1) as reader, bar:
        # Tokenizers release the interpreter's lock, so that the next batch is read meanwhile.
        next_batch = reader.submit(next, batches, None)
        while batch := next_batch.result():
            next_batch = reader.submit(next, batches, None)
            sentences = [sentence for _, document in batch for sentence in document]
            ids = iter(tokenizer.encode(sentences))
            tokenized = [(split, [next(ids) for _ in document]) for split, document in batch]
            for name, sizes in splits.items():
                _append(folder / name, sizes, [d for split, d in tokenized if split == name])
            num_documents += len(batch)
            characters += sum(map(len, sentences))
            progress["documents"] = num_documents
            _write_json(folder / "progress.json", progress)
            bar.update(sum(source.position for source in sources) - bar.n)
    source = sources[0]
    if not splits["train"]["tokens"]:
        raise UserError(f"{source.name} has no text to train on; give more text")
    if not splits["eval"]["tokens"]:
        remedy = "separate documents by blank lines"
        if num_documents > 1:
            remedy = f"set it to {math.ceil(100 / num_documents) / 100} or more"
        raise UserError(
            f"data.eval_fraction holds out none of the {num_documents} documents of {source.name}; "
            f"{remedy}, or give data.eval_source"
        )
    del progress["documents"]
    _write_json(folder / "store.json", {**progress, "vocab_size": tokenizer.vocab_size})
    (folder / "progress.json").unlink()
    seconds = time.monotonic() - start_time
    console.show(
        f"prepared {source.name} ({source.form}): {num_documents:,} documents, "
        f"{characters / 1e6:.1f} MB of text in {seconds:.1f} s "
        f"({characters / 1e6 / seconds:.1f} MB/s)"
    )


def _open_split(folder: Path, sizes: dict[str, Any] | None, dtype: str) -> dict[str, Any]:
    """Return the size of each file of a split, without what was written but not recorded."""
    folder.mkdir(exist_ok=True)
    for name in FILES:
        path = folder / f"{name}.bin"
        if sizes is None:
            path.write_bytes(bytes(_EMPTY[name]))
        elif not path.exists() or path.stat().st_size < sizes[name]:
            raise UserError(f"{path} is shorter than progress.json records; {REMEDY}")
        else:
            os.truncate(path, sizes[name])
    return sizes or {**_EMPTY, "dtype": dtype}


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
