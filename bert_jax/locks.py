"""A folder of ours: its lock, released when the process that holds it ends, and its replacement."""

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bert_jax import console
from bert_jax.errors import UserError

NAME = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, made where it is missing; UserError if another process holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / NAME).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            reason = "in use by another process; wait until that ends, or choose another"
            raise UserError(f"{folder} is {reason}") from error
        except OSError as error:  # some network file systems have no locks
            console.show(
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
