"""Classification and regression: scores against plain definitions, examples, predictions."""

import dataclasses
import itertools
import json
import math
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from helpers import model_config, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.batches.buckets import NO_LABEL, Features
from bert_jax.config import DataFiles, TaskConfig
from bert_jax.tasks.classification import Classification, Regression, correlations
from bert_jax.tasks.datasets import read_examples
from bert_jax.tasks.examples import Example

ALL = ("accuracy", "f1", "matthews")
MODEL = model_config()


def classes(*labels, **fields) -> Classification:
    return Classification(TaskConfig(labels=labels, **fields))


def numbers(**fields) -> Regression:
    return Regression(TaskConfig("regression", **fields))


def labelled(*labels) -> list[Example]:
    return [Example(None, "a.tsv:2", ("fox",), label) for label in labels]


def read(path, task=None, *, is_labelled=True, **fields):
    task, data = task or classes(), DataFiles(**fields)
    return read_examples(task, str(path), data, labelled=is_labelled)


def logits_of(number, count, probability=0.9):
    """Logits by which a class has a probability, and the others share the rest."""
    probabilities = np.full(count, (1 - probability) / max(1, count - 1) + 1e-30)
    probabilities[number] = probability
    return np.log(probabilities)


def write(task, examples, predictions):
    files = task.files(examples, predictions)
    return [json.loads(line) for line in files[".jsonl"].splitlines()]


def f1_of(correct, predicted, actual):
    return 2 * correct / (predicted + actual) if predicted + actual else 0.0


def pearson(a, b):
    a, b = a - a.mean(), b - b.mean()
    return (a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum())


def expected_scores(actual, predicted, count):
    """By indicators of each class: Matthews's correlation is Gorodkin's, over all of them."""
    actual, predicted = np.eye(count)[actual], np.eye(count)[predicted]
    f1 = [
        f1_of((actual[:, c] * predicted[:, c]).sum(), predicted[:, c].sum(), actual[:, c].sum())
        for c in range(count)
    ]

    there = actual.any(0) | predicted.any(0)

    def covariance(x, y):
        return sum(np.cov(x[:, c], y[:, c], bias=True)[0, 1] for c in range(count))

    spread = math.sqrt(covariance(actual, actual) * covariance(predicted, predicted))
    return {
        "accuracy": (actual * predicted).sum(1).mean(),
        # Of more than two classes, the mean of those that there are: not of 0 of 0 of 0.
        "f1": f1[1]
        if count == 2
        else np.mean([f for f, is_there in zip(f1, there, strict=True) if is_there]),
        "matthews": covariance(actual, predicted) / spread if spread > 1e-12 else 0.0,
    }


@st.composite
def class_predictions(draw):
    count = draw(st.integers(2, 5))
    numbers = st.lists(st.integers(0, count - 1), min_size=1, max_size=12)
    actual = draw(numbers)
    size = len(actual)
    predicted = draw(st.lists(st.integers(0, count - 1), min_size=size, max_size=size))
    return count, actual, predicted


@settings(deadline=None)
@given(class_predictions())
def test_scores_of_classes(drawn):
    count, actual, predicted = drawn
    names = "abcde"[:count]
    examples = labelled(*(names[number] for number in actual))
    scores = classes(*names).score(examples, [logits_of(number, count) for number in predicted])
    assert scores == pytest.approx(expected_scores(actual, predicted, count), abs=1e-12)


@pytest.mark.parametrize("metrics", [(), *itertools.combinations(ALL, 1), ALL])
def test_the_best_constant_prediction(metrics):
    for names, labels in (("ab", "aab"), ("ab", "bbb"), ("abc", "abccb"), ("ab", "aaa")):
        task = classes(*names, metrics=metrics)
        each = [
            expected_scores([names.index(x) for x in labels], [c] * len(labels), len(names))
            for c in range(len(names))
        ]
        best = max(np.mean([scores[name] for name in metrics or ("accuracy",)]) for scores in each)
        assert task.constant_score(labelled(*labels)) == pytest.approx(best)


