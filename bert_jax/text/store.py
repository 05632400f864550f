"""Read a token store: tokenized text in memory-mapped files, which `prepare` writes.

`train/` and `eval/` have the arrays of a `TokenStore` without a header, `tokenizer/` the tokenizer.
The tokens are those of the store's shards, in order: an ordinary store is its own and only shard;
others have their shards in `shards/`, each of which is the store of a part of the text.
`store.json` says what the store was prepared from, the sizes and the checksums; it is written last.
Until then `progress.json` says what is complete.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.storage import checksums, daemon_thread, json_files, locks
from bert_jax.text import tokenizer_loading
from bert_jax.text.tokenizer import Tokenizer

FILES = ("tokens", "sentences", "documents")
SPLITS = ("train", "eval")
CONTENT = (*SPLITS, "shards", "store.json", "tokenizer")  # of a folder that is a complete store
REMEDY = "remove the folder, and prepare or copy it again"
_VERIFIED_WITHIN = 0.8  # seconds that opening may take longer; a large store is verified meanwhile
_OPEN_SHARDS = 100  # files that are open at once: a process may have 1,024, and there are mixtures
CHARACTERS = ("characters", "unknown_characters")  # of the text
# Settings of reading, which are no part of a text; so are switches, such as "split" of files.
_OF_READING = {"text_field", "lines", "fasta"}
UNKNOWN_REMEDY = (
    "train a tokenizer on it, of tokenizer.kind byte_bpe or sentencepiece (without --init), or set "
    "tokenizer.path to a vocabulary of its characters"
)


class ShardedTokens:
    """The tokens of shards, in order, as an array [T] that is indexed by slices and arrays."""

    def __init__(self, sizes: Mapping[Path, int], dtype: str):
        """`sizes` are the bytes of the file of each shard, which is opened when it is needed."""
        self.dtype = np.dtype(dtype)
        self._starts = np.cumsum([0, *sizes.values()]) // self.dtype.itemsize
        paths = list(sizes)

        def open_shard(number: int) -> np.ndarray:
            return np.memmap(paths[number], self.dtype, mode="r")

        self._shard = functools.lru_cache(_OPEN_SHARDS)(open_shard)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        flat = index.ravel()
        shards = np.searchsorted(self._starts, flat, "right") - 1
        order = np.argsort(shards, kind="stable")
        numbers, firsts = np.unique(shards[order], return_index=True)
        tokens = np.empty(flat.shape, self.dtype)
        for number, chosen in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=False):
            tokens[chosen] = self._shard(number)[flat[chosen] - self._starts[number]]
        return tokens.reshape(index.shape)


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """Tokenized text, memory-mapped: T tokens in S sentences in N documents."""

    tokens: np.ndarray | ShardedTokens  # [T] uint16, or uint32 for a vocabulary over 65,536
    sentences: np.ndarray  # [S + 1] int64, where each sentence starts in `tokens`, and T
    documents: np.ndarray  # [N + 1] int64, where each document starts in `sentences`, and S

    @property
    def num_sentences(self) -> int:
        return len(self.sentences) - 1

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A prepared store: its tokenizer, training text and held-out text; or a mixture of several.

    `train` and `eval` of a mixture are those of its first text; `parts` has all.
    """

    tokenizer: Tokenizer
    train: TokenStore
    eval: TokenStore
    fingerprint: str = ""  # of the text, the tokenizer, and how the text was split
    text_identity: str = ""  # of the text and what is held out, whatever the tokenizer
    source_identity: str = ""  # of the text, whatever is held out of it
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
        remedy = f"{UNKNOWN_REMEDY}; a store has to be prepared again, with another --tokenizer"
        return f"{worst.unknown:.1%} of the characters{of} are unknown; {remedy}"


def has_record(folder: str | Path) -> bool:
    """Return whether a folder has the record of a store, which is complete or not."""
    # Path.exists raises for a list of files that is too long for a path.
    names = ("store.json", "progress.json")
    return any(os.path.exists(os.path.join(folder, name)) for name in names)


def is_store(path: str | Path) -> bool:
    """Return whether `path` is the folder of a store, or of shards that are not finished."""
    path = os.path.expanduser(path)
    # "" is no path: it would be the working directory.
    return path != "" and (has_record(path) or os.path.isdir(os.path.join(path, "shards")))


