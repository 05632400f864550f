"""Packed pairs: each pair once and complete, sequences full, batches a function of the number."""

import itertools

import numpy as np
import pytest
from helpers import FakeTokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stores import make_store, unpack

from bert_jax.batches import loader, packing, sentence_pairs
from bert_jax.batches.shuffle import SEGMENTS, keyed_generator
from bert_jax.config import DataConfig
from bert_jax.text.store import TokenStore

LENGTH = 128


def make_packed(store: TokenStore, length: int = LENGTH, seed: int = 0, **config):
    return loader.make_sequences(
        store, FakeTokenizer(), DataConfig(packing=True, **config), length, seed
    )


def pairs_of(batch) -> list[tuple[int, list[int], list[int]]]:
    """Return the pairs of a packed batch as `unpack` does, after a check of their form."""
    alone = {name: [] for name in ("input_ids", "token_type_ids", "attention_mask")}
    labels, length = [], batch["input_ids"].shape[1]
    for i, number in enumerate(batch["attention_mask"]):
        count = number.max()
        assert count >= 1
        used = (number > 0).sum()
        np.testing.assert_array_equal(number[:used], np.sort(number[:used]))
        assert not number[used:].any()
        assert (batch["input_ids"][i, used:] == FakeTokenizer.pad_id).all()
        assert not batch["position_ids"][i, used:].any()
        assert (batch["next_sentence_label"][i, :count] >= 0).all()
        assert (batch["next_sentence_label"][i, count:] == packing.NO_PAIR).all()
        assert not batch["segment_starts"][i, count:].any()
        for pair in range(count):
            (positions,) = np.nonzero(number == pair + 1)
            assert batch["segment_starts"][i, pair] == positions[0]
            np.testing.assert_array_equal(
                batch["position_ids"][i, positions], np.arange(len(positions))
            )
            for name, values in alone.items():
                values.append(np.pad(batch[name][i, positions], (0, length - len(positions))))
            alone["attention_mask"][-1] = (alone["attention_mask"][-1] > 0).astype(int)
            labels.append(batch["next_sentence_label"][i, pair])
    return unpack({**alone, "next_sentence_label": labels})


@pytest.fixture(scope="module")
def store():
    return make_store(300, longest=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=300), st.integers(1, 9))
@example([12] * 99, 9)
def test_every_pair_is_in_one_sequence_and_no_sequence_is_superfluous(sizes, most):
    length, sizes = 60, np.array(sizes)
    members = packing.pack(sizes, length, most, np.random.default_rng(0).permutation(len(sizes)))
    assert members.shape[1] == most
    np.testing.assert_array_equal(np.sort(members[members >= 0]), np.arange(len(sizes)))
    filled = np.where(members >= 0, sizes[members], 0).sum(1)
    assert filled.max() <= length
    # Nearly as few sequences as first fit by decreasing size.
    plain: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        fits = (r for r in plain if sum(r) + size <= length and len(r) < most)
        first = next(fits, None)
        plain.append([size]) if first is None else first.append(size)
    assert len(members) <= 1.1 * len(plain) + 1


@pytest.mark.parametrize("pairs", ["nsp", "sop"])
def test_an_epoch_has_every_pair_of_the_draw_once(store, pairs):
    sequences = make_packed(store, pairs=pairs)
    actual = pairs_of(sequences.batch(0, sequences.sequences_per_epoch))
    generator = keyed_generator(sequences.seed, SEGMENTS, 0, 0, 0)
    first, count, label = sequences._segments(
        sentence_pairs.SentencePairs._draw_sequences(sequences, 0, 0, 0), generator
    )
    expected = [
        (int(one), *(store.tokens[f : f + n].tolist() for f, n in zip(starts, sizes, strict=True)))
        for one, starts, sizes in zip(label, first.T, count.T, strict=True)
    ]
    assert sorted(actual) == sorted(expected)
    assert len(actual) > 1.4 * sequences.sequences_per_epoch


def test_sequences_are_full():
    """Documents of a tenth of a sequence and more leave sequences of one pair half empty."""
    short = make_store(2000, longest=20)
    for length in (LENGTH, 512):
        alone, packed, *_ = packing.statistics(make_packed(short, length))
        assert packed < 0.05
        batch = make_packed(short, length).batch(0, 64)
        assert (batch["attention_mask"] > 0).mean() > 0.95
    assert alone > 0.4


def test_the_share_that_is_cut_off_is_that_of_the_sentences(store):
    sizes = [b - a for a, b in itertools.pairwise(store.sentences.tolist())]
    for length in (8, LENGTH, 512):
        beyond = sum(max(0, size - (length - 3)) for size in sizes)
        assert packing.statistics(make_packed(store, length)).cut == beyond / sum(sizes)


def test_groups_have_as_many_sequences(store, monkeypatch):
    """A group whose draw has fewer adds complete sequences of a second one."""
    monkeypatch.setattr(sentence_pairs, "_BLOCK_SENTENCES", 64)
    monkeypatch.setattr(sentence_pairs, "_GROUP_BLOCKS", 16)
    sequences = make_packed(store)
    assert sequences._num_groups > 3
    sizes = [len(sequences._draw_sequences(0, group, 0)) for group in range(sequences._num_groups)]
    assert min(sizes) < sequences._group_size < max(sizes)
    for group in range(sequences._num_groups):
        chosen = sequences._group(0, group)
        assert len(chosen) == sequences._group_size
        if sizes[group] >= len(chosen):
            starts = chosen["first"][chosen["label"] != packing.NO_PAIR, 0]
            assert len(np.unique(starts)) == len(starts)
    pairs_of(sequences.batch(0, sequences.sequences_per_epoch))
