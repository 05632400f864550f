"""Training as a generator of steps; a run reads them, and logs, evaluates, saves and stops."""

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Self

import jax

from bert_jax import console
from bert_jax.batches import Batch
from bert_jax.batches.loader import EvalBatches
from bert_jax.config import FinetuneConfig, TrainConfig
from bert_jax.distributed import hosts
from bert_jax.errors import DivergedError, Interrupted
from bert_jax.text.store import Corpus
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.metrics import Sums, Writer, add_up, describe, describe_speed, means
from bert_jax.training.objective import TOKENS, Metrics, Objective
from bert_jax.training.progress import Progress
from bert_jax.training.step import TrainState

_IN_FLIGHT = 2  # steps


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stretch of training, up to the step `end`, with compiled steps of its own."""

    end: int
    batch_size: int
    cost: int  # of a step, compared with those of other stages
    train_step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    evaluate: Callable[[TrainState], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that was dispatched; the devices may still be at work on it.

    Attributes:
      number: the number of steps that the state has taken.
      last: the number of the last step of the run.
      stage: the stage that the step is of.
      means: of the metrics since the last log, if the step was logged.
      scores: on the held-out examples, if the step was evaluated.
      is_best: whether these scores are the best so far.
      stop_reason: why training stops after this step, such as a signal; "" if it continues.
    """

    number: int
    last: int
    stage: Stage
    means: dict[str, float] | None = None
    scores: dict[str, float] | None = None
    is_best: bool = False
    stop_reason: str = ""

    def is_due(self, every: int | Fraction) -> bool:
        """Return whether a multiple of `every` has come with this step, or it is the last one."""
        has_risen = self.number // every > (self.number - 1) // every
        return has_risen or self.number == self.last


class Training:
    """The steps of a run, with their metrics since the last log, their speed and the time left.

    At most two steps are in flight, so that a signal is obeyed after two. Nothing else waits for
    the devices but logs, evaluations and saves, and a step that is compiled.
    """

    def __init__(
        self,
        state: TrainState,
        stages: Sequence[Stage],
        batches: Iterator[Any],
        checkpoints: Checkpoints,
        writer: Writer,
        objective: Objective,
    ):
        self.state, self._stages, self._batches = state, stages, batches
        self._checkpoints, self._writer = checkpoints, writer
        self._progress = Progress(int(state.step), [(stage.end, stage.cost) for stage in stages])
        self._figures = objective.figures
        sums = checkpoints.log_window(int(state.step))
        self._window = _Window(checkpoints, sums, objective.loss_weights)

    @contextlib.contextmanager
    def shown(self) -> Iterator[Self]:
        """Show what is done while training; at the end, wait until the checkpoints are written."""
        with console.working(self._progress, says_end=False):
            yield self
        with console.working("saving", says_end=False):
            self._checkpoints.close()

    def steps(
        self,
        *,
        log_every: int,
        eval_every: int | Fraction,
        patience: int = 0,
        stop: Callable[[], str] = lambda: "",
    ) -> Iterator[Step]:
        """Take the steps from the state's own one on; log and evaluate those due; yield each.

        Args:
          log_every, eval_every: the last step is always due.
          patience: the number of evaluations without a better one after which training ends; 0
            for none.
          stop: returns why to stop now, or "".

        Raises:
          Interrupted: there was a reason to stop; the caller has saved the step that has it.
        """
        is_over = 0 < patience <= self._evaluations_since_best()
        for step in self._dispatched() if not is_over else ():
            means = self._log(step) if step.is_due(log_every) else None
            scores = self._evaluate(step) if step.is_due(eval_every) else None
            since_best, reason = self._evaluations_since_best() if scores else 1, stop()
            yield dataclasses.replace(
                step, means=means, scores=scores, is_best=since_best == 0, stop_reason=reason
            )
            if reason:
                raise Interrupted(
                    f"{reason} after step {step.number}: saved; the same command resumes from there"
                )
            if scores and 0 < patience <= since_best:
                hosts.print_on_main(
                    f"stopped    after step {step.number:,} of {step.last:,}, as "
                    f"{console.counted(since_best, 'evaluation')} had no better score"
                )
                return

    def _dispatched(self) -> Iterator[Step]:
        """Dispatch each step to the last, once the step before the previous one is done."""
        number, progress = int(self.state.step), self._progress
        in_flight: deque[Metrics] = deque()
        for stage in self._stages:
            while number < stage.end:
                batch, inner_seconds = next(self._batches), progress.inner_seconds
                if len(in_flight) == _IN_FLIGHT:
                    jax.block_until_ready(in_flight.popleft())
                self.state, metrics = stage.train_step(self.state, batch)
                in_flight.append(metrics)
                number += 1
                compiling = progress.inner_seconds - inner_seconds
                self._window.add(number, metrics, stage.batch_size, compiling=compiling)
                progress.n = number
                if compiling:
                    progress.mark(number)
                yield Step(number, self._stages[-1].end, stage)

    def _log(self, step: Step) -> dict[str, float]:
        """Wait for the steps since the last log; write, print and return their means."""
        values, inner_seconds = self._window.values(), self._progress.inner_seconds
        self._writer.write(step.number, "train", values)
        if self._progress.inner_seconds > inner_seconds:  # the first one begins files
            self._window.restart_clock()
        if expected := self._progress.logged(step.number, describe_speed(values)):
            hosts.print_on_main(expected)
        described = describe(values, self._figures, self._writer.baselines)
        speed = self._progress.speed_and_left()
        hosts.print_on_main(f"step {step.number}/{step.last}  {described}  {speed}")
        return values

    def _evaluate(self, step: Step) -> dict[str, float]:
        """Evaluate the state; write, draw, print and return the scores.

        Raises:
          TrainingError: a loss is not finite.
        """
        with console.working("evaluating", says_end=False):
            scores = step.stage.evaluate(self.state)
        for name, value in scores.items():
            if name.endswith("loss"):
                check_finite(f"held-out {name}", value, step.number, self._checkpoints)
        self._writer.write(step.number, "eval", scores)
        with console.working("drawing the curves", says_end=False):
            self._writer.draw()
        described = describe(scores, self._figures, self._writer.baselines)
        hosts.print_on_main(f"step {step.number}/{step.last}  held-out: {described}")
        self._window.restart_clock()
        return scores

    def save(self, step: Step, config: TrainConfig | FinetuneConfig) -> None:
        """Start writing a checkpoint of a step with its config, and with its scores if it has some.

        Raises:
          TrainingError: a metric of a step since the last log is not finite.
        """
        with console.working("saving", says_end=False):
            self._checkpoints.save(
                step.number, self.state, config, step.scores, self._window.sums()
            )
        self._window.restart_clock()

    def _evaluations_since_best(self) -> int:
        """Return the number of evaluations after the best one; 0 before the first one."""
        evaluations = [record for record in self._writer.records if record["split"] == "eval"]
        ranks = [self._checkpoints.rank(record) for record in evaluations]
        return len(ranks) - 1 - ranks.index(max(ranks)) if ranks else 0


