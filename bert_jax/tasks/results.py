"""The comparison of fine-tuning runs and baselines: scores, means and deviations."""

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax import console
from bert_jax.errors import UserError, first_line
from bert_jax.tasks.base import Task
from bert_jax.tasks.datasets import Datasets

_CONSTANT = "best constant prediction"
_DEGENERATE = ", degenerate"  # the end of the name of a run
_NOT_SCORES = ("step", "split", "loss", "sequences_per_second")
# "seed", the scores of its "best" evaluation, and whether it is "degenerate": no better than a
# constant prediction (Mosbach et al. 2021, section 5).
Run = Mapping[str, Any]


def comparison(
    task: Task,
    datasets: Datasets,
    runs: Sequence[Run],
    constant_score: float,
    random: Sequence[Run] = (),
    untrained: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Return the scores of each run and of the baselines, `random` weights among them."""
    names = [f"seed {run['seed']}{_DEGENERATE * run['degenerate']}" for run in runs]
    rows = [_row(name, run["best"]) for name, run in zip(names, runs, strict=True)]
    if len(runs) > 1:
        rows += _means("mean", runs)
    num_own = len(rows)
    if len(task.metrics) == 1:  # otherwise the constant score is a mean of them
        rows.append(_row(_CONSTANT, {task.metrics[0]: constant_score}))
    if random:
        rows += _means("random weights", random)
    if untrained:
        rows.append(_row("before training", untrained))
    if random or task.has_quick_baselines:
        held_out = next(iter(datasets.evals.values()))
        try:
            baselines = task.baselines(datasets.train, held_out)
        except (ValueError, UserError) as error:  # such as texts without words, or of one class
            baselines = {}
            console.warn(f"the baselines without an encoder cannot be fitted ({first_line(error)})")
        rows += [_row(name, scores) for name, scores in baselines.items()]
    model = rows[len(runs) if len(runs) > 1 else 0]["scores"]
    for row in rows[num_own:]:
        leads = [
            model[name] - score for name, score in row["scores"].items() if name in task.metrics
        ]
        row["is_beaten"] = round(statistics.fmean(leads), 4) > 0  # in the digits of the table
    return rows


def is_worthless(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the best run of a comparison is no better than a constant prediction."""
    beaten = {row["name"]: row.get("is_beaten", True) for row in rows}
    runs = [name for name in beaten if name.startswith("seed ")]
    if len(runs) == 1 and not beaten.get(_CONSTANT, True):  # of several their mean is compared
        return True
    return all(name.endswith(_DEGENERATE) for name in runs)


def no_better() -> str:
    """Return the mark of a baseline that a model does not beat."""
    return console.highlighted("no better than that", sys.stdout)


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


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of a comparison."""
    names, width = list(rows[0]["scores"]), max(len(row["name"]) for row in rows) + 2
    column = max(18, *(len(name) + 2 for name in names))
    lines = ["held out".ljust(width) + "".join(f"{name:>{column}}" for name in names)]
    for row in rows:
        cells = {name: f"{score:z.4f}" for name, score in row["scores"].items()}
        if row.get("runs", 1) > 1:
            cells = {name: f"{cells[name]} ± {x:.4f}" for name, x in row["deviation"].items()}
        lines.append(
            row["name"].ljust(width) + "".join(f"{cells.get(n, ''):>{column}}" for n in names)
        )
        if not row.get("is_beaten", True):
            lines[-1] += f"  {no_better()}"
    return "\n".join(lines)
