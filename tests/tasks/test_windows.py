"""Texts longer than the model's positions: windows that have every token, one answer for all."""

import dataclasses

import numpy as np
import pytest
from helpers import model_config, refused, untrained
from hypothesis import given, settings
from hypothesis import strategies as st

import bert_jax
from bert_jax import FinetuneConfig, OptimizerConfig, TaskConfig
from bert_jax.config import DataFiles
from bert_jax.config.validation import validate_finetuning
from bert_jax.tasks import make_task
from bert_jax.tasks.examples import Example
from bert_jax.text.tokenizer import Tokenizer

POSITIONS = 32
MODEL = model_config(max_position_embeddings=POSITIONS)
WORDS = ["the", "a", "of", "reads"]


def features(tokenizer: Tokenizer, *texts: tuple[str, ...], max_length=200, stride=0, kind=""):
    task = make_task(TaskConfig(kind or "classification", labels=("a", "b"), stride=stride))
    examples = [Example(None, f"a.tsv:{i + 2}", each, "b") for i, each in enumerate(texts)]
    return task, task.features(examples, tokenizer, MODEL, max_length)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 150), st.integers(0, POSITIONS - 2), st.integers(40, 160))
def test_every_token_is_in_a_window_and_no_window_is_too_long(wordpiece, count, stride, longest):
    text = " ".join(np.random.default_rng(count).choice(["fox", "over", "lazy", "dog"], count))
    ids = list(wordpiece.encode([text])[0])
    _, found = features(wordpiece, (text,), max_length=longest, stride=stride)
    step, covered, end = stride or (POSITIONS - 2) // 2, [], 0
    for number, sequence in enumerate(found.sequences):
        assert len(sequence) <= POSITIONS
        assert (sequence[0], sequence[-1]) == (wordpiece.cls_id, wordpiece.sep_id)
        start = number * step
        covered += list(sequence[1 + end - start : -1]) if number else list(sequence[1:-1])
        end = start + len(sequence) - 2
    assert covered == ids[: longest - 2]
    assert found.notes == [(number, len(found)) for number in range(len(found))]
    assert found.labels == [1] * len(found)
    assert found.windowed == (len(found) > 1) == (min(count, longest - 2) > POSITIONS - 2)
    assert found.truncated == (count > longest - 2)


def test_the_answer_is_the_mean_over_the_windows_in_any_order(wordpiece):
    task, found = features(wordpiece, ("dog",), ("fox " * 70,), stride=20)
    assert found.example_indices == [0, 1, 1, 1]
    logits, before = np.random.default_rng(0).normal(size=(4, 2)), None
    for index in (3, 1, 2):
        before = task.collect(before, found, index, logits[index])
    np.testing.assert_array_equal(before, logits[1:])
    np.testing.assert_allclose(task.answer(before), logits[1:].mean(0))
    alone = task.collect(None, found, 0, logits[0])
    np.testing.assert_array_equal(task.answer(alone), logits[0])
    assert not np.shares_memory(alone, logits)


def test_the_first_confident_window_decides():
    task = make_task(TaskConfig(labels=("a", "b"), window_confidence=0.9))
    windows = np.array([[0.0, 1.0], [3.0, 0.0], [0.0, 9.0]])  # 0.73, 0.95, 0.9999
    np.testing.assert_array_equal(task.answer(windows), windows[1])
    np.testing.assert_array_equal(task.answer(windows[:1]), windows[0])
    np.testing.assert_array_equal(task.answer(windows[::2]), windows[2])
    for always_mean in (0.0, 1.0):
        task = make_task(TaskConfig(labels=("a", "b"), window_confidence=always_mean))
        np.testing.assert_allclose(task.answer(windows), [1.0, 10 / 3])


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("given", [0.0, 0.97, 1.0])
def test_whether_windows_decide_alone_is_chosen_by_the_score(is_first, given):
    """The first sure window has the label, or all together have it: by construction."""
    generator, examples, predictions = np.random.default_rng(0), [], []
    for index in range(300):
        windows = generator.normal(scale=0.5, size=(generator.integers(2, 6), 2))
        if is_first:  # a window that tells, then some of the contrary that tell more
            tells = generator.integers(2)
            at = generator.integers(len(windows))
            windows[at] = (9.0, 0.0) if tells == 0 else (0.0, 9.0)
            windows[at + 1 :] = (0.0, 12.0) if tells == 0 else (12.0, 0.0)
        else:
            tells = int(windows.mean(0).argmax())
        examples.append(Example(None, str(index), ("",), ("a", "b")[tells]))
        predictions.append(windows)
    task = make_task(TaskConfig(labels=("a", "b"), window_confidence=given))
    task.tune(examples, predictions, {})
    if given:
        assert task.config.window_confidence == given
    elif is_first:
        assert 0.5 < task.config.window_confidence < 1
        assert task.score(examples, predictions)["accuracy"] == 1
    else:
        assert task.config.window_confidence == 1
        assert task.score(examples, predictions)["accuracy"] == 1


def test_chance_alone_chooses_no_window():
    chosen = []
    for seed in range(20):
        generator = np.random.default_rng(seed)
        predictions = [generator.normal(size=(3, 2)) for _ in range(100)]
        labels = generator.choice(["a", "b"], 100)
        examples = [Example(None, "", ("",), str(label)) for label in labels]
        task = make_task(TaskConfig(labels=("a", "b")))
        task.tune(examples, predictions, {})
        chosen.append(task.config.window_confidence)
    assert chosen.count(1.0) >= 18


