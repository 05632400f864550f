"""Append documents to a token store; a killed run resumes after the last recorded batch."""

import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from bert_jax.errors import UserError
from bert_jax.storage import checksums, json_files
from bert_jax.text import store, tokenizer_loading
from bert_jax.text.tokenizer import Tokenizer

# Bytes of the files of an empty split: sentences and documents begin with a start, an int64 of 0.
_EMPTY = {"tokens": 0, "sentences": 8, "documents": 8}
Document = tuple[str, list[str]]  # the split and the sentences


class StoreWriter:
    """Tokenizes documents and appends them to the files of a store.

    `progress.json` records the sizes and the checksums of the files after each batch. What is in
    the files beyond it was written by a process that was killed, and is removed.
    """

    def __init__(self, folder: Path):
        """Continue what `progress.json` of `folder` records; UserError if files do not fit it."""
        self._folder, self._path = folder, folder / "progress.json"
        record = {"documents": 0, "checksums": {}, **store.read_record(self._path)}
        record.pop("failed", None)
        self.tokenizer = tokenizer_loading.load(folder / "tokenizer")
        dtype = "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"
        with json_files.refusing_malformed(self._path, store.REMEDY):
            record |= {name: int(record.get(name, 0)) for name in store.CHARACTERS}
            self.num_documents = operator.index(record["documents"])
            splits, sums = record["splits"], record["checksums"]
            of_tokenizer = {name: x for name, x in sums.items() if name.startswith("tokenizer/")}
            checksums.check(folder, of_tokenizer, store.REMEDY)
            for name in store.SPLITS:
                splits[name] = _open_split(folder / name, splits.get(name), dtype)
                if f"{name}/tokens.bin" not in sums:  # it is new
                    sums |= checksums.of_files(folder, (folder / name).glob("*.bin"))
        self._record = record

    @property
    def num_characters(self) -> int:
        return self._record["characters"]

    @property
    def unknown_share(self) -> float:
        """The share of the characters that have become the unknown token."""
        return store.unknown_share(self._record)

    def append(self, documents: Sequence[Document]) -> None:
        """Tokenize documents, append them to their splits, and record it."""
        record = self._record
        sentences = [sentence for _, document in documents for sentence in document]
        ids = self.tokenizer.encode_literally(sentences)
        remaining = iter(ids)
        tokenized = [(split, [next(remaining) for _ in document]) for split, document in documents]
        for name, sizes in record["splits"].items():
            of_split = [document for split, document in tokenized if split == name]
            _append(self._folder / name, sizes, record["checksums"], of_split)
        self.num_documents += len(documents)
        record["documents"] = self.num_documents
        record["characters"] += sum(map(len, sentences))
        record["unknown_characters"] += _count_unknown(self.tokenizer, sentences, ids)
        json_files.write_record(self._path, record)

    def complete_record(self) -> dict[str, Any]:
        """Return the record to write to `store.json` if no more documents come."""
        record = {name: value for name, value in self._record.items() if name != "documents"}
        return {**record, "vocab_size": self.tokenizer.vocab_size}

    def finish(self) -> None:
        """Write `store.json`, with which the store is complete."""
        json_files.write_record(self._folder / "store.json", self.complete_record())
        self._path.unlink()


def _count_unknown(tokenizer: Tokenizer, sentences: list[str], ids: Sequence[Any]) -> int:
    """Return how many characters of sentences have become the unknown token."""
    positions = np.flatnonzero(np.concatenate(ids) == tokenizer.unk_id)
    with_unknown = np.searchsorted(np.cumsum([len(tokens) for tokens in ids]), positions, "right")
    unknown, names = 0, (tokenizer.unk_id, *tokenizer.special_ids)
    with tokenizer.literally():
        for index in map(int, np.unique(with_unknown)):
            spans = zip(*tokenizer.encode_with_offsets(sentences[index]), strict=True)
            unknown += sum(end - start for token, (start, end) in spans if token in names)
    return unknown


def _open_split(folder: Path, sizes: dict[str, Any] | None, dtype: str) -> dict[str, Any]:
    """Create the files of a split, or truncate them to what was recorded; return their sizes."""
    folder.mkdir(exist_ok=True)
    for name in store.FILES:
        path = folder / f"{name}.bin"
        if sizes is None:
            path.write_bytes(bytes(_EMPTY[name]))
        elif not path.exists() or path.stat().st_size < sizes[name]:
            raise UserError(f"{path} is shorter than progress.json records; {store.REMEDY}")
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
