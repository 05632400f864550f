"""Prepare a token store from text, with a tokenizer that is trained on it or given."""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bert_jax import console
from bert_jax.config import DataConfig, TokenizerConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.storage import checksums, daemon_thread, json_files, locks, paths
from bert_jax.storage.locks import locked
from bert_jax.text import memory, store, tokenizer_loading, tokenizer_training
from bert_jax.text.sources import (
    Shard,
    Source,
    check_apart,
    digest_json,
    merge_identities,
    open_source,
)
from bert_jax.text.store_writer import Document, StoreWriter
from bert_jax.text.tokenizer import Tokenizer

DEFAULT_VOCAB_SIZE = 32_000  # of a tokenizer trained where model.vocab_size is 0
_FORMAT = 1
_MOST_UNKNOWN = 0.2  # of the characters; little can be learned of such text
# Large enough to keep all cores busy, small enough to hold several in memory.
_BATCH_CHARACTERS = 2_000_000
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class OtherText(UserError):
    """A folder has a store of another text, or of other settings; `found` says which."""

    def __init__(self, found: str):
        super().__init__(
            f"{found}; choose another folder, or remove the folder to prepare it again"
        )
        self.found = found


def choose_tokenizer(config: TrainConfig, init: Tokenizer | None) -> Tokenizer | TokenizerConfig:
    """Return the tokenizer of a run, or how to train it; `init` is that which it begins with."""
    if init is None and config.tokenizer.path:
        return tokenizer_loading.load(config.tokenizer.path, lowercase=config.tokenizer.lowercase)
    return init or config.tokenizer


