"""Mixtures: the shares, the epochs and the order of each text, whatever reads them and when."""

import dataclasses
import zlib
from fractions import Fraction

import numpy as np
import pytest
from helpers import FakeTokenizer, train_batches
from stores import check_pure, make_store

from bert_jax.batches import loader
from bert_jax.batches.mixed_sequences import MixedSequences, part_seeds
from bert_jax.config import DataConfig, Phase, TrainConfig
from bert_jax.config.schedule import Stage
from bert_jax.text.store import Corpus, TokenStore

KINDS = {
    "nsp": {"pairs": "nsp"},
    "packed": {"pairs": "sop", "packing": True},
    "blocks": {"pairs": "none"},
}
APART = 1_000_000  # between the token ids of the texts
LENGTH, SIZE = 32, 48


def texts(weights, documents=(60, 25, 9, 40, 33)) -> Corpus:
    parts = []
    for number, weight in enumerate(weights):
        train, held_out = (make_store(documents[number], seed) for seed in (number, 90 + number))
        train = TokenStore(train.tokens + number * APART, train.sentences, train.documents)
        corpus = Corpus(FakeTokenizer(), train, held_out, name=f"text{number}", weight=weight)
        parts.append(corpus)
    return dataclasses.replace(parts[0], mixed=tuple(parts))


def run_config(kind: str, **changes) -> TrainConfig:
    data = DataConfig(**KINDS[kind], max_length=LENGTH, batch_size=SIZE)
    return TrainConfig(**{"steps": 2_000_000, "data": data, "seed": 5, **changes})


def owners(batch) -> np.ndarray:
    """The text of each sequence, by its first token."""
    return batch["input_ids"][:, 1] // APART


@pytest.mark.parametrize(
    "weights",
    [(0.7, 0.3), (0.5, *[0.1] * 5), (1e-6, 1 - 1e-6), (0.01,) * 100, (1 / 3,) * 3, (1.0,)],
)
def test_shares_are_those_of_the_weights_at_every_length(weights):
    part = loader.make_sequences(make_store(3), FakeTokenizer(), DataConfig(pairs="none"), 16, 0)
    for seed in range(3):
        mixed = MixedSequences([part] * len(weights), weights, seed)
        before = np.zeros(len(weights), int)
        for number in (0, 1, 2, 3, 10, 1000, 10**6, 10**9, 10**12):
            counts = np.array(mixed.counts(number))
            assert counts.sum() == number
            assert (counts >= before).all()
            for count, weight in zip(counts.tolist(), weights, strict=True):
                rounding = number / 2**39  # of the shares
                exact = Fraction(weight) * number
                assert abs(count - exact) < max(len(weights) - 1, 1e-9) + rounding
            before = counts
            owner = mixed._owners(number, 500)
            after = np.bincount(owner, minlength=len(weights)) + counts
            assert after.tolist() == mixed.counts(number + 500)


def test_a_rare_text_begins_anywhere():
    """On average over seeds it has its share from the start: a mean of 0.3 of 1000 runs."""
    part = loader.make_sequences(make_store(3), FakeTokenizer(), DataConfig(pairs="none"), 16, 0)
    rare = [MixedSequences([part] * 2, (0.003, 0.997), seed).counts(100)[0] for seed in range(1000)]
    assert {*rare} == {0, 1}
    assert np.mean(rare) == pytest.approx(0.3, abs=0.06)  # four standard deviations


