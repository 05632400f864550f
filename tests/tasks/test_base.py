"""Sequences and truncation, against Google's own loop; metrics, heads and plain values."""

import dataclasses
import datetime
import decimal

import numpy as np
import pytest
from helpers import FakeTokenizer, model_config, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.config import DataFiles, TaskConfig
from bert_jax.config.fields import TASKS
from bert_jax.config.settings import from_dict
from bert_jax.tasks import glue, make_task, task_class
from bert_jax.tasks.classification import Classification
from bert_jax.tasks.examples import Example, example_ids
from bert_jax.tasks.foreign import UnknownColumns
from bert_jax.tasks.question_answering import QuestionAnsweringConfig
from bert_jax.tasks.sequences import build_sequence, max_text_tokens, truncate

MODELS = {name: model_config(model_type=name) for name in ("bert", "roberta")}
TOKENIZER = FakeTokenizer()  # [CLS] is 2 and [SEP] 3
TOKENS = st.lists(st.integers(5, 99), max_size=30)


def google_truncate_seq_pair(tokens_a, tokens_b, max_length):
    while True:
        total_length = len(tokens_a) + len(tokens_b)
        if total_length <= max_length:
            break
        if len(tokens_a) > len(tokens_b):
            tokens_a.pop()
        else:
            tokens_b.pop()


@settings(deadline=None)
@given(TOKENS, TOKENS, st.integers(0, 70))
def test_pairs_are_truncated_as_google_does(first, second, room):
    expected = [list(first), list(second)]
    google_truncate_seq_pair(*expected, room)
    assert truncate([first, second], room) == expected


@settings(deadline=None)
@given(TOKENS, st.integers(0, 40))
def test_one_text_keeps_its_start(text, room):
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
def test_sequences_by_hand(name, texts, expected, second):
    sequence, second_start = build_sequence(texts, TOKENIZER, MODELS[name])
    assert sequence.tolist() == expected
    assert sequence.dtype == np.int32
    assert second_start == second


@settings(deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=2), st.sampled_from([*MODELS]), st.integers(8, 70))
def test_a_truncated_sequence_has_exactly_the_maximum_length(texts, name, max_length):
    truncated = truncate(texts, max_text_tokens(len(texts), MODELS[name], max_length))
    sequence, second = build_sequence(truncated, TOKENIZER, MODELS[name])
    if truncated == texts:
        assert len(sequence) <= max_length
    else:
        assert len(sequence) == max_length
    assert sequence[second:].tolist() == ([*truncated[1], 3] if len(truncated) == 2 else [])


TABLE_OF_TASKS = [
    (TaskConfig(labels=("a", "b", "c")), ["accuracy"], "pearson", 3),
    (TaskConfig("regression"), ["pearson", "spearman"], "accuracy", 1),
    (TaskConfig("token_classification", labels=("O", "B-X", "I-X")), ["f1"], "f2", 3),
    (TaskConfig("token_classification", labels=("N", "V")), ["accuracy"], "f1", 2),
    (TaskConfig("multiple_choice", labels=("0", "1", "2")), ["accuracy"], "f1", 1),
    (QuestionAnsweringConfig(), ["f1"], "best_f1", 2),
]


@pytest.mark.parametrize(("config", "metrics", "unknown", "outputs"), TABLE_OF_TASKS)
def test_metrics_and_heads(config, metrics, unknown, outputs):
    task = make_task(config)
    assert list(task.metrics) == metrics
    every = list(reversed(task.known_metrics))
    assert list(make_task(dataclasses.replace(config, metrics=tuple(every))).metrics) == every
    with refused("task.metrics has", unknown):
        make_task(dataclasses.replace(config, metrics=(unknown,)))
    head = task.model(MODELS["bert"], "mix")
    assert isinstance(head, task.model_class)
    assert (head.num_labels, head.probe) == (outputs, "mix")


def test_the_best_checkpoint_is_best_by_the_mean():
    task = Classification(TaskConfig(metrics=("accuracy", "f1")))
    assert task.mean_score({"accuracy": 0.5, "f1": 0.75, "matthews": 9.0}) == 0.625
    # A loss of any size decides between equal scores alone.
    losses = {"equal, lower": (0.5, 0.9e12), "equal": (0.5, 1e12), "worse": (0.499, 0.0)}
    ranks = [
        task.rank({"accuracy": score, "f1": score, "loss": loss}) for score, loss in losses.values()
    ]
    assert ranks == sorted(ranks, reverse=True)


def test_settings_of_version_0_2_0_are_read_by_each_kind():
    """Its config.json had the fields of every kind in each."""
    every = {"doc_stride": 64, "max_question": 32, "max_answer": 9, "n_best": 5, "teacher": ""}
    every |= {"with_unanswerable": True, "null_threshold": -1.5, "embedding": {"dense": 32}}
    for kind in TASKS:
        config = from_dict(TaskConfig, {"kind": kind, "labels": ["a"], **every}, "config.json")
        assert (type(config), config.kind) == (task_class(kind).settings, kind)
        read = dataclasses.asdict(config)
        for name in every.keys() & read.keys() - {"embedding"}:
            assert read[name] == every[name]
        assert read.get("embedding", {"dense": 32})["dense"] == 32
        later = {"kind", "glue", "labels", "metrics", "stride", "separator", "thresholds"}
        later.add("window_confidence")
        is_later = kind in ("reranker", "late_interaction", "sparse")
        assert is_later or read.keys() - later <= every.keys()


