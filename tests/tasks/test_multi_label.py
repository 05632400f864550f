"""Multi-label classification: reading, scores and thresholds by plain definitions, a whole run."""

import json

import numpy as np
import pytest
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logit

import bert_jax
from bert_jax import DataFiles, FinetuneConfig
from bert_jax.commands.flags import read_config
from bert_jax.tasks.datasets import load_datasets, read_examples
from bert_jax.tasks.examples import Example
from bert_jax.tasks.multi_label import (
    MultiLabelClassification,
    MultiLabelConfig,
    _best_threshold,
)

NAMES = ("drama", "war", "western")
WORDS = ("river", "model", "token", "bank", "reads", "the", "a")


def task(**fields) -> MultiLabelClassification:
    return MultiLabelClassification(MultiLabelConfig(**{"labels": NAMES, **fields}))


def read(path, *, is_labelled=True, **fields):
    return read_examples(task(**fields), str(path), DataFiles(), labelled=is_labelled)


def labelled(actual) -> list[Example]:
    return [
        Example(None, "a.tsv:2", ("fox",), tuple(np.array(NAMES)[row].tolist()))
        for row in np.array(actual, bool)
    ]


def test_labels_are_separated_in_a_table_and_a_list_in_json(tmp_path):
    table = tmp_path / "a.tsv"
    table.write_text("sentence\tlabel\nfox\twar, drama,war\nfox\t\nfox\twestern\n")
    assert [e.label for e in read(table)] == [("war", "drama"), (), ("western",)]
    table.write_text("sentence\tlabel\nfox\twar|a,b\n")
    assert read(table, separator="|")[0].label == ("war", "a,b")
    lines = tmp_path / "a.jsonl"
    values = [["war"], [], "war,drama"]
    lines.write_text("".join(json.dumps({"sentence": "fox", "label": v}) + "\n" for v in values))
    assert [e.label for e in read(lines)] == [("war",), (), ("war", "drama")]
    for value in (3, [3], [""], {"war": 1}):
        lines.write_text(json.dumps({"sentence": "fox", "label": value}) + "\n")
        with refused("a.jsonl:1: the label is", "; give a list of names, or a text of names"):
            read(lines)
    table.write_text("sentence\nfox\n")
    assert read(table, is_labelled=False)[0].label is None
    with refused("a.tsv:2 has no column 'label'; set data.label to one of sentence"):
        read(table)
    lines.write_text('{"sentence": "fox", "label": null}')
    with refused("a.jsonl:1 has no label; give '' or [] where none applies"):
        read(lines)


def test_labels_that_are_unknown_or_that_nothing_has(tmp_path):
    train, dev = tmp_path / "train.tsv", tmp_path / "dev.tsv"
    train.write_text("sentence\tlabel\nfox\twar\ncow\tdrama\n")
    dev.write_text("sentence\tlabel\nfox\twar,comedy\n")
    config = FinetuneConfig(
        task=MultiLabelConfig(), data=DataFiles(train=str(train), eval=str(dev))
    )
    with refused("dev.tsv:2: the label 'comedy' is none of those of the training data"):
        load_datasets(config)
    train.write_text("sentence\tlabel\nfox\t\ncow\t\n")
    with refused("train.tsv has no labels"):
        load_datasets(config)
    with refused("task.thresholds has 1 numbers, and task.labels 3 labels"):
        MultiLabelClassification.check(
            FinetuneConfig(task=MultiLabelConfig(labels=NAMES, thresholds=(0.5,)))
        )


_rows = st.lists(
    st.tuples(*[st.tuples(st.booleans(), st.integers(-3, 3)) for _ in NAMES]),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=60)
@given(_rows)
def test_scores_are_those_of_plain_definitions(rows):
    actual = np.array([[has for has, _ in row] for row in rows])
    logits = np.array([[value + 0.5 for _, value in row] for row in rows])
    scores = task().score(labelled(actual), list(logits))
    predicted = logits > 0

    def f1(a, p):
        return 2 * (a & p).sum() / (a.sum() + p.sum()) if (a | p).any() else None

    assert scores["micro_f1"] == pytest.approx(f1(actual, predicted) or 0)
    each = [f1(a, p) for a, p in zip(actual.T, predicted.T, strict=True)]
    each = [x for x in each if x is not None]
    assert scores["macro_f1"] == pytest.approx(np.mean(each or [0]))
    # Precision at each level of the logits, weighted by the recall that it adds.
    precisions = []
    for a, x in zip(actual.T, logits.T, strict=True):
        total, found, area = a.sum(), 0, 0.0
        for level in sorted(set(x), reverse=True):
            now = a[x >= level].sum()
            area += (now - found) / max(total, 1) * now / (x >= level).sum()
            found = now
        precisions += [area] if total else []
    assert scores["mean_average_precision"] == pytest.approx(np.mean(precisions or [0]))


def test_one_label_alone_has_the_scores_of_that_label():
    (one,) = ("war",)
    examples = [Example(None, "", ("fox",), label) for label in ((one,), ())]
    scores = task(labels=(one,)).score(examples, [np.array([1.0]), np.array([0.5])])
    assert scores["micro_f1"] == scores["macro_f1"] == pytest.approx(2 / 3)


def test_thresholds_of_the_user_stay():
    given = task(thresholds=(0.1, 0.2, 0.3))
    given.tune(labelled([[1, 0, 0]]), [np.zeros(3)], {})
    assert given.config.thresholds == (0.1, 0.2, 0.3)


@pytest.mark.parametrize("logits", [(-30, -40), (40, 30)])
def test_a_threshold_of_extreme_logits_is_between_them(logits):
    threshold = _best_threshold(np.array([True, False]), np.float32(logits))
    assert logits[1] < logit(threshold) < logits[0]


