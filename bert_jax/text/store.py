"""Read a token store: tokenized text in memory-mapped files, which `prepare` writes.

`train/` and `eval/` have the arrays of a `TokenStore` without a header, `tokenizer/` the tokenizer.
`store.json` says what the store was prepared from, and the sizes; it is written last. Until then
`progress.json` says what is complete.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.settings import read_json
from bert_jax.text import tokenizer as tokenizer_lib
from bert_jax.text.tokenizer import Tokenizer

FILES = ("tokens", "sentences", "documents")
REMEDY = "remove the folder to prepare it again"


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """Tokenized text, memory-mapped: T tokens in S sentences in N documents."""

    tokens: np.ndarray  # [T] uint16, or uint32 for a vocabulary over 65,536
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
    """A prepared store: its tokenizer, training text and held-out text."""

    tokenizer: Tokenizer
    train: TokenStore
    eval: TokenStore
    fingerprint: str = ""  # of the text, the tokenizer, and how the text was split


def is_store(path: str | Path) -> bool:
    """Return whether `path` is the folder of a store, complete or not."""
    # Not Path.exists, which raises for a list of files that is too long for a path.
    return any(os.path.exists(os.path.join(path, f"{name}.json")) for name in ("store", "progress"))


def open_store(folder: Path) -> Corpus:
    """Open a complete store."""
    if not (folder / "store.json").exists():
        raise UserError(f"{folder} is an unfinished store; repeat the command that was writing it")
    record = read_json(folder / "store.json", REMEDY)
    tokenizer = tokenizer_lib.load(folder / "tokenizer")
    if tokenizer.vocab_size != record["vocab_size"]:
        raise UserError(f"{folder / 'tokenizer'} is not the store's own tokenizer; {REMEDY}")
    splits = {name: _open_split(folder / name, sizes) for name, sizes in record["splits"].items()}
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    digest.update(tokenizer.fingerprint.encode())
    return Corpus(tokenizer, splits["train"], splits["eval"], digest.hexdigest())


def _open_split(folder: Path, sizes: dict[str, Any]) -> TokenStore:
    arrays = {}
    for name in FILES:
        path = folder / f"{name}.bin"
        size = path.stat().st_size if path.exists() else 0
        if size != sizes[name]:
            raise UserError(f"{path} has {size} bytes instead of {sizes[name]}; {REMEDY}")
        dtype = np.int64 if name != "tokens" else np.dtype(sizes["dtype"])
        # A plain array over the map: indexing the subclass is slower.
        arrays[name] = np.asarray(np.memmap(path, dtype, mode="r"))
    return TokenStore(**arrays)