def given_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer that a store was prepared with, if it was not trained for it."""
    path = folder / "store.json"
    record = store.read_record(path) if path.exists() else {}
    with json_files.refusing_malformed(path, store.REMEDY):
        is_given = "fingerprint" in record.get("identity", {}).get("tokenizer", {})
    return tokenizer_loading.load(folder / "tokenizer") if is_given else None


def prepare(
    data: DataConfig, tokenizer: Tokenizer | TokenizerConfig, vocab_size: int, folder: Path
) -> store.Corpus:
    """Return the store of `data.source`, written to `folder` where that has not been done."""
    write(data, tokenizer, vocab_size, folder)
    return store.open_store(folder)


def write(
    data: DataConfig,
    tokenizer: Tokenizer | TokenizerConfig,
    vocab_size: int,
    folder: Path,
    shard: Shard | None = None,
    *,
    restarts: bool = False,
) -> None:
    """Write the store of `data.source`, or of a shard of it, where that has not been done.

    `restarts` is whether what `folder` has of another text is written over, and not refused.
    """
    if store.other_files(folder) and not store.has_record(folder):
        raise UserError(f"{folder} is not empty and not a store; choose another folder")
    sources = open_sources(data, shard)
    vocab_size = vocab_size or DEFAULT_VOCAB_SIZE
    identity = _identity(sources, data.eval_fraction, tokenizer, vocab_size, is_whole=shard is None)
    # Apart from the identity, so that stores without them are those of the same text.
    begun = {"identity": identity, "formats": digest_json([each.formats for each in sources])}
    try:
        record = _read_progress(folder, begun, restarts)
    except UserError:
        locks.check_unlocked(folder)  # a process that writes other text is the first thing to say
        raise
    if store.is_complete(record):
        return
    try:
        if not store.has_tokenizer(record) and isinstance(tokenizer, TokenizerConfig):
            sentences = training_sentences(sources, data.eval_fraction)
            tokenizer = train_tokenizer(sentences, tokenizer, vocab_size)
        with locked(folder):
            record = _read_progress(folder, begun, restarts)
            if store.is_complete(record):  # another process has written it meanwhile
                return
            progress = folder / "progress.json"
            if isinstance(tokenizer, Tokenizer) and not store.has_tokenizer(record):
                json_files.write_record(progress, begun)  # the folder is this store's now
                (folder / "store.json").unlink(missing_ok=True)  # of text that is written over
                tokenizer.save(folder / "tokenizer")
                names = tokenizer.files()  # a killed process may have left a temporary one
                sums = checksums.of_files(folder, (folder / "tokenizer" / name for name in names))
                json_files.write_record(progress, {**begun, "splits": {}, "checksums": sums})
            try:
                documents = _documents(sources, data.eval_fraction)
                _tokenize(sources, documents, folder, is_whole=shard is None)
            except UserError as error:  # of the text, which the user may correct
                json_files.write_record(
                    progress, {**store.read_record(progress), "failed": str(error)}
                )
                raise
    except OSError as error:
        resumes = "make room, and repeat the command, which resumes"
        remedy = resumes if paths.is_full(error) else "choose another"
        raise UserError(f"{folder} cannot be written ({error.strerror}); {remedy}") from error


def open_sources(data: DataConfig, shard: Shard | None = None) -> list[Source]:
    """Return the text of `data.source` and, if there is one, of `data.eval_source`."""
    names = [data.source, data.eval_source] if data.eval_source else [data.source]
    sources = [open_source(name, data, shard) for name in names]
    check_apart(sources)
    return sources


def training_sentences(
    sources: list[Source], eval_fraction: float, chunks: Mapping[int, float] | None = None
) -> Iterator[str]:
    """Yield the training text of the first source, or of some chunks of it: its `sample`."""
    fraction = 0.0 if len(sources) > 1 else eval_fraction
    documents = _documents(sources[:1], fraction, chunks)
    return (s for split, document in documents if split == "train" for s in document)


def train_tokenizer(
    sentences: Iterable[str], config: TokenizerConfig, vocab_size: int
) -> Tokenizer:
    """Train a tokenizer on a sample of sentences."""
    # In a thread, since the libraries notice no signal, or take it for another error.
    train = partial(tokenizer_training.train, sentences, config, vocab_size)
    with console.working("training the tokenizer"):
        tokenizer = daemon_thread.start(train).result()
    if (size := tokenizer.vocab_size) < vocab_size:
        console.show(f"vocabulary {size:,} tokens; the text has too little for more")
    return tokenizer


def _identity(
    sources: list[Source],
    fraction: float,
    tokenizer: Tokenizer | TokenizerConfig,
    vocab_size: int,
    *,
    is_whole: bool,
) -> dict[str, Any]:
    text = sources[0].identity()
    held_out = sources[1].identity() if len(sources) > 1 else fraction
    if is_whole:
        text, held_out = merge_identities([text]), merge_identities([held_out])
    if isinstance(tokenizer, Tokenizer):
        settings = {"fingerprint": tokenizer.fingerprint}
    else:
        settings = {**dataclasses.asdict(tokenizer), "vocab_size": vocab_size}
        del settings["path"], settings["add"]
        if not tokenizer.strip_accents:  # so that the stores of earlier settings are those of these
            del settings["strip_accents"]
    return {"format": _FORMAT, "text": text, "held_out": held_out, "tokenizer": settings}


def _read_progress(folder: Path, begun: dict[str, Any], restarts: bool) -> dict[str, Any]:
    """Return the record of the store in a folder, or {}; of other text {} or UserError.

    `begun` is the record that the store of this text begins with.
    """
    if not store.has_record(folder):
        return {}
    path = folder / ("store.json" if (folder / "store.json").exists() else "progress.json")
    record, identity = store.read_record(path), begun["identity"]
    with json_files.refusing_malformed(path, store.REMEDY):
        stored, vocab_size = dict(record["identity"]), identity["tokenizer"].get("vocab_size")
        if vocab_size and vocab_size == record.get("vocab_size"):  # the text had no more tokens
            stored["tokenizer"] = {**stored["tokenizer"], "vocab_size": vocab_size}
    other = next((name for name, value in identity.items() if stored.get(name) != value), "")
    if not other and record.get("formats", begun["formats"]) != begun["formats"]:
        other = "file format"
    if other and "failed" not in record and not restarts:
        names = {"text": "other text", "held_out": "other held-out text"}
        found = f"was prepared from {names.get(other, f'another {other}')}"
        raise OtherText(f"{folder} {found}")
    return {} if other else record


def _documents(
    sources: list[Source], eval_fraction: float, chunks: Mapping[int, float] | None = None
) -> Iterator[Document]:
    """Yield documents with their splits; held-out ones are at even distances in each chunk.

    They are those of all chunks, or of some, each of which is read up to a position.
    """
    source, *held_out = sources
    fraction = 0.0 if held_out else eval_fraction
    for chunk, end in (chunks or dict.fromkeys(source.chunks, math.inf)).items():
        # So that chunks of few documents, too, hold out their share on average.
        first = chunk * _GOLDEN_RATIO % 1
        for index, document in enumerate(source.documents([chunk])):
            count, before = ((number * fraction + first) // 1 for number in (index + 1, index))
            yield "eval" if count > before else "train", document
            if source.position >= end:
                break
    for document in held_out[0].documents() if held_out else ():
        yield "eval", document


def _read_ahead(
    batches: Iterator[list[Document]], sources: list[Source]
) -> Iterator[list[Document]]:
    """Yield batches, of which the next is read meanwhile: tokenizers release the GIL."""

    def read() -> list[Document] | None:
        batch = next(batches, None)
        for source in sources:  # for no batch of a changed text may be recorded
            source.check_unchanged()
        return batch

    with ThreadPoolExecutor(1) as reader:
        next_batch = reader.submit(read)
        while batch := next_batch.result():
            next_batch = reader.submit(read)
            yield batch


def _tokenize(
    sources: list[Source], documents: Iterator[Document], folder: Path, *, is_whole: bool
) -> None:
    """Tokenize the documents that `progress.json` does not record yet, and complete the store."""
    writer = StoreWriter(folder)
    batches = memory.chunks(
        itertools.islice(documents, writer.num_documents, None),
        lambda document: sum(map(len, document[1])),
        most=math.inf,
        enough_characters=_BATCH_CHARACTERS,
    )
    start_time, previous_characters = time.monotonic(), writer.num_characters
    size, has_warned = sum(source.size for source in sources), False
    with console.working("tokenizing", size, says_end=False) as work:
        for batch in _read_ahead(batches, sources):
            writer.append(batch)
            position = sum(source.position for source in sources)
            if work.n or not previous_characters:
                work.n = position
            else:
                work.begin_at(position)
            if writer.unknown_share > _MOST_UNKNOWN and work.n < size and not has_warned:
                has_warned = True
                console.warn(
                    f"{writer.unknown_share:.0%} of the first {writer.num_characters:,} characters "
                    f"are unknown to the {writer.tokenizer.kind} tokenizer; if the others are, "
                    "too, the text is refused at its end"
                )
    source = sources[0]
    if is_whole:
        held_out = sources[1].name if len(sources) > 1 else ""
        check_text(writer.complete_record(), source.name, writer.tokenizer.kind, held_out)
    writer.finish()
    seconds = time.monotonic() - start_time
    counts = (
        console.counted(writer.num_documents, "document"),
        console.counted(writer.num_characters, "character"),
    )
    prepared = writer.num_characters - previous_characters
    speed = f" in {seconds:.1f} s ({prepared / seconds:,.0f} a second)" if seconds >= 1 else ""
    if speed and previous_characters:
        speed = f", the last {prepared:,} of them{speed}"
    console.show(f"prepared {source.name} ({source.form}): {', '.join(counts)}{speed}")


def check_text(record: Mapping[str, Any], name: str, kind: str, held_out: str = "") -> None:
    """Refuse a text, by its complete record, that cannot be trained on or evaluated.

    Args:
      record: of its store.
      name: of the text.
      kind: of the tokenizer.
      held_out: the name of the held-out text, if that is another.
    """
    splits = record["splits"]
    if not splits["train"]["tokens"]:
        raise UserError(f"{name} has no text to train on; give more text")
    if not splits["eval"]["tokens"] and held_out:
        raise UserError(f"{held_out} has no text to evaluate on; give more text")
    if not splits["eval"]["tokens"]:
        num_documents = splits["train"]["documents"] // 8 - 1
        remedy = "give more documents"
        if num_documents > 1:
            remedy = f"set data.eval_fraction to {math.ceil(100 / num_documents) / 100} or more"
        text = f"{console.counted(num_documents, 'document')} of {name}"
        raise UserError(
            f"data.eval_fraction holds out none of {text}; {remedy}, or, if it is the only text, "
            "give data.eval_source; in plain text a blank line ends a document, or each line does "
            "with data.sentences=documents"
        )
    if (share := store.unknown_share(record)) > _MOST_UNKNOWN:
        raise UserError(
            f"{share:.0%} of {name} is unknown to the {kind} tokenizer; {store.UNKNOWN_REMEDY}, "
            "or --config=letters for sequences of letters"
        )
