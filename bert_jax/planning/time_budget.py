"""Fit a run into minutes: the steps, and a smaller batch and model where those would be too few."""

import copy
import dataclasses
import statistics
import time
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from bert_jax import console
from bert_jax.config import Phase, TrainConfig, settings
from bert_jax.config.schedule import Stage, make_schedule, share_of_steps
from bert_jax.config.validation import validate
from bert_jax.console import duration
from bert_jax.distributed import devices
from bert_jax.distributed.mesh import make_mesh, shard_batch
from bert_jax.errors import UserError, refuse
from bert_jax.objectives import make_objective
from bert_jax.planning import synthetic
from bert_jax.planning.benchmark import take_steps
from bert_jax.training.setup import Setup

_STEPS, _SECONDS = 10, 5.0  # that are timed, at most
_FEWEST = 2000  # steps, below which a small batch or model learns more
_SMALLEST_BATCH, _SMALLEST_SIZE = 16, 128
_IN_STEPS = (
    "optimizer.warmup_fraction",
    "optimizer.decay_fraction",
    "data.length_warmup_fraction",
)
_WIDTH = ("model.hidden_size", "model.intermediate_size", "model.num_attention_heads")
# A model of which the user has set one of these keeps its size.
SHAPE = frozenset({*_WIDTH, "model.num_hidden_layers"})
# What the minutes may change of a recipe.
FITTED = (
    *("steps", "log_every", "eval_every", "eval_rows", "checkpoint.every", "data.batch_size"),
    *(*_WIDTH, *_IN_STEPS, "data.phases"),
)
_MOST_STEPS = (1 << 31) - 1  # of a config whose steps are not known yet
_LARGEST_SHARE = 0.999  # from 1 on, a share is a number of steps
_EVALUATIONS, _LOGS = 5, 20  # of a run
_EVALUATED = 50  # sequences that are trained on for each held-out one


