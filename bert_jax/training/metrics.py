"""What a run reports: JSON lines, TensorBoard, a picture, a progress bar or plain lines."""

import functools
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bert_jax.distributed import hosts
from bert_jax.training.objectives import Metrics


def means(batches: Iterable[Metrics]) -> dict[str, float]:
    """Returns the mean of each quantity over batches on the host, but for those without weight.

    `loss` is the sum of the means that end in `_loss`.
    """
    totals: dict[str, np.ndarray] = {}
    for sums in batches:
        for name, part in sums.items():
            pair = np.array([part.total, part.weight], np.float64)
            totals[name] = totals.get(name, 0) + pair
    result = {name: float(value / weight) for name, (value, weight) in totals.items() if weight > 0}
    losses = [value for name, value in result.items() if name.endswith("_loss")]
    return {"loss": sum(losses), **result}


def unigram_entropy(counts: np.ndarray) -> float:
    """Returns the entropy in nats of the distribution that some counts are: -Σ p log p."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


_SECONDS_OF_A_DRAWING = 30.0  # from one to the next; each takes one


class Writer:
    """The records of a run in its workdir: `metrics.jsonl`, TensorBoard events and `curves.png`.

    The first process of a run writes them; the others know them, as what is decided by them must
    be decided alike.

    Args:
      workdir: where they are.
      step: the step that the run goes on from; what an interrupted run recorded beyond is removed.
      panels: what is drawn, by name, with its title.

    Attributes:
      latest: the latest record of each split.
    """

    def __init__(self, workdir: Path, step: int, panels: Mapping[str, str]):
        self._panels = panels
        self._path = workdir / "metrics.jsonl"
        self._picture = workdir / "curves.png"
        found = hosts.broadcast_from_main(self._read)
        self._records = [record for record in found if record["step"] <= step]
        self.latest = {record["split"]: record for record in self._records}
        self._writes = hosts.is_main()
        if not self._writes:
            return
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in self._records))
        os.replace(temporary, self._path)
        self._lines = self._path.open("a")
        self._purge, self._folder = step + 1, str(workdir / "tensorboard")
        self._drawn = time.monotonic()

    @functools.cached_property
    def _events(self) -> Any:
        # Imported here: it imports PyTorch where there is one, for longer than a first step takes.
        import tensorboardX

        return tensorboardX.SummaryWriter(self._folder, purge_step=self._purge)

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        # The last line is incomplete where a run was killed while it wrote.
        lines = self._path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("}\n")]

    def records(self) -> list[dict[str, Any]]:
        """Returns all that has been recorded."""
        return self._records

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Records values of "train" or "eval" after `step` steps."""
        self.latest[split] = {"step": step, "split": split, **values}
        self._records.append(self.latest[split])
        if not self._writes:
            return
        self._lines.write(json.dumps(self.latest[split]) + "\n")
        self._lines.flush()
        for name, value in values.items():
            self._events.add_scalar(f"{split}/{name}", value, step)

    def draw(self) -> None:
        """Draws the course of the run so far, if that has not been done a moment ago."""
        if self._writes and time.monotonic() - self._drawn > _SECONDS_OF_A_DRAWING:
            self._draw()
            self._drawn = time.monotonic()

    def _draw(self) -> None:
        # Imported here: it takes longer than a small run's first step.
        from matplotlib.figure import Figure

        rows = -(-len(self._panels) // 2)
        figure = Figure(figsize=(9, 3 * rows), layout="constrained")
        places = figure.subplots(rows, 2, squeeze=False).flat
        for axes, (name, title) in zip(places, self._panels.items(), strict=False):
            for split, style in (("train", "-"), ("eval", "o-")):
                found = [r for r in self._records if r["split"] == split and name in r]
                label = "training" if split == "train" else "held-out"
                axes.plot(
                    [r["step"] for r in found], [r[name] for r in found], style, ms=3, label=label
                )
            axes.set(title=title, xlabel="step")
            axes.grid(alpha=0.3)
            axes.legend()
        temporary = self._picture.with_suffix(".tmp")
        figure.savefig(temporary, format="png", dpi=120)
        os.replace(temporary, self._picture)

    def close(self) -> None:
        """Draws, and closes the files."""
        if self._writes:
            self._draw()
            self._lines.close()
            self._events.close()


class Progress:
    """A bar where stderr is a terminal, plain lines on stdout where it is not.

    Of several processes the first one shows them.
    """

    def __init__(self, steps: int, step: int):
        self._steps = steps
        self._bar = tqdm(
            total=steps,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            disable=not (hosts.is_main() and sys.stderr.isatty()),
        )
        self._started, self._first = time.monotonic(), step

    def advance(self, step: int) -> None:
        """Moves the bar to `step`."""
        self._bar.update(step - self._bar.n if not self._bar.disable else 0)

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        if not hosts.is_main():
            return
        self._bar.clear()
        print(line, flush=True)
        self._bar.refresh()

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the training values of a log step."""
        speed = f"{values['sequences_per_second']:.0f} sequences/s"
        if "tokens_per_second" in values:
            speed += f", {values['tokens_per_second']:,.0f} tokens/s"
        if not self._bar.disable:
            self._bar.set_postfix_str(f"loss {values['loss']:.4f}, {speed}")
            return
        elapsed = time.monotonic() - self._started
        left = elapsed / max(step - self._first, 1) * (self._steps - step)
        self.say(f"step {step}/{self._steps}  {describe(values)}  {speed}  {duration(left)} left")

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self._bar.close()


_NOT_SHOWN = ("step", "split", "loss", "gradient_norm", "sequences_per_second")
_NOT_SHOWN += ("tokens_per_second", "token_share")


def describe(values: Mapping[str, float]) -> str:
    """Returns the losses, accuracies and scores of a log in one line."""
    parts = [f"loss {values['loss']:.4f}"]
    for name in ("mlm", "nsp"):
        if f"{name}_loss" in values:
            accuracy = values[f"{name}_accuracy"]
            parts.append(f"{name} {values[f'{name}_loss']:.4f} (accuracy {accuracy:.1%})")
    scores = (
        name for name in values if name not in _NOT_SHOWN and name[:4] not in ("mlm_", "nsp_")
    )
    parts += [f"{name} {values[name]:.4f}" for name in scores]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Returns a time as a person writes it: `45s`, `3m 20s`, `2h 05m`."""
    seconds = math.ceil(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    return f"{seconds // 3600}h {seconds // 60 % 60:02d}m"
