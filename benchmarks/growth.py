"""Scaling of a train step's time and memory with length, layers and vocabulary.

    python benchmarks/growth.py --config=small --output=growth

One size of the config is changed at a time, on random sequences: 4,096 tokens a step, or a single
longer sequence. Writes a table, OUTPUT.csv, and the curves, OUTPUT.png. The sizes are interleaved,
and the time is the median of the rounds. Memory is what the compiler says that a step needs besides
parameters, moments and the batch.
"""

import argparse
import copy
import csv
import gc
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure

from bert_jax.commands import process
from bert_jax.commands.flags import read_config
from bert_jax.commands.process import keep_host_memory
from bert_jax.config import TrainConfig, validation
from bert_jax.config.schedule import make_schedule
from bert_jax.distributed.mesh import make_mesh
from bert_jax.distributed.precision import resolve_dtype
from bert_jax.errors import UserError
from bert_jax.planning import synthetic
from bert_jax.training.setup import set_up

TOKENS = 4096  # of a step
SIZES = {
    "data.max_length": (128, 256, 512, 1024, 2048),
    "model.num_hidden_layers": (1, 2, 4, 8, 12),
    "model.vocab_size": (1024, 4096, 16384, 32768, 65536),
}

ARGS = argparse.Namespace()  # set by main


def parse(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of this script, and the words that set fields of the config."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="small", help="a recipe (small)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of a turn")
    parser.add_argument("--output", default="growth", help="name of the table and the curves")
    return parser.parse_known_args(words)


class Run:
    """A compiled train step of one size, with its state."""

    def __init__(self, config: TrainConfig):
        self.config = config
        phase = make_schedule(config).stages[0]
        mesh = make_mesh(config.parallel)
        setup = set_up(config, make_schedule(config).rate, mesh)
        self._state = setup.new_state()
        self._batch = synthetic.random_batch(config, phase)
        step = synthetic.train_step(setup, config, phase)
        self._step: Any = step.lower(self._state, self._batch).compile()
        self.gigabytes = self._step.memory_analysis().temp_size_in_bytes / 1e9
        self.tokens = phase.batch_size * phase.max_length
        self._count = 1
        for _ in range(2):  # the first settles the memory
            self.seconds()

    def seconds(self) -> float:
        """Return the seconds of a step, the mean of a turn."""
        started = time.perf_counter()
        for _ in range(self._count):
            self._state, _ = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        found = (time.perf_counter() - started) / self._count
        self._count = max(1, round(ARGS.seconds / found))
        return found


def main() -> None:
    """Measure every size, and draw the curves."""
    keep_host_memory()
    global ARGS
    ARGS, words = parse()
    config = read_config(ARGS.config, words, TrainConfig).config
    validation.validate(config)
    if not os.access(Path(ARGS.output).absolute().parent, os.W_OK):
        raise UserError(f"--output {ARGS.output} cannot be written there; make the folder first")
    if ARGS.rounds < 1 or ARGS.seconds <= 0:
        raise UserError("--rounds and --seconds must be positive")
    config.model = resolve_dtype(config.model, jax.devices()[0])
    rows = [("field", "value", "tokens a step", "ms a step", "microseconds a token", "GB")]
    print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for field, values in SIZES.items():
        runs = []
        for value in values:
            print(f"compiling {field} {value}", file=sys.stderr, flush=True)
            runs.append(Run(changed(config, field, value)))
        times = [[run.seconds() for run in runs] for _ in range(ARGS.rounds)]
        for value, run, column in zip(values, runs, zip(*times, strict=True), strict=True):
            median = statistics.median(column)
            a_token = 1e6 * median / run.tokens
            row = (field, value, run.tokens, f"{1e3 * median:.1f}", f"{a_token:.2f}")
            rows.append((*map(str, row), f"{run.gigabytes:.3f}"))
            print(f"| {' | '.join(rows[-1])} |", flush=True)
        del runs
        gc.collect()
    with open(f"{ARGS.output}.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    draw(rows[1:])


def changed(config: TrainConfig, field: str, value: int) -> TrainConfig:
    """Return the config with one size changed, and with the batch size of `TOKENS` a step."""
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
    figure.savefig(f"{ARGS.output}.png", dpi=120)


if __name__ == "__main__":
    process.run(main, Path(__file__).name)