def test_a_prediction_has_its_probability():
    task, predictions = classes("a", "b", "c"), [None] * 2
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    features = Features(notes=[(0, 1)] * 2)
    predictions[1] = task.collect(None, features, 0, logits)
    predictions[0] = task.collect(None, features, 1, np.array([1000.0, -1000.0, 0.0], np.float32))
    softmax = np.exp(logits) / np.exp(logits).sum()
    assert task.to_json(labelled("a")[0], predictions[1]) == {
        "label": "b",
        "probability": pytest.approx(softmax[1], rel=1e-6),
        "probabilities": pytest.approx(dict(zip("abc", softmax.tolist(), strict=True)), rel=1e-6),
    }
    assert task.to_json(labelled("a")[0], predictions[0])["probabilities"] == {
        "a": 1,
        "b": 0,
        "c": 0,
    }


def test_predictions_of_classes_as_json_lines():
    examples = [
        Example("x", "a:1", ("fox",), "a"),
        Example(None, "a:2", ("fox",), None),
        Example(0, "a:3", ("fox",), "日本"),
    ]
    predictions = [logits_of(0, 2, 0.75), logits_of(1, 2, 2 / 3), logits_of(0, 2, 1.0)]
    assert write(classes("a", "日本"), examples, predictions) == [
        {"id": "x", "prediction": "a", "probability": 0.75, "label": "a"},
        {"id": 1, "prediction": "日本", "probability": 0.666667},
        {"id": 0, "prediction": "a", "probability": 1.0, "label": "日本"},
    ]


def test_the_number_of_an_example_is_no_id_that_another_has():
    examples = [Example(name, "a:1", ("fox",), None) for name in ("1", None, None)]
    lines = write(classes("a", "b"), examples, [logits_of(0, 2, 0.75)] * 3)
    assert [line["id"] for line in lines] == ["1", None, 2]


@pytest.mark.parametrize(
    "names", [[f"class {n}" for n in range(31)], ["$x^$", "1_2"], ["a b " * 30, "c"]]
)
def test_the_confusion_matrix_is_drawn(tmp_path, names):
    examples = labelled(names[0], names[1], names[1])
    predictions = [logits_of(number, len(names)) for number in (0, 0, 1)]
    classes(*names).draw(tmp_path / "picture", examples, predictions)
    picture = (tmp_path / "picture").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert b"IEND" in picture[-12:]


def test_the_confusion_matrix_counts_the_examples_of_a_class(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    monkeypatch.setattr("bert_jax.tasks.classification.save_figure", lambda f, _: saved.append(f))
    examples = labelled("a", "b", "b")
    classes("a", "b", "none").draw(tmp_path / "x", examples, [logits_of(i, 3) for i in (0, 0, 1)])
    names = [label.get_text() for label in saved[0].axes[0].get_yticklabels()]
    assert names == ["a (1)", "b (2)", "none (0)"]


def test_the_confusion_matrix_of_many_classes_has_a_bounded_size(tmp_path):
    names = [f"class {number}" for number in range(300)]
    examples = [Example(None, "", ("fox",), name) for name in names]
    classes(*names).draw(tmp_path / "many", examples, list(np.eye(300)))
    header = (tmp_path / "many").read_bytes()[16:24]
    assert all(int.from_bytes(header[i : i + 4], "big") < 5000 for i in (0, 4))  # pixels


def test_numbers_are_names():
    """Those that are whole are named as such, also where pandas made them floats."""
    half, cents = Decimal("1.5"), Decimal("1.50")
    for label, name in ((1, "1"), (1.0, "1"), (1.5, "1.5"), (-2e-7, "-2e-07"), (half, "1.5")):
        assert classes().read_label(label, "here") == name
    assert classes().read_label(cents, "here") == "1.50"  # as pandas writes it to a .csv
    for label in (math.nan, math.inf, Decimal("NaN"), Decimal("sNaN"), Decimal("-Infinity")):
        with refused("the label ", "is no name; give a text or a number"):
            classes().read_label(label, "here")


def test_letters_that_the_font_lacks_are_drawn_without_a_warning(tmp_path, recwarn):
    examples = labelled("हिन्दी", "中文")
    task, predictions = classes("हिन्दी", "中文"), [logits_of(n, 2) for n in (0, 1)]
    task.draw(tmp_path / "picture", examples, predictions)
    assert not [each for each in recwarn if "Glyph" in str(each.message)]


PAIRS = st.lists(
    st.tuples(st.integers(-8, 8), st.integers(-8, 8)).map(lambda pair: (pair[0] / 4, pair[1] / 4)),
    min_size=1,
    max_size=12,
)


def ranks(values):
    """Return the rank of each value, the mean rank of equal ones."""
    return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])


