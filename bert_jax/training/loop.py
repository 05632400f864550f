"""The training loop: steps, logs, evaluations, checkpoints, signals."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import jax

from bert_jax.batches import Batch
from bert_jax.errors import Interrupted, TrainingError
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.metrics import Progress, Writer, describe, means
from bert_jax.training.objectives import TOKENS, Metrics
from bert_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a run with programs of its own.

    Attributes:
      end: the step before which it ends.
      batch_size: rows a step.
      train_step: (state, what the loader gives for a step) -> (state, sums).
      evaluate: state -> means over what is held out.
    """

    end: int
    batch_size: int
    train_step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    evaluate: Callable[[TrainState], dict[str, float]]


def evaluate(
    eval_step: Callable[[Any, Batch], Metrics],
    batches: Callable[[], Iterable[Batch]],
    batch_size: int,
    state: TrainState,
) -> dict[str, float]:
    """Returns the means over all held-out rows, and how many a second were evaluated."""
    started = time.monotonic()
    sums = jax.device_get([eval_step(state.params, batch) for batch in batches()])
    speed = len(sums) * batch_size / (time.monotonic() - started)
    return {**means(sums), "sequences_per_second": speed}


def fit(
    state: TrainState,
    stages: list[Stage],
    batches: Iterator[Any],
    checkpoints: Checkpoints,
    writer: Writer,
    *,
    log_every: int,
    eval_every: int,
    save_every: int,
    patience: int = 0,
    stop: Callable[[], str] = lambda: "",
) -> TrainState:
    """Trains from the state's own step to the end of the last stage.

    The state is saved every `save_every` steps, at the end, and where `stop`, asked after each
    step, returns a reason. The device is waited for at log steps, evaluations and checkpoints
    only. Closes `checkpoints`.

    With `patience`, training ends after so many evaluations without one that is better than all
    before; evaluations are then saved, too.

    Raises:
      TrainingError: a loss or a gradient is no longer finite.
      Interrupted: a signal came; the state has been saved.
    """
    step, last = int(state.step), stages[-1].end
    log = _Log(checkpoints)

    def due(every: int) -> bool:
        return step % every == 0 or step == last

    def without_gain() -> bool:
        ranks = [checkpoints.rank(r) for r in writer.records() if r["split"] == "eval"]
        return bool(patience and ranks) and len(ranks) - 1 - ranks.index(max(ranks)) >= patience

    is_over = without_gain()

    with closing(checkpoints), closing(Progress(last, step)) as progress:
        for stage in stages:
            if step < stage.end:
                log.restart_clock_after_next()  # which compiles the stage's program
            while step < stage.end and not is_over:
                state, sums = stage.train_step(state, next(batches))
                step += 1
                log.add(step, sums, stage.batch_size)
                progress.advance(step)
                if due(log_every):
                    values = log.values()
                    writer.write(step, "train", values)
                    progress.show(step, values)
                held_out = None
                if due(eval_every):
                    held_out = stage.evaluate(state)
                    writer.write(step, "eval", held_out)
                    writer.draw()
                    progress.say(f"step {step}/{last}  held-out: {describe(held_out)}")
                    is_over = without_gain()
                reason = stop()
                if due(save_every) or reason or is_over:
                    log.check()
                    checkpoints.save(step, state, held_out)
                if reason:
                    raise Interrupted(f"{reason} after step {step}: saved; {_GO_ON}")
                if due(eval_every) or due(save_every):
                    log.restart_clock()
    return state


_GO_ON = "the same command goes on from there"


class _Log:
    """The sums of the steps since the last log, and the time that they took."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints
        self._sums: list[tuple[int, Metrics]] = []
        self._restart_after_next = False
        self._first_speed: dict[str, float] = {}
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves out what went before, which was not training."""
        self._rows, self._timed_from = 0, len(self._sums)
        self._since = time.monotonic()

    def restart_clock_after_next(self) -> None:
        self._restart_after_next = True

    def add(self, step: int, sums: Metrics, rows: int) -> None:
        self._sums.append((step, sums))
        self._rows += rows
        if self._restart_after_next:
            jax.block_until_ready(sums)
            self._restart_after_next = False
            self._first_speed = self._speed()
            self.restart_clock()

    def check(self) -> None:
        """Waits for the steps so far, and stops the run at the first that is not finite."""
        self._sums = jax.device_get(self._sums)
        for step, sums in self._sums:
            for name, part in sums.items():
                if not math.isfinite(part.total):
                    good = self._checkpoints.latest()
                    kept = f"checkpoint {self._checkpoints.folder / str(good)}" if good else "none"
                    raise TrainingError(
                        f"{name} is {part.total} at step {step}; the last good checkpoint is: "
                        f"{kept}; lower optimizer.learning_rate or look at the data"
                    )

    def values(self) -> dict[str, float]:
        """Returns the means since the last call, and the rows and, of text, tokens a second."""
        self.check()
        values = means(sums for _, sums in self._sums)
        # Where nothing but a step that was compiled has been taken, its own speed.
        values |= self._speed() if self._rows else self._first_speed
        self._sums = []
        self.restart_clock()
        return values

    def _speed(self) -> dict[str, float]:
        seconds = time.monotonic() - self._since
        speed = {"sequences_per_second": self._rows / seconds}
        timed = [sums[TOKENS] for _, sums in self._sums[self._timed_from :] if TOKENS in sums]
        if timed:
            speed["tokens_per_second"] = sum(float(each.total) for each in timed) / seconds
        return speed
