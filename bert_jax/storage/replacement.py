"""Write a file or folder beside its path and rename it: it is there whole, or not at all."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bert_jax.errors import UserError, refuse
from bert_jax.storage.paths import on_disk


def temporary_folder(path: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a context with a folder beside a path, which is removed at its end.

    NFS keeps a file that is still open there, and the folder with it; that is no error.
    """
    parent = path.absolute().parent
    return tempfile.TemporaryDirectory(
        dir=parent, prefix=f".{path.name}.", ignore_cleanup_errors=True
    )


def replace(new: Path, path: Path) -> None:
    """Rename a folder to `path`, and remove what is there; nothing is lost if that fails."""
    with temporary_folder(path) as folder:
        old = Path(folder) / "old"
        try:
            if os.path.lexists(path):
                path.rename(old)
            new.rename(path)
        except BaseException:  # an interruption too, which may come after a renaming
            if os.path.lexists(old) and not os.path.lexists(path):
                old.rename(path)
            raise


def check_replaceable(path: Path, may_replace: Callable[[Path], bool] | None = None) -> None:
    """Refuse a path that exists, unless `may_replace` returns True for it."""
    if not os.path.lexists(path):
        return
    if not may_replace:
        raise UserError(
            f"{path} already exists; choose another path, or --force (force=True) to replace it"
        )
    if not may_replace(path):
        raise UserError(
            f"{path} is not what this writes, or has other files too, and is not replaced; "
            "choose another path, or remove it"
        )


@contextlib.contextmanager
def replacing(
    path: str | Path, may_replace: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to `path` at the end of the context."""
    path = on_disk(path)
    refuse("\0" in str(path), f"{str(path)!r} has a NUL byte", fix="choose another")
    if os.path.islink(path) and os.path.exists(path):  # what it leads to is replaced
        path = Path(os.path.realpath(path))
    check_replaceable(path, may_replace)
    try:
        parent = path.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(path) as folder:
            yield Path(folder) / path.name
            with _locked(parent):  # as another process may have written it, or is about to
                check_replaceable(path, may_replace)
                replace(Path(folder) / path.name, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}); choose another") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait for other processes that replace something in a folder; leave no file there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
