"""Stores on gs:// and s3://: copied to the user's cache, since training maps their files.

The name of a copy has a digest of what is there, so that a store that has changed is copied anew.
"""

import functools
import hashlib
import json
import os
import urllib.parse
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from bert_jax import console, locks, paths
from bert_jax.errors import UserError
from bert_jax.text import remote, shards, store

_PARTS = ("store.json", "tokenizer", "train", "eval", "shards")  # a bucket may have more
_TOKENIZER = "tokenizer/"  # which shards may have only in themselves
_AT_ONCE = 8  # files
_WITHOUT_LISTS = ("http:", "https:")  # their stores are not found


def is_store(source: str) -> bool:
    """Return whether a source is a store, on a disk or not."""
    return bool(_files(source)) if paths.is_remote(source) else store.is_store(source)


def is_of_shards(source: str) -> bool:
    """Return whether a source is a store or shards that are not one yet."""
    return is_store(source) or os.path.isdir(os.path.join(source, "shards"))


def tokenizer_folder(source: str) -> Path:
    """Return the tokenizer of a store, without the rest of one that is not on a disk."""
    is_apart = paths.is_remote(source) and any(n.startswith(_TOKENIZER) for n in _files(source))
    return (_fetch(source, _TOKENIZER) if is_apart else folder(source)) / "tokenizer"


def folder(source: str) -> Path:
    """Return the folder of a store; UserError if it cannot be copied, or shards are missing."""
    return _fetch(source) if paths.is_remote(source) else Path(source)


@functools.cache  # a run has one view of it
def _files(url: str) -> dict[str, remote.State]:
    """Return the files of a store, by their names in it; {} where there is none."""
    if url.startswith(_WITHOUT_LISTS) or {*url} & {*"*?[,"}:
        return {}
    top = {*remote.names(url)}
    if not {"store.json", "shards"} & top:
        return {}
    found = remote.files(url)
    return {name: state for name, state in found.items() if name.split("/")[0] in _PARTS}


def _fetch(url: str, only: str = "") -> Path:
    """Copy the files of a store that begin with `only`; a copy that was killed continues."""
    files = _files(url)
    digest = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()
    sizes = {name: size for name, (size, *_) in files.items() if name.startswith(only)}
    try:
        name = f"{urllib.parse.quote(url, safe='')}-{digest[:16]}"
        folder = locks.cache_folder() / "stores" / name
        with locks.locked(folder, waits=True):  # of the processes of a machine, one copies it
            if (folder / "store.json").exists():  # which is written last
                return folder
            if only or "store.json" in sizes:
                last = {name: sizes.pop(name) for name in ("store.json",) if name in sizes}
                _copy(url, folder, sizes)
                _copy(url, folder, last)
            else:
                _copy_shards(url, folder, sizes)
    except (OSError, RuntimeError) as error:  # RuntimeError without a home
        wrong = f"the copy of {url} on a disk cannot be written ({error})"
        raise UserError(f"{wrong}; set XDG_CACHE_HOME to a folder with enough space") from error
    return folder


def _copy_shards(url: str, folder: Path, sizes: dict[str, int]) -> None:
    """Copy shards that are not one store yet, and make one of the copies."""
    _copy(url, folder, {n: size for n, size in sizes.items() if n.endswith("/store.json")})
    try:
        shards.complete(folder)  # before the long copy
        _copy(url, folder, sizes)
        shards.join(folder)
    except UserError as error:
        raise UserError(str(error).replace(str(folder), url)) from error


def _copy(url: str, folder: Path, sizes: dict[str, int]) -> None:
    # A file is written in order, so one of the right size is whole. Opening verifies the content.
    missing = {name: size for name, size in sizes.items() if _size(folder / name) != size}
    total = sum(missing.values())
    if not missing:
        return
    with console.working(f"copying {url}", total) as work, ThreadPoolExecutor(_AT_ONCE) as pool:
        work.note = f"{total / 1e6:,.1f} MB to {folder}"
        copies = {pool.submit(remote.fetch, f"{url}/{n}", folder / n): n for n in missing}
        try:
            for copy in as_completed(copies):
                copy.result()
                work.n += missing[copies[copy]]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1
