"""Pairs against a literal, sequential form of Google's procedure; the rules of random access."""

import random
import time

import numpy as np
import pytest
from helpers import FakeTokenizer
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bert_jax.batches.loader import make_sequences
from bert_jax.batches.sequences import SentencePairs, _truncation, permute
from bert_jax.config import DataConfig
from bert_jax.text.store import TokenStore

LENGTH = 64
FIRST_PIECE = 10


def make_store(documents: int, seed: int = 0, longest: int = 30) -> TokenStore:
    """Documents of 1 to 40 sentences; every token is its own place, so that rows can be traced."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 41, documents)
    lengths = generator.integers(1, longest + 1, sizes.sum())
    return TokenStore(
        tokens=np.arange(FIRST_PIECE, FIRST_PIECE + lengths.sum(), dtype=np.uint32),
        sentences=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        documents=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
    )


def simulated_store(sentences: int) -> TokenStore:
    """The index of documents of 20 sentences of 20 tokens; the tokens take no memory."""
    return TokenStore(
        tokens=np.lib.stride_tricks.as_strided(np.zeros(1, np.uint16), (20 * sentences,), (0,)),
        sentences=np.arange(0, 20 * sentences + 1, 20, dtype=np.int64),
        documents=np.arange(0, sentences + 1, 20, dtype=np.int64),
    )


def rows_over(store: TokenStore, pairs: str = "nsp", seed: int = 0, length: int = LENGTH):
    return make_sequences(store, FakeTokenizer(), DataConfig(pairs=pairs), length, seed)


def literal_pairs(store: TokenStore, length: int, seed: int):
    """Google's procedure as a plain loop: (label, tokens of A, tokens of B) for each row."""
    draw = random.Random(seed)
    documents = [
        [
            store.tokens[store.sentences[s] : store.sentences[s + 1]].tolist()
            for s in range(low, high)
        ]
        for low, high in zip(store.documents, store.documents[1:], strict=False)
    ]
    rows = []
    for number, document in enumerate(documents):
        budget = length - 3
        target = draw.randint(2, budget) if draw.random() < 0.1 else budget
        chunk, at = [], 0
        while at < len(document):
            chunk.append(document[at])
            if at == len(document) - 1 or sum(map(len, chunk)) >= target:
                end = 1 if len(chunk) == 1 else draw.randint(1, len(chunk) - 1)
                a = [token for sentence in chunk[:end] for token in sentence]
                if len(chunk) == 1 or draw.random() < 0.5:
                    other = number
                    while other == number:
                        other = draw.randrange(len(documents))
                    b, start = [], draw.randrange(len(documents[other]))
                    for sentence in documents[other][start:]:
                        b += sentence
                        if len(b) >= target - len(a):
                            break
                    at -= len(chunk) - end
                    label = 1
                else:
                    b, label = [token for sentence in chunk[end:] for token in sentence], 0
                while len(a) + len(b) > budget:
                    longer = a if len(a) > len(b) else b
                    longer.pop(0 if draw.random() < 0.5 else -1)
                rows.append((label, a, b))
                chunk = []
            at += 1
    return rows


def unpack(batch):
    """Returns what `literal_pairs` does, of a batch."""
    rows = []
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
        rows.append((int(label), ids[1 : split - 1].tolist(), ids[split : size - 1].tolist()))
    return rows


@pytest.fixture(scope="module")
def store():
    return make_store(800)