def test_labels_that_no_held_out_text_has_keep_their_threshold():
    tuned = task()
    tuned.tune(labelled([[0, 0, 0]] * 2), list(np.array([[2.0, -1.0, 0.0], [1.0, 3.0, 4.0]])), {})
    assert tuned.config.thresholds == (0.5, 0.5, 0.5)


def test_a_constant_prediction_is_the_best_number_of_frequent_labels():
    actual = [[1, 1, 0], [1, 0, 0], [1, 1, 0], [0, 0, 1]]
    of_f1 = task(metrics=("micro_f1",))
    # Of drama, 3 right of 4 and 6 labels in all; with war, 5 of 8; with western, 6 of 12.
    assert of_f1.constant_score(labelled(actual)) == pytest.approx(2 * 5 / (8 + 6))
    assert task().constant_score(labelled(actual)) == pytest.approx((3 + 2 + 1) / 4 / 3)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_thresholds_are_the_best_ones_and_those_of_rare_labels_are_common(seed):
    generator = np.random.default_rng(seed)
    # As many as a threshold of their own needs, and fewer.
    actual = np.stack([generator.permutation(60) < count for count in (24, 10, 9)], axis=1)
    logits = np.round(generator.normal(size=(60, 3)) + actual - 1, 1)
    examples, predictions = labelled(actual), list(logits)
    tuned = task()
    tuned.tune(examples, predictions, {})
    thresholds = np.log(tuned.config.thresholds) - np.log1p(-np.array(tuned.config.thresholds))

    def best(a, x):
        levels = [np.inf, *np.unique(x)]
        return max(2 * (a & (x >= t)).sum() / max(1, a.sum() + (x >= t).sum()) for t in levels)

    for label in (0, 1):
        a, x = actual[:, label], logits[:, label]
        p = x >= thresholds[label]
        assert 2 * (a & p).sum() / (a.sum() + p.sum()) == pytest.approx(best(a, x))
    p = logits >= thresholds[2]
    common = 2 * (actual & p).sum() / (actual.sum() + p.sum())
    assert common == pytest.approx(best(actual.ravel(), logits.ravel()))


def test_the_loss_is_the_mean_binary_cross_entropy_of_what_is_labelled():
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(4, 3)), generator.random((4, 3)) < 0.5
    values = labels.astype(np.float32)
    values[1] = np.nan
    p = 1 / (1 + np.exp(-logits))
    losses = -np.where(labels, np.log(p), np.log(1 - p)).mean(1)
    of_task = task()
    objective = of_task.objective(of_task.model(bert_jax.ModelConfig(num_hidden_layers=1)))
    loss = objective.metrics(logits.astype(np.float32), values)["loss"]
    assert float(loss.total / loss.weight) == pytest.approx(losses[[0, 2, 3]].mean(), rel=1e-6)


@pytest.fixture(scope="module")
def finished(shallow_bert, tmp_path_factory):
    """A run on sentences that have the labels of the names of those words that have any."""
    folder = tmp_path_factory.mktemp("multi")
    generator = np.random.default_rng(0)
    for name, count in (("train", 240), ("dev", 60)):
        lines = ["sentence\tlabel"]
        for _ in range(count):
            words = generator.choice(WORDS, 4).tolist()
            lines.append(f"{' '.join(words)}\t{','.join(sorted({*words} & {*WORDS[:3]}))}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    words = [
        f"--config.data.{name}={folder / file}.tsv"
        for name, file in (("train", "train"), ("eval", "dev"))
    ]
    words += ["--config.task.kind=multi_label_classification", "--config.epochs=6"]
    words += ["--config.data.max_length=16", "--config.data.batch_size=16"]
    words += ["--config.optimizer.learning_rate=0.02", "--config.compare=True"]
    config = read_config("finetune/classification", words, FinetuneConfig).config
    return folder, bert_jax.finetune(config, shallow_bert, folder / "run", quiet=True)


def test_a_run_learns_its_labels_and_its_predictions_use_the_tuned_thresholds(finished):
    folder, result = finished
    rows = {row["name"]: row["scores"]["mean_average_precision"] for row in result.comparison}
    assert rows["seed 0"] > rows["best constant prediction"] + 0.1
    assert "TF-IDF, logistic regression" in rows
    thresholds = result.bert.task.thresholds
    assert len(thresholds) == len(result.bert.task.labels) == 3
    again = bert_jax.load(folder / "run")
    assert again.task.thresholds == thresholds
    predictions = again.predict(folder / "dev.tsv")
    assert predictions.scores["micro_f1"] == pytest.approx(result.scores["eval"]["micro_f1"])
    lines = (folder / "run/predictions.jsonl").read_text().splitlines()
    for line, each in zip(map(json.loads, lines), predictions, strict=True):
        assert line["prediction"] == each["labels"]
        probabilities = each["probabilities"]
        expected = [
            n for n, t in zip(again.task.labels, thresholds, strict=True) if probabilities[n] >= t
        ]
        assert each["labels"] == expected
        assert isinstance(line["label"], list)


def test_predictions_on_the_command_line_are_the_labels_with_probabilities(finished, bert_jax_main):
    folder, result = finished
    line = bert_jax_main("predict", folder / "run", "--text", "river the token").strip()
    (predicted,) = result.bert.predict(["river the token"])
    listed = [f"{label} {predicted['probabilities'][label]:.1%}" for label in predicted["labels"]]
    assert line.split("  ")[0] == ", ".join(listed)
    assert line.endswith("  river the token")
