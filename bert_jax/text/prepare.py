"""Write a token store: tokenize text once; a killed run resumes after the last recorded batch."""

import dataclasses
import itertools
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from bert_jax import background, checksums, console
from bert_jax.config import DataConfig, TokenizerConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.locks import locked
from bert_jax.text import tokenizer_loading, tokenizer_training
from bert_jax.text.sources import Source, open_source
from bert_jax.text.store import (
    CHARACTERS,
    FILES,
    REMEDY,
    UNKNOWN_REMEDY,
    Corpus,
    is_store,
    open_store,
    read_record,
    refusing_damage,
    unknown_share,
    write_record,
)
from bert_jax.text.tokenizer import Tokenizer, check_vocab_size

DEFAULT_VOCAB_SIZE = 32_000  # of a tokenizer trained where model.vocab_size is 0
_FORMAT = 1
_MOST_UNKNOWN = 0.2  # of the characters; little can be learned of such text
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
        return tokenizer_loading.load(config.tokenizer.path, lowercase=config.tokenizer.lowercase)
    return init_tokenizer or config.tokenizer


def resolve_vocab_size(config: TrainConfig, init_tokenizer: Tokenizer | None) -> int:
    """Return `model.vocab_size`, or where it is 0 the size of the run's tokenizer."""
    if config.model.vocab_size:
        return config.model.vocab_size
    if is_store(config.data.source):
        return tokenizer_loading.load(Path(config.data.source) / "tokenizer").vocab_size
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
    if (
        os.path.isdir(folder)
        and not is_store(folder)
        and {*os.listdir(folder)} - {"progress.tmp", ".lock"}
    ):
        raise UserError(f"{folder} is not empty and not a store; choose another folder")
    sources = [open_source(name, data) for name in (data.source, data.eval_source) if name]
    vocab_size = vocab_size or DEFAULT_VOCAB_SIZE
    if isinstance(tokenizer, Tokenizer):
        tokenizer_identity = {"fingerprint": tokenizer.fingerprint}
    else:
        tokenizer_identity = {**dataclasses.asdict(tokenizer), "vocab_size": vocab_size}
        del tokenizer_identity["path"]
        if not tokenizer.strip_accents:  # which older stores do not say
            del tokenizer_identity["strip_accents"]
    text, held_out, *_ = [*(source.identity() for source in sources), data.eval_fraction]
    identity = {"format": _FORMAT, "text": text, "held_out": held_out}
    identity["tokenizer"] = tokenizer_identity
    if os.path.exists(folder / "store.json"):
        _check_identity(folder, read_record(folder / "store.json"), identity)
        return open_store(folder)
    progress = folder / "progress.json"
    try:
        if not _can_resume(folder, identity) and isinstance(tokenizer, TokenizerConfig):
            documents = _documents(sources, data.eval_fraction)
            sentences = (s for split, document in documents if split == "train" for s in document)
            # In a thread, since the libraries notice no signal, or take it for another error.
            train = partial(tokenizer_training.train, sentences, tokenizer, vocab_size)
            tokenizer = background.start(train).result()
            if (size := tokenizer.vocab_size) < vocab_size:
                console.show(f"vocabulary {size:,} tokens; the text has too little for more")
        with locked(folder):
            if os.path.exists(folder / "store.json"):  # another process has written it meanwhile
                return open_store(folder)
            if isinstance(tokenizer, Tokenizer) and not _can_resume(folder, identity):
                write_record(progress, {"identity": identity})  # the folder is this store's now
                shutil.rmtree(folder / "tokenizer", ignore_errors=True)  # of another kind
                tokenizer.save(folder / "tokenizer")
                write_record(progress, {"identity": identity, "splits": {}, "checksums": {}})
            try:
                _tokenize(sources, _documents(sources, data.eval_fraction), folder)
            except UserError as error:  # of the text, which the user may correct
                write_record(progress, {**read_record(progress), "failed": str(error)})
                raise
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); choose another") from error
    return open_store(folder)


def _open_source(source: str, tokenizer: Tokenizer | TokenizerConfig) -> Corpus:
    """Open a store that is `data.source`; a tokenizer that was loaded must be its own."""
    corpus = open_store(Path(source))
    if isinstance(tokenizer, Tokenizer) and tokenizer.fingerprint != corpus.tokenizer.fingerprint:
        raise UserError(
            f"the tokenizer of tokenizer.path or --init is not the one that {source} was prepared "
            "with; drop that flag, or prepare the text with it: "
            "bert-jax prepare SOURCE STORE --tokenizer=CHECKPOINT"
        )
    return corpus


