"""Sizes and CRC-32C of files, which tell whether they are damaged."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c

from bert_jax.errors import UserError
from bert_jax.storage.paths import AnyPath

_BLOCK_BYTES = 1 << 20  # google_crc32c keeps the interpreter's lock, here for 0.1 ms


def of_files(folder: Path, paths: Iterable[Path]) -> dict[str, int]:
    """Return the CRC-32C of files of a folder, by their paths in it."""
    return {path.relative_to(folder).as_posix(): _of_file(path) for path in paths}


def check_size(path: Path, size: int, remedy: str) -> None:
    """Refuse a file that differs in size from the record."""
    found = path.stat().st_size if path.exists() else 0
    if found != size:
        raise UserError(f"{path} has {found} bytes instead of {size}; {remedy}")


def check(folder: AnyPath, recorded: Mapping[str, Any], remedy: str) -> None:
    """Refuse a file that cannot be read, or whose CRC-32C differs from the recorded one."""
    try:
        damage = find_damage(folder, recorded)
    except OSError as error:
        damage = f"it cannot be read ({error})"
    if damage:
        raise UserError(f"{folder}: {damage}; {remedy}")


def find_damage(folder: AnyPath, recorded: Mapping[str, Any]) -> str:
    """Return a sentence about a file whose CRC-32C differs from the recorded one; "" if none."""
    for name, checksum in recorded.items():
        if _of_file(folder / name) != checksum:
            return f"{name} has changed since it was written"
    return ""


def _of_file(path: AnyPath) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = google_crc32c.extend(checksum, block)
    return checksum
