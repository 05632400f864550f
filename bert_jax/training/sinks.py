"""Where the metrics of a run go besides `metrics.jsonl`: TensorBoard and Weights & Biases.

None of them may end a run: `metrics.Writer` drops the one that raises an error.
"""

import contextvars
import dataclasses
import functools
import importlib.util
import queue
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from bert_jax import console
from bert_jax.config import settings
from bert_jax.distributed import hosts
from bert_jax.errors import UserError
from bert_jax.storage import daemon_thread
from bert_jax.training import workdir

_PATIENCE = 30.0  # seconds in which a server has to take the last records of a run
Values = Mapping[str, int | float]


class Sink(Protocol):
    """What the metrics of a run are written to."""

    def write(self, step: int, values: Values) -> None:
        """Keep values such as "train/loss" of a step."""

    def close(self, *, succeeded: bool) -> None:
        """Keep whether the run has reached its end, and end."""


class TensorBoard(Sink):
    """TensorBoard's events in a folder, from `step` on; a config as a table of text."""

    def __init__(self, folder: Path, step: int, config: Any):
        self._folder, self._step, self._config = folder / "tensorboard", step, config

    @functools.cached_property
    def _path(self) -> Path:
        """Begin the file: at the first record, so that the first step does not wait for it."""
        # Imported late: it imports PyTorch if that is installed, which takes seconds.
        from tensorboardX.proto.event_pb2 import SessionLog  # pyright: ignore

        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        _append(path, file_version="brain.Event:2")
        # TensorBoard drops what it has of later steps.
        _append(path, step=self._step + 1, session_log=SessionLog(status=SessionLog.START))
        if self._config:
            values = settings.flatten(self._config).items()
            rows = [f"| {name} | {value} |" for name, value in values]
            table = "\n".join(["| field | value |", "|---|---|", *rows])
            _append(path, step=self._step, summary=_text("config", table))
        return path

    def write(self, step: int, values: Values) -> None:
        from tensorboardX.summary import scalar

        for name, value in values.items():
            _append(self._path, step=step, summary=scalar(name, value))

    def text(self, step: int, name: str, markdown: str) -> None:
        """Keep a text, such as a table."""
        _append(self._path, step=step, summary=_text(name, markdown))


def _text(name: str, markdown: str) -> Any:
    from tensorboardX.summary import text

    return text(name, markdown)


def _append(path: Path, **event: Any) -> None:
    # Not by a SummaryWriter, whose thread dies when the disk is full; a run then waits for it.
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore
    from tensorboardX.record_writer import masked_crc32c

    data = Event(wall_time=time.time(), **event).SerializeToString()
    with path.open("ab") as file:
        for part in (struct.pack("<Q", len(data)), data):  # as a TFRecord
            file.write(part + struct.pack("<I", masked_crc32c(part)))


class WeightsAndBiases:
    """A run of Weights & Biases; its own variables, as WANDB_PROJECT and WANDB_MODE, count."""

    def __init__(self, folder: Path, name: str, config: Any, id: str | None):
        import wandb  # pyright: ignore[reportMissingImports]

        quiet = wandb.Settings(console="off", silent=True)
        values = dataclasses.asdict(config)
        options = {"resume": "allow", "allow_val_change": True, "settings": quiet}
        self._run = wandb.init(id=id, name=name, dir=str(folder), config=values, **options)
        self.id = self._run.id
        self.address = self._run.settings.sync_dir if self._run.offline else self._run.url

    def write(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)  # steps that it has already are dropped there

    def close(self, *, succeeded: bool) -> None:
        self._run.finish(exit_code=int(not succeeded))


_SERVICES: dict[str, Any] = {"wandb": WeightsAndBiases}


def check(names: Iterable[str]) -> None:
    """Refuse a service whose package is not installed on the host that writes."""
    for name in names if hosts.is_main() else ():
        spec = importlib.util.find_spec(name)
        if not (spec and spec.origin):  # without one it is a folder of that name, as W&B makes
            raise UserError(
                f"log_to has {name}, which is not installed; "
                f"pip install 'bert-jax[{name}]', or leave it out"
            )


class Service:
    """A sink in a thread of its own, so that no step waits for a server, however slow it is."""

    def __init__(self, service: str, folder: Path, name: str, step: int, config: Any):
        self._name, self._succeeded = service, False
        self._records: queue.SimpleQueue[tuple[int, Values] | None] = queue.SimpleQueue()

        def serve() -> None:
            path = folder / f"{service}.id"  # of the run there, which a resumed one continues
            id = path.read_text().strip() if step and path.exists() else None
            sink = _SERVICES[service](folder, name, config, id)
            workdir.write(path, sink.id + "\n")
            hosts.print_on_main(f"{service:<10} {sink.address}")
            while record := self._records.get():
                step_of_record, values = record
                sink.write(step_of_record, values)
            sink.close(succeeded=self._succeeded)

        self._served = daemon_thread.start(partial(contextvars.copy_context().run, serve))

    def write(self, step: int, values: Values) -> None:
        if self._served.done():
            self._served.result()  # raises what ended the thread
        self._records.put((step, values))

    def close(self, *, succeeded: bool) -> None:
        self._succeeded = succeeded
        self._records.put(None)
        with console.working(f"waiting for {self._name}") as work:
            work.note = f"{_PATIENCE:.0f} s at most"
            if not futures.wait([self._served], timeout=_PATIENCE).done:
                raise TimeoutError(f"no answer in {_PATIENCE:.0f} s")
        self._served.result()