def _can_resume(folder: Path, identity: dict[str, Any]) -> bool:
    """Return whether a store can be resumed; UserError if it is of other text or settings."""
    if not (folder / "progress.json").exists():
        return False
    progress = read_record(folder / "progress.json")
    if "failed" not in progress:
        _check_identity(folder, progress, identity)
    return "splits" in progress and progress.get("identity") == identity


def _check_identity(folder: Path, record: dict[str, Any], identity: dict[str, Any]) -> None:
    stored = record.get("identity")
    stored = stored if isinstance(stored, dict) else {}
    tokenizer = stored.get("tokenizer")
    vocab_size = identity["tokenizer"].get("vocab_size")
    if isinstance(tokenizer, dict) and vocab_size and vocab_size == record.get("vocab_size"):
        # The text had no more tokens, and the model of the run has as many.
        size = {"vocab_size": tokenizer.get("vocab_size")}
        identity = {**identity, "tokenizer": {**identity["tokenizer"], **size}}
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
    path = folder / "progress.json"
    progress = read_record(path)
    tokenizer = tokenizer_loading.load(folder / "tokenizer")
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    characters, start_time = 0, time.monotonic()
    with refusing_damage(path):
        progress.pop("failed", None)
        progress |= {name: int(progress.get(name, 0)) for name in CHARACTERS}
        num_documents = progress.get("documents", 0)
        batches = _batches(itertools.islice(documents, num_documents, None))
        splits, sums = progress["splits"], progress.setdefault("checksums", {})
        for name in ("train", "eval"):
            splits[name] = _open_split(folder / name, splits.get(name), dtype)
            if f"{name}/tokens.bin" not in sums:  # it is new, or an earlier version began it
                sums |= checksums.of_files(folder, (folder / name).glob("*.bin"))
    size = sum(source.size for source in sources)
    bar = console.progress_bar(total=size, desc="tokenizing", unit_scale=True, leave=False)
    with ThreadPoolExecutor(1) as reader, bar:
        # Tokenizers release the interpreter's lock, so that the next batch is read meanwhile.
        next_batch = reader.submit(next, batches, None)
        while batch := next_batch.result():
            next_batch = reader.submit(next, batches, None)
            sentences = [sentence for _, document in batch for sentence in document]
            ids = tokenizer.encode(sentences)
            remaining = iter(ids)
            tokenized = [(split, [next(remaining) for _ in document]) for split, document in batch]
            for name, sizes in splits.items():
                _append(folder / name, sizes, sums, [d for s, d in tokenized if s == name])
            num_documents += len(batch)
            characters += sum(map(len, sentences))
            progress["documents"] = num_documents
            counts = sum(map(len, sentences)), _count_unknown(tokenizer, sentences, ids)
            for name, count in zip(CHARACTERS, counts, strict=True):
                progress[name] = progress.get(name, 0) + count
            write_record(path, progress)
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
    if (share := unknown_share(progress)) > _MOST_UNKNOWN:
        raise UserError(
            f"{share:.0%} of {source.name} is unknown to the {tokenizer.kind} tokenizer; "
            f"{UNKNOWN_REMEDY}, or --config=letters for sequences of letters"
        )
    del progress["documents"]
    sums |= checksums.of_files(folder, (folder / "tokenizer").iterdir())
    write_record(folder / "store.json", {**progress, "vocab_size": tokenizer.vocab_size})
    path.unlink()
    seconds = time.monotonic() - start_time
    console.show(
        f"prepared {source.name} ({source.form}): {num_documents:,} documents, "
        f"{characters / 1e6:.1f} million characters in {seconds:.1f} s "
        f"({characters / 1e6 / seconds:.1f} million/s)"
    )


def _count_unknown(
    tokenizer: Tokenizer, sentences: Sequence[str], ids: Sequence[Sequence[int]]
) -> int:
    """Return how many characters of sentences have become the unknown token."""
    positions = np.flatnonzero(np.concatenate(ids) == tokenizer.unk_id)
    with_unknown = np.searchsorted(np.cumsum([len(tokens) for tokens in ids]), positions, "right")
    unknown = 0
    for index in map(int, np.unique(with_unknown)):
        spans = zip(*tokenizer.encode_with_offsets(sentences[index]), strict=True)
        unknown += sum(end - start for i, (start, end) in spans if i == tokenizer.unk_id)
    return unknown


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
    return {**(sizes or _EMPTY), "dtype": dtype}


def _append(
    folder: Path, sizes: dict[str, Any], sums: dict[str, int], documents: list[list[Any]]
) -> None:
    """Append documents of sentences of token ids, without the empty ones; update sizes and sums."""
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
        data, path = array.tobytes(), folder / f"{name}.bin"
        with path.open("ab") as file:
            file.write(data)
        sizes[name] += len(data)
        key = f"{folder.name}/{path.name}"
        sums[key] = google_crc32c.extend(sums[key], data)
