"""The time that is left: by the steps between logs, without what is not training."""

import re

import pytest

from bert_jax import console
from bert_jax.training.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_is_of_steps_alone(clock):
    progress = Progress(0, [(100, 8)])
    with console.working(progress, says_end=False):
        with console.working("compiling", says_end=False):
            clock[0] += 60
        progress.mark(1)
        progress.logged(1, "a speed")
        assert progress.left() is None
        assert progress.speed_and_left() == "a speed"
        clock[0] += 5
        with console.working("evaluating", says_end=False):
            clock[0] += 3
        progress.logged(11, "9 sequences/s")
        assert progress.speed_and_left() == "9 sequences/s  44 s left"
        clock[0] += 4
        assert progress.left() == pytest.approx(40.5)


def test_a_longer_stage_takes_longer(clock):
    progress = Progress(0, [(10, 1), (20, 4)])
    with console.working(progress, says_end=False):
        progress.mark(1)
        clock[0] += 4
        progress.logged(5, "a speed")
        assert progress.left() == pytest.approx(5 + 4 * 10)


def test_the_end_is_expected_once(clock):
    progress = Progress(0, [(100, 8)])
    with console.working(progress, says_end=False):
        progress.mark(1)
        clock[0] += 1
        assert progress.logged(2, "a speed") == ""  # of one second, which says little
        clock[0] += 9
        first = progress.logged(11, "a speed")
        assert re.fullmatch(
            r"training   its steps end in 1 min 29 s, at \d\d:\d\d, without evaluations", first
        )
        assert progress.logged(12, "a speed") == ""


def test_the_end_is_expected_of_quick_steps_too(clock):
    """Ten logs, by which the speed is known, take less time than that after which it is said."""
    progress, lines = Progress(0, [(1000, 8)]), []
    with console.working(progress, says_end=False):
        for step in range(0, 60, 2):
            lines.append(progress.logged(step, "a speed"))
            clock[0] += 0.3
    assert len([line for line in lines if line]) == 1
