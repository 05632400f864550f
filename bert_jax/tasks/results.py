"""The table of results of several fine-tuning runs: scores, means and deviations."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.tasks.base import Example, Task

_NOT_SCORES = ("step", "split", "loss", "sequences_per_second")


class Table:
    """The scores on the first held-out set, of each run and of the baselines.

    A run whose best score is no better than that of a constant prediction is degenerate, as
    fine-tuning on little data sometimes is (Mosbach et al. 2021, section 5). The table names it and
    also has the mean without it.

    Args:
      task: of the runs.
      examples: of the first held-out set.
      runs: each with its "seed", the scores of its "best" evaluation, and if it is "degenerate".

    Attributes:
      rows: each with a "name", its "scores" and, of several runs, "deviation" and "runs".
    """

    def __init__(self, task: Task, examples: Sequence[Example], runs: Sequence[Mapping[str, Any]]):
        self.rows: list[dict[str, Any]] = []
        for run in runs:
            note = ", degenerate" if run["degenerate"] else ""
            self.add(f"seed {run['seed']}{note}", run["best"])
        if len(runs) > 1:
            self.add_runs("mean", runs)
        if len(task.metrics) == 1:  # otherwise the constant score is a mean of them
            constant = {task.metrics[0]: task.constant_score(examples)}
            self.add("best constant prediction", constant)

    def add(self, name: str, scores: Mapping[str, Any], **more: Any) -> None:
        """Add a row."""
        self.rows.append({"name": name, "scores": _scores(scores), **more})

    def add_runs(self, name: str, runs: Sequence[Mapping[str, Any]]) -> None:
        """Add the mean of runs and, if some are degenerate, of the others alone."""
        groups = {name: runs}
        sound = [run for run in runs if not run["degenerate"]]
        if 0 < len(sound) < len(runs):
            groups[f"{name} without {len(runs) - len(sound)} degenerate"] = sound
        for title, group in groups.items():
            means, deviation = {}, {}
            for key in _scores(group[0]["best"]):
                values = [run["best"][key] for run in group]
                means[key] = statistics.fmean(values)
                deviation[key] = statistics.stdev(values) if len(values) > 1 else 0.0
            self.add(title, means, deviation=deviation, runs=len(group))

    @property
    def names(self) -> list[str]:
        """The names of the scores."""
        return list(self.rows[0]["scores"])

    def __str__(self) -> str:
        width = max(len(row["name"]) for row in self.rows) + 2
        lines = ["held out".ljust(width) + "".join(f"{name:>18}" for name in self.names)]
        for row in self.rows:
            cells = "".join(f"{_cell(row, name):>18}" for name in self.names)
            lines.append(row["name"].ljust(width) + cells)
        return "\n".join(lines)


def _scores(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _NOT_SCORES}


def _cell(row: Mapping[str, Any], name: str) -> str:
    if name not in row["scores"]:
        return ""
    spread = f" ± {row['deviation'][name]:.4f}" if row.get("runs", 1) > 1 else ""
    return f"{row['scores'][name]:.4f}{spread}"