def evaluate(
    eval_step: Callable[[Any, Batch], Metrics],
    parts: Iterable[Corpus],
    held_out: Callable[[Corpus], EvalBatches],
    loss_weights: Mapping[str, float],
    state: TrainState,
) -> dict[str, float]:
    """Return the means over the `held_out` batches of each text, averaged by its weight.

    Also the losses of each text of a mixture, and how many sequences were evaluated a second.
    """
    started, count = time.monotonic(), 0
    sums: Sums = {}
    of_parts: dict[str, float] = {}
    for part in parts:
        batches = held_out(part)
        metrics = jax.device_get([eval_step(state.params, batch) for batch in batches])
        count += batches.num_sequences  # those of all hosts, without padding
        of_part = add_up(metrics)
        for name, value in means(of_part, loss_weights).items():
            if name not in of_part:  # the sum of the losses, which is made of their means below
                continue
            total, weight = sums.get(name, (0.0, 0.0))
            sums[name] = [total + part.weight * value, weight + part.weight]
            if part.name and name.endswith("_loss"):
                of_parts[f"{name}/{part.name}"] = value
    scores = means(sums, loss_weights)
    return {**scores, **of_parts, "sequences_per_second": count / (time.monotonic() - started)}


def check_finite(name: str, value: float, step: int, checkpoints: Checkpoints) -> None:
    """Raise DivergedError if a value is not finite, with the step of the last good checkpoint."""
    if math.isfinite(value):
        return
    latest = checkpoints.latest_path()
    saved = f"checkpoint {latest}" if latest else "none"
    raise DivergedError(
        f"{name} is {value} at step {step}; the last good checkpoint is: {saved}; lower "
        "optimizer.learning_rate, in another --workdir, or look at the data"
    )


class _Window:
    """The metrics of the steps since the last log, and their speed."""

    def __init__(self, checkpoints: Checkpoints, sums: Sums, loss_weights: Mapping[str, float]):
        self._checkpoints, self._sums, self._loss_weights = checkpoints, sums, loss_weights
        self._metrics: list[tuple[int, Metrics]] = []
        self._earlier_speed: dict[str, float] = {}  # until a step was compiled
        self.restart_clock()

    def restart_clock(self) -> None:
        """Drop the time since the last restart, which was not all training, and its steps."""
        self._timed: list[tuple[int, Metrics]] = []
        self._since = time.monotonic()

    def add(self, step: int, metrics: Metrics, sequences: int, *, compiling: float) -> None:
        """Add a step that was dispatched; compiling it took so many seconds, 0 if it was before."""
        self._metrics.append((step, metrics))
        if compiling and self._timed:  # the steps before it were done when it began to compile
            self._earlier_speed = self._speed(time.monotonic() - compiling)
        self._timed.append((sequences, metrics))
        if compiling:  # the time of this step is not that of the others
            jax.block_until_ready(metrics)
            self._earlier_speed = self._earlier_speed or self._speed(time.monotonic())
            self.restart_clock()

    def sums(self) -> Sums:
        """Wait for the steps so far, check that all their metrics are finite, and sum them."""
        fetched = jax.device_get(self._metrics)
        for step, metrics in fetched:
            for name, metric in metrics.items():
                check_finite(name, float(metric.total), step, self._checkpoints)
        self._sums = add_up((metrics for _, metrics in fetched), self._sums)
        self._metrics = []
        return self._sums

    def values(self) -> dict[str, float]:
        """Return the means since the last call, with sequences and, of text, tokens a second."""
        values = means(self.sums(), self._loss_weights)
        # If the only step so far is one that was compiled, its own speed.
        values |= self._speed(time.monotonic()) if self._timed else self._earlier_speed
        self._sums, self._earlier_speed = {}, {}
        self.restart_clock()
        return values

    def _speed(self, until: float) -> dict[str, float]:
        seconds = until - self._since
        speed = {"sequences_per_second": sum(count for count, _ in self._timed) / seconds}
        tokens = [metrics[TOKENS].total for _, metrics in self._timed if TOKENS in metrics]
        if tokens:
            speed["tokens_per_second"] = sum(map(float, jax.device_get(tokens))) / seconds
        return speed
