"""A workdir on gs://: checkpoints are written there, the small files on a disk and copied there.

Metrics, to which records are appended, locks and the token store, which is mapped into memory, need
a disk. They are in a folder of the user's cache, which is the workdir for all but `checkpoints`. A
machine that has none gets the small files from the bucket, and prepares the text again.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from bert_jax import locks, paths
from bert_jax.distributed import hosts
from bert_jax.errors import UserError
from bert_jax.paths import AnyPath
from bert_jax.text import remote

_ADDRESS = ".bucket"  # the file with the URL of a workdir; its time is that of the last copy
_KEPT = {_ADDRESS, locks.NAME, "store"}  # what is not copied, in either direction


def open_workdir(workdir: str | Path) -> Path:
    """Return the folder on a disk of a workdir: itself, or that of a URL with what is there."""
    if not paths.is_remote(workdir):
        return Path(workdir)
    url = str(workdir).rstrip("/")
    if not url.startswith("gs://"):
        wrong = f"--workdir {url} is not on a disk, which metrics and locks need"
        raise UserError(f"{wrong}; give a folder, or gs://BUCKET/FOLDER")
    try:
        folder = locks.cache_folder() / "runs" / url.replace("://", "/")
        folder.mkdir(parents=True, exist_ok=True)
        with locks.locked(folder):
            for path in folder.iterdir():  # what the bucket has is what counts
                if path.name not in _KEPT:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            for name in remote.names(url):
                if name not in (*_KEPT, "checkpoints"):
                    remote.fetch(f"{url}/{name}", folder / name)
            (folder / _ADDRESS).write_text(url)
    except (OSError, RuntimeError) as error:  # RuntimeError without a home
        wrong = f"the part of --workdir {url} that is on a disk cannot be written ({error})"
        raise UserError(f"{wrong}; set XDG_CACHE_HOME to a folder that can") from error
    return folder


def url_of(workdir: Path) -> str:
    """Return the URL that a workdir is a copy of; "" of one that is on a disk alone."""
    path = workdir / _ADDRESS
    return path.read_text() if os.path.exists(path) else ""


def address(workdir: Path) -> AnyPath:
    """Return where a workdir is kept: itself, or the folder of the bucket that it is a copy of."""
    return paths.as_path(url_of(workdir) or workdir)


def send(workdir: Path) -> None:
    """Copy what has changed since the last time to the bucket of a workdir, if it has one."""
    url, marker = url_of(workdir), workdir / _ADDRESS
    if not (url and hosts.is_main()):
        return
    since, now = marker.stat().st_mtime_ns, time.time_ns()
    for path in sorted(workdir.rglob("*")):
        name = path.relative_to(workdir)
        is_own = name.parts[0] not in _KEPT and path.suffix != ".tmp" and path.is_file()
        if is_own and path.stat().st_mtime_ns >= since:
            remote.send(path, f"{url}/{name.as_posix()}")
    os.utime(marker, ns=(now, now))


@contextlib.contextmanager
def sending(workdir: Path) -> Iterator[None]:
    """Copy a workdir at the end, however that comes."""
    try:
        yield
    finally:
        send(workdir)
