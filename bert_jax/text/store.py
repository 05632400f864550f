"""Read a token store: tokenized text in memory-mapped files, which `prepare` writes.

`train/` and `eval/` have the arrays of a `TokenStore` without a header, `tokenizer/` the tokenizer.
The tokens of a store of shards are in `shards/`, each of which is a store of its part of the text.
`store.json` says what the store was prepared from, the sizes and the checksums; it is written last.
Until then `progress.json` says what is complete.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.storage import checksums, daemon_thread, json_files
from bert_jax.text import tokenizer_loading
from bert_jax.text.mapped_files import MappedFiles
from bert_jax.text.tokenizer import Tokenizer

FILES = ("tokens", "sentences", "documents")
SPLITS = ("train", "eval")
REMEDY = "remove the folder, and prepare or copy it again"
_VERIFIED_WITHIN = 0.8  # seconds that opening may take longer; a large store is verified meanwhile
_BLOCK = 1 << 20
CHARACTERS = ("characters", "unknown_characters")  # of the text; an older store does not say
UNKNOWN_REMEDY = (
    "train a tokenizer on it, of tokenizer.kind byte_bpe or sentencepiece (without --init), or set "
    "tokenizer.path to a vocabulary of its characters"
)


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """Tokenized text, memory-mapped: T tokens in S sentences in N documents."""

    tokens: np.ndarray | MappedFiles  # [T] uint16, or uint32 for a vocabulary over 65,536
    sentences: np.ndarray  # [S + 1] int64, where each sentence starts in `tokens`, and T
    documents: np.ndarray  # [N + 1] int64, where each document starts in `sentences`, and S

    @property
    def num_sentences(self) -> int:
        return len(self.sentences) - 1

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def located(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return an array in memory, and where in it tokens are: those of a document in order.

        The last axis of `index` must increase.
        """
        tokens = self.tokens
        return (tokens, index) if isinstance(tokens, np.ndarray) else tokens.located(index)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A prepared store: its tokenizer, training text and held-out text; or a mixture of several.

    `train` and `eval` of a mixture are those of its first text; `parts` has all.
    """

    tokenizer: Tokenizer
    train: TokenStore
    eval: TokenStore
    fingerprint: str = ""  # of the text, the tokenizer, and how the text was split
    unknown: float = 0.0  # share of the characters that have become the unknown token
    verified: Future[None] | None = None
    name: str = ""  # in a mixture
    weight: float = 1.0  # its share of the sequences of a mixture
    mixed: tuple["Corpus", ...] = ()

    @property
    def parts(self) -> tuple["Corpus", ...]:
        return self.mixed or (self,)

    def verify(self, seconds: float | None = None) -> None:
        """Wait up to `seconds`, by default for ever, for the checksums; UserError on damage."""
        for part in self.parts:
            if part.verified and wait([part.verified], seconds).done:
                part.verified.result()

    @property
    def warning(self) -> str:
        """A line about unknown text, if it is more than one per cent."""
        worst = max(self.parts, key=lambda part: part.unknown)
        if worst.unknown <= 0.01:
            return ""
        of = f" of {worst.name}" if worst.name else ""
        return f"{worst.unknown:.1%} of the characters{of} are unknown; {UNKNOWN_REMEDY}"


def is_store(path: str | Path) -> bool:
    """Return whether `path` is the folder of a store, complete or not."""
    # Not Path.exists, which raises for a list of files that is too long for a path.
    return any(os.path.exists(os.path.join(path, f"{name}.json")) for name in ("store", "progress"))


def is_only_store(path: Path) -> bool:
    """Return whether a folder is a store with its checksums, and nothing added."""
    known = {path / f"{split}/{name}.bin" for split in SPLITS for name in FILES} | {path / ".lock"}
    for name in ("store.json", "progress.json"):
        if (path / name).exists():
            record = read_record(path / name)
            known |= {path / file for file in (name, *record.get("checksums", ()))}
    shards = path / "shards"
    found = {file for file in path.rglob("*") if not file.is_dir() and shards not in file.parents}
    is_of_shards = all(map(is_only_store, shards.iterdir())) if shards.is_dir() else True
    return is_store(path) and found <= known and is_of_shards


def unknown_share(record: Mapping[str, Any]) -> float:
    """Return the share of the characters that have become the unknown token."""
    number, unknown = (record.get(name, 0) for name in CHARACTERS)
    return unknown / max(1, number)


def open_store(folder: Path) -> Corpus:
    """Open a complete store; a thread verifies its checksums, which this waits 0.8 s for."""
    path = folder / "store.json"
    if not path.exists():
        remedy = "repeat the command that was writing it"
        if (folder / "shards").is_dir():
            remedy = f"prepare all shards, then: bert-jax prepare --finish={folder}"
        raise UserError(f"{folder} is an unfinished store; {remedy}")
    record = read_record(path)
    tokenizer = tokenizer_loading.load(folder / "tokenizer")
    with json_files.refusing_malformed(path, REMEDY):
        if tokenizer.vocab_size != record["vocab_size"]:
            raise UserError(f"{folder / 'tokenizer'} is not the store's own tokenizer; {REMEDY}")
        shards = record.get("shards")
        splits = {
            name: _open_split(folder, name, record["splits"][name], shards) for name in SPLITS
        }
        identity = {name: record[name] for name in ("identity", "splits", "vocab_size")}
        unknown = unknown_share(record)
        recorded = record.get("checksums")
        if recorded is not None:
            names = FILES if shards is None else FILES[1:]
            files = [f"{split}/{name}.bin" for split in SPLITS for name in names]
            recorded = {**dict.fromkeys(files), **recorded}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    digest.update(tokenizer.fingerprint.encode())

    def verify() -> None:
        try:
            if recorded is None:  # a store of an earlier version
                found = _find_disorder(splits, record["vocab_size"])
            else:
                found = checksums.find_damage(folder, recorded)
        except OSError as error:
            found = f"it cannot be read ({error})"
        if found:
            raise UserError(f"{folder}: {found}; {REMEDY}")

    verified = daemon_thread.start(verify)
    train, held_out = splits["train"], splits["eval"]
    corpus = Corpus(tokenizer, train, held_out, digest.hexdigest(), unknown, verified)
    corpus.verify(_VERIFIED_WITHIN)
    return corpus


def _open_split(
    folder: Path, split: str, sizes: Mapping[str, Any], shards: Mapping[str, Any] | None
) -> TokenStore:
    if sizes["dtype"] not in ("uint16", "uint32"):
        raise ValueError(f"tokens of type {sizes['dtype']}")
    arrays: dict[str, Any] = {}
    for name in FILES:
        dtype = "int64" if name != "tokens" else sizes["dtype"]
        files = {folder / split / f"{name}.bin": sizes[name]}
        if name == "tokens" and shards is not None:
            paths = (folder / "shards" / shard / split / "tokens.bin" for shard in shards)
            files = dict(zip(paths, (size[split] for size in shards.values()), strict=True))
        for path, size in files.items():
            check_size(path, size)
        if name == "tokens" and shards is not None:
            arrays[name] = MappedFiles(files, dtype)
        else:
            # A plain array over the map: indexing the subclass is slower.
            arrays[name] = np.asarray(np.memmap(next(iter(files)), dtype, mode="r"))
    return TokenStore(**arrays)


def check_size(path: Path, size: int) -> None:
    """Refuse a file that has not the size that a record has."""
    found = path.stat().st_size if path.exists() else 0
    if found != size:
        raise UserError(f"{path} has {found} bytes instead of {size}; {REMEDY}")


def _find_disorder(splits: Mapping[str, TokenStore], vocab_size: int) -> str:
    """Return in words which offsets or token ids are impossible; "" if none."""
    for name, store in splits.items():
        tokens, offsets = store.tokens, store.sentences
        for starts, end in ((store.documents, len(offsets) - 1), (offsets, len(tokens))):
            blocks = (starts[i : i + _BLOCK + 1] for i in range(0, len(starts), _BLOCK))
            if (starts[0], starts[-1]) != (0, end) or any((np.diff(b) < 0).any() for b in blocks):
                return f"{name} has offsets that are out of order"
        blocks = (tokens[i : i + _BLOCK] for i in range(0, len(tokens), _BLOCK))
        if any(block.max() >= vocab_size for block in blocks):
            return f"{name} has token ids that are not in the vocabulary"
    return ""


def read_record(path: Path) -> dict[str, Any]:
    """Return the content of a `store.json` or a `progress.json`."""
    return json_files.read_json(path, REMEDY)