@settings(deadline=None)
@given(PAIRS)
def test_scores_of_numbers(pairs):
    actual, predicted = np.array(pairs).T
    scores = numbers().score(labelled(*actual.tolist()), predicted.tolist())
    assert scores["mse"] == pytest.approx(np.mean((actual - predicted) ** 2))
    if len(set(actual)) == 1 or len(set(predicted)) == 1:
        assert (scores["pearson"], scores["spearman"]) == (0.0, 0.0)
    else:
        assert scores["pearson"] == pytest.approx(pearson(actual, predicted), abs=1e-9)
        expected = pearson(ranks(actual), ranks(predicted))
        assert scores["spearman"] == pytest.approx(expected, abs=1e-9)


def test_predictions_that_differ_by_rounding_are_constant():
    actual, rounding = np.array([1.0, 2.0, 3.0]), np.array([-3e-6, 0.0, 3e-6])
    assert set(correlations(actual, 3.7 + rounding).values()) == {0.0}
    assert np.isnan(correlations(actual, actual * [1, 1, np.nan])["pearson"])
    found = correlations(1000 + 1e-3 * actual, 1e6 + 4 * actual)
    assert found == pytest.approx({"pearson": 1.0, "spearman": 1.0})


def test_numbers():
    task, predictions = numbers(), [None]
    assert list(task.metrics) == ["pearson", "spearman"]
    assert task.constant_score(labelled(1.0, 2.0)) == 0.0
    assert task.example_labels(labelled(1.0)[0]) == ()
    predictions[0] = task.collect(None, Features(notes=[(0, 1)]), 0, np.float32([2.5]))
    examples = [Example(None, "a:1", ("fox",), 3.0), Example("x", "a:2", ("fox",), None)]
    assert task.to_json(examples[0], predictions[0]) == {"value": 2.5}
    assert write(task, examples, [predictions[0], 1.0]) == [
        {"id": 0, "prediction": 2.5, "label": 3.0},
        {"id": "x", "prediction": 1.0},
    ]


