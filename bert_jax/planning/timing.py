"""The train step by the clock: when each one ended, and how long it waited for its rows."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from bert_jax.errors import TrainingError

# Steps that the devices have been given and not ended. Two keep them busy; with many more, a time
# limit would be met late.
_AHEAD = 4


@dataclasses.dataclass(frozen=True)
class Timing:
    """What the clock said of some steps.

    Attributes:
      seconds: of each step, from the end of the one before, or from the start.
      waited: of these, the seconds in which the devices had nothing to do and its rows were not
        there.
      tokens: of all rows, padding not counted.
      places: of all rows, padding counted.
    """

    seconds: np.ndarray
    waited: np.ndarray
    tokens: int
    places: int

    @property
    def mean(self) -> float:
        """Seconds of a step, of which all rates are made."""
        return float(self.seconds.mean())

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Seconds that a quarter, a half and three quarters of the steps stay below."""
        low, middle, high = np.quantile(self.seconds, [0.25, 0.5, 0.75])
        return float(low), float(middle), float(high)

    @property
    def waiting(self) -> float:
        """The share of the time that was waiting."""
        return float(self.waited.sum() / self.seconds.sum())

    @property
    def padding(self) -> float:
        """The share of the rows' places that hold no token."""
        return 1 - self.tokens / self.places


def take(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: Iterator[Any],
    steps: int,
    seconds: float,
) -> tuple[Any, Timing]:
    """Takes steps one after the other, as in training, until there are enough of them.

    The devices are not waited for between steps: a thread notes when each has ended, while the next
    ones are prepared and handed over.

    Args:
      step: `(state, batch) -> (state, sums)`, on devices that do nothing else.
      state: the first; its memory is used again.
      batches: the rows of each step, as `step` takes them.
      steps: no more than these are taken.
      seconds: none is begun after these, but one is taken.

    Raises:
      TrainingError: a loss or a gradient is not finite.
    """
    ended: list[Future[float]] = []
    asked, came, found = [], [], []
    tokens, places, count, mask = 0, 0, 0, np.zeros(0)
    with ThreadPoolExecutor(1) as watcher:
        started = time.perf_counter()
        while len(ended) < steps and (not ended or time.perf_counter() - started < seconds):
            if len(ended) >= _AHEAD:
                ended[-_AHEAD].result()
            asked.append(time.perf_counter())
            batch = next(batches)
            came.append(time.perf_counter())
            state, sums = step(state, batch)
            ended.append(watcher.submit(_end, sums))
            found.append(sums)
            if batch["attention_mask"] is not mask:  # that of the step before may come again
                mask = batch["attention_mask"]
                count = int((np.asarray(mask) > 0).sum())
            tokens, places = tokens + count, places + mask.size
        ends = np.array([started, *(each.result() for each in ended)])
    _check(found)
    idle_from = np.maximum(ends[:-1], asked)
    waited = np.maximum(0.0, np.array(came) - idle_from)
    return state, Timing(np.diff(ends), waited, tokens, places)


def _end(sums: Any) -> float:
    jax.block_until_ready(sums)
    return time.perf_counter()


def _check(found: list[Any]) -> None:
    for number, sums in enumerate(jax.device_get(found), 1):
        for name, part in sums.items():
            if not math.isfinite(part.total):
                raise TrainingError(
                    f"{name} is {part.total} at step {number} of the benchmark, which would time "
                    "a broken run; lower optimizer.learning_rate"
                )
