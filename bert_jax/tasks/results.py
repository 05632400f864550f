"""What came of several runs of a task: means, spread, and which of them went wrong."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bert_jax.tasks.base import Example, Task

_NOT_SCORES = ("step", "split", "loss", "sequences_per_second")


class Table:
    """The scores on the first held-out set, a row for each run and for what it is compared with.

    A run whose best score is no better than that of a constant prediction is degenerate, as
    fine-tuning on little data sometimes is (Mosbach et al. 2021, section 5): it is named, and the
    mean is given without it, too.

    Args:
      task: that was learned.
      examples: of the first held-out set.
      runs: each with its "seed", the scores of its "best" evaluation, and if it is "degenerate".

    Attributes:
      rows: each with a "name", its "scores" and, of several runs, "deviation" and "runs".
    """

    def __init__(self, task: Task, examples: Sequence[Example], runs: Sequence[Mapping[str, Any]]):
        self._task = task
        self.rows: list[dict[str, Any]] = []
        for run in runs:
            note = ", degenerate" if run["degenerate"] else ""
            self.add(f"seed {run['seed']}{note}", run["best"])
        if len(runs) > 1:
            self.add_runs("mean", runs)
        if len(task.metrics) == 1:  # otherwise the constant score is a mean of them
            constant = dict.fromkeys(task.metrics, task.constant_score(examples))
            self.add("best constant prediction", constant)

    def add(self, name: str, scores: Mapping[str, Any], **more: Any) -> None:
        """Adds a row."""
        kept = {key: value for key, value in scores.items() if key not in _NOT_SCORES}
        self.rows.append({"name": name, "scores": kept, **more})

    def add_runs(self, name: str, runs: Sequence[Mapping[str, Any]]) -> None:
        """Adds the mean of some runs and, where some are degenerate, of the others alone."""
        groups = {name: runs}
        sound = [run for run in runs if not run["degenerate"]]
        if 0 < len(sound) < len(runs):
            groups[f"{name} without {len(runs) - len(sound)} degenerate"] = sound
        for title, group in groups.items():
            of_runs = [
                {k: v for k, v in run["best"].items() if k not in _NOT_SCORES} for run in group
            ]
            columns = {key: [scores[key] for scores in of_runs] for key in of_runs[0]}
            deviation = {
                key: statistics.stdev(values) if len(values) > 1 else 0.0
                for key, values in columns.items()
            }
            means = {key: statistics.fmean(values) for key, values in columns.items()}
            self.add(title, means, deviation=deviation, runs=len(group))

    @property
    def names(self) -> list[str]:
        """The names of the scores."""
        return list(self.rows[0]["scores"])

    def __str__(self) -> str:
        names = self.names
        width = max(len(row["name"]) for row in self.rows) + 2
        lines = ["held out".ljust(width) + "".join(f"{name:>18}" for name in names)]
        for row in self.rows:
            cells = [self._cell(row, name) for name in names]
            lines.append(row["name"].ljust(width) + "".join(f"{cell:>18}" for cell in cells))
        return "\n".join(lines)

    def _cell(self, row: Mapping[str, Any], name: str) -> str:
        if name not in row["scores"]:
            return ""
        spread = f" ± {row['deviation'][name]:.4f}" if row.get("runs", 1) > 1 else ""
        return f"{row['scores'][name]:.4f}{spread}"
