"""Average the metrics of a run, and write them as JSON lines, TensorBoard events and a plot."""

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bert_jax import console
from bert_jax.distributed import hosts
from bert_jax.errors import UserError
from bert_jax.training import workdir
from bert_jax.training.objectives import TOKENS, Metrics

Sums = dict[str, list[float]]  # the total and the weight of each metric


def add_up(batches: Iterable[Metrics], start: Sums | None = None) -> Sums:
    """Return the sums of the metrics of batches on the host, added to those of `start`."""
    sums = dict(start or {})
    for metrics in batches:
        for name, metric in metrics.items():
            total, weight = sums.get(name, (0.0, 0.0))
            sums[name] = [total + float(metric.total), weight + float(metric.weight)]
    return sums


def means(sums: Sums) -> dict[str, float]:
    """Return the mean of each metric of weight above 0, and as "loss" the sum of the losses."""
    result = {name: total / weight for name, (total, weight) in sums.items() if weight > 0}
    losses = [mean for name, mean in result.items() if name.endswith("_loss")]
    return {"loss": sum(losses), **result}


class Writer:
    """The records of a run in its workdir up to `step`: JSON lines, TensorBoard events, a plot."""

    # The first host writes them. The others keep the records too, so that every host decides alike.

    def __init__(self, folder: Path, step: int, panels: Mapping[str, str]):
        self._folder, self._panels = folder, panels
        self._path = folder / "metrics.jsonl"
        records = hosts.broadcast_from_main(lambda: _read_records(self._path))
        self.records = [record for record in records if record["step"] <= step]
        self._plotted = time.monotonic()
        self._draws = hosts.is_main()
        if hosts.is_main():
            lines = [json.dumps(record) + "\n" for record in self.records]
            workdir.write(self._path, "".join(lines))
            with self._pictures():
                # Imported late: it imports PyTorch if that is installed, which takes seconds.
                from tensorboardX.proto.event_pb2 import SessionLog  # pyright: ignore

                name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
                self._events = folder / "tensorboard" / name
                self._events.parent.mkdir(exist_ok=True)
                self._append_event(file_version="brain.Event:2")
                # TensorBoard drops what it has of later steps.
                start = SessionLog(status=SessionLog.START)
                self._append_event(step=step + 1, session_log=start)

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Record the values of a split, "train" or "eval", after `step` steps."""
        record = {"step": step, "split": split, **values}
        self.records.append(record)
        if not hosts.is_main():
            return
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if self._draws:
            with self._pictures():
                from tensorboardX.summary import scalar

                for name, value in values.items():
                    self._append_event(step=step, summary=scalar(f"{split}/{name}", value))

    def _append_event(self, **event: Any) -> None:
        # Not by a SummaryWriter, whose thread dies when the disk is full; a run then waits for it.
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore
        from tensorboardX.record_writer import masked_crc32c

        data = Event(wall_time=time.time(), **event).SerializeToString()
        with self._events.open("ab") as file:
            for part in (struct.pack("<Q", len(data)), data):  # as a TFRecord
                file.write(part + struct.pack("<I", masked_crc32c(part)))

    @contextlib.contextmanager
    def _pictures(self) -> Iterator[None]:
        """Say that TensorBoard's events or the plot cannot be written; continue without them."""
        try:
            yield
        except OSError as error:
            self._draws = False
            lost = f"TensorBoard's events and curves.png in {self._folder} are no longer written"
            reason = f"({error.strerror}); the run continues, with metrics.jsonl"
            hosts.print_on_main(f"{lost} {reason}")

    def draw(self, interval: float = 30.0) -> None:
        """Plot the run so far, unless that was done in the last `interval` seconds."""
        is_recent = time.monotonic() - self._plotted < interval
        if self._draws and not is_recent and not console.is_quiet():
            with self._pictures():
                self._plot()

    def _plot(self) -> None:
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
        self.draw(interval=0.0)


def _read_records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # What follows the last line is a record that the run was killed while writing.
    *lines, _ = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(dict(json.loads(line)))
            values = {**records[-1]}
            if values.pop("split") not in ("train", "eval") or type(values["step"]) is not int:
                raise ValueError("it has no valid step or split")
            if not all(type(value) in (int, float) for value in values.values()):
                raise ValueError("a value is not a number")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            reason = " ".join(str(error).split())[:100]
            raise UserError(
                f"{path} line {number} is damaged ({reason}); restore the file"
            ) from error
    return records


_NOT_SHOWN = {"loss", "gradient_norm", TOKENS, "sequences_per_second", "tokens_per_second"}


def describe(values: Mapping[str, float]) -> str:
    """Return the losses, accuracies and scores of a log or evaluation in one line."""
    parts = [f"loss {values['loss']:z.4f}"]
    for name in ("mlm", "nsp"):
        if f"{name}_loss" in values:
            accuracy = values[f"{name}_accuracy"]
            parts.append(f"{name} {values[f'{name}_loss']:z.4f} (accuracy {accuracy:.1%})")
    scores = [name for name in values if not name.startswith(("mlm_", "nsp_"))]
    parts += [f"{name} {values[name]:z.4f}" for name in scores if name not in _NOT_SHOWN]
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
