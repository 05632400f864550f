"""Stores on gs:// and s3://: copied to the user's cache, since training maps their files.

The name of a copy has a digest of the sizes and versions of the store's files, so that a changed
store is copied again.
"""

import contextlib
import hashlib
import json
import os
import shutil
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from bert_jax import console
from bert_jax.errors import UserError, naming
from bert_jax.storage import locks, paths, remote
from bert_jax.text import files, records, shards, store

_WITHOUT_LISTS = ("http:", "https:", "file:")  # their stores are not copied
_SPACE = "set XDG_CACHE_HOME to a folder with enough space"


def is_store(source: str) -> bool:
    """Return whether a source is a store, on a disk or not."""
    if not paths.is_remote(source):
        return store.is_store(source)
    # The name of a text saves requests.
    is_text = records.reader(source) or files.suffix(source) in (".txt", *files.OPENERS)
    if is_text or {*source} & {*"*?[,"} or source.startswith(_WITHOUT_LISTS):
        return False
    return any(remote.exists(f"{source.rstrip('/')}/{name}") for name in ("store.json", "shards"))


def tokenizer_folder(source: str) -> Path:
    """Return the folder of a store's tokenizer; of a store at a URL, only that is copied."""
    if not paths.is_remote(source):
        return folder(source) / "tokenizer"
    with _copy_of(source) as (copy, files):
        folders = {name.rpartition("/")[0] for name in files}
        names = [name for name in folders if name.endswith("tokenizer")]
        name = min(names, key=len, default="tokenizer")  # shards may have one only in themselves
        _copy(source, copy, {n: size for n, size in files.items() if n.startswith(f"{name}/")})
    return copy / name


def folder(source: str) -> Path:
    """Return the folder of a store; UserError if it cannot be copied, or is not whole."""
    if not paths.is_remote(source):
        path = Path(os.path.expanduser(source))
        if not os.path.exists(path):  # on this host; on another it may
            raise UserError(f"data source {source} does not exist; copy the store here")
        if os.path.isdir(path / "shards"):
            shards.finish(path)
        return path
    with _copy_of(source) as (folder, files):
        if (folder / "store.json").exists():  # which is written last
            return folder
        manifest = files.pop("store.json", None)
        if not manifest:
            records = {name: size for name, size in files.items() if name.endswith("/store.json")}
            _copy(source, folder, records)
            with naming(source, folder):
                shards.complete(folder)  # before the long copy
        _copy(source, folder, files)
        if manifest:
            remote.fetch(f"{source.rstrip('/')}/store.json", folder / "manifest.json")
            os.replace(folder / "manifest.json", folder / "store.json")
        else:
            with naming(source, folder):
                shards.check_tokenizer(folder)
                shards.join(folder)
    return folder


@contextlib.contextmanager
def _copy_of(source: str) -> Iterator[tuple[Path, dict[str, int]]]:
    """Yield the folder of the copy of a store, to one process of a machine at a time.

    With the sizes of the store's files, by their paths in it.
    """
    url = source.rstrip("/")
    files = {n: x for n, x in remote.files(url).items() if n.split("/")[0] in store.CONTENT}
    digest = hashlib.sha256(json.dumps([url, sorted(files.items())]).encode()).hexdigest()
    name = urllib.parse.quote(url.rpartition("/")[2], safe="")[:100]
    try:
        folder = paths.cache_folder() / "stores" / f"{name}-{digest[:16]}"
        with locks.locked(folder, waits=True):
            yield folder, {name: size for name, (size, *_) in files.items()}
    except (OSError, RuntimeError) as error:  # RuntimeError without a home
        raise UserError(f"the copy of {url} cannot be written ({error}); {_SPACE}") from error


def _copy(source: str, folder: Path, sizes: dict[str, int]) -> None:
    """Copy the files that are missing, or not whole; a store's checksums tell what is damaged."""
    missing = {
        name: size
        for name, size in sizes.items()
        if not (folder / name).exists() or (folder / name).stat().st_size != size
    }
    total, free = sum(missing.values()), shutil.disk_usage(folder).free
    if total > free:
        raise UserError(
            f"{source} has {total / 1e9:.1f} GB to copy to {folder}, where {free / 1e9:.1f} are "
            f"free; {_SPACE}"
        )
    if missing:
        with console.working(f"copying {source}", total) as work:
            work.note = f"{total / 1e6:,.1f} MB to {folder}"
            remote.fetch_files(source.rstrip("/"), [*missing], folder, work)
