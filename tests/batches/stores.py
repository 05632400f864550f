"""Synthetic token stores, and batches of pairs as plain lists."""

import numpy as np
from helpers import FakeTokenizer

from bert_jax.text.store import TokenStore

FIRST_TOKEN = 10


def make_store(documents: int, seed: int = 0, longest: int = 30) -> TokenStore:
    """Documents of 1 to 40 sentences; each token id is its own offset, so that it can be traced."""
    generator = np.random.default_rng(seed)
    return store_of(
        sizes := generator.integers(1, 41, documents),
        generator.integers(1, longest + 1, sizes.sum()),
    )


def store_of(sizes: np.ndarray, lengths: np.ndarray) -> TokenStore:
    """Documents of so many sentences, and sentences of so many tokens."""
    return TokenStore(
        tokens=np.arange(FIRST_TOKEN, FIRST_TOKEN + sum(lengths), dtype=np.uint32),
        sentences=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        documents=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
    )


def unpack(batch) -> list[tuple[int, list[int], list[int]]]:
    """Return (label, tokens of A, tokens of B) of each pair, after a check of its form."""
    pairs = []
    for ids, types, mask, label in zip(
        batch["input_ids"],
        batch["token_type_ids"],
        batch["attention_mask"],
        batch["next_sentence_label"],
        strict=True,
    ):
        size = mask.sum()
        assert (mask[:size] == 1).all()
        assert (ids[size:] == FakeTokenizer.pad_id).all()
        split = int((types[:size] == 0).sum())
        assert ids[0] == FakeTokenizer.cls_id
        assert ids[split - 1] == ids[size - 1] == FakeTokenizer.sep_id
        assert (types[split:size] == 1).all()
        assert (types[size:] == 0).all()
        pairs.append((int(label), ids[1 : split - 1].tolist(), ids[split : size - 1].tolist()))
    return pairs


def check_pure(make, indices=(0, 1, 2, 40, 41, 200, 10_000), size: int = 48) -> None:
    """Check that a batch depends on its number alone, whatever was read before or with it."""
    forward, backward = make(0), make(0)
    first = {number: forward.batch(number, size) for number in indices}
    for number in reversed(indices):
        batch = backward.batch(number, size)
        quarters = [backward.batch(number, size, part) for part in np.split(np.arange(size), 4)]
        for name, value in batch.items():
            assert value.dtype == np.int32
            np.testing.assert_array_equal(value, first[number][name])
            np.testing.assert_array_equal(value, np.concatenate([q[name] for q in quarters]))
    other = make(1).batch(0, size)
    assert (other["input_ids"] != first[0]["input_ids"]).any(axis=1).mean() > 0.9
