"""Small texts, shards of them, and interruptions of what is written."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from bert_jax.config import TokenizerConfig
from bert_jax.storage import json_files
from bert_jax.text import prepare, shards
from bert_jax.text.store import Corpus

TOKENIZER = TokenizerConfig(kind="wordpiece")
VOCAB_SIZE = 60
CHUNK_BYTES = 1500  # of the fixture small_chunks
WORDS = ["cat", "dog", "mat", "rain", "sun", "why", "tree", "sat", "on", "the"]


def make_documents(number: int, seed: int = 0) -> list[list[str]]:
    """Return documents of lines, each a sentence."""
    generator = np.random.default_rng(seed)
    return [
        [f"{i} {' '.join(generator.choice(WORDS, n))}." for n in generator.integers(2, 12, 5)]
        for i in range(number)
    ]


def write_text(path, documents: list[list[str]]) -> None:
    path.write_text("\n\n".join("\n".join(document) for document in documents) + "\n")


def prepare_shard(data, tokenizer, folder, number: int, count: int) -> None:
    path = shards.shard_folder(folder, (number, count))
    prepare.write(data, tokenizer, 0, path, (number, count))


@contextlib.contextmanager
def interrupted(after: int) -> Iterator[list[dict]]:
    """Interrupt what is done after so many records of progress; yield the records."""
    write, records = json_files.write_record, []

    def write_or_interrupt(path, record) -> None:
        if len(records) == after:
            raise KeyboardInterrupt
        records.append(record)
        write(path, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_files, "write_record", write_or_interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield records


def assert_same_files(one, other) -> None:
    """Check that each file of a folder has the same bytes in another."""
    for path in one.rglob("*.*"):
        if path.is_file():
            assert path.read_bytes() == (other / path.relative_to(one)).read_bytes()


def assert_same_stores(one: Corpus, other: Corpus) -> None:
    assert one.fingerprint == other.fingerprint
    for split in ("train", "eval"):
        for name in ("tokens", "sentences", "documents"):
            found, expected = (getattr(getattr(c, split), name)[:] for c in (one, other))
            np.testing.assert_array_equal(found, expected)
