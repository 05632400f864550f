"""Average the metrics of a run, and write them as JSON lines, to other sinks and as curves."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax import console
from bert_jax.config import FinetuneConfig, TrainConfig
from bert_jax.distributed import hosts
from bert_jax.errors import UserError
from bert_jax.storage.json_files import write_text
from bert_jax.training import curves, sinks
from bert_jax.training.objective import Figure, Metrics

CURVES, BASELINES = "curves.png", "baselines.json"
_EVENTS = "TensorBoard's events"
_RECORDS = "metrics.jsonl"
Sums = dict[str, list[float]]  # the total and the weight of each metric


def add_up(batches: Iterable[Metrics], start: Sums | None = None) -> Sums:
    """Return the sums of the metrics of batches on the host, added to those of `start`."""
    sums = dict(start or {})
    for metrics in batches:
        for name, metric in metrics.items():
            total, weight = sums.get(name, (0.0, 0.0))
            sums[name] = [total + float(metric.total), weight + float(metric.weight)]
    return sums


def means(sums: Sums, loss_weights: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of each metric of weight above 0, and as "loss" the sum of the losses."""
    result = {name: total / weight for name, (total, weight) in sums.items() if weight > 0}
    losses = (name for name in result if name.endswith("_loss"))
    loss = sum((loss_weights.get(name, 1.0) * result[name] for name in losses), 0.0)
    return {"loss": loss, **result}


def remove_metrics(folder: Path) -> None:
    """Remove the metrics of another run from a folder, and what a service would continue."""
    for name in (_RECORDS, sinks.WANDB_ID):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / sinks.TENSORBOARD, ignore_errors=True)


class Writer(contextlib.AbstractContextManager["Writer"]):
    """The records of a run in its workdir up to `step`, and in the other sinks; its curves.

    `progress` returns the counters of a step; `changes` are the steps from which sequences have
    another length. As a context manager it ends with the run.
    """

    # The first host writes them. The others keep the records too, so that every host decides alike.

    @console.working("opening the metrics", says_end=False)
    def __init__(
        self,
        folder: Path,
        step: int,
        config: TrainConfig | FinetuneConfig | None = None,
        progress: Callable[[int], sinks.Values] = lambda step: {},
        baselines: Mapping[str, float] | None = None,
        figures: Sequence[Figure] = (),
        changes: Sequence[int] = (),
    ):
        self._folder, self._progress, self.baselines = folder, progress, dict(baselines or {})
        self._titles = {figure.name: figure.heading for figure in figures}
        self._path = folder / _RECORDS
        records = hosts.broadcast_from_main(lambda: read_records(self._path))
        self.records = [record for record in records if record["step"] <= step]
        self._plotted = self._started = time.monotonic()
        self._seconds = max((record.get("seconds", 0.0) for record in self.records), default=0.0)
        self._changes = changes
        is_seed = isinstance(config, FinetuneConfig)  # in the workdir of the run
        self._name = "/".join(folder.absolute().parts[-1 - is_seed :])
        self._sinks: dict[str, sinks.Sink] = {}
        self._draws = hosts.is_main()
        if hosts.is_main():
            lines = [json.dumps(record) + "\n" for record in self.records]
            write_text(self._path, "".join(lines))
            write_text(folder / BASELINES, json.dumps(self.baselines) + "\n")
            with self._dropping_on_error(_EVENTS):
                self._sinks[_EVENTS] = sinks.TensorBoard(folder, step, config)
            for service in dict.fromkeys(config.log_to if config else ()):
                with self._dropping_on_error(service):
                    make = sinks.SERVICES[service]
                    self._sinks[service] = make(folder, self._name, step, config)

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Record the values of a split, "train" or "eval", after `step` steps."""
        seconds = self._seconds + time.monotonic() - self._started
        counters = {**self._progress(step), "seconds": round(seconds, 3)}
        record = {"step": step, "split": split, **counters, **values}
        self.records.append(record)
        if not hosts.is_main():
            return
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        shown = {**counters, **values} if split == "train" else values
        self._each(
            lambda sink: sink.write(step, {f"{split}/{k}": value for k, value in shown.items()})
        )

    def _each(self, call: Callable[[sinks.Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            with self._dropping_on_error(name):
                call(sink)

    @contextlib.contextmanager
    def _dropping_on_error(self, name: str) -> Iterator[None]:
        """Say that a sink cannot be written; continue without it."""
        try:
            yield
        except Exception as error:  # of any library's own
            self._sinks.pop(name, None)
            self._draws &= name != CURVES
            reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
            hosts.warn_on_main(
                f"{name} of {self._folder} is no longer written ({reason}); the run continues, "
                "with metrics.jsonl"
            )

    def draw(self, interval: float = 30.0) -> None:
        """Draw the run so far, unless that was done in the last `interval` seconds."""
        is_recent = time.monotonic() - self._plotted < interval
        draws = self._draws and self._folder.is_dir() and console.shows(console.Level.RESULTS)
        if self.records and draws and not is_recent:
            with self._dropping_on_error(CURVES):
                path = self._folder / CURVES
                curves.draw(
                    path, self._name, self.records, self.baselines, self._titles, self._changes
                )
                self._plotted = time.monotonic()

    def close(self, *, succeeded: bool = True) -> None:
        self.draw(interval=0.0)
        self._each(lambda sink: sink.close(succeeded=succeeded))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(succeeded=kind is None)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `metrics.jsonl`; none where there is no such file."""
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
                f"{path} line {number} is damaged ({reason}); restore it, or move the file away"
            ) from error
    return records


_NOT_SHOWN = {"loss", "gradient_norm", *curves.NOT_SCORES}


def describe(
    values: Mapping[str, float], figures: Sequence[Figure], baselines: Mapping[str, float]
) -> str:
    """Return the losses, accuracies and scores of a log or evaluation in one line.

    Each loss of an objective is followed by its baseline, if that does not change during the run,
    and by the figures whose names begin as its own does.
    """
    # Held-out labels may all be such that they have a score, and no loss.
    parts = [f"loss {values['loss']:z.4f}"] if "loss" in values else []
    prefixes = []
    for loss in figures:
        if not loss.name.endswith("_loss") or loss.name not in values:
            continue
        prefix = loss.name.removesuffix("loss")
        notes = []
        if loss.name in baselines:
            notes.append(f"{loss.baseline} {baselines[loss.name]:.2f}")
        for figure in figures:
            if figure.name.startswith(prefix) and figure is not loss:
                value = format(values.get(figure.name, 0.0), figure.form)
                notes.append(f"{figure.name.removeprefix(prefix)} {value}")
        beside = f" ({', '.join(notes)})" if notes else ""
        parts.append(f"{prefix.rstrip('_')} {values[loss.name]:z.4f}{beside}")
        prefixes.append(prefix)
    scores = [name for name in values if not name.startswith(tuple(prefixes))]
    parts += [f"{name} {values[name]:z.4f}" for name in scores if name not in _NOT_SHOWN]
    return "  ".join(parts)


def describe_speed(values: Mapping[str, float]) -> str:
    """Return the speed of a log in words."""
    nouns = {"sequences_per_second": "sequence", "tokens_per_second": "token"}
    return ", ".join(console.speed(values[x], noun) for x, noun in nouns.items() if x in values)
