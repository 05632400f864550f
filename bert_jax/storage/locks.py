"""Locks of folders, which are released when the process that holds them ends."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from bert_jax import console
from bert_jax.errors import UserError

NAME = ".lock"


@contextlib.contextmanager
def locked(folder: Path, *, waits: bool = False) -> Iterator[None]:
    """Make a folder where it is missing, and lock it.

    Where another process has the lock, wait for it if `waits`; UserError otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / NAME).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not waits:
                raise UserError(
                    f"{folder} is in use by another process; "
                    "wait until that ends, or choose another"
                ) from error
            with console.working(f"waiting for the process that uses {folder}"):
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            console.warn(
                f"{folder} cannot be locked ({error.strerror}); run one command on it at a time"
            )
        yield
