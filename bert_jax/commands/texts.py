"""Texts for a command: the lines of a file or of standard input, as they come."""

import json
import os
import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_jax import background
from bert_jax.errors import UserError
from bert_jax.text.records import STDIN, file_fault, read_lines

_MOST = 256  # lines that are read ahead
_WAIT = 0.01  # seconds, for lines that come together


def find(source: str) -> Path | str:
    """Return the path of a file of texts, or "-" for stdin; UserError without one."""
    if source != STDIN:
        if fault := file_fault(source):
            raise UserError(f"{source} {fault}; give a file with a text a line, or - for stdin")
        return Path(source)
    if os.isatty(0):
        print("reading texts from the terminal, one a line; Ctrl-D ends", file=sys.stderr)
    return STDIN


def argument(text: str) -> str:
    """Return a text of the command line; UserError if it is not UTF-8."""
    if text.encode(errors="replace").decode() != text:  # with halves of surrogate pairs
        raise UserError(f"{text!r} is not UTF-8; convert it")
    return text


def numbered(source: str, *, with_empty: bool = False) -> Iterator[tuple[str, str]]:
    """Yield where each line is, for messages, and the line; UserError if there is none."""
    path = find(source)  # at once, and not when the first line is wanted
    name = "stdin" if path == STDIN else source

    def lines() -> Iterator[tuple[str, str]]:
        where = ""
        for number, (line, _) in enumerate(read_lines(path), start=1):
            if line or with_empty:
                where = f"{name}:{number}"
                yield where, line
        if not where:
            raise UserError(f"{name} has no text; give one a line")

    return lines()


class Ahead:
    """Lines that a thread reads: iterating yields, at a time, those that have come, in order.

    So the answer for a line does not wait for the next one, and a long text is read in batches.
    """

    def __init__(self, lines: Iterator[tuple[str, str]]):
        self._lines: queue.Queue[tuple[str, str] | None] = queue.Queue(_MOST)
        self._reading = background.start(lambda: self._read(lines))

    def _read(self, lines: Iterator[tuple[str, str]]) -> None:
        try:
            for line in lines:
                self._lines.put(line)
        finally:
            self._lines.put(None)

    def __iter__(self) -> Iterator[list[tuple[str, str]]]:
        last: Any = ()
        while last is not None:
            some = [self._lines.get()]
            time.sleep(_WAIT)
            some += [self._lines.get() for _ in range(self._lines.qsize())]
            last = some[-1]
            if lines := [line for line in some if line is not None]:
                yield lines
        self._reading.result()  # or its error


def print_json(values: Any) -> None:
    """Print a value as a line of JSON, in letters that stdout has, for a reader that waits."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(values, ensure_ascii=not is_utf8), flush=True)
