"""Texts for a command: the lines of a file or of standard input, as they come."""

import itertools
import json
import os
import queue
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from bert_jax import console
from bert_jax.errors import UserError, refuse
from bert_jax.storage import daemon_thread
from bert_jax.text import records
from bert_jax.text.files import STDIN, existing

_Line = TypeVar("_Line")
_MOST = 256  # lines that are read ahead
_WAIT = 0.01  # seconds, for lines that come together


def argument(text: str) -> str:
    """Return a text of the command line; UserError if it is not UTF-8."""
    if text.encode(errors="replace").decode() != text:  # with halves of surrogate pairs
        raise UserError(f"{text!r} is not UTF-8; convert it")
    return text


def column_of(column: str | None, sources: Sequence[str]) -> str:
    """Return the column of the text in files, `column` or the default; UserError if none has it."""
    refuse(
        column is not None and not any(map(records.reader, sources)),
        f"--column has no effect on {', '.join(sources)}",
        fix="leave it out, or give a table, JSON lines or Parquet",
    )
    return column or "text"


def numbered(
    source: str, *, column: str | None = None, with_empty: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield where each text of a file, or line of stdin ("-"), is, for messages, and the text.

    A file has a text a line; or, with a `column`, perhaps records with a text in it.
    UserError if there is none. Work in progress shows how much of the file has been read.
    """
    refuse(source == STDIN and sys.stdin is None, "stdin is closed", fix="give a file")
    if source == STDIN and os.isatty(0):
        print("reading texts from the terminal, one a line; Ctrl-D ends", file=sys.stderr)
    if source != STDIN:
        source = str(existing(source, "give a file with a text a line, or - for stdin"))

    def lines() -> Iterator[tuple[str, str]]:
        size = 0 if source == STDIN else os.stat(source).st_size
        is_empty = True
        lines = ((record.fields["text"], record) for record in records.text_lines(source))
        found = lines if column is None else records.texts(source, column, "--column")
        for text, record in found:
            console.advance(record.position, size)
            if text or with_empty:
                is_empty = False
                yield record.where, text
        if is_empty:
            name = "stdin" if source == STDIN else source
            raise UserError(f"{name} has no text; give one a line")

    found = lines()
    # The first line of a file at once, so that its faults come before long work.
    return found if source == STDIN else itertools.chain([next(found)], found)


def read_ahead(lines: Iterator[_Line]) -> Iterator[list[_Line]]:
    """Yield the lines, or what is made of each, that a thread has read by then, in order.

    So the answer for a line does not wait for the next one, and a long text is read in batches.
    """
    ready: queue.Queue[_Line | None] = queue.Queue(_MOST)

    def read() -> None:
        try:
            for line in lines:
                ready.put(line)
        finally:
            ready.put(None)

    reading, is_end = daemon_thread.start(read), False
    while not is_end:
        some = [ready.get()]
        time.sleep(_WAIT)
        some += [ready.get() for _ in range(ready.qsize())]
        is_end = some[-1] is None
        if batch := [line for line in some if line is not None]:
            yield batch
    reading.result()  # or its error


def print_json(values: Any) -> None:
    """Print a value as a line of JSON, in letters that stdout has, for a reader that waits."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(values, ensure_ascii=not is_utf8), flush=True)
