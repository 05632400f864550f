"""What the clock says of steps whose times are known."""

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest

from bert_jax.errors import TrainingError
from bert_jax.planning import timing

MASK = np.array([[1, 1, 1, 0], [2, 1, 1, 1]])  # of packed rows, each text has a number of its own


class Result:
    """Ready some time after it was asked for, as a device's is."""

    def __init__(self, before: "Result | None", seconds: float, value: float = 1.0):
        now = time.perf_counter()
        self._at = max(now, before._at if before else now) + seconds
        self.total = value

    def block_until_ready(self):
        time.sleep(max(0.0, self._at - time.perf_counter()))
        return self


def step_of(seconds: float, value: float = 1.0):
    """Returns a step of so many seconds, the next of which begins when it has ended."""

    def step(state, batch):
        done = Result(state, seconds)
        return done, {"loss": SimpleNamespace(total=value), "done": done}

    return step


def slow(seconds: float):
    for _ in itertools.count():
        time.sleep(seconds)
        yield {"attention_mask": MASK}


def test_steps_that_wait_for_nothing():
    batches = itertools.repeat({"attention_mask": MASK})
    _, found = timing.take(step_of(0.02), None, batches, 15, 60.0)
    assert len(found.seconds) == 15
    low, middle, high = found.quartiles
    assert 0.01 < low <= middle <= high
    assert found.seconds.sum() >= 15 * 0.02
    assert found.mean == pytest.approx(found.seconds.sum() / 15)
    assert found.waiting < 0.2
    assert (found.tokens, found.places) == (7 * 15, 8 * 15)
    assert found.padding == pytest.approx(1 / 8)


def test_rows_made_while_the_devices_work_are_not_waited_for():
    _, found = timing.take(step_of(0.02), None, slow(0.005), 15, 60.0)
    assert found.waiting < 0.3  # that of the first step is


def test_slow_rows_are_waited_for():
    """A step of 10 ms and rows that take 30."""
    _, found = timing.take(step_of(0.01), None, slow(0.03), 10, 60.0)
    assert 0.4 < found.waiting < 0.9
    assert found.mean >= 0.03


def test_ends_in_time():
    started = time.perf_counter()
    _, found = timing.take(step_of(0.02), None, slow(0.0), 10_000, 0.2)
    assert 5 <= len(found.seconds) < 25
    assert time.perf_counter() - started < 2
    _, found = timing.take(step_of(0.02), None, slow(0.0), 10_000, 1e-9)
    assert len(found.seconds) == 1


def test_a_broken_run_has_no_figures():
    with pytest.raises(TrainingError, match="loss is nan at step 1"):
        timing.take(step_of(0.0, float("nan")), None, slow(0.0), 3, 60.0)
