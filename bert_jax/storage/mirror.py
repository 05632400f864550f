"""A workdir on gs://: checkpoints are written there, small files on a disk and copied there.

Metrics, to which records are appended, locks and the token store, which is mapped into memory, need
a disk. They are in a folder of the user's cache, which is the workdir for everything except
`checkpoints`. A machine without that folder gets the small files from the bucket, and prepares the
text again.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from bert_jax import console
from bert_jax.errors import TrainingError, UserError
from bert_jax.storage import locks, paths, remote
from bert_jax.storage.paths import AnyPath

_LONGEST_NAME = 200  # of a file, which may have 255 bytes with what is added to it
_ADDRESS = ".bucket"  # the file with the URL of a workdir
_OF_RUN = ("config.json", "text.sha256", "metrics.jsonl")  # which tell one run from another
# What a run that resumes reads; then what it only writes.
_READ = (*_OF_RUN, "tokenizer", "results.json", "wandb.id")
_WRITTEN = ("baselines.json", "curves.png", "tensorboard")


def open_workdir(workdir: AnyPath, process: int = 0) -> Path:
    """Return the folder of a workdir on a disk: itself, or the copy of a URL with what is there.

    Each process of a run has a copy of its own, by its number; only that of process 0 is sent.
    """
    if not paths.is_remote(workdir):
        return Path(workdir)
    url = str(workdir)
    number = f"%{process}" if process else ""  # which no quoted URL ends with
    try:
        folder = paths.cache_folder() / "runs" / f"{_quoted(url)}{number}"
        with locks.locked(folder):
            if process == 0:
                _send_later_records(url, folder)
            for name in (*_READ, *_WRITTEN):  # the files of the bucket replace those of the disk
                path = folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                if name in _READ:
                    remote.fetch(f"{url}/{name}", path)
            (folder / _ADDRESS).write_text(url, encoding="utf-8")
    except (OSError, RuntimeError) as error:  # RuntimeError without a home
        raise UserError(
            f"the part of --workdir {url} that is on a disk cannot be written ({error}); "
            "set XDG_CACHE_HOME to a folder that can"
        ) from error
    return folder


def _send_later_records(url: str, folder: Path) -> None:
    """Send the files of a run whose disk has records of steps that the bucket lacks.

    They could not be copied before. The records of the bucket are then the first of the disk: those
    of another run, or of one that another machine continued, have other speeds at least.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        there = Path(temporary)
        for name in _OF_RUN:
            remote.fetch(f"{url}/{name}", there / name)
        (config, text, records), (its_config, its_text, its_records) = (
            [(path / name).read_bytes() if (path / name).is_file() else b"" for name in _OF_RUN]
            for path in (folder, there)
        )
    is_same_run = its_config and (config, text) == (its_config, its_text)
    if is_same_run and len(records) > len(its_records) and records.startswith(its_records):
        send(folder)


def _quoted(url: str) -> str:
    """Return a URL as the name of a folder; of a long one the beginning and a hash."""
    name = urllib.parse.quote(url, safe="")
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def url_of(workdir: AnyPath) -> str:
    """Return the URL that a workdir is a copy of; "" for one that is on a disk alone."""
    path = os.path.join(workdir, _ADDRESS)
    url = Path(path).read_text(encoding="utf-8") if os.path.exists(path) else ""
    return url if workdir.name.startswith(_quoted(url)) else ""  # a copied folder is no workdir


def address(workdir: AnyPath) -> AnyPath:
    """Return where a workdir is kept: itself, or the folder of the bucket that it is a copy of."""
    url = url_of(workdir)
    return paths.as_path(url) if url else workdir


def send(workdir: Path) -> None:
    """Copy the small files of a workdir to its bucket, if it has one."""
    url = url_of(workdir)
    if not url or workdir.name != _quoted(url):  # the copy of another process than 0
        return
    for name in (*_READ, *_WRITTEN):
        if (workdir / name).exists():
            remote.send(workdir / name, f"{url}/{name}")


def try_to_send(
    workdir: Path, then: str = "the run continues, and copies it with the next checkpoint"
) -> None:
    """Send a workdir, or warn, with what happens then."""
    try:
        send(workdir)
    except UserError as error:
        cause, separator, advice = str(error).rpartition("; ")
        console.warn(f"{cause if separator else advice}; {then}")


@contextlib.contextmanager
def sending(workdir: Path) -> Iterator[None]:
    """Send a workdir at the end of the context, also after an error.

    TrainingError if that fails: the same command, repeated, sends it.
    """
    try:
        yield
    except BaseException:
        try_to_send(workdir, f"its last files are in {workdir} alone")
        raise
    try:
        send(workdir)
    except UserError as error:
        raise TrainingError(
            f"{error}; the run is trained, and repeating the command ends it"
        ) from error
