"""Several pairs in a row: each pair once, none cut, rows full; the same by index as ever."""

import numpy as np
import pytest
from absl import flags
from helpers import FakeTokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_sequences import make_store, unpack

from bert_jax.batches import loader, packing
from bert_jax.batches import sequences as pretraining
from bert_jax.config import DataConfig, Phase, TrainConfig, validate
from bert_jax.errors import UserError
from bert_jax.text.store import Corpus, TokenStore

flags.FLAGS.mark_as_parsed()  # Grain reads a flag
LENGTH = 128


def rows_over(store: TokenStore, length: int = LENGTH, seed: int = 0, **config):
    return loader.make_sequences(
        store, FakeTokenizer(), DataConfig(packing=True, **config), length, seed
    )


def pairs_of(batch) -> list[tuple[int, list[int], list[int]]]:
    """The pairs of a packed batch as `unpack` gives them, once each is found to be whole."""
    alone = {name: [] for name in ("input_ids", "token_type_ids", "attention_mask")}
    labels, length = [], batch["input_ids"].shape[1]
    for row, number in enumerate(batch["attention_mask"]):
        count = number.max()
        assert count >= 1
        used = (number > 0).sum()
        np.testing.assert_array_equal(number[:used], np.sort(number[:used]))
        assert not number[used:].any()
        assert (batch["input_ids"][row, used:] == FakeTokenizer.pad_id).all()
        assert not batch["position_ids"][row, used:].any()
        assert (batch["next_sentence_label"][row, :count] >= 0).all()
        assert (batch["next_sentence_label"][row, count:] == packing.NO_PAIR).all()
        assert not batch["segment_starts"][row, count:].any()
        for pair in range(count):
            (places,) = np.nonzero(number == pair + 1)
            assert batch["segment_starts"][row, pair] == places[0]
            np.testing.assert_array_equal(
                batch["position_ids"][row, places], np.arange(len(places))
            )
            for name, values in alone.items():
                values.append(np.pad(batch[name][row, places], (0, length - len(places))))
            alone["attention_mask"][-1] = (alone["attention_mask"][-1] > 0).astype(int)
            labels.append(batch["next_sentence_label"][row, pair])
    return unpack({**alone, "next_sentence_label": labels})


@pytest.fixture(scope="module")
def store():
    return make_store(300, longest=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=300), st.integers(1, 9))
@example([12] * 99, 9)
def test_every_pair_has_one_place_and_no_row_too_much(sizes, most):
    length, sizes = 60, np.array(sizes)
    members = packing.pack(sizes, length, most, np.random.default_rng(0).permutation(len(sizes)))
    assert members.shape[1] == most
    np.testing.assert_array_equal(np.sort(members[members >= 0]), np.arange(len(sizes)))
    filled = np.where(members >= 0, sizes[members], 0).sum(1)
    assert filled.max() <= length
    # No more rows than if each took, of what is left, the largest that fits.
    plain: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        row = next((r for r in plain if sum(r) + size <= length and len(r) < most), None)
        plain.append([size]) if row is None else row.append(size)
    assert len(members) <= 1.1 * len(plain) + 1


@pytest.mark.parametrize("pairs", ["nsp", "sop"])
def test_an_epoch_has_every_pair_of_the_walk_once(store, pairs):
    rows = rows_over(store, pairs=pairs)
    found = pairs_of(rows.batch(0, rows.sequences_per_epoch))
    key = rows.seed, pretraining.SEGMENTS, 0, 0, 0
    first, count, label = rows._segments(rows._walk(0, 0, 0), pretraining.keyed_generator(*key))
    expected = [
        (int(one), *(store.tokens[f : f + n].tolist() for f, n in zip(starts, sizes, strict=True)))
        for one, starts, sizes in zip(label, first.T, count.T, strict=True)
    ]
    assert sorted(found) == sorted(expected)
    assert len(found) > 1.4 * rows.sequences_per_epoch