def is_only_store(path: Path) -> bool:
    """Return whether a folder is a store, and has nothing else."""
    return has_record(path) and other_files(path) <= {*CONTENT, "progress.json"}


def other_files(folder: Path) -> set[str]:
    """Return the names in a folder, if it is one, but for those that only writing leaves there."""
    names = os.listdir(folder) if os.path.isdir(folder) else ()
    return {name for name in names if name != locks.NAME and not json_files.is_temporary(name)}


def read_record(path: Path) -> dict[str, Any]:
    """Return the content of a `store.json` or a `progress.json`."""
    return json_files.read_record(path, REMEDY)


def has_tokenizer(record: Mapping[str, Any]) -> bool:
    """Return whether the store of a record has its tokenizer; {} is the record of none."""
    return "splits" in record


def is_complete(record: Mapping[str, Any]) -> bool:
    """Return whether the store of a record has all of its text."""
    return "vocab_size" in record


def unknown_share(record: Mapping[str, Any]) -> float:
    """Return the share of the characters that have become the unknown token."""
    number, unknown = (record[name] for name in CHARACTERS)
    return unknown / max(1, number)


def open_store(folder: Path) -> Corpus:
    """Open a complete store; a thread verifies its checksums, which this waits 0.8 s for."""
    path = folder / "store.json"
    if not path.exists():
        remedy = "repeat the command that was writing it"
        if (folder / "shards").is_dir():
            remedy = "prepare all of its shards"
        raise UserError(f"{folder} is an unfinished store; {remedy}")
    record = read_record(path)
    tokenizer = tokenizer_loading.load(folder / "tokenizer")
    with json_files.refusing_malformed(path, REMEDY):
        if tokenizer.vocab_size != record["vocab_size"]:
            raise UserError(f"{folder / 'tokenizer'} is not the store's own tokenizer; {REMEDY}")
        splits = {name: _open_split(folder, name, record) for name in SPLITS}
        identity = {name: record[name] for name in ("identity", "splits", "vocab_size")}
        source, held_out = (record["identity"][name] for name in ("text", "held_out"))
        switches = {name for name, value in source.items() if isinstance(value, bool)}
        content = {name: source[name] for name in source.keys() - switches - _OF_READING}
        unknown = unknown_share(record)
        files = (name for split in SPLITS for name in _file_sizes(split, record))
        recorded = {**dict.fromkeys(files), **record["checksums"]}  # None differs from any checksum
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    digest.update(tokenizer.fingerprint.encode())
    corpus = Corpus(
        tokenizer,
        train=splits["train"],
        eval=splits["eval"],
        fingerprint=digest.hexdigest(),
        text_identity=_digest([source, held_out]),
        source_identity=_digest(content),
        unknown=unknown,
        verified=daemon_thread.start(lambda: checksums.check(folder, recorded, REMEDY)),
    )
    corpus.verify(_VERIFIED_WITHIN)
    return corpus


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _open_split(folder: Path, split: str, record: Mapping[str, Any]) -> TokenStore:
    dtype = record["splits"][split]["dtype"]
    if dtype not in ("uint16", "uint32"):
        raise ValueError(f"tokens of type {dtype}")
    sizes = {folder / name: size for name, size in _file_sizes(split, record).items()}
    for path, size in sizes.items():
        checksums.check_size(path, size, REMEDY)
    *shards, sentences, documents = sizes
    tokens: Any = ShardedTokens({path: sizes[path] for path in shards}, dtype)
    if len(shards) == 1:
        # A plain array over the map: indexing the subclass is slower.
        tokens = np.asarray(np.memmap(shards[0], dtype, mode="r"))
    return TokenStore(
        tokens,
        sentences=np.asarray(np.memmap(sentences, np.int64, mode="r")),
        documents=np.asarray(np.memmap(documents, np.int64, mode="r")),
    )


def _file_sizes(split: str, record: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of the files of a split: the tokens of each shard, then the offsets."""
    sizes, shards = record["splits"][split], record.get("shards")
    files = {f"shards/{name}/{split}/tokens.bin": of[split] for name, of in (shards or {}).items()}
    if shards is None:
        files = {f"{split}/tokens.bin": sizes["tokens"]}
    return files | {f"{split}/{name}.bin": sizes[name] for name in FILES[1:]}