def test_statistics_are_those_of_the_literal_procedure(store):
    """Rows, lengths, split points, share of random pairs and of short rows, over several epochs."""
    epochs = 6
    expected = [row for seed in range(epochs) for row in literal_pairs(store, LENGTH, seed)]
    rows = rows_over(store)
    found = [
        row
        for index in range(epochs * rows.sequences_per_epoch // 256)
        for row in unpack(rows.batch(index, 256))
    ]
    assert rows.sequences_per_epoch == pytest.approx(len(expected) / epochs, rel=0.02)
    for name, measure in {
        "total": lambda row: len(row[1]) + len(row[2]),
        "length of A": lambda row: len(row[1]),
        "length of B": lambda row: len(row[2]),
        "split": lambda row: len(row[1]) / (len(row[1]) + len(row[2])),
        "is random": lambda row: row[0],
        "total of random rows": lambda row: row[0] * (len(row[1]) + len(row[2])),
    }.items():
        a, b = [measure(row) for row in expected], [measure(row) for row in found]
        assert stats.ks_2samp(a, b).pvalue > 1e-3, name
        assert np.mean(a) == pytest.approx(np.mean(b), rel=0.02), name


def test_random_pairs_come_from_another_document_uniformly(store):
    rows = rows_over(store)
    chosen = []
    for index in range(rows.sequences_per_epoch // 256):
        for label, a, b in unpack(rows.batch(index, 256)):
            of_a, of_b = (
                np.searchsorted(
                    store.documents,
                    np.searchsorted(store.sentences, x[0] - FIRST_PIECE, "right") - 1,
                    "right",
                )
                - 1
                for x in (a, b)
            )
            assert (of_a != of_b) == bool(label)
            if label:
                chosen.append(of_b)
            else:
                assert a[-1] < b[0]
    counts = np.bincount(chosen, minlength=store.num_documents)
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("pairs", ["nsp", "sop"])
def test_a_walk_uses_every_sentence_exactly_once(store, pairs):
    walk = rows_over(store, pairs)._walk(epoch=3, group=0, walk=0)
    end = np.where(walk.is_random, walk.split, walk.end)
    order = np.argsort(walk.start)
    assert (walk.start < walk.split).all()
    assert (walk.split <= walk.end).all()
    np.testing.assert_array_equal(walk.start[order][1:], end[order][:-1])
    assert walk.start.min() == 0
    assert end.max() == store.num_sentences


def test_an_epoch_covers_nearly_all_of_the_text(store):
    """The first epoch is one walk; later ones have its number of rows, a per cent more or fewer."""
    rows = rows_over(store)
    for epoch, least in ((0, 1.0), (1, 0.97), (2, 0.97)):
        used = np.zeros(store.num_sentences, bool)
        group = rows._group(epoch, 0)
        end = np.where(group.is_random, group.split, group.end)
        for low, high in zip(group.start, end, strict=True):
            used[low:high] = True
        assert used.mean() >= least


def test_sentence_order():
    store = make_store(400)
    rows = rows_over(store, "sop")
    labels, swapped = [], []
    for index in range(rows.sequences_per_epoch // 128):
        for label, a, b in unpack(rows.batch(index, 128)):
            labels.append(label)
            near = abs(a[0] - b[0]) < 200
            if near:
                assert label == int(a[0] > b[0])
                swapped.append(label)
    assert np.mean(swapped) == pytest.approx(0.5, abs=0.03)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 60))
def test_truncation_is_that_of_the_loop(size_a, size_b, budget):
    a, b = size_a, size_b
    while a + b > budget:
        if a > b:
            a -= 1
        else:
            b -= 1
    cut = _truncation(np.array([size_a]), np.array([size_b]), budget)[:, 0]
    assert (size_a - cut[0], size_b - cut[1]) == (a, b)


@given(st.integers(1, 5000), st.integers(0, 2**32))
def test_permute_is_a_bijection(size, key):
    np.testing.assert_array_equal(np.sort(permute(np.arange(size), size, (key,))), np.arange(size))


def test_permute_leaves_no_order():
    moved = permute(np.arange(100_000), 100_000, (1,))
    assert abs(stats.spearmanr(np.arange(100_000), moved).statistic) < 0.02
    assert abs(stats.spearmanr(moved[1:], moved[:-1]).statistic) < 0.02
    assert abs(stats.spearmanr(moved, permute(np.arange(100_000), 100_000, (2,))).statistic) < 0.02


@pytest.mark.parametrize("pairs", ["nsp", "sop", "none"])
def test_a_batch_is_a_pure_function_of_its_index(store, pairs):
    """Whatever was asked before, and whichever rows of it a process asks for."""
    forward, backward = rows_over(store, pairs), rows_over(store, pairs)
    indices = [0, 1, 2, 40, 41, 200, 10_000]
    first = {index: forward.batch(index, 48) for index in indices}
    for index in reversed(indices):
        whole = backward.batch(index, 48)
        parts = [backward.batch(index, 48, low, low + 12) for low in range(0, 48, 12)]
        for name, value in whole.items():
            np.testing.assert_array_equal(value, first[index][name])
            np.testing.assert_array_equal(value, np.concatenate([part[name] for part in parts]))
    other = rows_over(store, pairs, seed=1).batch(0, 48)
    assert (other["input_ids"] != first[0]["input_ids"]).any(axis=1).mean() > 0.9


def test_epochs_differ_and_rows_are_shuffled_over_the_whole_text(store):
    rows = rows_over(store)
    size = rows.sequences_per_epoch
    starts = [rows.batch(epoch, size)["input_ids"][:, 1] for epoch in (0, 1)]
    assert abs(stats.spearmanr(*starts).statistic) < 0.05
    assert abs(stats.spearmanr(starts[0][1:], starts[0][:-1]).statistic) < 0.05
    assert len(np.intersect1d(*starts)) < 0.8 * size


@pytest.mark.parametrize("longest", [3, 30, 200])
def test_full_blocks(longest):
    """Consecutive tokens, [SEP] exactly where documents end, no padding, no token twice."""
    store = make_store(60, longest=longest)
    ends = store.sentences[store.documents[1:]] + FIRST_PIECE - 1
    rows = rows_over(store, "none")
    batch = rows.batch(0, rows.sequences_per_epoch)
    seen = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        assert mask.all()
        assert ids[0] == FakeTokenizer.cls_id
        assert ids[-1] == FakeTokenizer.sep_id
        text, inside = ids[1:-1], ids[1:-1] != FakeTokenizer.sep_id
        tokens = text[inside]
        np.testing.assert_array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens)))
        for place in np.flatnonzero(~inside):
            assert place == 0 or text[place - 1] in ends
        closed = ends[(ends >= tokens[0]) & (ends < tokens[-1])]
        assert (~inside[1:]).sum() >= len(closed)
        seen.append(tokens)
    seen = np.concatenate(seen)
    assert len(np.unique(seen)) == len(seen)
    assert len(seen) > 0.9 * len(store.tokens) - 2 * LENGTH
    for index in range(1, 30):  # what one epoch leaves out, others do not
        ids = rows.batch(index, rows.sequences_per_epoch)["input_ids"]
        seen = np.union1d(seen, ids)
    assert np.isin(store.tokens[2 * LENGTH : -2 * LENGTH], seen).all()


