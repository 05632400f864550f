"""The comparison of fine-tuning runs and baselines: scores, means and deviations."""

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax import console
from bert_jax.tasks.base import Task
from bert_jax.tasks.classification import Classification
from bert_jax.tasks.datasets import Datasets

_NOT_SCORES = ("step", "split", "loss", "sequences_per_second")
# "seed", the scores of its "best" evaluation, and whether it is "degenerate": no better than a
# constant prediction (Mosbach et al. 2021, section 5).
Run = Mapping[str, Any]


def comparison(
    task: Task, datasets: Datasets, runs: Sequence[Run], random: Sequence[Run] = ()
) -> list[dict[str, Any]]:
    """Return the scores of each run and of the baselines, `random` weights among them."""
    names = [f"seed {run['seed']}{', degenerate' * run['degenerate']}" for run in runs]
    rows = [_row(name, run["best"]) for name, run in zip(names, runs, strict=True)]
    if len(runs) > 1:
        rows += _means("mean", runs)
    num_own = len(rows)
    if len(task.metrics) == 1:  # otherwise the constant score is a mean of them
        constant = task.constant_score(next(iter(datasets.evals.values())))
        rows.append(_row("best constant prediction", {task.metrics[0]: constant}))
    if random:
        rows += _means("random weights", random)
        if type(task) is Classification:
            rows.append(_row("TF-IDF, logistic regression", tfidf_scores(task, datasets)))
    model = rows[len(runs) if len(runs) > 1 else 0]["scores"]
    for row in rows[num_own:]:
        leads = [
            model[name] - score for name, score in row["scores"].items() if name in task.metrics
        ]
        row["is_beaten"] = round(statistics.fmean(leads), 4) > 0  # in the digits of the table
    return rows


def no_better() -> str:
    """Return the mark of a baseline that a model does not beat."""
    return console.coloured("no better than that", 33, sys.stdout)


def _row(name: str, scores: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    kept = {key: value for key, value in scores.items() if key not in _NOT_SCORES}
    return {"name": name, "scores": kept, **more}


def _means(name: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the mean of runs and, if some are degenerate, of the others alone."""
    groups = {name: runs}
    sound = [run for run in runs if not run["degenerate"]]
    if 0 < len(sound) < len(runs):
        groups[f"{name} without {len(runs) - len(sound)} degenerate"] = sound
    rows = []
    for title, group in groups.items():
        scores = [_row("", run["best"])["scores"] for run in group]
        columns = {key: [each[key] for each in scores] for key in scores[0]}
        means = {key: statistics.fmean(values) for key, values in columns.items()}
        deviation = {key: float(np.std(x, ddof=len(group) > 1)) for key, x in columns.items()}
        rows.append(_row(title, means, deviation=deviation, runs=len(group)))
    return rows


@console.working("fitting the TF-IDF baseline")
def tfidf_scores(task: Classification, datasets: Datasets) -> dict[str, float]:
    """Return the held-out scores of logistic regression on TF-IDF of words and pairs of words."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    held_out = next(iter(datasets.evals.values()))
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    model = make_pipeline(vectorizer, LogisticRegression(max_iter=1000))
    texts = [" ".join(example.texts) for example in datasets.train]
    model.fit(texts, [example.label for example in datasets.train])
    predicted = model.predict([" ".join(example.texts) for example in held_out])
    logits = np.eye(len(task.labels))
    return task.score(held_out, [logits[task.labels.index(label)] for label in predicted])


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of a comparison."""
    names, width = list(rows[0]["scores"]), max(len(row["name"]) for row in rows) + 2
    lines = ["held out".ljust(width) + "".join(f"{name:>18}" for name in names)]
    for row in rows:
        cells = {name: f"{score:z.4f}" for name, score in row["scores"].items()}
        if row.get("runs", 1) > 1:
            cells = {name: f"{cells[name]} ± {x:.4f}" for name, x in row["deviation"].items()}
        lines.append(row["name"].ljust(width) + "".join(f"{cells.get(n, ''):>18}" for n in names))
        if not row.get("is_beaten", True):
            lines[-1] += f"  {no_better()}"
    return "\n".join(lines)
