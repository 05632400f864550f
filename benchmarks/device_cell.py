"""Time a train step at the next batch size, for device.py, which starts this program.

Each batch is a line of JSON in a file, written when it was measured; the last line says why there
are no more. Until then the exit code is `MORE`, and the program is to be started again. Several
such programs compile at the same time: with `TURNS`, a file that they lock, each waits until no
other compiles or measures before it measures. A trace has one batch, and the time of each kind of
kernel.
"""

import collections
import contextlib
import dataclasses
import fcntl
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.commands import process
from bert_jax.commands.flags import read_config
from bert_jax.config import TrainConfig
from bert_jax.config.schedule import Stage, make_schedule
from bert_jax.config.validation import validate
from bert_jax.errors import UserError

MORE = 75  # exit code: there are more batches to try
TURNS = "DEVICE_TURNS"  # environment variable: the file to lock
GAIN = 1.02  # of the speed, by twice the batch, for which twice that is tried
KERNELS = 15  # that are shown
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128}
TINY |= {"intermediate_size": 64}


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured.

    Attributes:
      recipe, length, dtype: of the model and its sequences.
      attention: "plain" or "fused", as `model.attention`.
      attention_dropout: as published; otherwise none.
      tiny: a model of seconds.
    """

    recipe: str
    length: int
    dtype: str = "bfloat16"
    attention: str = "plain"
    attention_dropout: bool = True
    tiny: bool = False

    @property
    def form(self) -> str:
        """What is not the length's and the recipe's."""
        without = "" if self.attention_dropout else ", no attention dropout"
        return f"{self.dtype}, {self.attention}{without}"

    @property
    def name(self) -> str:
        """The name of its files."""
        form = self.form.replace(",", "").replace(" ", "-")
        return f"speed-{self.recipe}-{self.length}-{form}"

    def config(self, batch: int) -> TrainConfig:
        """Return the config of a batch size."""
        config = read_config(self.recipe, [], TrainConfig).config
        longest = max(self.length, config.model.max_position_embeddings)
        changes: Any = {"dtype": self.dtype, "attention": self.attention}
        changes |= {"max_position_embeddings": longest, **(TINY if self.tiny else {})}
        if not self.attention_dropout:
            changes["attention_probs_dropout_prob"] = 0.0
        model = dataclasses.replace(config.model, **changes)
        sizes: Any = {"max_length": self.length, "batch_size": batch, "phases": ()}
        data = dataclasses.replace(config.data, **sizes)
        config = dataclasses.replace(config, model=model, data=data)
        validate(config)
        return config


def next_batch(
    rows: Sequence[Mapping[str, Any]], first: int, most: int, devices: int = 1
) -> int | str:
    """Return the batch to measure after some, or why there is none.

    The first one is doubled while that is faster and memory lasts, and halved until one fits.
    """
    speeds = {r["batch_size"]: r["random"]["sequences_per_second"] for r in rows if "random" in r}
    refused = [r["batch_size"] for r in rows if "does_not_fit" in r]
    if not speeds:
        batch = min(refused) // 2 if refused else first
        return batch // devices * devices or "no batch fits in memory"
    largest = max(speeds)
    if any(batch <= 2 * largest for batch in refused):
        return "memory is full"
    if 2 * largest > most:
        return "the largest batch asked for"
    smaller = [speed for batch, speed in speeds.items() if batch < largest]
    return "no faster" if smaller and speeds[largest] < GAIN * max(smaller) else 2 * largest


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file, if there is one."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def kernels(folder: Path) -> list[tuple[str, float]]:
    """Return the kinds of kernels in a trace that took longest, with their share of the time."""
    import jax

    path = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    of_devices = [plane for plane in planes if plane.name.startswith("/device:")]
    seconds = collections.Counter()
    for plane in of_devices or planes:
        lines = {line.name: line for line in plane.lines}
        # TPUs have lines of the same time by step, module and operation; GPUs have streams.
        names = [name for name in lines if name == "XLA Ops"]
        names = names or [name for name in lines if name.startswith("Stream")]
        for name in names or ([] if of_devices else lines):
            for event in lines[name].events:
                seconds[re.sub(r"([._]\d+)+$", "", event.name)] += event.duration_ns
    total = sum(seconds.values())
    return [(name, each / total) for name, each in seconds.most_common(KERNELS)]


def _check_estimate(config: TrainConfig, stage: Stage) -> None:
    """Raise a MemoryError if the batch cannot fit, which compiling it would take a minute to say.

    The estimate was 0.91 to 1.01 of what the compiler says (`costs.estimate_cost`).
    """
    import jax

    from bert_jax.distributed import devices as device_lib
    from bert_jax.planning import costs, synthetic

    setup = synthetic.checked_setup(config, [stage], jax.devices())
    estimate = costs.estimate_cost(config, stage, setup)["memory"]["total"]
    device_lib.check_memory(int(0.95 * estimate), jax.devices())


def main() -> None:
    """Measure the next batch of a cell; the arguments are those that device.py gives."""
    values, first, most, output, trace = json.loads(sys.argv[1])
    cell, output = Cell(**values), Path(output)
    if output.exists():  # without the half of a line that a killed process has left
        output.write_text("".join(output.read_text().rpartition("\n")[:2]))
    import jax

    from bert_jax.distributed import devices as device_lib
    from bert_jax.planning import benchmark, synthetic

    process.cache_compiled_programs()  # but the step, whose compilation is timed
    limits: Any = {"steps": 3 if cell.tiny else 30, "seconds": 6.0, "trace_folder": trace or None}
    devices = jax.device_count()
    if not isinstance(batch := next_batch(read(output), first, most, devices), str):
        config = synthetic.resolve(cell.config(batch), jax.devices()[0])
        stage = make_schedule(config).main_stages[0]
        try:
            with device_lib.out_of_memory_refused(stage, jax.devices()[0]), _turns() as wait:
                _check_estimate(config, stage)
                row = benchmark.measure(config, stage, **limits, before_timing=wait)
        except UserError as error:
            if "does not fit in the memory" not in str(error):
                raise
            row = {"batch_size": batch, "does_not_fit": str(error)}
        if trace and "random" in row:
            row["kernels"] = kernels(Path(trace))
        _append(output, row)
        batch = next_batch(read(output), first, most, devices)
    if not isinstance(batch, str):
        sys.exit(MORE)
    _append(output, {"end": batch})


@contextlib.contextmanager
def _turns() -> Iterator[Callable[[], None]]:
    """Yield what waits until this process is alone; before, it compiles beside others."""
    if TURNS not in os.environ:
        yield lambda: None
        return
    with open(os.environ[TURNS], "a") as file:  # closed, it is no longer locked
        fcntl.flock(file, fcntl.LOCK_SH)

        def wait() -> None:
            fcntl.flock(file, fcntl.LOCK_UN)  # else two that wait would wait for each other
            fcntl.flock(file, fcntl.LOCK_EX)

        yield wait


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    process.run(main, Path(__file__).name)
