"""Batches by step: across phases, from any step, for any host, and the same as ever."""

import dataclasses
import itertools
import zlib
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import FakeTokenizer, assert_same_arrays, train_batches
from stores import make_store

from bert_jax.batches import loader
from bert_jax.batches.loader import NOTHING_READ, ReadBefore
from bert_jax.config import Phase, TrainConfig
from bert_jax.config.schedule import Stage, make_schedule
from bert_jax.distributed import hosts as hosts_lib
from bert_jax.text.store import Corpus
from bert_jax.training import loop
from bert_jax.training.objective import WeightedSum
from bert_jax.training.step import TrainState

# CRC-32 of batches by (pairs, packing): of steps 0, 17, 30 and 39, then the first of evaluation.
# They were recorded at commit 239187a; a run that began with that code resumes with this one.
CHECKSUMS = {
    ("nsp", False): [397158848, 2461781265, 2496444938, 2624022503, 2116813829],
    ("sop", False): [2401509765, 4189258908, 344713703, 1947876858, 1965943580],
    ("none", False): [3647992910, 1718475202, 2788537837, 630315678, 213382284],
    ("nsp", True): [1049473335, 2009175492, 1447121949, 871320433, 2116813829],
    ("sop", True): [341538261, 3822107168, 1611712058, 3485573057, 1965943580],
}


@pytest.fixture(scope="module")
def corpus():
    return Corpus(FakeTokenizer(), make_store(100), make_store(20, seed=1))


def config(**changes) -> TrainConfig:
    config = TrainConfig(steps=40, **changes)
    config.data.max_length, config.data.batch_size = 32, 16
    config.data.phases = (Phase(start=0.75, max_length=64, batch_size=8),)
    return config


def checksum(batch) -> int:
    # Of earlier versions, sequences without padding had a mask too.
    batch = {"attention_mask": np.ones_like(batch["input_ids"]), **batch}
    arrays = (np.ascontiguousarray(value) for _, value in sorted(batch.items()))
    return zlib.crc32(b"".join(array.tobytes() for array in arrays))


@pytest.mark.parametrize(("pairs", "packing"), CHECKSUMS)
def test_batches_are_those_of_earlier_versions(pairs, packing, corpus):
    run = config(seed=3)
    run.data.pairs, run.data.packing = pairs, packing
    batches = train_batches(corpus, run)
    held_out = next(iter(loader.EvalBatches(corpus, Stage(64, 16), run.data, run.eval_rows)))
    actual = [checksum(batch) for batch in (*(batches[s] for s in (0, 17, 30, 39)), held_out)]
    assert actual == CHECKSUMS[pairs, packing]
    assert set(batches.statistics()) == (set() if pairs == "none" else {32, 64})


@pytest.mark.parametrize(("documents", "padded"), [(100, False), (1, True)])
def test_blocks_have_a_mask_only_where_the_text_is_shorter_than_one(documents, padded):
    run = config()
    run.data.pairs, run.data.max_length = "none", 600
    store = make_store(documents)
    assert (len(store.tokens) < 598) == padded
    batches = train_batches(Corpus(FakeTokenizer(), store, store), run)
    batch = batches[0]
    assert ("attention_mask" in batch) == padded
    padding = {600: 1 - batch["attention_mask"].mean()} if padded else {}
    assert batches.block_padding() == pytest.approx(padding)
    assert (batch["input_ids"] == FakeTokenizer.pad_id).any() == padded


def test_phases_change_length_and_batch(corpus):
    batches = train_batches(corpus, config())
    shapes = [batches[step]["input_ids"].shape for step in range(40)]
    assert shapes == [(16, 32)] * 30 + [(8, 64)] * 10
    per_epoch = [sequences.sequences_per_epoch for sequences in batches._sequences.values()]
    assert batches.epochs() == pytest.approx(30 * 16 / per_epoch[0] + 10 * 8 / per_epoch[1])


def test_batches_that_grow_are_phases_of_one_length(corpus):
    """The rate of a step is as it is without them."""
    run = config()
    run.data.phases = (Phase(10, 32, 32), Phase(20, 32, 64))
    batches = train_batches(corpus, run)
    sizes = [len(batches[step]["index"]) for step in (0, 9, 10, 19, 20, 39)]
    assert sizes == [16, 16, 32, 32, 64, 64]
    assert batches.progress(40)["sequences"] == 10 * 16 + 10 * 32 + 20 * 64
    assert make_schedule(run).rate.peaks == ((0, 1e-4),)


