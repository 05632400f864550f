"""JSON files: read behind one guard, written to a temporary name and renamed."""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c

from bert_jax.errors import UserError
from bert_jax.storage.paths import AnyPath

_CHECKSUM = "crc32c"


def read_json(path: AnyPath, remedy: str, kind: type = dict) -> Any:
    """Return the object of a JSON file, or its list; `remedy` is what to do if it is damaged."""
    try:
        if isinstance(path, Path) and path.exists() and not path.is_file():
            raise ValueError("it is no regular file")  # a device or a pipe may have no end
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, kind):
            raise ValueError(f"it is not a JSON {'object' if kind is dict else kind.__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); {remedy}") from error
    return values


def read_record(path: AnyPath, remedy: str) -> dict[str, Any]:
    """Return the object that `write_record` wrote, which must agree with its checksum."""
    values = read_json(path, remedy)
    recorded = values.pop(_CHECKSUM, None)
    if recorded != _checksum(values):
        raise UserError(f"{path} is damaged: its checksum does not agree; {remedy}")
    return values


@contextlib.contextmanager
def refusing_malformed(path: AnyPath, remedy: str) -> Iterator[None]:
    """Turn an error that the values of a JSON file cause into a UserError."""
    try:
        yield
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error!r}); {remedy}") from error


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON object with its checksum."""
    write_text(path, json.dumps({**record, _CHECKSUM: _checksum(record)}, indent=1))


def write_text(path: Path, content: str) -> None:
    """Write a file under a temporary name, and rename it."""
    write_bytes(path, content.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, and rename it."""
    with replacement(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[BinaryIO]:
    """Yield a file under a temporary name, which is renamed to `path` at the end of the context."""
    # A name of its own, as another process may write the same file.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_temporary(name: str) -> bool:
    """Return whether a name is one that `replacement` gives to a file while it is written."""
    return bool(re.search(r"\.[0-9a-f]{8}\.tmp$", name))


def _checksum(record: Mapping[str, Any]) -> int:
    return google_crc32c.value(json.dumps({**record, _CHECKSUM: None}, sort_keys=True).encode())
