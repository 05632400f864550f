"""User-facing errors: a one-line message and an exit code each."""

import contextlib
import difflib
import numbers
import re
from collections.abc import Iterable, Iterator, Mapping

# Characters of what a message says is wrong, which may quote any value, and of its advice, which
# may hold a command.
_LONGEST_CAUSE, _LONGEST_ADVICE = 400, 1000
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def nearest(word: str, names: Iterable[str] | Mapping[str, str], otherwise: str) -> str:
    """Return a question for the nearest name, as a mapping shows it, or `otherwise`.

    >>> nearest("smal", ["tiny", "small"], "there are tiny and small")
    'did you mean small?'
    """
    shown = names if isinstance(names, Mapping) else {name: name for name in names}
    close = difflib.get_close_matches(word, shown, 1)
    return f"did you mean {shown[close[0]]}?" if close else otherwise


def renamed(message: str, names: Mapping[str, str]) -> str:
    """Return a message with the fields of a config by other names: those of flags or arguments.

    >>> renamed("set data.text to one of a, b", {"data.text": "--columns"})
    'set --columns to one of a, b'
    """
    any_name = "|".join(map(re.escape, names))
    pattern = rf"(?<![\w./-])({any_name})(?!\w|\.\w|\[)"
    return re.sub(pattern, lambda match: names[match[0]], message) if names else message


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type, at most 300 characters of it."""
    return (str(error).strip() or repr(error)).splitlines()[0][:300]


class CommandError(Exception):
    """Ends a command with its message and `exit_code`.

    A message that quotes a long value keeps the ends of it, and what to do, after the last "; ".

    >>> len(str(UserError(f"texts is {'x' * 100_000}; give a text")))
    414
    """

    exit_code = 1

    def __init__(self, message: str):
        # One line, of characters that leave a terminal as it is, whatever a file's name holds.
        line = " ".join(map(str.strip, _shorten(message).split("\n")))
        super().__init__(_shorten("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)))


def without_controls(text: str) -> str:
    """Return a text for a terminal: control characters, but for tabs and newlines, are escaped.

    >>> without_controls("a\\tb\\x1b[2J")
    'a\\tb\\\\x1b[2J'
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def _shorten(message: str) -> str:
    cause, separator, advice = message.rpartition("; ")
    if not separator:
        return _keep_ends(message, _LONGEST_CAUSE)
    return _keep_ends(cause, _LONGEST_CAUSE) + separator + _keep_ends(advice, _LONGEST_ADVICE)


def _keep_ends(text: str, longest: int) -> str:
    half = longest // 2 - 1
    return f"{text[:half]} … {text[-half:]}" if len(text) > longest else text


class UserError(CommandError):
    """A mistake that the user can fix: one line that says what is wrong, where, and what to do.

    >>> import bert_jax
    >>> try:
    ...     bert_jax.recipe("tny")
    ... except bert_jax.UserError as error:
    ...     print(error)
    --config=tny: no such recipe or file; did you mean tiny?
    """

    exit_code = 2


def refuse(condition: object, message: str, *, fix: str) -> None:
    """Raise a UserError of what is wrong, and of what to do about it, if a condition holds.

    >>> refuse(False, "steps is 8", fix="raise it")
    """
    if condition:
        raise UserError(f"{message}; {fix}")


@contextlib.contextmanager
def naming(address: object, copy: object) -> Iterator[None]:
    """Name an address in an error about the copy of what is there.

    >>> with naming("gs://bucket/a", "/cache/a"):
    ...     raise UserError("/cache/a/config.json is damaged")
    Traceback (most recent call last):
      ...
    bert_jax.errors.UserError: gs://bucket/a/config.json is damaged
    """
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace(str(copy), str(address))) from error


def check_count(count: object, name: str) -> None:
    """Refuse an argument that is not a whole number of at least 1.

    >>> check_count(3, "top_k")
    """
    if not isinstance(count, numbers.Integral) or isinstance(count, bool) or int(count) < 1:
        raise UserError(f"{name} is {count!r}; give a whole number, 1 or more")


class TrainingError(CommandError):
    """Training cannot continue, for example because the loss is not finite.

    >>> TrainingError("loss is nan at step 7").exit_code
    1
    """


class DivergedError(TrainingError):
    """A loss or a gradient is not finite.

    >>> DivergedError("loss is nan at step 7").exit_code
    1
    """


class Interrupted(CommandError):
    """A signal asked a command to stop; it has saved, and the same one resumes (EX_TEMPFAIL).

    >>> Interrupted("SIGTERM after step 7").exit_code
    75
    """

    exit_code = 75


class TextWarning(UserWarning):
    """Texts or labels were not read as they are: truncated, unknown, or of no use for a loss.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     vectors = getfixture("tiny_bert").encode("river " * 50)
    >>> str(caught[0].message)
    "the text is longer than the model's 32 tokens and was truncated"
    """


class HostLost(CommandError):
    """Not all processes of a run connected in time; the same command may (EX_UNAVAILABLE)."""

    exit_code = 69
