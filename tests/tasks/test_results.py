"""The table of several runs: means by hand, and degenerate runs."""

import pytest

from bert_jax.config import TaskConfig
from bert_jax.tasks.classification import Classification
from bert_jax.tasks.datasets import Datasets
from bert_jax.tasks.examples import Example
from bert_jax.tasks.results import as_text, comparison, is_worthless

EXAMPLES = [Example(None, "a:1", (f"fox {label}",), label) for label in "aab"]
DATASETS = Datasets(EXAMPLES, {"eval": EXAMPLES}, {})


def task(*metrics) -> Classification:
    return Classification(TaskConfig(metrics=metrics, labels=("a", "b")))


def run(seed, accuracy, f1, *, is_degenerate=False):
    best = {"step": 9, "split": "eval", "loss": 0.1, "accuracy": accuracy, "f1": f1}
    best["sequences_per_second"] = 100.0
    return {"seed": seed, "best": best, "degenerate": is_degenerate}


def test_mean_and_deviation():
    rows = comparison(task(), DATASETS, [run(0, 0.5, 0.25), run(1, 1.0, 0.75)], 2 / 3)
    assert [row["name"] for row in rows] == ["seed 0", "seed 1", "mean", "best constant prediction"]
    assert rows[1]["scores"] == {"accuracy": 1.0, "f1": 0.75}
    assert rows[2]["scores"] == {"accuracy": 0.75, "f1": 0.5}
    # Of two, the difference over √2: that of a sample.
    assert rows[2]["deviation"] == pytest.approx({"accuracy": 0.5 / 2**0.5, "f1": 0.5 / 2**0.5})
    assert rows[2]["runs"] == 2
    assert rows[3]["scores"] == {"accuracy": pytest.approx(2 / 3)}


def test_degenerate_runs_are_named_and_there_is_a_mean_without_them():
    runs = [run(4, 0.5, 0.25), run(5, 0.25, 0.0, is_degenerate=True), run(6, 0.75, 0.5)]
    rows = comparison(task(), DATASETS, runs, 2 / 3)[:-1]
    assert [row["name"] for row in rows] == [
        "seed 4",
        "seed 5, degenerate",
        "seed 6",
        "mean",
        "mean without 1 degenerate",
    ]
    assert rows[3]["scores"] == {"accuracy": 0.5, "f1": 0.25}
    assert rows[3]["deviation"] == pytest.approx({"accuracy": 0.25, "f1": 0.25})
    assert rows[4]["scores"] == {"accuracy": 0.625, "f1": 0.375}
    assert (rows[3]["runs"], rows[4]["runs"]) == (3, 2)


def test_a_model_is_worthless_if_its_best_run_is():
    bad, good = run(4, 0.3, 0.0, is_degenerate=True), run(5, 0.9, 0.9)
    for runs, expected in ([bad, bad, good], False), ([bad, bad], True), ([bad], True):
        assert is_worthless(comparison(task(), DATASETS, runs, 2 / 3)) == expected
    assert is_worthless(comparison(task(), DATASETS, [run(6, 0.66669, 0.5)], 2 / 3))  # as shown


def test_no_second_mean_without_sound_runs_and_no_spread_of_one():
    runs = [run(seed, 0.5, 0.25, is_degenerate=True) for seed in (0, 1)]
    names = [row["name"] for row in comparison(task(), DATASETS, runs, 2 / 3)]
    assert names[2:] == ["mean", "best constant prediction"]
    table = comparison(task(), DATASETS, [runs[0], run(1, 0.75, 0.5)], 2 / 3)
    assert table[3]["deviation"] == {"accuracy": 0.0, "f1": 0.0}
    assert as_text(table).splitlines()[4].split()[-2:] == ["0.7500", "0.5000"]


@pytest.mark.parametrize(
    ("metrics", "names"),
    [((), ["seed 3", "best constant prediction"]), (("accuracy", "f1"), ["seed 3"])],
)
def test_one_run_has_no_mean_and_several_metrics_have_no_constant(metrics, names):
    table = comparison(task(*metrics), DATASETS, [run(3, 0.5, 0.25)], 2 / 3)
    assert [row["name"] for row in table] == names


def test_a_baseline_that_cannot_be_fitted_is_left_out(capsys):
    letters = [Example(None, "", ("A C G T",), "a"), Example(None, "", ("T",), "b")]
    table = comparison(
        task(),
        Datasets(letters, {"eval": letters}, {}),
        [run(3, 0.5, 0.25)],
        0.5,
        [run(3, 0.5, 0.25)],
    )
    assert "TF-IDF, logistic regression" not in [row["name"] for row in table]
    assert (
        "the baselines without an encoder cannot be fitted (empty vocabulary"
        in capsys.readouterr().out
    )


def test_text():
    random = [run(0, 0.25, 0.125), run(1, 0.25, 0.125)]
    table = comparison(task(), DATASETS, [run(0, 0.5, 0.25), run(1, 1.0, 0.75)], 2 / 3, random)
    text = as_text(table)
    lines = text.splitlines()
    assert [line.split() for line in lines] == [
        ["held", "out", "accuracy", "f1"],
        ["seed", "0", "0.5000", "0.2500"],
        ["seed", "1", "1.0000", "0.7500"],
        ["mean", "0.7500", "±", "0.3536", "0.5000", "±", "0.3536"],
        ["best", "constant", "prediction", "0.6667"],
        ["random", "weights", "0.2500", "±", "0.0000", "0.1250", "±", "0.0000"],
        ["TF-IDF,", "logistic", "regression", "0.6667", "0.0000"],
    ]
    assert len({len(line) for line in lines}) == 1
    assert lines[4][:47].endswith("0.6667")
