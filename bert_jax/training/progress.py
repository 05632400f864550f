"""The progress of training: the steps so far, and the time that is left."""

import time
from collections import deque
from collections.abc import Sequence

from bert_jax.console import Work, duration

_LOGS = 10  # the speed is that of the steps since so many logs
_FEWEST = 2  # steps to know a speed
_EXPECTED_AFTER = 5.0  # seconds of steps, before which a speed says little of the end
_DAY = 24 * 3600


class Progress(Work):
    """Training from a step on, as work; the time left is known at a log, which waits for all steps.

    It is the time of steps alone: not that of compilation, evaluations and saves.
    """

    def __init__(self, step: int, stages: Sequence[tuple[int, int]]):
        """Take the last step of each stage and the cost of one of its steps."""
        super().__init__("training", total=stages[-1][0])
        self.n, self._stages = step, stages
        self._marks: deque[tuple[float, int]] = deque(maxlen=_LOGS)  # seconds and steps
        self._first_mark = 0.0  # seconds
        self._end: float | None = None  # of training, by the monotonic clock
        self._has_expected = False  # whether the line of the end was returned

    def mark(self, step: int) -> None:
        """Note that all steps up to this one are done."""
        if not self._marks:
            self._first_mark = self.seconds()
        self._marks.append((self.seconds(), step))

    def logged(self, step: int, note: str) -> str:
        """Note a log; once, when the speed is known, return a line that says when training ends."""
        self.note = note
        since, first = self._marks[0] if self._marks else (0.0, step)
        if step - first >= _FEWEST:
            speed = self._cost(first, step) / (self.seconds() - since)
            self._end = time.monotonic() + self._cost(step, self._stages[-1][0]) / speed
        self.mark(step)
        left = self.left()
        if self._has_expected or not left or self.seconds() - self._first_mark < _EXPECTED_AFTER:
            return ""
        self._has_expected = True
        form = "%H:%M" if left < _DAY / 2 else "%Y-%m-%d %H:%M"
        end = time.strftime(form, time.localtime(time.time() + left))
        return f"training   its steps end in {duration(left)}, at {end}, without evaluations"

    def speed_and_left(self) -> str:
        """Return the speed of the last log and the time left, for a line."""
        left = self.left()
        return f"{self.note}  {duration(left)} left" if left else self.note

    def left(self) -> float | None:
        """Return the seconds to the last step, None where no speed is known yet."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def _cost(self, first: int, last: int) -> int:
        """Return the cost of the steps after `first` up to `last`."""
        total = start = 0
        for end, cost in self._stages:
            total += cost * max(0, min(end, last) - max(start, first))
            start = end
        return total

    def where(self) -> str:
        return f"step {self.n:,} of {self.total:,}"
