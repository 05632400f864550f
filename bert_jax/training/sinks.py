"""Where the metrics of a run go besides `metrics.jsonl`: TensorBoard and Weights & Biases.

None of them may end a run: `metrics.Writer` drops the one that raises an error.
"""

import dataclasses
import functools
import importlib.util
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from bert_jax import console
from bert_jax.config import settings
from bert_jax.distributed import hosts
from bert_jax.errors import UserError

Values = Mapping[str, int | float]
TENSORBOARD, WANDB_ID = "tensorboard", "wandb.id"  # in the folder of a run


class Sink(Protocol):
    """What the metrics of a run are written to."""

    package: ClassVar[str] = ""  # that it needs, of which this package has an extra

    def write(self, step: int, values: Values) -> None:
        """Keep values such as "train/loss" of a step."""

    def close(self, *, succeeded: bool) -> None:
        """Keep whether the run has reached its end, and end."""


class TensorBoard(Sink):
    """TensorBoard's events in a folder, from `step` on; a config as a table of text."""

    # Not by a SummaryWriter, whose thread dies when the disk is full; a run then waits for it.

    def __init__(self, folder: Path, step: int, config: Any):
        self._folder, self._step, self._config = folder / TENSORBOARD, step, config

    @functools.cached_property
    @console.working("beginning TensorBoard's file", says_end=False)
    def _events(self) -> Any:
        """Begin the file: at the first record, so that the first step does not wait for it."""
        # Imported late: it imports PyTorch if that is installed, which takes seconds.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog  # pyright: ignore
        from tensorboardX.summary import text

        self._folder.mkdir(exist_ok=True)
        events = EventsWriter(str(self._folder / "events"), filename_suffix=f".{self._step}")
        # TensorBoard drops what it has of later steps.
        start = SessionLog(status=SessionLog.START)
        _append(events, step=self._step + 1, session_log=start)
        if self._config:
            values = settings.flatten(self._config).items()
            rows = [f"| {name} | {value} |" for name, value in values]
            table = "\n".join(["| field | value |", "|---|---|", *rows])
            _append(events, step=self._step, summary=text("config", table))
        return events

    def write(self, step: int, values: Values) -> None:
        events = self._events  # before the import, which is a part of its work
        from tensorboardX.summary import scalar

        for name, value in values.items():
            _append(events, step=step, summary=scalar(name, value))

    def close(self, *, succeeded: bool) -> None:
        if "_events" in vars(self):  # a run that writes nothing leaves no file
            self._events.close()


def _append(events: Any, **fields: Any) -> None:
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore

    events.write_event(Event(wall_time=time.time(), **fields))
    events.flush()


class WeightsAndBiases(Sink):
    """A run of Weights & Biases, which sends it from a process of its own.

    Its own variables, as WANDB_PROJECT and WANDB_MODE, count. A resumed run continues the one whose
    id is in the folder.
    """

    package = "wandb"

    def __init__(self, folder: Path, name: str, step: int, config: Any):
        import wandb  # pyright: ignore[reportMissingImports]

        path = folder / WANDB_ID
        self._run = wandb.init(
            id=path.read_text().strip() if step and path.exists() else None,
            name=name,
            dir=str(folder),
            config=dataclasses.asdict(config),
            resume="allow",
            allow_val_change=True,
            settings=wandb.Settings(console="off", silent=True),
        )
        hosts.write_on_main(path, self._run.id + "\n")
        address = self._run.settings.sync_dir if self._run.offline else self._run.url
        hosts.print_on_main(f"wandb      {address}")

    def write(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)  # steps that it has already are dropped there

    def close(self, *, succeeded: bool) -> None:
        self._run.finish(exit_code=int(not succeeded))


# By the name in `log_to`. Each is made of a run's folder, its name, its first step and its config.
SERVICES: dict[str, Any] = {"wandb": WeightsAndBiases}


def check(names: Iterable[str]) -> None:
    """Refuse a service whose package is not installed on the host that writes."""
    for name in names if hosts.is_main() else ():
        package = SERVICES[name].package
        spec = importlib.util.find_spec(package) if package else None
        # Without an origin it is a folder of that name, as W&B makes.
        if package and not (spec and spec.origin):
            raise UserError(
                f"log_to has {name}, which is not installed; "
                f"pip install 'bert-jax[{package}]', or leave it out"
            )
