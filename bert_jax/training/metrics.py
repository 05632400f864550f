"""Metric writers of a run: JSON lines, TensorBoard events, a plot, a progress bar or lines."""

import functools
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax import console
from bert_jax.distributed import hosts
from bert_jax.training import workdir
from bert_jax.training.objectives import TOKENS, Metrics


def means(batches: Iterable[Metrics]) -> dict[str, float]:
    """Return the mean of each metric over batches on the host, without those of weight 0.

    `loss` is the sum of the means whose names end in `_loss`.
    """
    sums: dict[str, np.ndarray] = {}
    for metrics in batches:
        for name, metric in metrics.items():
            pair = np.array([metric.total, metric.weight], np.float64)
            sums[name] = sums.get(name, 0) + pair
    result = {name: float(total / weight) for name, (total, weight) in sums.items() if weight > 0}
    losses = [mean for name, mean in result.items() if name.endswith("_loss")]
    return {"loss": sum(losses), **result}


def unigram_entropy(counts: np.ndarray) -> float:
    """Return the entropy in nats of a distribution given by counts: -Σ p log p."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


_SECONDS_BETWEEN_PLOTS = 30.0  # each takes about one


class Writer:
    """The records of a run in its workdir: `metrics.jsonl`, TensorBoard events and `curves.png`.

    The first host writes them. The others keep the records too, so that all decide alike by them.
    Records after `step`, from which the run resumes, are removed. `panels` has the title of each
    metric that is plotted.
    """

    def __init__(self, folder: Path, step: int, panels: Mapping[str, str]):
        self._folder, self._first_step, self._panels = folder, step, panels
        path = folder / "metrics.jsonl"
        records = hosts.broadcast_from_main(lambda: _read_records(path))
        self.records = [record for record in records if record["step"] <= step]
        self.latest = {record["split"]: record for record in self.records}
        self._plotted = time.monotonic()
        if hosts.is_main():
            workdir.write(path, "".join(json.dumps(record) + "\n" for record in self.records))
            self._lines = path.open("a")

    @functools.cached_property
    def _events(self) -> Any:
        # Imported late: it imports PyTorch if that is installed, which takes longer than a step.
        import tensorboardX

        folder = str(self._folder / "tensorboard")
        return tensorboardX.SummaryWriter(folder, purge_step=self._first_step + 1)

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Record the values of a split, "train" or "eval", after `step` steps."""
        self.latest[split] = {"step": step, "split": split, **values}
        self.records.append(self.latest[split])
        if not hosts.is_main():
            return
        self._lines.write(json.dumps(self.latest[split]) + "\n")
        self._lines.flush()
        for name, value in values.items():
            self._events.add_scalar(f"{split}/{name}", value, step)

    def draw(self) -> None:
        """Plot the run so far, unless that was done a moment ago."""
        if time.monotonic() - self._plotted > _SECONDS_BETWEEN_PLOTS:
            self._draw()
            self._plotted = time.monotonic()

    def _draw(self) -> None:
        if not hosts.is_main() or console.is_quiet():
            return
        # Imported late: it takes longer than a small run's first step.
        from matplotlib.figure import Figure

        rows = -(-len(self._panels) // 2)
        figure = Figure(figsize=(9, 3 * rows), layout="constrained")
        grid = figure.subplots(rows, 2, squeeze=False).flat
        for axes, (name, title) in zip(grid, self._panels.items(), strict=False):
            for split, style in (("train", "-"), ("eval", "o-")):
                records = [r for r in self.records if r["split"] == split and name in r]
                steps, values = [r["step"] for r in records], [r[name] for r in records]
                label = "training" if split == "train" else "held-out"
                axes.plot(steps, values, style, ms=3, label=label)
            axes.set(title=title, xlabel="step")
            axes.grid(alpha=0.3)
            axes.legend()
        temporary = self._folder / "curves.tmp"
        figure.savefig(temporary, format="png", dpi=120)
        os.replace(temporary, self._folder / "curves.png")

    def close(self) -> None:
        """Plot, and close the files."""
        self._draw()
        if hosts.is_main():
            self._lines.close()
            self._events.close()


def _read_records(path: Path) -> list[dict[str, Any]]:
    # The last line is incomplete if the run was killed while writing it.
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


class Progress:
    """A bar if stderr is a terminal, otherwise plain lines on stdout; on the first host alone."""

    def __init__(self, steps: int, step: int):
        self._steps = steps
        self._bar = console.progress_bar(
            total=steps, initial=step, unit="step", dynamic_ncols=True, is_shown=hosts.is_main()
        )
        self._started, self._first_step = time.monotonic(), step

    def advance(self) -> None:
        """Move the bar by a step."""
        self._bar.update()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if not hosts.is_main():
            return
        self._bar.clear()
        console.show(line)
        self._bar.refresh()

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Show the training values of a log step."""
        speed = f"{values['sequences_per_second']:.0f} sequences/s"
        if "tokens_per_second" in values:
            speed += f", {values['tokens_per_second']:,.0f} tokens/s"
        if not self._bar.disable:
            self._bar.set_postfix_str(f"loss {values['loss']:.4f}, {speed}")
            return
        elapsed = time.monotonic() - self._started
        left = elapsed / max(step - self._first_step, 1) * (self._steps - step)
        self.say(f"step {step}/{self._steps}  {describe(values)}  {speed}  {duration(left)} left")

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


_NOT_SHOWN = {"loss", "gradient_norm", TOKENS, "sequences_per_second", "tokens_per_second"}


def describe(values: Mapping[str, float]) -> str:
    """Return the losses, accuracies and scores of a log or evaluation in one line."""
    parts = [f"loss {values['loss']:.4f}"]
    for name in ("mlm", "nsp"):
        if f"{name}_loss" in values:
            accuracy = values[f"{name}_accuracy"]
            parts.append(f"{name} {values[f'{name}_loss']:.4f} (accuracy {accuracy:.1%})")
    scores = [name for name in values if not name.startswith(("mlm_", "nsp_"))]
    parts += [f"{name} {values[name]:.4f}" for name in scores if name not in _NOT_SHOWN]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return a duration as `45s`, `3m 20s` or `2h 05m`."""
    seconds = math.ceil(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    return f"{seconds // 3600}h {seconds // 60 % 60:02d}m"