CLASSES = make_task(TaskConfig("classification", labels=("a", "b")))
NUMBERS = make_task(TaskConfig("regression"))
MNLI = make_task(glue.task("mnli"))
TAGS = make_task(TaskConfig("token_classification", labels=("O", "B-X")))
CHOICES = make_task(TaskConfig("multiple_choice", labels=("0", "1")))
ANSWERS = make_task(QuestionAnsweringConfig())
PAIR, FOUR = {"text": "a,b", "label": "y"}, {"text": "a,b,c,d", "label": "y"}
WORDS = {"text": "tokens", "label": "ner_tags"}
SWAG = {"context": "A", "start": "b", "choices": ("c", "d")}
ASKED = {"question": " Who? ", "context": "The fox and the dog."}
FOUND = {"text": ["fox", "dog"], "answer_start": [4, 16]}


@pytest.mark.parametrize(
    ("task", "value", "columns", "texts", "label"),
    [
        (CLASSES, "A fox", {}, ("A fox",), None),
        (CLASSES, ["A fox"], {}, ("A fox",), None),
        (CLASSES, ("A fox", "a dog"), {}, ("A fox", "a dog"), None),
        (CLASSES, {"sentence": "A fox", "label": "a", "other": 3}, {}, ("A fox",), "a"),
        (CLASSES, {"a": "A", "b": "B", "y": "b", "id": 7}, PAIR, ("A", "B"), "b"),
        (NUMBERS, {"sentence": "A fox", "label": 2.5}, {}, ("A fox",), 2.5),
        (MNLI, {"premise": "A", "hypothesis": "B"}, {}, ("A", "B"), None),
        (MNLI, {"premise": "x", "a": "A", "b": "B", "y": 2}, PAIR, ("A", "B"), "contradiction"),
        (TAGS, ["The", "fox"], {}, ("The", "fox"), None),
        (TAGS, {"sentence": ("The", "fox")}, {}, ("The", "fox"), None),
        (TAGS, {"tokens": ["a"], "ner_tags": ["O"]}, WORDS, ("a",), ("O",)),
        (CHOICES, SWAG, {}, ("A", "b", "c", "d"), None),
        (CHOICES, {"context": "A", "choices": ["c", "d"]}, {}, ("A", "", "c", "d"), None),
        (CHOICES, dict(zip("abcdy", "ABCD1", strict=True)), FOUR, ("A", "B", "C", "D"), "1"),
        (ANSWERS, tuple(ASKED.values()), {}, ("Who?", ASKED["context"]), None),
        (
            ANSWERS,
            {**ASKED, "id": 7, "answers": FOUND},
            {},
            ("Who?", ASKED["context"]),
            (("fox", 4), ("dog", 16)),
        ),
    ],
)
def test_examples_of_plain_values(task, value, columns, texts, label):
    example = task.example_from(value, 3, DataFiles(**columns) if columns else UnknownColumns())
    assert (example.where, example.texts, example.label) == ("examples[3]", texts, label)
    name = value.get("id") if isinstance(value, dict) else None
    assert example.id == (str(name) if name and task is ANSWERS else name)


@pytest.mark.parametrize(
    ("task", "value"),
    [
        *((CLASSES, value) for value in (3, [], ("a", "b", "c"), {}, b"ab", " ", ["a", 3])),
        (MNLI, {"a": "A", "b": "B"}),
        *((TAGS, value) for value in (3, [], "The fox", ["fox", ""], {}, {"sentence": "The fox"})),
        *((CHOICES, {**SWAG, "choices": value}) for value in (["a"], "ab", ["a", "b", "c"])),
        *((CHOICES, value) for value in ({**SWAG, "context": ""}, "The fox", {})),
        *(
            (ANSWERS, value)
            for value in (3, "Who?", ("Who?", "A fox.", "x"), {"question": "?"}, {})
        ),
    ],
)
def test_values_of_another_form_are_refused(task, value):
    with refused("examples[3]"):
        task.example_from(value, 3, DataFiles())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (7, 7),
        ("q1", "q1"),
        (3.0, 3),  # as pandas has whole numbers beside a missing one
        (None, None),
        (float("nan"), None),
        (datetime.date(2020, 1, 2), "2020-01-02"),
        (decimal.Decimal("1.50"), "1.50"),
    ],
)
def test_an_id_is_a_text_or_a_number(given, name):
    """So that a column of dates does not end a run when its predictions are written."""
    assert Example(given, "a.tsv:2", ("fox",), None).id == name


def test_a_number_names_no_example_whose_id_is_another():
    examples = [Example(name, "a:1", ("A",), None) for name in (1, None, None, "5", None)]
    assert example_ids(examples) == [1, None, 2, "5", 4]
    assert example_ids(examples, first=3) == [1, 4, None, "5", 7]
