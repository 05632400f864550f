"""Batches by step across phases, from any step on; held-out rows each once, whatever the batch."""

import itertools

import numpy as np
import pytest
from absl import flags
from helpers import FakeTokenizer
from test_sequences import make_store

from bert_jax.batches import loader
from bert_jax.config import Phase, TrainConfig
from bert_jax.text.store import Corpus

flags.FLAGS.mark_as_parsed()  # Grain reads a flag


@pytest.fixture(scope="module")
def corpus():
    return Corpus(FakeTokenizer(), make_store(100), make_store(20, seed=1))


def config(**changes) -> TrainConfig:
    made = TrainConfig(steps=40, **changes)
    made.data.max_length, made.data.batch_size = 32, 16
    made.data.phases = (Phase(start=0.75, max_length=64, batch_size=8),)
    return made


def test_phases_change_length_and_batch(corpus):
    batches = loader.TrainBatches(corpus, config())
    shapes = [batches[step]["input_ids"].shape for step in range(40)]
    assert shapes == [(16, 32)] * 30 + [(8, 64)] * 10
    per_epoch = [rows.sequences_per_epoch for _, _, rows in batches._phases]
    assert batches.epochs() == pytest.approx(30 * 16 / per_epoch[0] + 10 * 8 / per_epoch[1])


@pytest.mark.parametrize("start", [0, 7, 29, 30, 39])
def test_starts_anywhere_with_the_same_batches(corpus, start):
    """Prepared ahead or not."""
    batches = loader.TrainBatches(corpus, config())
    ahead = list(batches.starting_at(start))
    assert len(ahead) == 40 - start
    for step, found in enumerate(ahead, start=start):
        expected = loader.TrainBatches(corpus, config())[step]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)


def test_the_seed_changes_every_batch(corpus):
    first, second = (loader.TrainBatches(corpus, config(seed=seed)) for seed in (0, 1))
    for step in (0, 35):
        assert (first[step]["input_ids"] != second[step]["input_ids"]).any(axis=1).mean() > 0.9


@pytest.mark.parametrize("limit", [20_000, 50])
def test_held_out_rows_are_evaluated_once_whatever_the_batch(corpus, limit):
    found = {}
    for size in (1, 7, 64):
        batches = list(loader.eval_batches(corpus, config(eval_rows=limit), Phase(0.0, 32, size)))
        assert {b["input_ids"].shape for b in batches} == {(size, 32)}
        present = [b["attention_mask"][:, 0] > 0 for b in batches]
        rows = np.concatenate([b["index"][p] for b, p in zip(batches, present, strict=True)])
        np.testing.assert_array_equal(rows, np.arange(len(rows)))
        assert len(rows) <= limit
        ids = [b["input_ids"][p] for b, p in zip(batches, present, strict=True)]
        found[size] = sorted(map(tuple, itertools.chain.from_iterable(ids)))
    assert len(found[1]) == len(found[7]) == len(found[64])


@pytest.mark.parametrize(
    "runs",
    [
        [lambda n: [(0, n // 2)], lambda n: [(n // 2, n)]],
        # Of hosts whose devices do not lie side by side in the mesh.
        [lambda n: [(0, 2), (4, 6)], lambda n: [(2, 4), (6, n)]],
    ],
)
def test_what_the_hosts_read_is_the_whole_batch(corpus, runs):
    """To the bit, in training, across phases, and in evaluation."""

    def check(of_hosts, whole, size):
        order = [
            i
            for process_slices in runs
            for low, high in process_slices(size)
            for i in range(low, high)
        ]
        assert sorted(order) == list(range(size))
        for name, value in whole.items():
            found = np.concatenate([part[name] for part in of_hosts])
            np.testing.assert_array_equal(found, value[order])

    hosts = [loader.TrainBatches(corpus, config(), process_slices) for process_slices in runs]
    alone = loader.TrainBatches(corpus, config())
    for step in (0, 17, 29, 30, 39):
        size = 16 if step < 30 else 8
        check([host[step] for host in hosts], alone[step], size)
        assert all(len(host[step]["index"]) < size for host in hosts)
        check(
            [loader.take_slices(alone[step], process_slices) for process_slices in runs],
            alone[step],
            size,
        )
    phase = Phase(0.0, 32, 8)
    evaluated = [
        loader.eval_batches(corpus, config(), phase, process_slices) for process_slices in runs
    ]
    for *of_hosts, whole in zip(
        *evaluated, loader.eval_batches(corpus, config(), phase), strict=True
    ):
        check(of_hosts, whole, 8)
