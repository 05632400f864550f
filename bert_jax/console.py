"""Terminal output: lines and progress bars, which a caller from Python can silence."""

import contextlib
import contextvars
import shlex
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

_QUIET: contextvars.ContextVar[bool] = contextvars.ContextVar("quiet", default=False)


@contextlib.contextmanager
def quiet(is_quiet: bool = True) -> Iterator[None]:
    """Show nothing, and draw no pictures, within this context."""
    token = _QUIET.set(is_quiet)
    try:
        yield
    finally:
        _QUIET.reset(token)


def is_quiet() -> bool:
    """Return whether nothing is to be shown."""
    return _QUIET.get()


def show(text: str = "") -> None:
    """Print a text on stdout at once, above any bar."""
    if not is_quiet():
        with tqdm.external_write_mode():
            print(text, flush=True)


def counted(number: int, noun: str) -> str:
    """Return a number of things in words, such as "1 document" and "1,000 documents"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def quoted(word: Any) -> str:
    """Return a word of a command so that a shell takes it as it is, and the command as no flag."""
    text = str(word)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def progress_bar(*, is_shown: bool = True, **options: Any) -> tqdm:
    """Return a bar on stderr, which is disabled where stderr is no terminal."""
    return tqdm(disable=None if is_shown and not is_quiet() else True, **options)
