"""The progress of training: the steps that have finished, and the time that is left."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

import jax

from bert_jax.console import Work, duration
from bert_jax.training.objectives import Metrics

_LOGS = 10  # the speed is that of the steps since so many logs
_FEWEST = 2  # steps to know a speed


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
        self._running: deque[tuple[int, jax.Array]] = deque()
        self._marks: deque[tuple[float, int]] = deque(maxlen=_LOGS)  # seconds and steps

    def add(self, step: int, metrics: Metrics, *, compiles: bool) -> None:
        """Note a step that was dispatched, and which have finished; one that compiled has."""
        self._running.append((step, next(iter(metrics.values())).total))
        while self._running and (compiles or self._running[0][1].is_ready()):
            self.n, _ = self._running.popleft()
        if not self._marks:
            self._marks.append((self.seconds(), self.n))

    def took(self, work: Work) -> None:
        """Note how long an evaluation or a save took, without compilation."""
        before = self._seconds_each.get(work.doing, work.seconds())
        self._seconds_each[work.doing] = min(before, work.seconds())

    def logged(self, step: int) -> str:
        """Return the speed and the time left at a log, for which the steps so far have finished."""
        self.n = step
        self._running.clear()
        left = self.left()
        self._marks.append((self.seconds(), step))
        return f"{self.note}  {'' if left is None else f'{duration(left)} left'}".rstrip()

    def left(self) -> float | None:
        """Return the seconds to the last step, None where no speed is known yet."""
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
