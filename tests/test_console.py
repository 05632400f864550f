"""What is printed while work takes time, on a terminal and elsewhere, at each level."""

import os
import pty
import sys
import termios
import time

import pytest
from tqdm import tqdm

from bert_jax import console
from bert_jax.console import Level


@pytest.fixture
def hasty(monkeypatch):
    """Work says lines after a twentieth of a second."""
    for name, seconds in (("_TICK", 0.01), ("_SILENCE", 0.05), ("_LONG", 0.1)):
        monkeypatch.setattr(console, name, seconds)


def test_control_characters_of_files_do_not_reach_the_terminal(capsys):
    with console.output(Level.PROGRESS):
        console.warn("a \x1b[2J\x07 name\tb")
    assert capsys.readouterr().out == "warning    a \\x1b[2J\\x07 name\tb\n"


def test_work_is_not_silent_in_a_file(hasty, capsys):
    with console.output(Level.PROGRESS), console.working("reading", 10) as work:
        work.n = 5
        time.sleep(0.2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("reading: 50%, ")
    assert "left" in lines[-2]
    assert lines[-1].startswith("reading took 0.")


def test_the_innermost_work_alone_says_lines(hasty, capsys):
    with console.output(Level.PROGRESS), console.working("outer") as outer:
        with console.working("inner", says_end=False):
            time.sleep(0.15)
        assert outer.seconds() < 0.1  # its own
        spent = console.time_spent()
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines[:-1]} == {"inner"}
    assert lines[-1].startswith("outer took 0.")
    assert spent == "0.2 s"  # nothing that took a second


def test_the_time_left_is_that_of_the_part_in_progress(monkeypatch):
    """Neither what was found done nor the part before says how fast this one is."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with console.working("predicting") as work:
        now += 100  # the first part
        console.advance(1000, 1000)
        now += 1
        console.advance(10, 1000)  # of the second one
        assert work.left() is None
        now += 9
        console.advance(100, 1000)
        assert work.left() == 900 / 90 * 9
    with console.working("tokenizing", 100) as work:
        work.begin_at(60)
        now += 10
        work.n = 70
        assert work.left() == 30


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0.43, "0.43 steps/s"), (1.4, "1.4 steps/s"), (9.96, "10 steps/s"), (4e4, "40,000 steps/s")],
)
def test_slow_work_has_a_speed(number, shown):
    assert console.speed(number, "step") == shown


def test_nothing_is_said_to_a_closed_pipe(hasty, monkeypatch):
    def fail(*_, **__):
        raise BrokenPipeError

    with console.output(Level.PROGRESS), console.working("reading", says_end=False):
        monkeypatch.setattr("builtins.print", fail)
        time.sleep(0.2)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("level", "printed"),
    [
        (Level.NOTHING, []),
        (Level.RESULTS, ["warning", "score"]),
        (Level.PROGRESS, ["warning", "score", "step"]),
        (Level.DETAILS, ["warning", "score", "step", "short work took 0.0 s"]),
    ],
)
def test_levels(level, printed, capsys):
    with console.output(level):
        console.warn("")
        console.show("score", Level.RESULTS)
        console.show("step")
        with console.working("short work"):
            pass
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == printed
    with console.output(level, to_stderr=True):  # results are not mixed with it
        console.show("step")
    assert capsys.readouterr() == ("", "step\n" * (level >= Level.PROGRESS))


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that does some work on a terminal and returns what that shows."""
    main, other = pty.openpty()
    stream = os.fdopen(other, "w")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def shown(columns: int, work) -> str:
        # Here, as pytest sets them itself after the fixtures.
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        termios.tcsetwinsize(other, (24, columns))
        work()
        stream.write("END")
        stream.flush()
        screen = b""
        while not screen.endswith(b"END"):
            screen += os.read(main, 4096)
        return screen.decode().removesuffix("END")

    yield shown
    stream.close()
    os.close(main)


def some_work():
    tqdm.get_lock()  # which takes long the first time
    with console.output(Level.PROGRESS), console.working("reading", 4) as work:
        work.n = 3
        time.sleep(0.2)
        console.show("a line")
        time.sleep(0.2)


def test_lines_are_above_the_bar_of_a_terminal(hasty, terminal, monkeypatch):
    monkeypatch.setattr(console, "_TICK", 0.05)  # since nobody reads the terminal meanwhile
    screen = terminal(80, some_work)
    before, _, after = screen.partition("a line\r\n")
    assert "| reading: 75%" in before
    assert before.endswith("\r")  # the bar is cleared for the line
    assert "| reading: 75%" in after
    assert "\n" not in before


def test_work_without_a_total_has_no_bar_on_a_terminal(hasty, terminal, monkeypatch):
    def work():
        tqdm.get_lock()
        with console.output(Level.PROGRESS), console.working("outer"):
            time.sleep(0.2)
            with console.working("inner", says_end=False):
                time.sleep(0.3)

    monkeypatch.setattr(console, "_TICK", 0.05)
    screen = terminal(80, work)
    assert "outer: 0." in screen
    assert "inner: " in screen
    assert "|" not in screen
    assert "Error" not in screen
    assert "\x1b[A" not in screen  # which goes up, to a second bar


def test_a_terminal_of_unknown_size_has_lines(hasty, terminal):
    screen = terminal(0, some_work)
    assert "|" not in screen
    assert screen.startswith("reading: ")


def test_colour_is_for_terminals_that_want_it(terminal, monkeypatch):
    def warn():
        with console.output(Level.RESULTS):
            console.warn("careful")

    assert terminal(80, warn) == "\x1b[33mwarning\x1b[0m    careful\r\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal(80, warn) == "warning    careful\r\n"