def test_numbers_are_means_too(wordpiece):
    task = make_task(TaskConfig("regression"))
    found = task.features([Example(None, "", ("fox " * 50,), 3.0)], wordpiece, MODEL, 200)
    before = None
    for index, value in enumerate((1.0, 2.0, 6.0)):
        before = task.collect(before, found, index, np.array([value]))
    assert len(found) == 3
    assert before == pytest.approx(3.0)


def test_pairs_and_strides_that_have_no_windows(wordpiece):
    features(wordpiece, ("fox", "dog"))
    with refused("a.tsv:2: a pair of texts has more tokens than the model's 32 positions"):
        features(wordpiece, ("fox " * 20, "dog " * 20))
    config = FinetuneConfig(model=MODEL, data=DataFiles(max_length=200))
    validate_finetuning(config)
    config.task.stride = POSITIONS - 1
    with refused("task.stride 31 exceeds the 30 tokens of a window"):
        validate_finetuning(config)
    unread = FinetuneConfig(model=MODEL, data=DataFiles(max_length=32))
    for name, value in (("stride", 8), ("window_confidence", 0.9)):
        unread.task = TaskConfig(**{name: value})
        with refused(f"task.{name} is of windows, which no text has: data.max_length 32 is not ab"):
            validate_finetuning(unread)
    tags = TaskConfig("token_classification", stride=14)  # has windows at any length
    tagging = FinetuneConfig(model=MODEL, data=DataFiles(max_length=16), task=tags)
    validate_finetuning(tagging)
    tags.stride = 15
    with refused("task.stride 15 exceeds the 14 tokens of a window"):
        validate_finetuning(tagging)
    choosing = dataclasses.replace(config, task=TaskConfig("multiple_choice"))
    with refused("data.max_length 200 exceeds model.max_position_embeddings 32"):
        validate_finetuning(choosing)
    choosing.data.max_length, choosing.task.stride = 32, 8
    with refused("task.stride has no effect on multiple_choice; leave it out"):
        validate_finetuning(choosing)
    numbers = FinetuneConfig(model=MODEL, task=TaskConfig("regression", window_confidence=0.9))
    with refused("task.window_confidence is for the windows of a text in classification, not regr"):
        validate_finetuning(numbers)


@pytest.mark.parametrize("stride", [0, 13, 30])
def test_the_vector_of_a_text_is_the_mean_over_its_windows(tiny_bert, stride):
    bert = untrained(tiny_bert, "embedding")
    task = dataclasses.replace(bert.task, stride=stride)
    bert = dataclasses.replace(bert, task=task, data=dataclasses.replace(bert.data, max_length=80))
    generator = np.random.default_rng(0)
    words = ["the", "reads", "head", "large"]  # each a token
    texts = [" ".join(generator.choice(words, n)) for n in (90, 3, 40, 25)]
    with pytest.warns(UserWarning, match="1 of 4 texts are longer than the model's 80 tokens"):
        vectors = bert.encode(texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    short = dataclasses.replace(bert, data=dataclasses.replace(bert.data, max_length=POSITIONS))
    for text, vector in zip(texts, vectors, strict=True):
        words = text.split()[:78]
        assert len(bert.tokenizer.encode([text])[0]) == len(text.split())
        starts = range(0, max(1, len(words) - 30 + (stride or 15)), stride or 15)
        parts = [" ".join(words[start : start + 30]) for start in starts]
        mean = short.encode(parts).mean(0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-6)
    # Fine-tuning's own evaluation has the same vectors.
    pairs = [(texts[0], texts[1]), (texts[2], texts[3])]
    actual = [each["similarity"] for each in bert.predict(pairs)]
    expected = [float(vectors[0] @ vectors[1]), float(vectors[2] @ vectors[3])]
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    (query,) = (
        make_task(task)
        .features([Example(None, "", (texts[1], texts[0]), 1.0)], bert.tokenizer, bert.config, 80)
        .notes[-1:]
    )
    assert query[0] == 0
    assert query[1] < 1


def test_a_word_beyond_the_positions_is_learned(shallow_bert, tmp_path, capsys):
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(160):
        label = ("river", "token")[generator.integers(2)]
        words = [*generator.choice(WORDS, 30), label, *generator.choice(WORDS, 4)]
        rows.append({"sentence": " ".join(words), "label": label})
    config = FinetuneConfig(
        epochs=12.0,
        data=DataFiles(max_length=96, batch_size=16),
        optimizer=OptimizerConfig(name="adamw", learning_rate=0.02, warmup_fraction=0.1),
    )
    assert shallow_bert.config.max_position_embeddings == POSITIONS
    given = {"train": rows[40:], "eval": rows[:40]}
    result = bert_jax.finetune(config, shallow_bert, tmp_path / "run", **given)
    printed = capsys.readouterr().out
    assert "windows    120 texts of more than 32 tokens, read in windows" in printed
    assert result.scores["eval"]["accuracy"] > 0.8
    bert = bert_jax.load(tmp_path / "run")
    texts = [row["sentence"] for row in rows[:40]]
    labels = [each["label"] for each in bert.predict(texts)]
    right = np.mean([a == row["label"] for a, row in zip(labels, rows[:40], strict=True)])
    assert right == pytest.approx(result.scores["eval"]["accuracy"])
