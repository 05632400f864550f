"""Batches of a task: every row once, in the lengths that pad least, however it is split."""

from itertools import combinations

import numpy as np
import pytest
from helpers import FakeTokenizer
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.batches import buckets as finetuning
from bert_jax.batches.buckets import FILL, Batcher, TrainSteps
from bert_jax.batches.features import NO_LABEL, Features


def rows_of(sizes, choices=1, per_piece=False) -> Features:
    """Rows whose pieces and labels tell which they are."""
    count = len(sizes) // choices
    sequences = [np.full(size, 10 + i, np.int32) for i, size in enumerate(sizes)]
    labels = [np.full(size, i % 3) if per_piece else i % 3 for i, size in enumerate(sizes[:count])]
    second = [size // 2 for size in sizes]
    return Features(
        sequences, second, np.arange(count), labels, choices=choices, per_piece=per_piece
    )


def batcher_of(sizes, **more) -> Batcher:
    return Batcher(rows_of(sizes, **more), FakeTokenizer(), 2, 64)


def test_a_batch_by_hand():
    batch = batcher_of([3, 2, 4]).make(np.array([2, 0, FILL]), 5)
    assert batch["input_ids"].tolist() == [[12, 12, 12, 12, 0], [10, 10, 10, 0, 0], [0] * 5]
    assert batch["token_type_ids"].tolist() == [[0, 0, 1, 1, 0], [0, 1, 1, 0, 0], [0] * 5]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [0] * 5]
    assert batch["labels"].tolist() == [2, 0, NO_LABEL]


def test_labels_of_pieces_and_choices_by_hand():
    batch = batcher_of([2, 3], per_piece=True).make(np.array([1, 0]), 4)
    assert batch["labels"].tolist() == [[1, 1, 1, NO_LABEL], [0, 0, NO_LABEL, NO_LABEL]]
    batch = batcher_of([2, 3, 1, 2], choices=2).make(np.array([1, FILL]), 3)
    assert batch["input_ids"].tolist() == [[[12, 0, 0], [13, 13, 0]], [[0] * 3, [0] * 3]]
    assert batch["labels"].tolist() == [1, NO_LABEL]


def test_numbers_that_are_not_known_are_not_zero():
    rows = rows_of([2, 2])
    rows.labels = [0.5, float("nan")]
    labels = Batcher(rows, FakeTokenizer(), 1, 64).make(np.array([1, 0, FILL]), 2)["labels"]
    np.testing.assert_array_equal(labels, np.array([np.nan, 0.5, np.nan], np.float32))


@pytest.mark.parametrize(("count", "size"), [(64, 8), (61, 8), (5, 8)])
def test_every_row_once_an_epoch_whatever_the_parts(count, size):
    sizes = np.random.default_rng(0).integers(3, 60, count)
    batcher = batcher_of(sizes)
    per_epoch = -(-count // size)
    plan = finetuning.plan_lengths(batcher, size, 1)
    steps = TrainSteps(batcher, plan, size, 3 * per_epoch, seed=1)
    for epoch in range(3):
        rows = np.concatenate([steps.order(epoch * per_epoch + s) for s in range(per_epoch)])
        assert sorted(rows[rows != FILL]) == list(range(count))
    for step in (0, per_epoch - 1, 2 * per_epoch):
        order, parts = steps.order(step), steps[step]
        places = np.concatenate([part["index"] for part in parts])
        assert sorted(places) == list(range(size))
        lengths = [part["input_ids"].shape[1] for part in parts]
        assert lengths == sorted(lengths)
        assert set(lengths) <= set(plan.lengths)
        for part in parts:
            for place, ids, mask in zip(
                part["index"], part["input_ids"], part["attention_mask"], strict=True
            ):
                row = order[place]
                assert mask.sum() == (0 if row == FILL else sizes[row])
                assert set(ids[mask > 0]) == (set() if row == FILL else {10 + row})


def test_orders_differ_by_epoch_and_seed_and_do_not_depend_on_what_was_asked_before():
    batcher = batcher_of([4] * 40)
    plan = finetuning.plan_lengths(batcher, 8, 1)
    steps = [TrainSteps(batcher, plan, 8, 20, seed) for seed in (0, 0, 1)]
    late = steps[0].order(12)
    np.testing.assert_array_equal(steps[1].order(2), steps[0].order(2))
    np.testing.assert_array_equal(steps[1].order(12), late)
    assert not np.array_equal(steps[0].order(2), steps[0].order(7))
    assert not np.array_equal(steps[2].order(2), steps[0].order(2))


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_parts_are_shared_evenly_by_the_devices(devices):
    batcher = batcher_of([5] * 50 + [60] * 50)
    plan = finetuning.plan_lengths(batcher, 32, devices)
    assert plan.parts > 1
    assert 32 // plan.parts % devices == 0


def test_rows_of_one_length_are_not_split():
    plan = finetuning.plan_lengths(batcher_of([33] * 50), 32, 1)
    assert (plan.parts, plan.lengths, plan.mean_length) == (1, (40,), 40.0)


def test_no_length_exceeds_the_greatest():
    batcher = Batcher(rows_of([30, 5]), FakeTokenizer(), 2, 30)
    assert finetuning.plan_lengths(batcher, 2, 1).lengths[-1] == 30


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40))
def test_lengths_pad_least(sizes):
    longest = finetuning.round_up(max(sizes))
    found = finetuning.choose_lengths(np.array(sizes), longest)
    assert found[-1] == longest
    assert len(found) <= 4
    multiples = range(8, longest, 8)
    least = min(
        finetuning.pad_to(np.array(sizes), [*chosen, longest]).sum()
        for count in range(4)
        for chosen in combinations(multiples, count)
    )
    assert finetuning.pad_to(np.array(sizes), found).sum() == least


@given(st.lists(st.integers(1, 60), min_size=1, max_size=50), st.sampled_from([1, 4, 16]))
def test_evaluation_sees_every_row_once_and_the_longest_first(sizes, batch_size):
    batcher = batcher_of(sizes)
    batches = list(finetuning.eval_batches(batcher, batch_size))
    indices = np.concatenate([indices for indices, _ in batches])
    assert sorted(indices[indices != FILL]) == list(range(len(sizes)))
    seen = [sizes[i] for i in indices if i != FILL]
    assert seen == sorted(sizes, reverse=True)
    for of_batch, batch in batches:
        assert len(batch["input_ids"]) == batch_size
        wanted = [0 if i == FILL else sizes[i] for i in of_batch]
        assert batch["attention_mask"].sum(1).tolist() == wanted
