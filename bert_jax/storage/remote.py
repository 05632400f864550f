"""Files of gs://, s3://, https:// and whatever else fsspec reads, by its config and credentials."""

import contextlib
import errno
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_jax import console
from bert_jax.errors import UserError, first_line, refuse
from bert_jax.storage import paths

State = tuple[Any, ...]  # the size in bytes, and what changes with the content
_CHECK = "check the address, the network and your credentials, and repeat the command"
# As file systems name it; a size alone is known of a server that has none of these.
_VERSIONS = ("ETag", "etag", "generation", "created", "mtime")


def find(pattern: str) -> list[tuple[str, State]]:
    """Return the files that a URL or a glob names, in order, with their sizes; UserError if none.

    A listing has the sizes of a thousand files in one request. The rest of a state takes one each.
    """
    cause = None
    with _file_system(pattern) as (system, path):
        try:
            found = {path: system.info(path)}  # a name that exists is no pattern
        except FileNotFoundError as error:
            cause = error.__cause__
            found = system.glob(path, detail=True)
        files = {n: info for n, info in found.items() if info["type"] == "file"}
        sizes = []
        for name, info in files.items():
            url = system.unstrip_protocol(name)
            is_listed = info.get("size") is not None  # a web server may list names alone
            sizes.append((url, (_state(info) if is_listed else state(url))[:1]))
    if not files:
        if cause and getattr(cause, "status", None) != 404:  # of a web server
            raise UserError(f"data source {pattern} cannot be read ({first_line(cause)}); {_CHECK}")
        what = "is a folder, not a file" if found else "does not exist"
        raise UserError(f"data source {pattern} {what}; give files or a glob 'gs://text/*.txt'")
    return sorted(sizes)


def files(url: str) -> dict[str, State]:
    """Return the state of all files below a folder, by their paths in it.

    UserError for one that is outside of a folder that they are copied to.
    """
    with _file_system(url) as (system, path):
        prefix = f"{path.rstrip('/')}/"
        found = {
            name.removeprefix(prefix): _state(info)
            for name, info in system.find(path, detail=True).items()
        }
    for name in found:
        is_outside = name.startswith("/") or not {".", ".."}.isdisjoint(name.split("/"))
        refuse(is_outside, f"{url} has a file {name!r}, which is not copied", fix="remove it")
    return found


def exists(url: str) -> bool:
    """Return whether there is such a file or folder; UserError without the right to know."""
    with _file_system(url) as (system, path):
        return system.exists(path)


def state(url: str) -> State:
    """Return the state of a file as it is now."""
    with _file_system(url) as (system, path):
        return _state(system.info(path))


@contextlib.contextmanager
def open_file(url: str, block_bytes: int) -> Iterator[io.BufferedReader]:
    """Open a file to be read in blocks, each by one request; UserError if any fails."""
    with (
        _file_system(url) as (system, path),
        system.open(path, "rb", cache_type="none") as file,
    ):
        yield io.BufferedReader(file, block_bytes)


def fetch(url: str, path: Path) -> None:
    """Copy a file, or the files of a folder, to a disk; do nothing if it does not exist."""
    with _file_system(url) as (system, name):
        if system.exists(name):
            path.parent.mkdir(parents=True, exist_ok=True)
            system.get(name, str(path), recursive=True)


def fetch_files(url: str, names: Sequence[str], folder: Path, work: console.Work) -> None:
    """Copy files of a folder, several at once, and count their bytes as the work that is done."""
    import fsspec

    class Progress(fsspec.Callback):
        def branched(self, path_1: str, path_2: str, **kwargs: Any) -> fsspec.Callback:
            return self  # for all files

        def relative_update(self, inc: int = 1) -> None:
            work.n += inc

    with _file_system(url) as (system, path):
        there, here = [f"{path}/{name}" for name in names], [str(folder / name) for name in names]
        for name in here:
            os.makedirs(os.path.dirname(name), exist_ok=True)
        system.get(there, here, callback=Progress())


def send(path: Path, url: str) -> None:
    """Copy a file, or the files of a folder, from a disk."""
    with _file_system(url, "written") as (system, name):
        slash = "/" if path.is_dir() else ""  # copies what is in a folder
        system.put(f"{path}{slash}", f"{name}{slash}", recursive=True)


@contextlib.contextmanager
def _file_system(url: str, done: str = "read") -> Iterator[tuple[Any, str]]:
    """Yield the file system of a URL, and the path in it; errors are those of `reading`."""
    with reading(url, done):
        import fsspec

        yield fsspec.core.url_to_fs(url, use_listings_cache=False)  # a file may change


def _state(info: dict[str, Any]) -> State:
    if info.get("size") is None:
        raise ValueError("the server does not say its size")
    return (int(info["size"]), *(str(info[name]) for name in _VERSIONS if name in info))


@contextlib.contextmanager
def reading(url: object, done: str = "read") -> Iterator[None]:
    """Turn an error of a URL, of which file systems raise nearly every type, into a UserError.

    OSError where a disk is full, or may only be read.
    """
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(
            f"{url} needs a package that is not installed ({first_line(error)}); install it; "
            "pip install 'bert-jax[remote]' has those of gs://, s3:// and https://"
        ) from error
    except Exception as error:
        is_read_only = isinstance(error, OSError) and error.errno == errno.EROFS
        if paths.is_full(error) or is_read_only or not paths.is_remote(str(url)):
            raise
        raise UserError(f"{url} cannot be {done} ({first_line(error)}); {_CHECK}") from error
