"""Sentence pairs against a literal, sequential form of Google's procedure; random access."""

import random
import time

import numpy as np
import pytest
from helpers import FakeTokenizer
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from stores import FIRST_TOKEN, make_store, store_of, unpack

from bert_jax.batches import sentence_pairs
from bert_jax.batches.sentence_pairs import SentencePairs
from bert_jax.text.store import TokenStore

LENGTH = 64


def make_pairs(store: TokenStore, kind: str = "nsp", seed: int = 0, length: int = LENGTH):
    return SentencePairs(store, FakeTokenizer(), length, seed, kind == "sop", 0.1)


def simulated_store(sentences: int) -> TokenStore:
    """The index of documents of 20 sentences of 20 tokens; the tokens take no memory."""
    return TokenStore(
        tokens=np.lib.stride_tricks.as_strided(np.zeros(1, np.uint16), (20 * sentences,), (0,)),
        sentences=np.arange(0, 20 * sentences + 1, 20, dtype=np.int64),
        documents=np.arange(0, sentences + 1, 20, dtype=np.int64),
    )


def literal_pairs(store: TokenStore, length: int, seed: int):
    """Google's procedure as a plain loop: (label, tokens of A, tokens of B) of each pair."""
    draw = random.Random(seed)
    documents = [
        [
            store.tokens[store.sentences[s] : store.sentences[s + 1]].tolist()
            for s in range(low, high)
        ]
        for low, high in zip(store.documents, store.documents[1:], strict=False)
    ]
    pairs = []
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
                pairs.append((label, a, b))
                chunk = []
            at += 1
    return pairs


@pytest.fixture(scope="module")
def store():
    return make_store(800)


def test_statistics_are_those_of_the_literal_procedure(store):
    """Lengths, split points, and the shares of random and of short pairs, over several epochs."""
    epochs = 4
    expected = [pair for seed in range(epochs) for pair in literal_pairs(store, LENGTH, seed)]
    pairs = make_pairs(store)
    actual = [
        pair
        for number in range(epochs * pairs.sequences_per_epoch // 256)
        for pair in unpack(pairs.batch(number, 256))
    ]
    assert pairs.sequences_per_epoch == pytest.approx(len(expected) / epochs, rel=0.02)
    for name, measure in {
        "total": lambda pair: len(pair[1]) + len(pair[2]),
        "length of A": lambda pair: len(pair[1]),
        "length of B": lambda pair: len(pair[2]),
        "split": lambda pair: len(pair[1]) / (len(pair[1]) + len(pair[2])),
        "is random": lambda pair: pair[0],
        "total of random pairs": lambda pair: pair[0] * (len(pair[1]) + len(pair[2])),
    }.items():
        a, b = [measure(pair) for pair in expected], [measure(pair) for pair in actual]
        assert stats.ks_2samp(a, b).pvalue > 1e-3, name
        assert np.mean(a) == pytest.approx(np.mean(b), rel=0.02), name


def test_random_pairs_come_from_another_document_uniformly(store):
    def document(tokens):
        sentence = np.searchsorted(store.sentences, tokens[0] - FIRST_TOKEN, "right") - 1
        return np.searchsorted(store.documents, sentence, "right") - 1

    pairs, documents = make_pairs(store), []
    for number in range(pairs.sequences_per_epoch // 256):
        for label, a, b in unpack(pairs.batch(number, 256)):
            assert (document(a) != document(b)) == bool(label)
            if label:
                documents.append(document(b))
            else:
                assert a[-1] < b[0]
    counts = np.bincount(documents, minlength=store.num_documents)
    assert stats.chisquare(counts).pvalue > 1e-3


def sentences_used(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first sentence of each pair, and the one after its last, without random segments."""
    return pairs["start"], np.where(pairs["is_random"], pairs["split"], pairs["end"])


@pytest.mark.parametrize("kind", ["nsp", "sop"])
def test_a_draw_uses_every_sentence_exactly_once(store, kind):
    pairs = make_pairs(store, kind)._draw_sequences(epoch=3, group=0, draw=0)
    start, end = sentences_used(pairs)
    order = np.argsort(start)
    assert (pairs["start"] < pairs["split"]).all()
    assert (pairs["split"] <= pairs["end"]).all()
    np.testing.assert_array_equal(start[order][1:], end[order][:-1])
    assert start.min() == 0
    assert end.max() == store.num_sentences


def test_an_epoch_covers_nearly_all_of_the_text(store):
    """The first epoch is one draw; later ones have its number of pairs, 1% more or fewer."""
    pairs = make_pairs(store)
    for epoch, least in ((0, 1.0), (1, 0.97), (2, 0.97)):
        used = np.zeros(store.num_sentences, bool)
        for low, high in zip(*sentences_used(pairs._group(epoch, 0)), strict=True):
            used[low:high] = True
        assert used.mean() >= least


def test_sentence_order():
    pairs = make_pairs(make_store(400), "sop")
    swapped = []
    for number in range(pairs.sequences_per_epoch // 128):
        for label, a, b in unpack(pairs.batch(number, 128)):
            if abs(a[0] - b[0]) < 200:  # of the same document
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
    sizes = np.array([size_a]), np.array([size_b])
    dropped_a, dropped_b = sentence_pairs._num_truncated(*sizes, budget)[:, 0]
    assert (size_a - dropped_a, size_b - dropped_b) == (a, b)


def test_epochs_differ_and_sequences_are_shuffled_over_the_text(store):
    pairs = make_pairs(store)
    size = pairs.sequences_per_epoch
    starts = [pairs.batch(epoch, size)["input_ids"][:, 1] for epoch in (0, 1)]
    assert abs(stats.spearmanr(*starts).statistic) < 0.05
    assert abs(stats.spearmanr(starts[0][1:], starts[0][:-1]).statistic) < 0.05
    assert len(np.intersect1d(*starts)) < 0.8 * size


def test_documents_longer_than_a_block_are_used_completely():
    lengths = np.random.default_rng(0).integers(1, 9, 6000)
    store = store_of([5000, 3, 997], lengths)
    start, end = sentences_used(make_pairs(store)._draw_sequences(0, 0, 0))
    assert (end - start).sum() == store.num_sentences


def test_random_access_to_a_large_corpus():
    """The first batch of ten groups, and one far into the run, come in seconds."""
    store = simulated_store(20_000_000)
    pairs = make_pairs(store, length=128)
    assert pairs._num_groups == 10
    for number in (0, 1_000_000):
        start = time.monotonic()
        pairs.batch(number, 256)
        assert time.monotonic() - start < 10


def test_a_group_is_a_random_choice_of_blocks(monkeypatch):
    """The blocks of each of several groups come from all over the corpus."""
    monkeypatch.setattr(sentence_pairs, "_BLOCK_SENTENCES", 64)
    monkeypatch.setattr(sentence_pairs, "_GROUP_BLOCKS", 512)
    sentences = 5 * 512 * 64
    pairs = make_pairs(simulated_store(sentences), length=128)
    assert pairs._num_groups == 5
    blocks = np.unique(pairs._group(0, 2)["start"] // 64)
    assert 1 <= len(blocks) / 512 <= 2  # each reaches a little into the next
    assert stats.kstest(blocks / (sentences / 64), "uniform").pvalue > 1e-3
    starts = np.concatenate([pairs._group(0, group)["start"] for group in range(5)])
    # Nearly every pair of an epoch starts at another sentence.
    assert len(np.unique(starts)) > 0.99 * len(starts)
