"""Terminal output: lines, and the progress of work that takes time, as much as is asked for."""

import contextlib
import contextvars
import dataclasses
import enum
import errno
import logging
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from tqdm import tqdm

from bert_jax.errors import without_controls

_TICK = 0.25  # seconds between two looks at work in progress
_SILENCE = 30.0  # seconds without a line, where there is no terminal, after which work says a line
_MOST_SILENCE = 300.0  # of long work, which says fewer lines
_LONG = 2.0  # seconds of work whose end is worth a line
_COLOUR = re.compile(r"(\x1b\[(?:33|0)m)")  # as `highlighted` has


class Level(enum.IntEnum):
    """How much is shown; each level includes those before it."""

    NOTHING = 0
    RESULTS = 1  # and warnings
    PROGRESS = 2
    DETAILS = 3


@dataclasses.dataclass
class _Output:
    level: Level = Level.RESULTS  # of functions that are called from Python
    to_stderr: bool = False
    started: float = dataclasses.field(default_factory=time.monotonic)
    spent: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds by kind of work
    work: "Work | None" = None  # the innermost that is in progress
    last_line: float = dataclasses.field(default_factory=time.monotonic)
    is_closed: bool = False  # whether the reader of the lines has ended
    when_closed: Callable[[], None] | None = None  # what to do then, in place of an error


_DEFAULT = _Output()
_OUTPUT: contextvars.ContextVar[_Output] = contextvars.ContextVar("output")


@contextlib.contextmanager
def output(
    level: Level, *, to_stderr: bool = False, started: float | None = None
) -> Iterator[None]:
    """Show so much within this context, which began at `started` of the monotonic clock."""
    token = _OUTPUT.set(_Output(level, to_stderr, started or time.monotonic()))
    try:
        yield
    finally:
        _OUTPUT.reset(token)


def quiet() -> contextlib.AbstractContextManager[None]:
    """Show nothing, and draw no pictures, within this context."""
    return output(Level.NOTHING)


def shows(level: Level) -> bool:
    """Return whether what belongs to a level is shown."""
    return _OUTPUT.get(_DEFAULT).level >= level


def when_closed(action: Callable[[], None] | None) -> None:
    """Do something, once, when the reader of the lines has ended, in place of a BrokenPipeError."""
    _OUTPUT.get(_DEFAULT).when_closed = action


def show(text: str = "", level: Level = Level.PROGRESS) -> None:
    """Print a text at once, above any bar; its control characters are escaped."""
    current = _OUTPUT.get(_DEFAULT)
    if current.level < level or current.is_closed:
        return
    try:
        with tqdm.external_write_mode():
            parts = (p if _COLOUR.match(p) else without_controls(p) for p in _COLOUR.split(text))
            stream = _stream()
            print("".join(parts), file=stream)
            if hasattr(stream, "flush"):  # not an application's own that only writes
                stream.flush()
    except OSError as error:
        is_closed = error.errno in (errno.EPIPE, errno.EIO)  # of a pipe; of a terminal
        if not is_closed or not current.when_closed:
            raise
        current.is_closed = True
        current.when_closed()
    current.last_line = time.monotonic()


def _stream() -> TextIO:
    """Return where lines are printed."""
    return sys.stderr if _OUTPUT.get(_DEFAULT).to_stderr else sys.stdout


def warn(text: str) -> None:
    """Print a warning, with its label in colour on a terminal."""
    show(f"{highlighted('warning', _stream())}    {text}", Level.RESULTS)


@contextlib.contextmanager
def logging_kept() -> Iterator[None]:
    """Leave the application's logging as it is, whatever libraries log through absl."""
    # absl calls logging.basicConfig where the root logger has no handler. With Python's last
    # resort as its handler, all is printed as it is without one.
    root, handler = logging.getLogger(), logging.lastResort
    if root.handlers or handler is None:
        yield
        return
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


@contextlib.contextmanager
def silenced(name: str) -> Iterator[None]:
    """Keep the logger of a library from warnings."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(max(level, logging.ERROR))
    try:
        yield
    finally:
        log.setLevel(level)


def highlighted(text: str, stream: TextIO) -> str:
    """Return a text in yellow, if the stream is a terminal that has colours."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in (None, "", "dumb")
    return text if is_plain or not is_terminal(stream) else f"\x1b[33m{text}\x1b[0m"


def duration(seconds: float) -> str:
    """Return a time in words.

    >>> [duration(seconds) for seconds in (3.21, 59.0, 61.0, 7384.0, 190_000.0)]
    ['3.2 s', '59 s', '1 min 1 s', '2 h 3 min', '2 d 4 h']
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, of in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // of} {smaller}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def time_spent() -> str:
    """Return the time since the command or call began, and what most of it was spent on."""
    current = _OUTPUT.get(_DEFAULT)
    spent = sorted(current.spent.items(), key=lambda each: (each[0] != "training", -each[1]))
    parts = [f"{what} {duration(s)}" for what, s in spent[:5] if s >= 1]
    whole = duration(time.monotonic() - current.started)
    return f"{whole}, of which {', '.join(parts)}" if parts else whole


def code_span(text: str) -> str:
    """Return a text as Markdown shows code: without a character that would end or change it.

    >>> code_span("a `b`\\n")
    "`a 'b' `"
    """
    plain = "".join(c if c.isprintable() else " " for c in text)
    return "`" + plain.replace("`", "'") + "`"


def counted(number: int, noun: str) -> str:
    """Return a number of things in words, such as "1 document" and "1,000 documents"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def epochs(number: float) -> str:
    """Return a number of epochs in words."""
    text = f"{number:.1g}"
    if number >= 0.1:
        text = f"{number:,.{1 + (number < 10)}f}".rstrip("0").rstrip(".")
    return "1 epoch" if text == "1" else f"{text} epochs"