@pytest.mark.parametrize("pairs", ["none", "nsp"])
def test_phases_of_one_length_read_on(corpus, pairs):
    """As a run of that length alone does, also where a phase of another length lies between."""
    run, alone = config(), config()
    run.data.pairs = alone.data.pairs = pairs
    run.data.batch_size = alone.data.batch_size = 4
    run.data.phases, alone.data.phases = (Phase(10, 32, 32), Phase(20, 64, 8), Phase(30, 32, 4)), ()
    alone.steps = 100  # with as many sequences of 32 tokens
    batches, expected = train_batches(corpus, run), train_batches(corpus, alone)
    assert batches.progress(40)["sequences"] == 10 * (4 + 32 + 8 + 4)
    found = [batches[step]["input_ids"] for step in (*range(20), *range(30, 40))]
    found = np.concatenate(found)
    assert len({row.tobytes() for row in found}) == 4 * alone.steps
    if pairs == "none":  # random sentences of pairs depend on the batch
        ids = [expected[step]["input_ids"] for step in range(alone.steps)]
        np.testing.assert_array_equal(found, np.concatenate(ids))
    stages = make_schedule(run).stages
    for step in (12, 20, 34):  # a fork that changes nothing
        read = NOTHING_READ.until(step, stages)
        forked = loader.TrainBatches(corpus, stages, run.data, run.seed, read_before=read)
        for later in range(step, 40):
            assert_same_arrays(forked[later], batches[later])
        assert forked.progress(40) == batches.progress(40)


@pytest.mark.parametrize("start", [0, 29, 30, 39])
def test_prefetched_batches_are_the_same_from_any_step(corpus, start):
    prefetched = list(loader.prefetch(train_batches(corpus, config()), start))
    assert len(prefetched) == 40 - start
    batches = train_batches(corpus, config())
    for step, batch in enumerate(prefetched, start=start):
        assert_same_arrays(batch, batches[step])


@pytest.mark.parametrize("limit", [20_000, 50])
def test_held_out_sequences_are_evaluated_once_whatever_the_batch(corpus, limit):
    counts = set()
    for size in (1, 7, 64):
        batches = list(loader.EvalBatches(corpus, Stage(32, size), config().data, limit))
        assert {b["input_ids"].shape for b in batches} == {(size, 32)}
        present = [b["attention_mask"][:, 0] > 0 for b in batches]
        index = np.concatenate([b["index"][p] for b, p in zip(batches, present, strict=True)])
        np.testing.assert_array_equal(index, np.arange(len(index)))
        assert len(index) <= limit
        counts.add(len(index))
    assert len(counts) == 1


