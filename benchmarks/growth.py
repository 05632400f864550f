"""Scaling of a train step's time and memory with length, layers and vocabulary.

    python benchmarks/growth.py --config=configs/small.py --output=growth

Each size is that of the config, with one of them changed, on rows of random pieces: 4,096 tokens a
step, or one row of a greater length. Writes a table, OUTPUT.csv, and the curves, OUTPUT.png. The
sizes are measured in turns; the time is the median of the rounds. Memory is the compiler's, of what
a step needs besides parameters, moments and rows.
"""

import copy
import csv
import gc
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
from absl import flags
from matplotlib.figure import Figure

from bert_jax import config as config_lib
from bert_jax.commands import flags as cli
from bert_jax.commands.process import keep_host_memory
from bert_jax.config import TrainConfig
from bert_jax.distributed.mesh import init_sharded, make_mesh
from bert_jax.distributed.precision import resolve_dtype
from bert_jax.errors import UserError
from bert_jax.planning import synthetic

TOKENS = 4096  # of a step
SIZES = {
    "data.max_length": (128, 256, 512, 1024, 2048),
    "model.num_hidden_layers": (1, 2, 4, 8, 12),
    "model.vocab_size": (1024, 4096, 16384, 32768, 65536),
}

ROUNDS = flags.DEFINE_integer("rounds", 5, "How often each size has its turn.")
SECONDS = flags.DEFINE_float("seconds", 3.0, "Of a turn.")
OUTPUT = flags.DEFINE_string("output", "growth", "Where the table and the curves go.")


class Run:
    """A compiled train step of one size, with its state."""

    def __init__(self, config: TrainConfig):
        self.config = config
        _, phase = config_lib.phases(config)[0]
        mesh = make_mesh(config.parallel)
        setup = synthetic.set_up(config, phase, mesh)
        self._state = init_sharded(setup.new_state, setup.layout.state, jax.random.key(0))
        self._batch = synthetic.random_batch(config, phase)
        self._step: Any = setup.jit().lower(self._state, self._batch).compile()
        self.gigabytes = self._step.memory_analysis().temp_size_in_bytes / 1e9
        self.tokens = phase.batch_size * phase.max_length
        self._count = 1
        for _ in range(2):  # the first settles the memory
            self.seconds()

    def seconds(self) -> float:
        """Returns the seconds of a step, the mean of a turn."""
        started = time.perf_counter()
        for _ in range(self._count):
            self._state, _ = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        found = (time.perf_counter() - started) / self._count
        self._count = max(1, round(SECONDS.value / found))
        return found


def main() -> None:
    """Measures every size, and draws them."""
    keep_host_memory()
    config, _ = cli.read_config(Path(__file__).parents[1] / "configs" / "small.py", TrainConfig)
    config_lib.validate(config)
    if not os.access(Path(OUTPUT.value).absolute().parent, os.W_OK):
        raise UserError(f"--output {OUTPUT.value} cannot be written there; make the folder first")
    if ROUNDS.value < 1 or SECONDS.value <= 0:
        raise UserError("--rounds and --seconds must be positive")
    config.model = resolve_dtype(config.model, jax.devices()[0])
    rows = [("field", "value", "tokens a step", "ms a step", "microseconds a token", "GB")]
    print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for field, values in SIZES.items():
        runs = []
        for value in values:
            print(f"compiling {field} {value}", file=sys.stderr, flush=True)
            runs.append(Run(changed(config, field, value)))
        times = [[run.seconds() for run in runs] for _ in range(ROUNDS.value)]
        for value, run, column in zip(values, runs, zip(*times, strict=True), strict=True):
            median = statistics.median(column)
            a_token = 1e6 * median / run.tokens
            row = (field, value, run.tokens, f"{1e3 * median:.1f}", f"{a_token:.2f}")
            rows.append((*map(str, row), f"{run.gigabytes:.3f}"))
            print(f"| {' | '.join(rows[-1])} |", flush=True)
        del runs
        gc.collect()
    with open(f"{OUTPUT.value}.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    draw(rows[1:])


def changed(config: TrainConfig, field: str, value: int) -> TrainConfig:
    """Returns the config with one size changed, and as many rows as make the tokens of a step."""
    config = copy.deepcopy(config)
    part, name = field.split(".")
    setattr(getattr(config, part), name, value)
    model, data = config.model, config.data
    model.max_position_embeddings = max(data.max_length, model.max_position_embeddings)
    data.batch_size = max(1, TOKENS // data.max_length)
    return config


def draw(rows: list[tuple[str, ...]]) -> None:
    """Draws time and memory of a token against each size."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, len(SIZES), sharex="col", squeeze=False)
    for column, (field, values) in enumerate(SIZES.items()):
        mine = [row for row in rows if row[0] == field]
        for axis, place, name in ((axes[0], 4, "microseconds a token"), (axes[1], 5, "GB")):
            axis[column].plot(values, [float(row[place]) for row in mine], marker="o")
            axis[column].set(ylabel=name)
            axis[column].margins(0.1)
            axis[column].locator_params(axis="x", nbins=4)
            axis[column].set(xlim=0, ylim=0)
            axis[column].grid(visible=True, alpha=0.3)
        axes[1][column].set(xlabel=field)
    figure.savefig(f"{OUTPUT.value}.png", dpi=120)


if __name__ == "__main__":
    cli.run(main)
