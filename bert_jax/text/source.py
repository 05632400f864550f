"""The interface of a text source: raw text as documents, which are lists of sentences."""

import abc
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bert_jax.config import DataConfig
from bert_jax.errors import UserError
from bert_jax.text import sentences
from bert_jax.text.records import Record

Shard = tuple[int, int]  # its number, from 0, and the number of shards


class Source(abc.ABC):
    """Documents that can be read any number of times.

    A text of several chunks can be divided into shards, each of which reads some of the chunks.

    Attributes:
      name: of the text, for messages.
      chunks: those that this reads; the documents of one do not depend on the others.
      form: how documents are found in the text, for messages.
      size: the amount of work, in bytes, records or per cent.
      position: how much of it the current reading has done.
      is_divisible: whether there are shards of such a text.
    """

    name: str
    chunks: range = range(1)
    form: str = "split into sentences"
    size: int = 1
    position: int = 0
    is_divisible: bool = False

    def __init__(self, name: str, data: DataConfig, shard: Shard | None = None):
        """Open the text that `data.source` names, or a shard of it; UserError if that fails."""
        self.name = name

    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return JSON that is equal if, and only if, the text is."""

    @abc.abstractmethod
    def texts(self, chunk: int = 0) -> Iterator[list[str]]:
        """Yield the documents of a chunk as lists of sentences, of any size."""

    def documents(self, chunks: Iterable[int] | None = None) -> Iterator[list[str]]:
        """Yield documents as lists of sentences, both of bounded size, none of them empty."""
        chunks = self.chunks if chunks is None else chunks
        for text in itertools.chain.from_iterable(map(self.texts, chunks)):
            document = [part for s in text for part in sentences.split_long_sentence(s)]
            for start in range(0, len(document), sentences.MAX_DOCUMENT_SENTENCES):
                yield document[start : start + sentences.MAX_DOCUMENT_SENTENCES]


def record_sentences(record: Record, text_field: str) -> list[str]:
    """Return the sentences of a field of a record; UserError if it has no text."""
    text = record.field(text_field, "data.text_field")
    if not isinstance(text, str):
        raise UserError(f"{record.where} has no text in {text_field!r}; set data.text_field")
    return sentences.split_text(text)


def merge_identities(shards: Sequence[Any]) -> Any:
    """Return the identity of a text from those of all its shards in order; None if they differ."""
    digests, common = [], []
    for identity in shards:
        if isinstance(identity, dict) and "chunk_bytes" in identity:
            digests += identity["sha256"]
            identity = {**identity, "sha256": None}
        common.append(identity)
    if any(identity != common[0] for identity in common):
        return None
    return {**common[0], "sha256": digest_json(digests)} if digests else common[0]


def digest_json(value: Any) -> str:
    """Return the SHA-256 of a value of JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
