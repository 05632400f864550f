"""The metrics of a run: means, and JSON lines, TensorBoard events, a plot and printed lines."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bert_jax import console
from bert_jax.distributed import hosts
from bert_jax.training import workdir
from bert_jax.training.objectives import TOKENS, Metrics

Sums = dict[str, list[float]]  # the total and the weight of each metric


def add(sums: Sums, metrics: Metrics) -> None:
    """Add the metrics of a batch on the host."""
    for name, metric in metrics.items():
        total, weight = sums.get(name, (0.0, 0.0))
        sums[name] = [total + float(metric.total), weight + float(metric.weight)]


def means(sums: Sums) -> dict[str, float]:
    """Return the mean of each metric, without those of weight 0.

    `loss` is the sum of the means whose names end in `_loss`.
    """
    result = {name: total / weight for name, (total, weight) in sums.items() if weight > 0}
    losses = [mean for name, mean in result.items() if name.endswith("_loss")]
    return {"loss": sum(losses), **result}


class Writer:
    """The records of a run in its workdir: `metrics.jsonl`, TensorBoard events and `curves.png`.

    The first host writes them. The others keep the records too, so that all decide alike by them.
    Records after `step`, from which the run resumes, are removed. `panels` has the title of each
    metric that is plotted.
    """

    def __init__(self, folder: Path, step: int, panels: Mapping[str, str]):
        self._folder, self._panels = folder, panels
        self._path = folder / "metrics.jsonl"
        records = hosts.broadcast_from_main(lambda: _read_records(self._path))
        self.records = [record for record in records if record["step"] <= step]
        self.latest = {record["split"]: record for record in self.records}
        self._plotted = time.monotonic()
        if hosts.is_main():
            lines = [json.dumps(record) + "\n" for record in self.records]
            workdir.write(self._path, "".join(lines))
            # Imported late: it imports PyTorch if that is installed, which takes seconds.
            import tensorboardX

            tensorboard = str(folder / "tensorboard")
            self._events = tensorboardX.SummaryWriter(tensorboard, purge_step=step + 1)

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Record the values of a split, "train" or "eval", after `step` steps."""
        self.latest[split] = {"step": step, "split": split, **values}
        self.records.append(self.latest[split])
        if not hosts.is_main():
            return
        with self._path.open("a") as file:
            file.write(json.dumps(self.latest[split]) + "\n")
        for name, value in values.items():
            self._events.add_scalar(f"{split}/{name}", value, step)

    def draw(self, interval: float = 30.0) -> None:
        """Plot the run so far, unless that was done in the last `interval` seconds."""
        is_recent = time.monotonic() - self._plotted < interval
        if is_recent or not hosts.is_main() or console.is_quiet():
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
        self._plotted = time.monotonic()

    def close(self) -> None:
        """Plot, and close the files."""
        self.draw(interval=0.0)
        if hosts.is_main():
            self._events.close()


def _read_records(path: Path) -> list[dict[str, Any]]:
    # The last line is incomplete if the run was killed while writing it.
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


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


def show(bar: tqdm, step: int, values: Mapping[str, float], seconds_per_step: float) -> None:
    """Show the values of a log step in the bar or, where that is disabled, in a line."""
    speed = f"{values['sequences_per_second']:.0f} sequences/s"
    if "tokens_per_second" in values:
        speed += f", {values['tokens_per_second']:,.0f} tokens/s"
    if not bar.disable:
        bar.set_postfix_str(f"loss {values['loss']:.4f}, {speed}")
        return
    left = bar.format_interval(seconds_per_step * (bar.total - step))
    hosts.print_on_main(f"step {step}/{bar.total}  {describe(values)}  {speed}  {left} left")
