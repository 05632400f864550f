"""Masks: exact counts, the 80/10/10 split, what is never chosen, whole words, keys."""

import dataclasses
import random

import jax
import numpy as np
import pytest
from helpers import LENGTH, PREDICTIONS, SPECIAL, VOCAB, batch, masking
from scipy import stats

from bert_jax.config import DataConfig, TokenizerConfig
from bert_jax.config.schedule import Stage, default_predictions
from bert_jax.objectives.masking import make_masking
from bert_jax.text import tokenizer_training

MASK_ID = 4


# Tokens that continue a word: half of the vocabulary.
CONTINUES = np.arange(VOCAB) >= 50


def draw(rows, *, seed: int = 0, continues: np.ndarray | None = None):
    """Return the masked ids of sequences, and their predictions."""
    names = ("input_ids", "attention_mask", "index")
    mask = jax.jit(masking(continues))
    return jax.device_get(mask(jax.random.key(seed), *(rows[name] for name in names)))


def rows_of(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return sequences of token ids, of which 0 is padding."""
    index = np.arange(len(ids), dtype=np.int32)
    return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int32), "index": index}


@pytest.fixture(scope="module")
def drawn():
    """Many sequences, as (batch, masked ids, predictions)."""
    rows = batch(2000)
    return rows, *draw(rows)


def test_counts_are_those_of_the_original(drawn):
    rows, _, predictions = drawn
    lengths = rows["attention_mask"].sum(1)
    expected = [min(PREDICTIONS, max(1, round(0.15 * int(n)))) for n in lengths]
    np.testing.assert_array_equal(predictions.weights.sum(1), expected)


def test_chosen_positions_are_distinct_tokens_of_the_sequence(drawn):
    rows, masked, predictions = drawn
    for index in range(len(masked)):
        ids, valid = rows["input_ids"][index], predictions.weights[index] > 0
        chosen = predictions.positions[index][valid]
        assert len(set(chosen.tolist())) == len(chosen)
        assert rows["attention_mask"][index][chosen].all()
        assert not np.isin(ids[chosen], SPECIAL).any()
        np.testing.assert_array_equal(predictions.labels[index][valid], ids[chosen])
        untouched = np.setdiff1d(np.arange(len(ids)), chosen)
        np.testing.assert_array_equal(masked[index][untouched], ids[untouched])


def test_every_position_is_equally_likely(drawn):
    rows, _, predictions = drawn
    full = rows["attention_mask"].sum(1) > 25
    candidate = ((rows["attention_mask"] > 0) & ~np.isin(rows["input_ids"], SPECIAL))[full]
    chosen = np.zeros_like(candidate)
    for row, (positions, weights) in enumerate(
        zip(predictions.positions[full], predictions.weights[full], strict=True)
    ):
        chosen[row, positions[weights > 0]] = True
    expected = (candidate * (chosen.sum(1) / candidate.sum(1))[:, None]).sum(0)
    found = chosen.sum(0)
    z = (found - expected)[expected > 50] / np.sqrt(expected[expected > 50])
    assert np.abs(z).max() < 4


def test_80_10_10(drawn):
    rows, masked, predictions = drawn
    valid = predictions.weights > 0
    before = np.take_along_axis(rows["input_ids"], predictions.positions, 1)[valid]
    after = np.take_along_axis(masked, predictions.positions, 1)[valid]
    count = valid.sum()
    is_mask, is_same = after == MASK_ID, after == before
    # A random token is [MASK] or the token itself once in VOCAB.
    for found, share in ((is_mask, 0.8 + 0.1 / VOCAB), (is_same, 0.1 + 0.1 / VOCAB)):
        assert abs(found.sum() - share * count) < 4 * np.sqrt(count * share * (1 - share))
    random = after[~is_mask & ~is_same]
    counts = np.bincount(random, minlength=VOCAB)
    assert counts[list(SPECIAL[:3])].all()  # of the whole vocabulary, as in the original
    assert stats.chisquare(np.delete(counts, MASK_ID)).pvalue > 1e-3


def test_a_sequence_of_padding_or_special_tokens_predicts_nothing():
    _, predictions = draw(rows_of(np.array([[0] * 32, [2, 3, 3, *[0] * 29]], np.int32)))
    assert predictions.weights.sum() == 0


def test_masks_follow_the_index_and_the_key():
    rows = batch(16)
    (whole, _), (other, _) = draw(rows), draw(rows, seed=1)
    order = np.random.default_rng(0).permutation(16)[:8]
    part, _ = draw({name: value[order] for name, value in rows.items()})
    np.testing.assert_array_equal(part, whole[order])
    several = rows["attention_mask"].sum(1) > 10  # of one prediction two keys may choose the same
    assert several.sum() >= 10
    assert (other != whole).any(axis=1)[several].all()


def test_whole_words():
    """All tokens of a word that is not divided are chosen or none, and no more than the count."""
    rows = batch(1000)
    _, predictions = draw(rows, continues=CONTINUES)
    lengths = rows["attention_mask"].sum(1)
    limit = np.array([min(PREDICTIONS, max(1, round(0.15 * int(n)))) for n in lengths])
    taken = predictions.weights.sum(1)
    assert (taken <= limit).all()
    assert taken.sum() > 0.9 * limit.sum()
    for row in range(1000):
        ids = rows["input_ids"][row]
        chosen = set(predictions.positions[row][predictions.weights[row] > 0].tolist())
        for word in words_of(ids[: lengths[row]]):
            assert len(chosen & word) in (0, len(word))


def words_of(ids: np.ndarray) -> list[set[int]]:
    """The positions of each word that could be chosen whole."""
    words = []
    for place, token in enumerate(ids):
        if token in SPECIAL:
            continue
        if words and words[-1][-1] == place - 1 and CONTINUES[token]:
            words[-1].append(place)
        else:
            words.append([place])
    return [set(word) for word in words if len(word) <= round(0.15 * LENGTH)]


def sequences_of(words: list[int], length: int, rows: int) -> np.ndarray:
    """Sequences [CLS] WORDS [SEP] with words of these sizes, up to the length."""
    tokens = [token for size in words for token in (10, *[60] * (size - 1))]
    return np.tile(np.array([2, *tokens[: length - 2], 3], np.int32), (rows, 1))


def chosen_share(ids: np.ndarray, share: float) -> tuple[np.ndarray, int]:
    """How often each position is predicted, and the largest number of each sequence's."""
    rows, length = ids.shape
    counts = [max(1, round(share * n)) for n in range(length + 1)]
    mask = dataclasses.replace(
        masking(CONTINUES, length), counts=np.array(counts), max_predictions=counts[-1]
    )
    index = np.arange(rows, dtype=np.int32)
    found = jax.jit(mask)(jax.random.key(1), ids, np.ones_like(ids), index)[1]
    weights = np.asarray(found.weights)
    np.testing.assert_array_equal(weights.sum(1), counts[-1])
    positions = np.asarray(found.positions)[weights > 0]
    return np.bincount(positions, minlength=length) / rows, counts[-1]


@pytest.mark.parametrize("share", [0.1, 0.15, 0.4])
@pytest.mark.parametrize("length", [16, 32, 64, 256])
def test_tokens_of_a_divided_word_are_equally_likely(length, share):
    """Also the last ones, where the word is no whole number of parts."""
    rows = 4000
    chosen, count = chosen_share(sequences_of([length], length, rows), share)
    expected = count / (length - 2)
    z = (chosen[1:-1] - expected) / np.sqrt(expected * (1 - expected) / rows)
    assert np.abs(z).max() < 4.5
    assert chosen[0] == chosen[-1] == 0


def test_a_divided_word_among_others_is_masked_as_often_as_they_are():
    chosen, _ = chosen_share(sequences_of([1, 2, 3, 41, 2, 1, 30, 46, 1, 2], 128, 4000), 0.15)
    assert 0.13 < chosen[1:-1].min() < chosen[1:-1].max() < 0.17


@pytest.mark.parametrize("text", ["ACGT" * 200, "ความคิดเห็น" * 40, "吾輩は猫である。" * 40])
@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece", "byte_bpe"])
def test_text_without_spaces_has_words(text, kind):
    """As many tokens of it are predicted as of other text, and not the same few."""
    config = TokenizerConfig(kind=kind, model_type="bpe" if kind == "sentencepiece" else "unigram")
    generator = random.Random(0)
    lines = ["".join(generator.choices(text, k=600)) for _ in range(50)]
    tokenizer = tokenizer_training.train(lines, config, 300)
    stage = Stage(64, 8, max_predictions=10)
    mask = make_masking(tokenizer, stage, DataConfig(whole_word_masking=True))
    ids = np.concatenate(tokenizer.encode(lines))
    count = len(ids) // 62
    blocks = np.full((count, 64), tokenizer.sep_id, np.int32)
    blocks[:, 0], blocks[:, 1:-1] = tokenizer.cls_id, ids[: count * 62].reshape(count, 62)
    _, predictions = jax.jit(mask)(
        jax.random.key(0), blocks, np.ones_like(blocks), np.arange(count, dtype=np.int32)
    )
    assert predictions.weights.sum() > 0.8 * 10 * count
    places = np.bincount(np.asarray(predictions.positions)[predictions.weights > 0], minlength=64)
    assert places[1:-1].all()


def test_whole_words_are_equally_likely():
    """A word's chance does not depend on its position: words of two tokens are chosen equally."""
    ids = np.tile(np.array([2, *[10, 60] * 14, 3, 0, 0], np.int32), (4000, 1))
    _, predictions = draw(rows_of(ids), continues=CONTINUES)
    chosen = predictions.positions[predictions.weights > 0]
    counts = np.bincount(chosen, minlength=32)[1:29:2]
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("share", [0.05, 0.15, 0.3])
@pytest.mark.parametrize("length", [8, 16, 22, 32])
def test_words_of_any_size_are_masked_in_full_sequences(length, share):
    """Also where the largest count is rounded up, or set, and a full sequence has fewer."""
    sizes = np.arange(1, length - 1)
    ids = np.full((len(sizes), length), 3, np.int32)
    ids[:, 0] = 2
    for row, size in zip(ids, sizes, strict=True):
        words = (length - 2) // size
        row[1 : 1 + words * size] = np.tile([10, *[60] * (size - 1)], words)
    rounded_up = default_predictions(length, share)
    for most in (rounded_up, rounded_up + 3):
        counts = [min(most, max(1, round(share * n))) for n in range(length + 1)]
        mask = dataclasses.replace(
            masking(CONTINUES, length), counts=np.array(counts), max_predictions=most
        )
        found = jax.jit(mask)(jax.random.key(0), ids, np.ones_like(ids), np.arange(len(ids)))[1]
        chosen = np.asarray(found.weights.sum(1))
        assert chosen.min() > 0
        assert chosen.max() <= counts[-1]
