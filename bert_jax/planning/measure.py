"""The train step of one phase of a config, measured on the devices that are here."""

import contextlib
import dataclasses
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from bert_jax import config as config_lib
from bert_jax.batches import Batch, loader
from bert_jax.config import Phase, TrainConfig
from bert_jax.distributed.mesh import (
    check_divides,
    check_model,
    init_sharded,
    jit_step,
    make_mesh,
    shard_batch,
)
from bert_jax.distributed.precision import resolve_dtype
from bert_jax.planning import breakdown, ceiling, chips, compiling, cost, memory, synthetic, timing
from bert_jax.planning.ceiling import Ceiling
from bert_jax.planning.compiling import Compiled
from bert_jax.planning.synthetic import Setup
from bert_jax.planning.timing import Timing
from bert_jax.text import prepare as prepare_lib
from bert_jax.text.store import Corpus
from bert_jax.training.masking import make_masking

_WARM_UP = 6  # steps that settle the memory, and fill what is prepared ahead
_PROFILED = 5
_INPUT_SECONDS = 1.0  # of rows without a step
_ENDLESS = 1 << 40  # steps


@dataclasses.dataclass(frozen=True)
class Limits:
    """When a measurement is over: at the first of the two.

    Attributes:
      steps: how many are timed.
      seconds: how long they are timed.
    """

    steps: int = 50
    seconds: float = 60.0


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the time of a step comes to, over all devices.

    Attributes:
      rows: a second.
      places: tokens a second, padding counted.
      real_tokens: tokens a second, padding not counted.
      flops: the model's own operations a second, by `cost.model_flops`.
      mfu_of_datasheet: their share of what the maker of the devices states; None where that is not
        known for these devices and this type.
      mfu_of_products: their share of what matrix products alone reach here.
    """

    rows: float
    places: float
    real_tokens: float
    flops: float
    mfu_of_datasheet: float | None
    mfu_of_products: float


@dataclasses.dataclass(frozen=True)
class Steps:
    """What was found by taking steps.

    Attributes:
      synthetic: with random rows that lie on the devices already.
      real: with rows of the text, made and sent as in training.
      input_seconds: of making a batch of them alone.
      parameters: of the model.
      peak: bytes of memory that the steps used, and what they are of.
      shares: of each kind of operation of the time on synthetic rows; None if not asked for.
    """

    synthetic: Timing
    real: Timing
    input_seconds: float
    parameters: int
    peak: tuple[int | None, str]
    shares: dict[str, float] | None


@dataclasses.dataclass(frozen=True)
class Report:
    """All that is measured of a phase.

    Attributes:
      config: of the run.
      number: of the phase, from 1.
      phase: itself.
      device: the first of them.
      num_devices: how many there are.
      compiled: the step.
      needed: bytes of each device, by the compiler.
      steps: as they were taken.
      ceiling: of matrix products.
      datasheet: operations a second of all devices, by their maker; None as in `Rates`.
      load: how many processes wanted a core when it began, on the mean of a minute.
    """

    config: TrainConfig
    number: int
    phase: Phase
    device: Any
    num_devices: int
    compiled: Compiled
    needed: int
    steps: Steps
    ceiling: Ceiling
    datasheet: float | None
    load: float

    def rates(self, timing: Timing) -> Rates:
        """Returns what the mean time of a step comes to."""
        pairs = self.config.data.pairs != "none"
        rows = self.phase.batch_size / timing.mean
        places = rows * self.phase.max_length
        flops = rows * cost.model_flops(self.config.model, self.phase, pairs=pairs)
        return Rates(
            rows=rows,
            places=places,
            real_tokens=places * (1 - timing.padding),
            flops=flops,
            mfu_of_datasheet=flops / self.datasheet if self.datasheet else None,
            mfu_of_products=flops / self.ceiling.flops,
        )


def measure(
    config: TrainConfig,
    number: int,
    limits: Limits,
    say: Callable[[str], None],
    traces: Path | None = None,
) -> Report:
    """Measures a phase of a config.

    Args:
      config: of the run, valid.
      number: of the phase, from 1.
      limits: of the steps that are timed.
      say: is told what is being done.
      traces: a folder for a profile, of which the shares are made.

    Raises:
      UserError: the text cannot be read, a batch does not fit, or the profile failed.
      TrainingError: a loss or a gradient is not finite.
    """
    load, _, _ = os.getloadavg()
    _, phase = config_lib.phases(config)[number - 1]
    mesh = make_mesh(config.parallel)
    device = mesh.devices.flat[0]
    config = dataclasses.replace(config, model=resolve_dtype(config.model, device))
    check_model(config.model, mesh, [phase.max_length], packed=config.data.packing)
    check_divides(phase.batch_size, config.optimizer.microbatches, mesh)
    with tempfile.TemporaryDirectory(prefix="bert-jax-") as folder, memory.fits(phase, device):
        say(f"reading {config.data.source}")
        with contextlib.redirect_stdout(sys.stderr):
            corpus = prepare_lib.read(config, None, Path(folder))
        say("compiling the step, without a cache and with one")
        masking = make_masking(corpus.tokenizer, phase, config.data)
        run = synthetic.set_up(config, phase, mesh, masking)
        compiled = compiling.compile_twice(lambda: _compile(run, config, phase))
        needed = cost.total_memory(compiled.program.memory_analysis())
        rows = batches(corpus, config, phase)
        steps = _take_steps(compiled.program, run, config, phase, rows, limits, say, traces)
        say("matrix products alone")
        most = ceiling.measure(config.model, phase, mesh)
    chip = chips.of_device(device) if config.model.dtype == "bfloat16" else None
    datasheet = chip.peak * mesh.size if chip else None
    return Report(
        config, number, phase, device, mesh.size, compiled, needed, steps, most, datasheet, load
    )


def batches(corpus: Corpus, config: TrainConfig, phase: Phase) -> Iterator[Batch]:
    """Yields the rows of a phase, without end, prepared ahead as in training."""
    data = dataclasses.replace(
        config.data, max_length=phase.max_length, batch_size=phase.batch_size, phases=()
    )
    endless = dataclasses.replace(config, data=data, steps=_ENDLESS)
    return loader.prefetch(loader.TrainBatches(corpus, endless), 0)


def _compile(run: Setup, config: TrainConfig, phase: Phase) -> Any:
    mesh = run.layout.mesh
    step = jit_step(run.step, run.layout, run.layout.state, ("state", "metrics"))
    found = step.lower(run.like, synthetic.abstract_rows(config, phase, mesh)).compile()
    memory.check(phase, cost.total_memory(found.memory_analysis()), list(mesh.devices.flat))
    return found


def _take_steps(
    step: Any,
    run: Setup,
    config: TrainConfig,
    phase: Phase,
    rows: Iterator[Batch],
    limits: Limits,
    say: Callable[[str], None],
    traces: Path | None,
) -> Steps:
    mesh = run.layout.mesh
    peak = memory.Peak(list(mesh.devices.flat))
    state = init_sharded(run.new_state, run.layout.state, jax.random.key(config.seed))
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    same = itertools.repeat(shard_batch(mesh, synthetic.rows(config, phase)))

    def of_text(state: Any, batch: Batch) -> Any:
        return step(state, shard_batch(mesh, batch))

    def some(number: int) -> None:
        nonlocal state
        state, _ = timing.take(step, state, same, number, limits.seconds)

    some(_WARM_UP)
    shares = None
    if traces:
        say(f"a profile of {_PROFILED} steps")
        shares = breakdown.profile(lambda: some(_PROFILED), traces, step.as_text())
    say("steps with synthetic rows")
    state, of_synthetic = timing.take(step, state, same, limits.steps, limits.seconds)
    say("steps with real rows")
    state, _ = timing.take(of_text, state, rows, _WARM_UP, limits.seconds)
    state, of_real = timing.take(of_text, state, rows, limits.steps, limits.seconds)
    say("real rows without steps")
    most = peak.read()
    alone = seconds_of_next(rows, min(_INPUT_SECONDS, limits.seconds))
    return Steps(of_synthetic, of_real, alone, parameters, most, shares)


def seconds_of_next(batches: Iterator[Batch], seconds: float) -> float:
    """Returns the seconds that a batch takes where nothing else is done.

    Those that lie ready when it begins are left out.
    """
    for _ in range(2 * loader.PREFETCHED_BATCHES):
        next(batches)
    started, number = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds or not number:
        next(batches)
        number += 1
    return passed / number
