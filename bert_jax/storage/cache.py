"""The folder of this program in the user's cache."""

import os
from pathlib import Path


def folder() -> Path:
    """Return the folder; RuntimeError for a user without a home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a path that is not absolute.
    return (base if base.is_absolute() else Path.home() / ".cache") / "bert-jax"