def test_rows_are_full(store):
    """Of documents of a tenth of a row and more, which leave rows of one pair half empty."""
    short = make_store(2000, longest=20)
    for length in (LENGTH, 512):
        alone, packed = packing.padding(rows_over(short, length))
        assert packed < 0.05
        batch = rows_over(short, length).batch(0, 64)
        assert (batch["attention_mask"] > 0).mean() > 0.95
    assert alone > 0.4


def test_a_batch_is_a_pure_function_of_its_index(store):
    """Whatever was asked before, and whichever rows of it a process asks for."""
    forward, backward = rows_over(store), rows_over(store)
    indices = [0, 1, 2, 40, 41, 200, 10_000]
    first = {index: forward.batch(index, 48) for index in indices}
    for index in reversed(indices):
        whole = backward.batch(index, 48)
        parts = [backward.batch(index, 48, low, low + 12) for low in range(0, 48, 12)]
        for name, value in whole.items():
            assert value.dtype == np.int32
            np.testing.assert_array_equal(value, first[index][name])
            np.testing.assert_array_equal(value, np.concatenate([part[name] for part in parts]))
    other = rows_over(store, seed=1).batch(0, 48)
    assert (other["input_ids"] != first[0]["input_ids"]).any(axis=1).mean() > 0.9


def test_epochs_differ(store):
    rows = rows_over(store)
    first, second = (
        {tuple(a) for _, a, _ in pairs_of(rows.batch(epoch, rows.sequences_per_epoch))}
        for epoch in (0, 1)
    )
    assert len(first & second) < 0.5 * len(first)


def test_groups_have_as_many_rows(store, monkeypatch):
    """Those whose walk gives fewer take some of a second one's, all of them whole."""
    monkeypatch.setattr(pretraining, "_BLOCK_SENTENCES", 64)
    monkeypatch.setattr(pretraining, "_GROUP_BLOCKS", 16)
    rows = rows_over(store)
    assert rows._groups > 3
    walks = [len(rows._rows(0, group, 0)) for group in range(rows._groups)]
    assert min(walks) < rows._group_rows < max(walks)
    for group in range(rows._groups):
        members = rows._group(0, group).members
        assert len(members) == rows._group_rows
        assert len(np.unique(members[members >= 0])) == (members >= 0).sum()
    pairs_of(rows.batch(0, rows.sequences_per_epoch))


def test_text_shorter_than_a_row():
    tiny = TokenStore(
        tokens=np.arange(10, 15, dtype=np.uint16),
        sentences=np.array([0, 2, 5], np.int64),
        documents=np.array([0, 2], np.int64),
    )
    for length in (8, LENGTH):
        assert pairs_of(rows_over(tiny, length).batch(7, 16))


def test_a_run_begins_anywhere_and_evaluates_rows_that_are_not_packed(store):
    """Collectives phases; what is held out is the same for a run without packing."""
    corpus = Corpus(FakeTokenizer(), store, make_store(20, seed=1))
    config = TrainConfig(steps=12)
    config.data.max_length, config.data.batch_size, config.data.packing = 32, 16, True
    config.data.phases = (Phase(start=0.5, max_length=64, batch_size=8),)
    batches = loader.TrainBatches(corpus, config)
    assert set(batches.padding()) == {32, 64}
    for step, found in enumerate(batches.starting_at(4), start=4):
        for name, value in loader.TrainBatches(corpus, config)[step].items():
            np.testing.assert_array_equal(found[name], value)
    held_out = list(loader.eval_batches(corpus, config, Phase(0.0, 32, 16)))
    config.data.packing = False
    plain = list(loader.eval_batches(corpus, config, Phase(0.0, 32, 16)))
    for one, other in zip(held_out, plain, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])


def test_full_blocks_are_not_packed():
    config = TrainConfig(data=DataConfig(pairs="none", packing=True))
    with pytest.raises(UserError, match=r"data\.packing is for pairs; set it to False"):
        validate(config)