def test_tables(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('sentence\tlabel\nA "fox\tyes\nA dog\t1\n')
    assert read(path) == [
        Example(None, f"{path}:2", ('A "fox',), "yes"),
        Example(None, f"{path}:3", ("A dog",), "1"),
    ]
    path = tmp_path / "a.jsonl"
    rows = [
        {"id": 7, "a": "fox", "b": "dog", "y": 0},
        {"a": "fox", "b": "dog", "y": "x"},
        {"a": "fox", "b": "dog", "y": None},
        {"a": "fox", "b": "dog"},
        {"a": "fox", "b": "dog", "y": ""},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    examples = read(path, text="a, b", label="y", is_labelled=False)
    assert [example.label for example in examples] == ["0", "x", None, None, None]
    assert {example.texts for example in examples} == {("fox", "dog")}
    assert [example.id for example in examples] == [7, None, None, None, None]
    path.write_text('{"sentence": "A", "label": 2}\n{"sentence": "B", "label": "-1.5e0"}')
    assert [example.label for example in read(path, numbers())] == [2.0, -1.5]


@pytest.mark.parity
def test_true_and_false_are_the_same_classes_in_each_form(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = [{"sentence": "fox", "label": True}, {"sentence": "dog", "label": False}]
    table = pandas.DataFrame(rows)
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    sources = [str(tmp_path / "a.csv"), str(tmp_path / "a.jsonl"), table, rows]
    for source in sources:
        examples = read_examples(classes(), source, DataFiles(), labelled=True)
        assert [example.label for example in examples] == ["True", "False"]


@pytest.mark.parametrize(
    ("row", "fields", "key_words"),
    [
        ({"sentence": "A", "label": [True]}, {}, "the label [True] is no name"),
        ({"sentence": "A", "label": math.inf}, {}, "the label inf is no name"),
        ({"sentence": "A", "label": "high"}, {"task": numbers()}, "the label 'high' is no number"),
        ({"sentence": "A", "label": "nan"}, {"task": numbers()}, "the label 'nan' is no number"),
        ({"sentence": " ", "label": "no"}, {}, "a text is ' '"),
        ({"sentence": 5, "label": "no"}, {}, "a.jsonl:1: the number 5 is where a text is expected"),
        ({"sentence": math.nan, "label": "no"}, {}, "a text is nan; fill it in"),
        ({"sentence": "A", "label": ""}, {}, "has no label"),
        ({"sentence": "A", "Label": "no"}, {}, "set data.label to one of sentence, Label; did you"),
        ({"sentence": "A", "label": "no"}, {"label": "gold"}, "has no column 'gold'; set data.la"),
        ({"sentence": "A", "label": "no"}, {"text": "sentence,b"}, "has no column 'b'"),
        ({"a": "A", "b": "B", "c": "C", "label": "no"}, {"text": "a,b,c"}, "names 3 columns"),
    ],
)
def test_rows_that_are_refused(tmp_path, row, fields, key_words):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    with refused(key_words):
        read(path, **fields)


def test_a_file_named_like_the_built_in_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("builtin_reviews.tsv").write_text("sentence\tlabel\nA fox\t yes \n")
    task = classes("no", "yes")
    data = DataFiles(train="builtin_reviews.tsv")
    (record,) = task.read_records(data.train, data)
    assert task.make_example(record).label == "yes"


def test_features(wordpiece):
    task = classes("no", "yes")
    pair = ("the lazy fox jumps", "the dog jumped over")
    examples = [
        Example(None, "a:1", ("The fox",), "yes"),
        Example(None, "a:2", pair, None),
        Example(None, "a:3", pair, "no"),
    ]
    features = task.features(examples, wordpiece, MODEL, 10)
    assert [sequence.tolist() for sequence in features.sequences] == [
        [2, 5, 6, 3],
        [2, 5, 11, 6, 7, 3, 5, 12, 7, 3],
        [2, 5, 11, 6, 7, 3, 5, 12, 7, 3],
    ]
    assert features.second_starts == [4, 6, 6]
    assert features.labels == [1, NO_LABEL, 0]
    assert features.example_indices == [0, 1, 2]
    assert (features.choices, features.per_token, features.truncated) == (1, False, 2)
    assert task.features(examples, wordpiece, MODEL, 13).truncated == 0
    of_numbers = numbers().features([*labelled(2.5), *labelled(None)], wordpiece, MODEL, 8)
    assert of_numbers.labels == [2.5, pytest.approx(float("nan"), nan_ok=True)]


def test_the_docstrings_of_the_library(monkeypatch):
    splits = {"train": [("Opens it.", "files")], "eval": [("Adds them.", "numbers")]}
    monkeypatch.setattr("bert_jax.text.builtin.docstring_areas", splits.__getitem__)
    train = Example(None, "builtin #0", ("Opens it.",), "files")
    assert read("builtin") == [train]
    assert read("builtin@train") == [dataclasses.replace(train, where="builtin@train #0")]
    assert read("builtin@eval")[0].label == "numbers"
