"""The progress of training: the steps that have finished, and the time that is left."""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from bert_jax.console import Work, duration
from bert_jax.training.objective import Metrics

_LOGS = 10  # the speed is that of the steps since so many logs
_FEWEST = 2  # steps to know a speed
_DAY = 24 * 3600


class Progress(Work):
    """Training from a step on, as work of which steps, evaluations and saves are left.

    Steps are dispatched before they run. A step has finished when its metrics are ready, which is
    asked without waiting. Time within compilation, evaluations and saves is not that of steps.
    """

    def __init__(self, step: int, stages: Sequence[tuple[int, int]], every: Mapping[str, int]):
        """Take of each stage its last step and the cost of a step; and the other intervals."""
        super().__init__("training", total=stages[-1][0])
        self.n, self._stages, self._every = step, stages, every
        self._seconds_each: dict[str, float] = {}
        self._running: deque[tuple[int, Any]] = deque()  # a type of JAX lacks is_ready
        self._lock = threading.Lock()
        self._marks: deque[tuple[float, int]] = deque(maxlen=_LOGS)  # seconds and steps

    def add(self, step: int, metrics: Metrics, *, compiles: bool) -> None:
        """Note a step that was dispatched; one that compiled has been waited for."""
        self._running.append((step, next(iter(metrics.values())).total))
        if compiles or not self._marks:
            self._marks.append((self.seconds(), step))
        if compiles:
            self._finish(step)

    def _finish(self, known: int = 0) -> None:
        """Count the steps that have finished, among them those up to `known`."""
        # Also by the thread that shows them, as the main thread may wait for a log.
        with self._lock:
            while self._running and (
                self._running[0][0] <= known or self._running[0][1].is_ready()
            ):
                self.n, _ = self._running.popleft()

    def took(self, work: Work) -> None:
        """Note how long an evaluation or a save took, without compilation."""
        before = self._seconds_each.get(work.doing, work.seconds())
        self._seconds_each[work.doing] = min(before, work.seconds())

    def logged(self, step: int, note: str) -> str:
        """Note a log, which has waited for all steps; the first time, return when training ends."""
        is_first, self.note = not self.note, note
        self._finish(step)
        left = self.left()
        self._marks.append((self.seconds(), step))
        if not is_first or left is None:
            return ""
        form = "%H:%M" if left < _DAY / 2 else "%Y-%m-%d %H:%M"
        end = time.strftime(form, time.localtime(time.time() + left))
        return f"expected   {duration(left)} more, until {end}"

    def speed_and_left(self) -> str:
        """Return the speed of the last log and the time left, for a line."""
        left = self.left()
        return f"{self.note}  {duration(left)} left" if left else self.note

    def left(self) -> float | None:
        """Return the seconds to the last step, None where no speed is known yet."""
        self._finish()
        step, last = self.n, self._stages[-1][0]
        since, first = self._marks[0] if self._marks else (0.0, step)
        if step - first < _FEWEST:
            return None
        seconds = (self.seconds() - since) / self._cost(first, step) * self._cost(step, last)
        for name, every in self._every.items():
            # Each is done at the last step too.
            times = -(-last // every) - step // every
            seconds += self._seconds_each.get(name, 0.0) * times
        return max(0.0, seconds)

    def _cost(self, first: int, last: int) -> int:
        """Return the cost of the steps after `first` up to `last`."""
        ends = [0, *(end for end, _ in self._stages)]
        spans = [
            (min(end, last) - max(start, first), cost)
            for (start, end), (_, cost) in zip(pairwise(ends), self._stages, strict=True)
        ]
        return sum(max(0, span) * cost for span, cost in spans)

    def where(self) -> str:
        return f"step {self.n:,} of {self.total:,}"
