"""Files of gs://, s3://, https:// and whatever else fsspec reads, by its config and credentials."""

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError, first_line
from bert_jax.storage import paths

State = tuple[Any, ...]  # the size in bytes, and what changes with the content
# As file systems name it; a size alone is known of a server that has none of these.
_VERSIONS = ("ETag", "etag", "generation", "created", "mtime")


def find(pattern: str) -> list[tuple[str, State]]:
    """Return the files that a URL or a glob names, in order, with their sizes; UserError if none.

    A listing has the sizes of a thousand files in one request. The rest of a state takes one each.
    """
    cause = None
    with reading(pattern):
        system, path = _system(pattern)
        try:
            found = {path: system.info(path)}  # a name that exists is no pattern
        except FileNotFoundError as error:
            cause = error.__cause__
            found = system.glob(path, detail=True)
        files = {n: info for n, info in found.items() if info["type"] == "file"}
        if not files and system.exists(f"{path.rstrip('/')}/store.json"):
            raise UserError(
                f"{pattern} is a store, which is read from a disk, gs:// or s3:// alone; "
                "give text, or copy the store to a disk, as data.source"
            )
        sizes = []
        for name, info in files.items():
            url = system.unstrip_protocol(name)
            is_listed = info.get("size") is not None  # a web server may list names alone
            sizes.append((url, (_state(info) if is_listed else state(url))[:1]))
    if not files:
        reason = f" ({first_line(cause)})" if cause else ""
        what = "is a folder, not a file" if found else f"does not exist{reason}"
        raise UserError(f"data source {pattern} {what}; give files or a glob 'gs://text/*.txt'")
    return sorted(sizes)


def names(url: str) -> list[str]:
    """Return the names of the files and folders in a folder; [] if it does not exist."""
    with reading(url):
        system, path = _system(url)
        try:
            return [Path(name).name for name in system.ls(path, detail=False)]
        except FileNotFoundError:
            return []


def files(url: str) -> dict[str, State]:
    """Return the state of all files below a folder, by their paths in it."""
    with reading(url):
        system, path = _system(url)
        found = system.find(path, detail=True)
        prefix = f"{path.rstrip('/')}/"
        return {name.removeprefix(prefix): _state(info) for name, info in found.items()}


def exists(url: str) -> bool:
    """Return whether there is such a file or folder; UserError without the right to know."""
    with reading(url):
        system, path = _system(url)
        return system.exists(path)


def state(url: str) -> State:
    """Return the state of a file as it is now."""
    with reading(url):
        system, path = _system(url)
        return _state(system.info(path))


def open_file(url: str, block_bytes: int) -> io.BufferedReader:
    """Open a file to be read in blocks, each by one request; UserError if any fails."""
    return io.BufferedReader(_File(url), block_bytes)


def fetch(url: str, path: Path) -> None:
    """Copy a file, or the files of a folder, to a disk; do nothing if it does not exist."""
    with reading(url):
        system, name = _system(url)
        if system.exists(name):
            path.parent.mkdir(parents=True, exist_ok=True)
            system.get(name, str(path), recursive=True)


def copy(url: str, path: Path, advance: Callable[[int], None] = lambda size: None) -> None:
    """Copy a file to a disk, and call `advance` with the number of bytes copied so far."""
    import fsspec

    callback = fsspec.Callback(hooks={"advance": lambda size, value: advance(value)})
    with reading(url):
        system, name = _system(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        system.get_file(name, str(path), callback=callback)


def read(url: str) -> bytes:
    """Return the content of a file."""
    with reading(url):
        system, name = _system(url)
        return system.cat_file(name)


def send(path: Path, url: str) -> None:
    """Copy a file from a disk."""
    with reading(url, "written"):
        system, name = _system(url)
        system.put_file(str(path), name)


def write(url: str, data: bytes) -> None:
    """Write a file."""
    with reading(url, "written"):
        system, name = _system(url)
        system.pipe_file(name, data)


class _File(io.RawIOBase):
    def __init__(self, url: str):
        self._url, self._position = url, 0
        self._size = state(url)[0]
        self._system, self._path = _system(url)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        start, end = self._position, min(self._position + len(buffer), self._size)
        if start >= end:
            return 0
        with reading(self._url):
            data = self._system.cat_file(self._path, start=start, end=end)
            if len(data) != end - start:
                raise OSError(
                    f"the server sends {len(data)} bytes where {end - start} bytes from {start} on "
                    "are asked for"
                )
        buffer[: len(data)] = data
        self._position = end
        return len(data)


def _system(url: str) -> tuple[Any, str]:
    import fsspec

    return fsspec.core.url_to_fs(url, use_listings_cache=False)  # a file may change


def _state(info: dict[str, Any]) -> State:
    if info.get("size") is None:
        raise ValueError("the server does not say its size")
    return (int(info["size"]), *(str(info[name]) for name in _VERSIONS if name in info))


@contextlib.contextmanager
def reading(url: object, done: str = "read") -> Iterator[None]:
    """Turn an error of a URL, of which file systems raise nearly every type, into a UserError."""
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
        if not paths.is_remote(str(url)):
            raise
        raise UserError(
            f"{url} cannot be {done} ({first_line(error)}); "
            "check the address, the network and your credentials, and repeat the command"
        ) from error
