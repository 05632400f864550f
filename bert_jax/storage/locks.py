"""Locks of folders, which are released when the process that holds them ends."""

import contextlib
import fcntl
import os
import socket
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
    # Not by a link, whose file this would empty.
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waits:
                raise _in_use(folder) from None
            with console.working(f"waiting for the process that uses {folder}"):
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            console.warn(
                f"{folder} cannot be locked ({error.strerror}); run one command on it at a time"
            )
        with contextlib.suppress(OSError):  # a full disk; the name is for messages alone
            file.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
        yield


def check_unlocked(folder: Path) -> None:
    """Refuse a folder that another process has locked; make nothing."""
    if not os.path.isfile(folder / NAME):  # a pipe would be waited for
        return
    with contextlib.suppress(OSError), (folder / NAME).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(folder) from None


def _in_use(folder: Path) -> UserError:
    """Return the error that names the process which has locked a folder."""
    try:
        holder = (folder / NAME).read_text().strip()
    except (OSError, ValueError):
        holder = ""
    return UserError(
        f"{folder} is in use by {holder or 'another process'}; wait until that ends, or choose "
        "another"
    )
