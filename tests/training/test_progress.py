"""The time that is left: by finished steps, without what is not training."""

import re

import pytest

from bert_jax import console
from bert_jax.training.objective import WeightedSum
from bert_jax.training.progress import Progress


class Pending:
    """A metric of a step that has been dispatched."""

    def __init__(self, *, ready: bool):
        self.ready = ready

    def is_ready(self) -> bool:
        return self.ready


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def step(progress, number, *, ready=True, compiles=False):
    metrics = {"loss": WeightedSum(Pending(ready=ready), 1.0)}
    progress.add(number, metrics, compiles=compiles)
    return metrics["loss"].total


def test_the_time_left_is_of_finished_steps_evaluations_and_saves(clock):
    progress = Progress(0, [(100, 8)], {"evaluating": 50, "saving": 100})
    with console.working(progress, says_end=False):
        with console.working("compiling", says_end=False):
            clock[0] += 60
        step(progress, 1, compiles=True)
        assert progress.left() is None
        for number in range(2, 12):
            clock[0] += 0.5
            step(progress, number)
        step(progress, 12, ready=False)
        assert progress.left() == pytest.approx(0.5 * 89)
        assert progress.n == 11
        with console.working("evaluating", says_end=False) as work:
            clock[0] += 3
            with console.working("compiling", says_end=False):
                clock[0] += 20
        progress.took(work)
        assert progress.left() == pytest.approx(0.5 * 89 + 2 * 3)
        for number in range(13, 61):
            step(progress, number, ready=False)
        progress.logged(60, "9 sequences/s")
        # 5 s for 59 steps, and the evaluation at 100.
        assert progress.speed_and_left() == "9 sequences/s  6.4 s left"


def test_a_longer_stage_takes_longer(clock):
    progress = Progress(0, [(10, 1), (20, 4)], {})
    with console.working(progress, says_end=False):
        step(progress, 1, compiles=True)
        clock[0] += 4
        step(progress, 5)
        assert progress.left() == pytest.approx(5 + 4 * 10)


def test_the_end_is_expected_once_a_speed_is_known(clock):
    progress = Progress(0, [(100, 8)], {})
    with console.working(progress, says_end=False):
        step(progress, 1, compiles=True)
        assert progress.left() is None
        clock[0] += 10
        step(progress, 11, ready=False)
        first = progress.logged(11, "a speed")
        assert re.fullmatch(r"expected   1 min 29 s more, until \d\d:\d\d", first)
        assert progress.logged(12, "a speed") == ""