@pytest.mark.parametrize("kind", KINDS)
def test_each_text_has_the_sequences_that_it_has_alone(kind):
    """Those of a run on it by itself, in batches of 1,024, one after another: its own epochs."""
    config, weights = run_config(kind), (0.6, 0.3, 0.1)
    corpus = texts(weights)
    batches = train_batches(corpus, config)
    steps = [batches[step] for step in range(90)]
    owner = np.concatenate([owners(batch) for batch in steps])
    assert {batch["index"].tolist() == list(range(SIZE)) for batch in steps} == {True}
    per_epoch = 0
    for number, (part, seed) in enumerate(
        zip(corpus.mixed, part_seeds(config.seed * 1000, 3), strict=True)
    ):
        alone = loader.make_sequences(part.train, part.tokenizer, config.data, LENGTH, seed)
        count = int((owner == number).sum())
        per_epoch += alone.sequences_per_epoch
        expected = [alone.batch(i, 1024) for i in range(-(-count // 1024))]
        for name in {*steps[0]} - {"index"}:
            found = np.concatenate([batch[name] for batch in steps])[owner == number]
            np.testing.assert_array_equal(
                found, np.concatenate([batch[name] for batch in expected])[:count]
            )
        _, sequences, epochs = batches.progress_of_parts(90)[number]
        assert sequences == count
        assert epochs == pytest.approx(count / alone.sequences_per_epoch)
        assert batches.progress(90)[f"epoch/text{number}"] == epochs
        assert epochs > 1
    progress = batches.progress(90)
    assert progress["sequences"] == 90 * SIZE
    assert progress["epoch"] == pytest.approx(90 * SIZE / per_epoch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_depends_on_its_number_alone(kind):
    corpus, data = texts((0.7, 0.3)), run_config(kind).data

    def make(seed: int) -> MixedSequences:
        parts = [
            loader.make_sequences(part.train, part.tokenizer, data, LENGTH, part_seed)
            for part, part_seed in zip(corpus.mixed, part_seeds(seed, 2), strict=True)
        ]
        return MixedSequences(parts, (0.7, 0.3), seed)

    check_pure(make, indices=(0, 1, 40, 10_000))
    whole = make(0).batch(0, 4 * SIZE)  # nor on the size of batches
    quarters = [make(0).batch(number, SIZE) for number in range(4)]
    for name in {*whole} - {"index"}:
        np.testing.assert_array_equal(whole[name], np.concatenate([q[name] for q in quarters]))
    scattered = np.array([40, 3, 41, 0])  # for a mesh whose hosts are not in order
    for name, value in make(0).batch(1, SIZE, scattered).items():
        np.testing.assert_array_equal(value, quarters[1][name][scattered])


def test_texts_of_one_size_are_not_shuffled_alike():
    corpus = texts((0.5, 0.5), documents=(30, 30))
    one = corpus.mixed[0]
    corpus = dataclasses.replace(corpus, mixed=(one, dataclasses.replace(one, name="again")))
    ids = train_batches(corpus, run_config("blocks"))[0]["input_ids"]
    assert len(np.unique(ids[:, 1])) > 0.8 * SIZE


def test_the_mixture_is_the_same_in_every_phase():
    config = run_config("nsp", steps=40)
    config.data.phases = (Phase(start=0.5, max_length=64, batch_size=20),)
    batches = train_batches(texts((0.75, 0.25)), config)
    for step, size in ((0, 48), (19, 48), (20, 20), (39, 20)):
        assert np.bincount(owners(batches[step])).tolist() == [0.75 * size, 0.25 * size]
    for _, sequences, _ in batches.progress_of_parts(40)[1:]:
        assert sequences == pytest.approx(0.25 * (20 * 48 + 20 * 20), abs=2)
    assert not (batches[20]["input_ids"][:, 1] == batches[0]["input_ids"][:20, 1]).all()


def test_held_out_text_of_each_is_evaluated_alone():
    corpus = texts((0.9, 0.1))
    for part in corpus.parts:
        batches = loader.EvalBatches(part, Stage(LENGTH, 16), run_config("nsp").data, 50)
        assert sum((batch["attention_mask"][:, 0] > 0).sum() for batch in batches) == 50


def test_the_batches_are_those_of_earlier_versions():
    """A run on a mixture resumes on the sequences that it would have had."""
    batches = train_batches(texts((0.7, 0.3)), run_config("blocks"))
    found = [zlib.crc32(np.ascontiguousarray(batches[i]["input_ids"]).tobytes()) for i in (0, 17)]
    assert found == [1963425261, 1648228050]
