"""Folders of ours: locks, released when the process that holds them ends, and replacement."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bert_jax import console
from bert_jax.errors import UserError

NAME = ".lock"


def cache_folder() -> Path:
    """Return the folder of this program in the user's cache; RuntimeError without a home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a path that is not absolute.
    return (base if base.is_absolute() else Path.home() / ".cache") / "bert-jax"


@contextlib.contextmanager
def locked(folder: Path, *, waits: bool = False) -> Iterator[None]:
    """Lock a folder, made where it is missing; where another process has it, wait or UserError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / NAME).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not waits:
                reason = "in use by another process; wait until that ends, or choose another"
                raise UserError(f"{folder} is {reason}") from error
            with console.working(f"waiting for the process that uses {folder}"):
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            console.warn(
                f"{folder} cannot be locked ({error.strerror}); run one command on it at a time"
            )
        yield


def replace(new: Path, path: Path) -> None:
    """Rename a folder to `path`, and remove what is there; nothing is lost if that fails."""
    with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=f".{path.name}.") as folder:
        old = path.rename(Path(folder) / "old") if path.exists() else None
        try:
            new.rename(path)
        except OSError:
            if old:
                old.rename(path)
            raise


def check_replaceable(path: Path, may_replace: Callable[[Path], bool] | None = None) -> None:
    """Refuse a path that exists, but for what `may_replace`."""
    exists = os.path.lexists(path)
    if exists and not may_replace:
        raise UserError(f"{path} already exists; choose another path, or --force to replace it")
    if exists and may_replace and not may_replace(path):
        wrong = f"{path} is not what this writes, or has other files too, and is not replaced"
        raise UserError(f"{wrong}; choose another path, or remove it")


@contextlib.contextmanager
def replacing(
    path: str | Path, may_replace: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """Yield a temporary path that becomes `path`, in the place of only what `may_replace`."""
    path = Path(path)
    check_replaceable(path, may_replace)
    try:
        parent = path.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=f".{path.name}.") as folder:
            yield Path(folder) / path.name
            replace(Path(folder) / path.name, path)
    except (OSError, ValueError) as error:  # ValueError for a NUL byte in the path
        raise UserError(f"{path} cannot be written ({error}); choose another") from error