@pytest.mark.parametrize("limit", [1, 37])
@pytest.mark.parametrize("host", [np.arange, lambda n: np.arange(n // 2)])
def test_the_speed_of_an_evaluation_counts_a_sequence_once(corpus, monkeypatch, host, limit):
    """Of two hosts, each of which reads all of a batch, or half of it."""
    monkeypatch.setattr(hosts_lib, "count", lambda: 2)
    clock = itertools.count()  # one second an evaluation
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def held_out(part):
        return loader.EvalBatches(part, Stage(32, 16), config().data, limit, host)

    state = TrainState(step=0, params={}, opt_state={}, rng=None)
    metrics = {"mlm_loss": WeightedSum(1.0, 1.0)}
    scores = loop.evaluate(lambda *_: metrics, [corpus], held_out, {}, state)
    assert scores["sequences_per_second"] == limit


def test_a_text_without_a_prediction_has_no_part_in_the_loss(corpus):
    """As of short sequences in which no whole word may be masked."""
    parts = [dataclasses.replace(corpus, name=name, weight=0.5) for name in ("a", "b")]
    of_parts = [{"mlm_loss": WeightedSum(8.0, 2.0)}, {"mlm_loss": WeightedSum(0.0, 0.0)}]
    found = iter(of_parts)
    state = TrainState(step=0, params={}, opt_state={}, rng=None)

    def held_out(part):
        return loader.EvalBatches(part, Stage(32, 16), config().data, 1)

    scores = loop.evaluate(lambda *_: next(found), parts, held_out, {}, state)
    assert (scores["loss"], scores["mlm_loss"], scores["mlm_loss/a"]) == (4.0, 4.0, 4.0)
    assert "mlm_loss/b" not in scores


@pytest.mark.parametrize(
    "hosts",
    [
        [lambda n: np.arange(n // 2), lambda n: np.arange(n // 2, n)],
        # Hosts whose devices are not adjacent in the mesh.
        [lambda n: np.r_[0:2, 4:6], lambda n: np.r_[2:4, 6:n]],
    ],
)
def test_the_hosts_read_the_global_batch(corpus, hosts):
    """To the bit, in training, across phases, and in evaluation."""

    def check(slices, batch):
        size = len(batch["index"])
        order = np.concatenate([host(size) for host in hosts])
        assert sorted(order) == list(range(size))
        assert all(len(part["index"]) < size for part in slices)
        assert_same_arrays(
            {name: np.concatenate([part[name] for part in slices]) for name in batch},
            {name: value[order] for name, value in batch.items()},
        )

    by_host = [train_batches(corpus, config(), host) for host in hosts]
    batches = train_batches(corpus, config())
    for step in (0, 17, 29, 30, 39):
        check([slices[step] for slices in by_host], batches[step])
        check([loader.take_indices(batches[step], host) for host in hosts], batches[step])
    phase = Stage(32, 8)
    held_out_of = partial(loader.EvalBatches, corpus, phase, config().data, config().eval_rows)
    by_host, held_out = [held_out_of(host) for host in hosts], held_out_of()
    for *slices, batch in zip(*by_host, held_out, strict=True):
        check(slices, batch)


def test_a_fork_to_another_text_counts_from_its_own_step(corpus):
    run = config()
    stages = make_schedule(run).stages
    whole = train_batches(corpus, run)
    forked = loader.TrainBatches(corpus, stages, run.data, run.seed, read_before=ReadBefore(20))
    assert forked.progress(20)["sequences"] == 0
    for name, value in whole.progress(40).items():
        assert forked.progress(40)[name] == pytest.approx(value - whole.progress(20)[name])
    assert_same_arrays(forked[35], whole[35])
    # A fork of the fork reads on in that text.
    read = ReadBefore(20).until(25, stages)
    again = loader.TrainBatches(corpus, stages, run.data, run.seed, read_before=read)
    assert_same_arrays(again[26], forked[26])


def test_a_fork_to_another_text_does_not_begin_with_what_the_run_has_read(corpus):
    """As of a mixture whose weights change, most of which is the text of the run."""
    run = config()
    run.data.pairs, run.data.phases, run.data.batch_size, run.steps = "none", (), 8, 200
    stages = make_schedule(run).stages

    def blocks(steps, **read) -> set[bytes]:
        before = ReadBefore(**read)
        batches = loader.TrainBatches(corpus, stages, run.data, run.seed, read_before=before)
        return {row.tobytes() for step in steps for row in batches[step]["input_ids"]}

    per_epoch = 1 / train_batches(corpus, run).progress(1)["epoch"]
    count = int(per_epoch / 2)
    first, later = range(count), range(count, 2 * count)
    read = blocks(first)
    again = read & blocks(later, counted_from=count, shuffled_anew=count)
    assert len(again) < 0.8 * len(read)
    assert blocks(later, counted_from=count) == read  # as forks had it
    kept = ReadBefore(count, (), count).until(count + 5, stages)
    assert (kept.counted_from, kept.shuffled_anew) == (count + 5, count)


@pytest.mark.parametrize("pairs", ["none", "nsp"])
@pytest.mark.parametrize("size", [4, 16])
def test_a_fork_with_another_batch_size_continues_in_the_text(corpus, pairs, size):
    """Of full blocks each sequence of an epoch is read once, as without a fork."""
    run = config()
    run.data.pairs, run.data.phases, run.data.batch_size, run.steps = pairs, (), 8, 200
    whole = train_batches(corpus, run)
    forked = dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=size))
    stages = make_schedule(forked).stages
    read = NOTHING_READ.until(20, make_schedule(run).stages)
    batches = loader.TrainBatches(corpus, stages, forked.data, forked.seed, read_before=read)
    count = 8 * 32 // size  # steps with the sequences of 32 steps
    assert batches.progress(20) == whole.progress(20)
    assert batches.progress(20 + count) == pytest.approx(whole.progress(52))
    again = read.until(20 + count, stages)
    assert again.earlier == ((0, 32, 52 * 8),)
    last = loader.TrainBatches(
        corpus, make_schedule(run).stages, run.data, run.seed, read_before=again
    )
    assert last.progress(20 + count + 7) == pytest.approx(whole.progress(59))
    if pairs == "none":
        ids = [batches[step]["input_ids"] for step in range(20, 20 + count)]
        expected = [whole[step]["input_ids"] for step in range(20, 52)]
        np.testing.assert_array_equal(np.concatenate(ids), np.concatenate(expected))
        np.testing.assert_array_equal(last[20 + count]["input_ids"], whole[52]["input_ids"])


def test_a_fork_that_changes_nothing_has_the_batches_of_the_run(corpus):
    run = config()  # with a phase from step 30 on
    stages = make_schedule(run).stages
    whole = train_batches(corpus, run)
    for step in (12, 30, 34):
        read = NOTHING_READ.until(step, stages)
        forked = loader.TrainBatches(corpus, stages, run.data, run.seed, read_before=read)
        for later in range(step, 40):
            assert_same_arrays(forked[later], whole[later])
        assert forked.progress(40) == whole.progress(40)
