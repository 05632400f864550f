"""Joining and cutting texts, against Google's own loop."""

import numpy as np
import pytest
from helpers import FakeTokenizer, model_config
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.config import TaskConfig
from bert_jax.errors import UserError
from bert_jax.tasks.base import build_sequence, choose_metrics, max_text_tokens, truncate
from bert_jax.tasks.classification import Classification

MODELS = {name: model_config(model_type=name) for name in ("bert", "roberta")}
TOKENIZER = FakeTokenizer()  # [CLS] is 2 and [SEP] 3
PIECES = st.lists(st.integers(5, 99), max_size=30)


def google_truncate_seq_pair(tokens_a, tokens_b, max_length):
    while True:
        total_length = len(tokens_a) + len(tokens_b)
        if total_length <= max_length:
            break
        if len(tokens_a) > len(tokens_b):
            tokens_a.pop()
        else:
            tokens_b.pop()


@given(PIECES, PIECES, st.integers(0, 70))
def test_pairs_are_cut_as_google_does(first, second, room):
    expected = [list(first), list(second)]
    google_truncate_seq_pair(*expected, room)
    assert truncate([first, second], room) == expected


@given(PIECES, st.integers(0, 40))
def test_one_text_keeps_its_beginning(text, room):
    assert truncate([text], room) == [text[:room]]


@pytest.mark.parametrize(
    ("name", "texts", "expected", "second"),
    [
        ("bert", [[7, 8]], [2, 7, 8, 3], 4),
        ("roberta", [[7, 8]], [2, 7, 8, 3], 4),
        ("bert", [[7, 8], [9]], [2, 7, 8, 3, 9, 3], 4),
        ("roberta", [[7, 8], [9]], [2, 7, 8, 3, 3, 9, 3], 5),
        ("bert", [[], []], [2, 3, 3], 2),
        ("roberta", [[], []], [2, 3, 3, 3], 3),
    ],
)
def test_join_by_hand(name, texts, expected, second):
    sequence, begin = build_sequence(texts, TOKENIZER, MODELS[name])
    assert sequence.tolist() == expected
    assert sequence.dtype == np.int32
    assert begin == second


@given(st.lists(PIECES, min_size=1, max_size=2), st.sampled_from([*MODELS]), st.integers(8, 70))
def test_a_cut_sequence_is_exactly_as_long_as_it_may_be(texts, name, max_length):
    cut = truncate(texts, max_text_tokens(len(texts), MODELS[name], max_length))
    sequence, second = build_sequence(cut, TOKENIZER, MODELS[name])
    if cut == texts:
        assert len(sequence) <= max_length
    else:
        assert len(sequence) == max_length
    assert sequence[second:].tolist() == ([*cut[1], 3] if len(cut) == 2 else [])


def test_metrics_that_are_asked_for():
    known = ("accuracy", "f1")
    assert list(choose_metrics((), ("accuracy",), known)) == ["accuracy"]
    assert list(choose_metrics(("f1", "accuracy"), ("accuracy",), known)) == ["f1", "accuracy"]
    with pytest.raises(UserError, match=r"^task.metrics has 'bleu'; this task has accuracy, f1$"):
        choose_metrics(("f1", "bleu"), ("accuracy",), known)


def test_the_best_checkpoint_is_best_by_the_mean():
    task = Classification(TaskConfig(metrics=("accuracy", "f1")))
    assert task.mean_score({"accuracy": 0.5, "f1": 0.75, "matthews": 9.0}) == 0.625
