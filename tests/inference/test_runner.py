"""The engine of inference: every sequence once, in few sizes, whatever the step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.batches.token_sequences import FILL, TokenSequences
from bert_jax.inference import runner
from bert_jax.inference.runner import Runner, Sequences, padded_length, run_batches
from bert_jax.text.memory import chunks

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=50)


def sequences_of(sizes, num_types=2, **columns) -> Sequences:
    """Sequences whose tokens tell their index."""
    token_ids = [np.full(size, 10 + index) for index, size in enumerate(sizes)]
    second_starts = [size // 2 for size in sizes]
    sequences = TokenSequences(token_ids, second_starts, pad_id=0, num_types=num_types)
    return Sequences(sequences, 64, **columns)


def test_a_batch_by_hand():
    sequences = sequences_of([3, 2, 4], number=np.array([5, 6, 7]))
    batch = sequences.batch(np.array([2, 0, FILL]), 5)
    assert batch["input_ids"].tolist() == [[12, 12, 12, 12, 0], [10, 10, 10, 0, 0], [0] * 5]
    assert batch["token_type_ids"].tolist() == [[0, 0, 1, 1, 0], [0, 1, 1, 0, 0], [0] * 5]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [0] * 5]
    assert batch["number"].tolist()[:2] == [7, 5]
    batch = sequences_of([3], num_types=1).all()
    assert batch["input_ids"].shape == (1, 16)
    assert not batch["token_type_ids"].any()


@settings(deadline=None)
@given(SIZES, st.sampled_from([1, 4, 16]))
def test_every_sequence_runs_once_and_the_longest_first(sizes, batch_size):
    outputs = list(run_batches(lambda batch: batch, sequences_of(sizes), batch_size))
    indices = np.concatenate([indices for indices, _ in outputs])
    assert sorted(indices) == list(range(len(sizes)))
    assert [sizes[i] for i in indices] == sorted(sizes, reverse=True)
    for indices, batch in outputs:
        count, length = batch["input_ids"].shape
        assert (count, length) == (batch_size, padded_length(max(sizes[i] for i in indices), 64))
        expected = [sizes[i] for i in indices] + [0] * (count - len(indices))
        assert batch["attention_mask"].sum(1).tolist() == expected


def test_batches_of_about_as_many_tokens(monkeypatch):
    monkeypatch.setattr(runner, "_BATCH_TOKENS", 512)
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 61, 300).tolist()
    engine = Runner({"scale": np.float32(2)})
    step = engine.compile("sums", lambda params, batch: params["scale"] * batch["input_ids"].sum(1))
    assert step is engine.compile("sums", None)
    found, shapes = np.zeros(300), set()
    for indices, values in engine.run(step, sequences_of(sizes)):
        found[indices] = np.asarray(values)[: len(indices)]
        shapes.add(len(values))
        assert len(values) % engine.num_devices == 0
    np.testing.assert_array_equal(found, [2 * n * (10 + i) for i, n in enumerate(sizes)])
    assert max(shapes) == 512 // 16
    some = list(engine.run(step, sequences_of(sizes), 7))
    assert max(len(indices) for indices, _ in some) == 7
    # Of one batch, and of a number that the devices do not divide.
    values = engine.call(step, sequences_of([3, 5, 1]).all())
    assert values.tolist() == [60, 110, 24]
    assert isinstance(values, np.ndarray)


def test_the_device_runs_the_next_batch_while_one_is_read():
    begun = []
    outputs = run_batches(begun.append, sequences_of([3] * 5), 1)
    for number, _ in enumerate(outputs, start=1):
        assert len(begun) == min(number + 1, 5)


def test_padded_lengths():
    found = {padded_length(length, 2048) for length in range(1, 2049)}
    assert len(found) == 11 + 6
    assert all(padded_length(length, 2048) >= length for length in range(1, 2049))
    assert padded_length(500, 502) == 502


@pytest.mark.parametrize(("size", "expected"), [(1, 4), (100, 3)])
def test_chunks_are_bounded_and_lazy(size, expected):
    limits, read = {"most": 4, "enough_characters": 300}, []

    def texts():
        for number in range(9):
            read.append(number)
            yield "a" * size

    first, *others = chunks(texts(), **limits)
    assert len(first) == expected
    assert sum(map(len, others)) == 9 - expected
    read.clear()
    next(chunks(texts(), **limits))
    assert len(read) == expected
