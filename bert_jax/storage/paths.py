"""Paths on a disk are pathlib's; those in a bucket are etils', which have the same methods."""

import errno
import importlib.util
import os
import re
import reprlib
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from bert_jax.errors import UserError, refuse

if TYPE_CHECKING:
    from etils import epath

    AnyPath = Path | epath.Path
else:
    AnyPath = PurePath  # the base of both; to import etils here would delay each command by 60 ms

HUB = "hf:"  # before the name of a model of the Hugging Face hub
# What a CHECKPOINT may be, for help and errors.
CHECKPOINT = (
    "a workdir, one of its checkpoints, a Hugging Face or Google checkpoint directory, or "
    "hf:OWNER/NAME, a model of the Hugging Face hub"
)


def is_remote(path: str | PurePath) -> bool:
    """Return whether a path is a URL, or was one before it became a Path."""
    return bool(re.match(r"\w{2,}:/", str(path)))


def file_name(path: str | PurePath) -> str:
    """Return the name of a file, of a web address without its query: "a.txt" of ".../a.txt?x=y"."""
    text = str(path)
    if re.match("https?:/", text):
        text = re.split("[?#]", text, maxsplit=1)[0]
    return PurePath(text).name


def as_path(name: "str | AnyPath") -> AnyPath:
    """Return the path of a name, in which "~" is the user's home, or of gs://BUCKET/FOLDER.

    UserError for "" and for another URL.
    """
    check_named(name)
    if not is_remote(name):
        return Path(os.path.expanduser(name))  # which stays without a home
    url = re.sub(":/(?!/)", "://", str(name), count=1).rstrip("/")  # a Path has one slash
    scheme, _, folder = url.partition("://")
    if scheme != "gs" or {"", ".", ".."} & {*folder.split("/")}:
        raise UserError(f"{url} is no folder of gs://; give a folder, or gs://BUCKET/FOLDER")
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(
            f"{url} needs a package that is not installed; pip install 'bert-jax[remote]'"
        )
    from etils import epath

    return epath.Path(url)


def is_full(error: object) -> bool:
    """Return whether an error says that a disk, or a user's share of it, has no room."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def cache_folder() -> Path:
    """Return this program's folder in the user's cache, which others may not read.

    RuntimeError for a user without a home; OSError where the folder cannot be made.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a path that is not absolute.
    folder = (base if base.is_absolute() else Path.home() / ".cache") / "bert-jax"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def check_named(name: object) -> None:
    """Refuse what is no path, and "", which pathlib takes for the working directory."""
    if not isinstance(name, str | os.PathLike):
        raise UserError(f"a path is {reprlib.repr(name)}; give the name of a file or a folder")
    if not str(name):
        raise UserError("a path is empty; give the name of a file or a folder")


def is_on_hub(name: object) -> bool:
    """Return whether a path is the name of a model of the Hugging Face hub."""
    return str(name).startswith(HUB)


def on_disk(name: object) -> Path:
    """Return the path of a file or folder to write, in which "~" is the user's home.

    UserError for "", and for a URL or a model of the hub.
    """
    check_named(name)
    path = str(name)
    refuse(
        is_remote(path) or is_on_hub(path),
        f"{path} is not on a disk, where this is written",
        fix="give another path, and copy what is there then",
    )
    return Path(os.path.expanduser(path))


def file_to_write(name: object) -> Path:
    """Return the path of a file; UserError if its folder is not there, or cannot be written."""
    path = on_disk(name)
    folder = path.absolute().parent
    refuse(not os.path.isdir(folder), f"{path} is in no folder", fix="make the folder first")
    refuse(not os.access(folder, os.W_OK), f"{path} cannot be written there", fix="choose another")
    return path


def absolute(path: AnyPath) -> AnyPath:
    """Return a path that does not depend on the folder of the process."""
    return path if is_remote(path) else path.absolute()


def exists(path: AnyPath) -> bool:
    """Return whether there is such a path; False for a name that is too long, where Path raises."""
    return path.exists() if is_remote(path) else os.path.exists(path)


def is_same_file(one: str, other: str) -> bool:
    """Return whether two paths lead to one file on a disk."""
    names = [os.path.expanduser(name) for name in (one, other)]
    return all(map(os.path.exists, names)) and os.path.samefile(names[0], names[1])


def is_folder(path: AnyPath) -> bool:
    """Return whether a path is a folder; False for a name that is too long."""
    return path.is_dir() if is_remote(path) else os.path.isdir(path)
