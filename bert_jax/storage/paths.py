"""Paths on a disk, and in a bucket: those of etils, which have the same methods."""

import importlib.util
import os
import re
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from bert_jax.errors import UserError

if TYPE_CHECKING:
    from etils import epath

    AnyPath = Path | epath.Path
else:
    AnyPath = PurePath  # which both are; to import etils here would delay each command by 60 ms

# What may be given for a checkpoint.
CHECKPOINT = (
    "a workdir, one of its checkpoints, a Hugging Face or Google checkpoint directory, or "
    "hf:OWNER/NAME, a model of the Hugging Face hub"
)


def is_remote(path: str | PurePath) -> bool:
    """Return whether a path is a URL, or was one before it became a Path."""
    return bool(re.match(r"\w{2,}:/", str(path)))


def as_path(name: "str | AnyPath") -> AnyPath:
    """Return the path that a name is of; UserError for a URL that is not of gs://BUCKET/FOLDER."""
    if not is_remote(name):
        return Path(name)
    url = re.sub(":/(?!/)", "://", str(name), count=1).rstrip("/")  # a Path has one slash
    scheme, _, folder = url.partition("://")
    if scheme != "gs" or {"", ".", ".."} & {*folder.split("/")}:
        raise UserError(f"{url} is no folder of a bucket; give a folder, or gs://BUCKET/FOLDER")
    if importlib.util.find_spec("gcsfs") is None:
        fault = "needs a package that is not installed"
        raise UserError(f"{url} {fault}; pip install 'bert-jax[remote]'")
    from etils import epath

    return epath.Path(url)


def absolute(path: AnyPath) -> AnyPath:
    """Return a path that does not depend on the folder of the process."""
    return path if is_remote(path) else path.absolute()


def exists(path: AnyPath) -> bool:
    """Return whether there is such a path, also where the name is too long, as Path does not."""
    return path.exists() if is_remote(path) else os.path.exists(path)


def is_folder(path: AnyPath) -> bool:
    """Return whether a path is a folder, likewise."""
    return path.is_dir() if is_remote(path) else os.path.isdir(path)
