"""The training loop: steps, logs, evaluations and checkpoints."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import jax

from bert_jax import console
from bert_jax.batches import Batch
from bert_jax.distributed import hosts
from bert_jax.errors import Interrupted, TrainingError
from bert_jax.text.store import Corpus
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.metrics import Sums, Writer, add_up, describe, describe_speed, means
from bert_jax.training.objectives import TOKENS, Metrics
from bert_jax.training.progress import Progress
from bert_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stretch of training, up to the step `end`, with compiled steps of its own."""

    end: int
    batch_size: int
    cost: int  # of a step, compared with those of other stages
    train_step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    evaluate: Callable[[TrainState], dict[str, float]]


def evaluate(
    eval_step: Callable[[Any, Batch], Metrics],
    parts: Iterable[tuple[Corpus, Callable[[], Iterable[Batch]]]],
    batch_size: int,
    state: TrainState,
) -> dict[str, float]:
    """Return the means over the held-out sequences of each text, averaged by its weight.

    Also the losses of each text of a mixture, and how many sequences were evaluated a second.
    """
    started, count = time.monotonic(), 0
    sums: Sums = {}
    of_parts: dict[str, float] = {}
    for part, batches in parts:
        metrics = jax.device_get([eval_step(state.params, batch) for batch in batches()])
        count += len(metrics) * batch_size
        for name, value in means(add_up(metrics)).items():
            total, weight = sums.get(name, (0.0, 0.0))
            sums[name] = [total + part.weight * value, weight + part.weight]
            if part.name and name.endswith("_loss"):
                of_parts[f"{name}/{part.name}"] = value
    scores = {name: total / weight for name, (total, weight) in sums.items()}
    return {**scores, **of_parts, "sequences_per_second": count / (time.monotonic() - started)}


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
    patience: int = 0,  # evaluations in a row without a new best that end training; 0: never
    stop: Callable[[], str] = lambda: "",  # returns a reason to save and raise Interrupted
    verify: Callable[[float | None], None] = lambda seconds: None,  # waits, raises for damaged data
    watch: Callable[[int, Mapping[str, float]], str] = lambda step, values: "",  # what to warn of
) -> TrainState:
    """Train from the state's own step to the end of the last stage; close `checkpoints`.

    The state is saved every `save_every` steps, at each evaluation that is the best so far, and at
    the end. Nothing waits for the device but logs, evaluations and checkpoints. A loss or gradient
    that is not finite raises `TrainingError`.
    """
    step, last = int(state.step), stages[-1].end
    log = _Log(checkpoints, checkpoints.log_window(step))
    costs = [(stage.end, stage.cost) for stage in stages]
    progress = Progress(step, costs, {"evaluating": eval_every, "saving": save_every})

    def due(every: int) -> bool:
        return step % every == 0 or step == last

    def warn(step: int, values: Mapping[str, float]) -> None:
        if warning := watch(step, values):
            hosts.warn_on_main(warning)

    def evaluations_since_best() -> int:
        ranks = [checkpoints.rank(r) for r in writer.records if r["split"] == "eval"]
        return len(ranks) - 1 - ranks.index(max(ranks)) if ranks else 0

    def ends_early() -> bool:
        return 0 < patience <= evaluations_since_best()

    with _closing(checkpoints), console.working(progress, says_end=False):
        for stage in stages:
            while step < stage.end and not ends_early():
                batch, inner_seconds = next(batches), progress.inner_seconds
                state, metrics = stage.train_step(state, batch)
                step += 1
                compiles = progress.inner_seconds > inner_seconds
                log.add(step, metrics, stage.batch_size, compiles=compiles)
                progress.add(step, metrics, compiles=compiles)

                if due(log_every):
                    verify(0)
                    values = log.values()
                    writer.write(step, "train", values)
                    if expected := progress.logged(step, describe_speed(values)):
                        hosts.print_on_main(expected)
                    line = f"step {step}/{last}  {describe(values, writer.baselines)}"
                    hosts.print_on_main(f"{line}  {progress.speed_and_left()}")
                    warn(step, values)

                held_out = None
                if due(eval_every):
                    with console.working("evaluating", says_end=False) as work:
                        held_out = stage.evaluate(state)
                    progress.took(work)
                    for name, value in held_out.items():
                        if name.endswith("loss"):
                            check_finite(f"held-out {name}", value, step, checkpoints)
                    writer.write(step, "eval", held_out)
                    with console.working("drawing the curves", says_end=False):
                        writer.draw()
                    line = f"step {step}/{last}  held-out: {describe(held_out, writer.baselines)}"
                    hosts.print_on_main(line)
                    warn(step, held_out)

                stop_reason, is_best = stop(), held_out and evaluations_since_best() == 0
                if due(save_every) or is_best or ends_early() or stop_reason:
                    with console.working("saving", says_end=False) as work:
                        sums = log.sums()
                        verify(None)
                        checkpoints.save(step, state, held_out, sums)
                    progress.took(work)
                if stop_reason:
                    where = f"{stop_reason} after step {step}"
                    raise Interrupted(f"{where}: saved; the same command resumes from there")
                if held_out or due(save_every):
                    log.restart_clock()
    return state


@contextlib.contextmanager
def _closing(checkpoints: Checkpoints) -> Iterator[None]:
    """Wait at the end for checkpoints to be written."""
    with closing(checkpoints):
        yield
        with console.working("saving", says_end=False):
            checkpoints.close()


def check_finite(name: str, value: float, step: int, checkpoints: Checkpoints) -> None:
    """Raise TrainingError if a value is not finite, with the step of the last good checkpoint."""
    if math.isfinite(value):
        return
    latest = checkpoints.latest()
    saved = f"checkpoint {checkpoints.folder / str(latest)}" if latest else "none"
    where = f"{name} is {value} at step {step}; the last good checkpoint is: {saved}"
    raise TrainingError(f"{where}; lower optimizer.learning_rate or look at the data")


class _Log:
    """The metrics of the steps since the last log, and their speed."""

    def __init__(self, checkpoints: Checkpoints, sums: Sums):
        self._checkpoints, self._sums = checkpoints, sums
        self._metrics: list[tuple[int, Metrics]] = []
        self._first_speed: dict[str, float] = {}
        self.restart_clock()

    def restart_clock(self) -> None:
        """Drop the time since the last restart, which was not all training, and its steps."""
        self._timed: list[tuple[int, Metrics]] = []
        self._since = time.monotonic()

    def add(self, step: int, metrics: Metrics, sequences: int, *, compiles: bool) -> None:
        self._metrics.append((step, metrics))
        self._timed.append((sequences, metrics))
        if compiles:  # the time of this step is not that of the others
            jax.block_until_ready(metrics)
            self._first_speed = self._speed()
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
        values = means(self.sums())
        # If the only step so far is the one that compiled, its own speed.
        values |= self._speed() if self._timed else self._first_speed
        self._sums = {}
        self.restart_clock()
        return values

    def _speed(self) -> dict[str, float]:
        seconds = time.monotonic() - self._since
        speed = {"sequences_per_second": sum(count for count, _ in self._timed) / seconds}
        tokens = [metrics[TOKENS].total for _, metrics in self._timed if TOKENS in metrics]
        if tokens:
            speed["tokens_per_second"] = sum(map(float, jax.device_get(tokens))) / seconds
        return speed
