"""Stores on gs:// and s3://: copied to the user's cache, since training maps their files.

The name of a copy has a digest of the store, so that a changed store is copied again.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from bert_jax import console
from bert_jax.errors import UserError
from bert_jax.storage import cache, daemon_thread, json_files, locks, paths, remote
from bert_jax.text import shards, store

_WITHOUT_LISTS = ("http:", "https:", "file:")  # their stores are not copied
_OF_TEXT = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".gz", ".xz")  # saves requests
_AT_ONCE = 8  # files
_PARTS = (*store.SPLITS, "shards", "store.json", "tokenizer")  # a bucket may have more
_SPACE = "set XDG_CACHE_HOME to a folder with enough space"


def is_store(source: str) -> bool:
    """Return whether a source is a store, on a disk or not."""
    if not paths.is_remote(source):
        return store.is_store(source)
    is_text = {*source} & {*"*?[,"} or Path(source).suffix in _OF_TEXT
    if is_text or source.startswith(_WITHOUT_LISTS):
        return False
    return any(remote.exists(f"{source.rstrip('/')}/{name}") for name in ("store.json", "shards"))


def tokenizer_folder(source: str) -> Path:
    """Return the folder of a store's tokenizer; of a store at a URL, only that is copied."""
    if not paths.is_remote(source):
        return Path(source) / "tokenizer"
    url, files, version = _find(source)
    folders = {name.rpartition("/")[0] for name in files}
    names = sorted((n for n in folders if n.endswith("tokenizer")), key=len)
    name = names[0] if names else "tokenizer"  # shards may have one only in themselves
    with _copy_of(url, version) as folder:
        if (folder / "store.json").exists():
            return folder / "tokenizer"
        _copy(url, folder, {n: size for n, size in files.items() if n.startswith(f"{name}/")})
    return folder / name


def folder(source: str) -> Path:
    """Return the folder of a store; UserError if it cannot be copied, or shards are missing."""
    if not paths.is_remote(source):
        return Path(source)
    url, files, version = _find(source)
    with _copy_of(url, version) as folder:
        if not (folder / "store.json").exists():  # which is written last
            (_copy_whole if "store.json" in files else _copy_shards)(url, folder, files)
    return folder


def _find(source: str) -> tuple[str, dict[str, int], Any]:
    """Return the URL of a store, the sizes of its files, and a version that its content has."""
    url = source.rstrip("/")
    files = {n: x for n, x in remote.files(url).items() if n.split("/")[0] in _PARTS}
    version: Any = sorted(files.items())
    if "store.json" in files:  # which has the checksums of the others
        version = remote.read(f"{url}/store.json").decode()
    return url, {name: size for name, (size, *_) in files.items()}, version


@contextlib.contextmanager
def _copy_of(url: str, version: Any) -> Iterator[Path]:
    """Yield the folder of the copy of a store, to one process of a machine at a time."""
    digest = hashlib.sha256(json.dumps([url, version]).encode()).hexdigest()
    name = urllib.parse.quote(url.rpartition("/")[2], safe="")[:100]
    try:
        folder = cache.folder() / "stores" / f"{name}-{digest[:16]}"
        with locks.locked(folder, waits=True):
            yield folder
    except (OSError, RuntimeError) as error:  # RuntimeError without a home
        raise UserError(f"the copy of {url} cannot be written ({error}); {_SPACE}") from error


def _copy_whole(url: str, folder: Path, files: dict[str, int]) -> None:
    manifest = folder / "manifest.json"
    remote.copy(f"{url}/store.json", manifest)
    with json_files.refusing_malformed(manifest, store.REMEDY):
        names = [*store.read_record(manifest)["checksums"]]
    if missing := [name for name in names if name not in files]:
        raise UserError(
            f"{url} has no {missing[0]}, which its store.json names; "
            "wait until all of it has been sent, or send it again"
        )
    _copy(url, folder, {name: files[name] for name in names})
    os.replace(manifest, folder / "store.json")


def _copy_shards(url: str, folder: Path, files: dict[str, int]) -> None:
    """Copy shards that are not one store yet, and make one of the copies."""
    _copy(url, folder, {n: size for n, size in files.items() if n.endswith("/store.json")})
    try:
        shards.complete(folder)  # before the long copy
    except UserError as error:
        raise UserError(str(error).replace(str(folder), url)) from error
    _copy(url, folder, files)
    shards.join(folder)


def _copy(url: str, folder: Path, sizes: dict[str, int]) -> None:
    """Copy the files that are missing; each is renamed to its own name once it is whole."""
    missing = {name: size for name, size in sizes.items() if not (folder / name).exists()}
    total, free = sum(missing.values()), shutil.disk_usage(folder).free
    if total > free:
        raise UserError(
            f"{url} has {total / 1e9:.1f} GB to copy to {folder}, where {free / 1e9:.1f} are free; "
            f"{_SPACE}"
        )
    if not missing:
        return
    names, stopped = iter(missing), threading.Event()
    with console.working(f"copying {url}", total) as work:
        work.note = f"{total / 1e6:,.1f} MB to {folder}"

        def copy_files() -> None:
            while not stopped.is_set() and (name := next(names, None)):
                copied = 0

                def advance(size: int) -> None:
                    nonlocal copied
                    work.n, copied = work.n + size - copied, size

                # Of hosts that share the folder, each has its own; the parts of a file come in any
                # order, so its size says nothing.
                part = folder / f"{name}.{socket.gethostname()}.part"
                remote.copy(f"{url}/{name}", part, advance)
                if part.stat().st_size != missing[name]:
                    raise UserError(
                        f"{url}/{name} was changed while it was copied; repeat the command"
                    )
                os.replace(part, folder / name)

        copies = [daemon_thread.start(copy_files) for _ in range(min(_AT_ONCE, len(missing)))]
        try:
            for copy in as_completed(copies):
                copy.result()
        finally:
            stopped.set()
