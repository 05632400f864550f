"""A lock on a folder, which the operating system takes back when its process ends."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from bert_jax import console
from bert_jax.errors import UserError

NAME = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create a folder where needed, and refuse it while another process is in this context."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / NAME).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder} is in use by another process; wait for its end, or choose another folder"
            ) from error
        except OSError as error:  # some network file systems have no locks
            console.show(f"{folder} cannot be locked ({error.strerror}); start one command at once")
        yield