def speed(number: float, noun: str) -> str:
    """Return a number of things a second in words.

    >>> [speed(number, "sequence") for number in (0.4321, 3.21, 4321.0)]
    ['0.43 sequences/s', '3.2 sequences/s', '4,321 sequences/s']
    """
    return f"{number:.2g} {noun}s/s" if number < 9.95 else f"{number:,.0f} {noun}s/s"


def quoted(word: Any) -> str:
    """Return a word of a command so that a shell takes it as it is, and the command as no flag."""
    text = str(word)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


class Work:
    """Work in progress: `n` of `total` is done, if there is a total."""

    def __init__(self, doing: str, total: int | None = None):
        self.doing, self.total, self.n = doing, total, 0
        self.note = ""  # what else there is to say of it
        self._started, self.inner_seconds = time.monotonic(), 0.0  # without and of the work in it
        self._first, self._first_seconds = 0, 0.0  # what was done when its speed was first known
        self._seconds: float | None = None  # once it has ended
        self._inner: Work | None = None

    def seconds(self) -> float:
        """Return how long it has taken, without the work within it."""
        inner = self._inner  # which another thread may end
        now = inner._started if inner else time.monotonic()
        return now - self._started - self.inner_seconds if self._seconds is None else self._seconds

    def left(self) -> float | None:
        """Return how many seconds it will take, None if that is unknown."""
        if not self.total:
            return None
        done, seconds = self.n - self._first, self.seconds() - self._first_seconds
        # The first parts are often slower than the others, which wait for no compilation.
        if done < max(1, self.total / 100) or seconds < _LONG:
            return None
        return max(0.0, self.total - self.n) / done * seconds

    def begin_at(self, done: int) -> None:
        """Set what is done, and leave it out of the estimate of the time left."""
        self.n = self._first = done
        self._first_seconds = self.seconds()

    def where(self) -> str:
        """Return how far it is."""
        return f"{self.n / self.total:.0%}" if self.total else ""

    def text(self) -> str:
        """Return what there is to say of it, in a line."""
        left = self.left()
        so_far = f"{duration(self.seconds())} so far"
        time_text = so_far if left is None else f"{duration(left)} left"
        parts = (self.where(), time_text, self.note)
        return f"{self.doing}: {', '.join(filter(None, parts))}"


@contextlib.contextmanager
def working(
    doing: str | Work, total: int | None = None, *, says_end: bool = True
) -> Iterator[Work]:
    """Show that work is in progress: a bar or the seconds on a terminal, lines elsewhere.

    In a file it says nothing while other lines are printed. Work of more than two seconds ends with
    the time that it took, unless `says_end` is False.
    """
    current = _OUTPUT.get(_DEFAULT)
    work = doing if isinstance(doing, Work) else Work(doing, total)
    outer, current.work = current.work, work
    if outer:
        outer._inner = work
    ended = threading.Event()
    ticks = _draw if is_terminal(sys.stderr) else _say
    context = contextvars.copy_context()
    ticker = threading.Thread(target=context.run, args=(ticks, work, ended), daemon=True)
    if not outer and current.level >= Level.PROGRESS:  # one thread shows all
        ticker.start()
    try:
        yield work
    finally:
        ended.set()
        if ticker.ident:
            ticker.join()
        work._seconds, whole = work.seconds(), time.monotonic() - work._started
        current.spent[work.doing] = current.spent.get(work.doing, 0.0) + work._seconds
        current.work = outer
        if outer:
            outer.inner_seconds += whole
            outer._inner = None
    if (says_end and whole >= _LONG) or current.level == Level.DETAILS:
        show(f"{work.doing} took {duration(whole)}{f' ({work.note})' if work.note else ''}")


def follow(text: str) -> None:
    """Print what the innermost work in progress does next, and show that."""
    show(text)
    if work := _OUTPUT.get(_DEFAULT).work:
        work.doing, work._started, work.inner_seconds = text, time.monotonic(), 0.0


def advance(done: int, total: int) -> None:
    """Set how far the innermost work is, if there is any.

    A smaller number than before means that its next part has begun.
    """
    if work := _OUTPUT.get(_DEFAULT).work:
        is_next_part = done < work.n
        work.n, work.total = done, total
        if is_next_part:
            work.begin_at(done)


def _say(work: Work, ended: threading.Event) -> None:
    """Print a line about the innermost work whenever nothing has been printed for some seconds."""
    current = _OUTPUT.get(_DEFAULT)
    while not ended.wait(_TICK):
        work = current.work or work
        silence = min(max(_SILENCE, work.seconds() / 30), _MOST_SILENCE)
        if time.monotonic() - current.last_line >= silence:
            try:
                show(work.text())
            except BrokenPipeError:  # which ends the command at its next line
                return


def _draw(work: Work, ended: threading.Event) -> None:
    """Draw the innermost work below what is printed, as a bar if it has a total."""
    current = _OUTPUT.get(_DEFAULT)
    bar = None
    while not ended.wait(_TICK):
        work = current.work or work
        text = work.text().replace("{", "{{").replace("}", "}}")
        form = f"{{bar}}| {text}" if work.total else text
        if bar is None:
            bar = tqdm(total=work.total, bar_format=form, dynamic_ncols=True, leave=False)
        bar.n, bar.total, bar.bar_format = work.n, work.total, form
        bar.refresh()
    if bar is not None:  # one without a total has no truth value
        bar.close()


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal of a known width."""
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except (AttributeError, OSError, ValueError):  # of an object with `write` alone, or of None
        return False