def test_text_shorter_than_a_row():
    store = TokenStore(
        tokens=np.arange(10, 15, dtype=np.uint16),
        sentences=np.array([0, 2, 5], np.int64),
        documents=np.array([0, 2], np.int64),
    )
    for pairs in ("nsp", "sop", "none"):
        batch = rows_over(store, pairs).batch(7, 16)
        assert (batch["attention_mask"].sum(1) >= 5).all()
        assert set(np.unique(batch["input_ids"])) <= {0, 2, 3, *range(10, 15)}


def test_documents_longer_than_a_block_are_used_whole():
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 9, 6000)
    store = TokenStore(
        tokens=np.arange(10, 10 + lengths.sum(), dtype=np.uint32),
        sentences=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        documents=np.array([0, 5000, 5003, 6000], np.int64),
    )
    walk = rows_over(store)._walk(0, 0, 0)
    end = np.where(walk.is_random, walk.split, walk.end)
    assert (end - walk.start).sum() == store.num_sentences


def test_a_hundred_million_sentences():
    """The first batch of such a corpus, and one far into the run, in seconds and bounded memory."""
    sentences = 100_000_000
    store = simulated_store(sentences)
    for pairs in ("nsp", "none"):
        started = time.monotonic()
        rows = rows_over(store, pairs, length=128)
        rows.batch(0, 256)
        assert time.monotonic() - started < 10
        started = time.monotonic()
        rows.batch(1_000_000, 256)
        assert time.monotonic() - started < 10


def test_a_group_is_a_random_choice_of_blocks():
    """Of a corpus of many groups, whose blocks come from all over it."""
    sentences = 10_000_000
    store = simulated_store(sentences)
    rows = rows_over(store, length=128)
    assert isinstance(rows, SentencePairs)
    assert rows._groups == 5
    blocks = np.unique(rows._group(0, 2).start // 1024)
    assert 1 <= len(blocks) / (sentences / 1024 / 5) <= 2  # each reaches a little into the next
    assert stats.kstest(blocks / (sentences / 1024), "uniform").pvalue > 1e-3
    epoch = np.concatenate([rows._group(0, group).start for group in range(5)])
    # Random access: nearly every row of an epoch begins at another sentence.
    assert len(np.unique(epoch)) > 0.99 * len(epoch)