def fit(
    config: TrainConfig,
    minutes: float,
    *,
    keeps_size: bool,
    kept: Collection[str] = (),
) -> TrainConfig:
    """Return a config that trains for about so many minutes on the devices of this host.

    Some steps are timed on random sequences. Where there is time for fewer than 2,000, the batch is
    halved, and then the width of the model. A batch that cannot fit in memory is halved too. The
    time includes the timing and compilation, and not the preparation of the text.

    Args:
      keeps_size: whether the model keeps its size.
      kept: the dotted names of what the user has set. Other numbers of steps, such as those of a
        warm-up, become shares of all steps.

    Raises:
      UserError: the minutes are too few to compile the step, or a batch does not fit in memory.
    """
    config, started = open_ended(config, kept), time.monotonic()
    config = _with_fitting_batches(config, kept)
    while True:
        seconds, compile_seconds = _measure(config)
        spent = time.monotonic() - started  # in timing steps
        steps = int((60 * minutes - spent - compile_seconds) / seconds)
        if steps >= _FEWEST:
            break
        halvings = int(np.ceil(np.log2(_FEWEST / max(steps, 1))))
        smaller = _smaller_batch(config, halvings, kept)
        if smaller.data.batch_size < config.data.batch_size:
            config = smaller
        elif not keeps_size and (narrower := _narrower(config)):
            config = narrower
        else:
            break
    if steps < 1:
        raise UserError(
            f"--minutes={minutes:g} is too short: timing steps takes {duration(spent)} here, "
            f"compiling takes {duration(compile_seconds)} and a step {1e3 * seconds:,.1f} ms; "
            "give more"
        )
    evaluated_every, logged_every = -(-steps // _EVALUATIONS), -(-steps // _LOGS)
    console.show(f"minutes    {minutes:g}, which are {steps:,} steps of {1e3 * seconds:,.0f} ms")
    phases = _rising(config.data.phases, steps)
    refuse(
        "data.phases" in kept and len(phases) < len(config.data.phases),
        f"--minutes={minutes:g} leaves no steps for each of data.phases",
        fix="give their starts as shares, such as 0.9, or more minutes",
    )
    config.steps, config.data.phases = steps, phases
    fitted = {
        "log_every": logged_every,
        "eval_every": evaluated_every,
        "eval_rows": min(config.eval_rows, max(1, steps * config.data.batch_size // _EVALUATED)),
        "checkpoint.every": evaluated_every,
    }
    for name, value in fitted.items():
        if name not in kept:
            settings.assign(config, name, value)
    return config


def _check_memory(config: TrainConfig) -> None:
    """Refuse a stage that certainly does not fit in the memory of the devices."""
    config, mesh = synthetic.resolve(config, jax.devices()[0]), make_mesh(config.parallel)
    for stage in make_schedule(config).stages:
        devices.check_fits(config.model, stage, config.optimizer, mesh)


def _with_fitting_batches(config: TrainConfig, kept: Collection[str]) -> TrainConfig:
    """Return a config whose batches are halved until they may fit in memory, or refuse them."""
    while True:
        smaller = _smaller_batch(config, 1, kept)
        try:
            _check_memory(config)
            return config
        except UserError:
            if smaller == config:
                raise
        config = smaller


def _measure(config: TrainConfig) -> tuple[float, float]:
    """Return the mean seconds of a step of the run, and those that compilation takes."""
    schedule, config = make_schedule(config), synthetic.resolve(config, jax.devices()[0])
    setup = synthetic.checked_setup(config, schedule.stages, jax.devices())
    total = compiling = 0.0
    for stage in schedule.stages:
        step_seconds, compile_seconds = _measure_stage(setup, config, stage)
        total += step_seconds * (stage.end - stage.first_step)
        compiling += compile_seconds
    return total / schedule.steps, compiling


def _measure_stage(setup: Setup, config: TrainConfig, stage: Stage) -> tuple[float, float]:
    """Return the median seconds of a step of a stage, and those of the first, which compiles it."""
    what = f"timing steps of {stage.batch_size} × {stage.max_length}"
    with devices.out_of_memory_refused(stage, jax.devices()[0]), console.working(what):
        step = synthetic.train_step(setup, config, stage)
        batch = shard_batch(setup.layout.mesh, synthetic.random_batch(config, stage))
        state, first = take_steps(step, setup.new_state(), batch, 1, _SECONDS)
        _, times = take_steps(step, state, batch, _STEPS, _SECONDS)
    return statistics.median(times), float(first[0])


def _smaller_batch(config: TrainConfig, halvings: int, kept: Collection[str]) -> TrainConfig:
    """Return a config whose batches are halved so often, as far as they are large enough.

    They still divide over devices and microbatches. Those that are `kept` stay.
    """
    if "data.batch_size" in kept:
        return config
    size, parts = config.data.batch_size, jax.device_count() * config.optimizer.microbatches
    while halvings > 0 and size >= 2 * _SMALLEST_BATCH and size % (2 * parts) == 0:
        size, halvings = size // 2, halvings - 1
    times = config.data.batch_size // size
    phases = tuple(
        dataclasses.replace(phase, batch_size=max(1, phase.batch_size // times // parts) * parts)
        if phase.batch_size
        else phase
        for phase in config.data.phases
    )
    if times == 1 or "data.phases" in kept:
        phases = config.data.phases
    data = dataclasses.replace(config.data, batch_size=size, phases=phases)
    return dataclasses.replace(config, data=data)


def _narrower(config: TrainConfig) -> TrainConfig | None:
    """Return a config with a model of half the width, or None if that is too small or invalid."""
    model = config.model
    if model.hidden_size < 2 * _SMALLEST_SIZE:
        return None
    narrow = dataclasses.replace(
        model,
        hidden_size=model.hidden_size // 2,
        intermediate_size=model.intermediate_size // 2,
        num_attention_heads=max(1, model.num_attention_heads // 2),
    )
    narrower = dataclasses.replace(config, model=narrow)
    try:
        validate(narrower)
        make_objective(synthetic.resolve(narrower, jax.devices()[0]))
    except UserError:  # such as of a generator, which is a share of it
        return None
    return narrower


def open_ended(config: TrainConfig, kept: Collection[str]) -> TrainConfig:
    """Return a config of as many steps as there may be, before it is known how many there are.

    Its other numbers of steps are shares of all, but for fields whose dotted names are `kept`.
    """

    def share(steps: Any) -> float:
        return steps if steps < 1 else min(steps / config.steps, _LARGEST_SHARE)

    result = copy.deepcopy(config)
    for name in _IN_STEPS:
        if name not in kept:
            settings.assign(result, name, share(settings.flatten(config)[name]))
    if "data.phases" not in kept:
        result.data.phases = tuple(
            dataclasses.replace(phase, start=share(phase.start)) for phase in config.data.phases
        )
    result.steps = _MOST_STEPS
    return result


def _rising(phases: Sequence[Phase], steps: int) -> tuple[Phase, ...]:
    """Return the phases that begin after those before them, in so many steps."""
    result, last = [], 0
    for phase in phases:
        first_step = share_of_steps(phase.start, steps)
        if last < first_step < steps:
            result.append(phase)
            last = first_step
    return tuple(result)
