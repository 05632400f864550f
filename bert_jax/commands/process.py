"""Programs that JAX has compiled, kept on disk for the next process that wants them."""

import contextlib
import ctypes
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from bert_jax.distributed import hosts

_FOLDER = "jax_compilation_cache_dir"
# What JAX warns of, where it goes on without the entry.
_WARNING = re.compile(r"Error (reading|writing) persistent compilation cache entry for '(.*?)'")


def keep() -> None:
    """Keeps compiled programs in the user's cache, where JAX has not been given a folder for them.

    They save a run that goes on, or another of the same sizes, the time to compile. JAX tells
    programs of other devices, versions and flags apart. What cannot be kept or read is compiled
    again, without a word. Several hosts must share the folder, as the first one alone writes, and
    those that wait for others while they compile would wait for ever: there it has to be given.
    """
    if getattr(jax.config, _FOLDER) is None and hosts.count() == 1:
        try:
            folder = _folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # a disk that is full or read only, or no home
            return
        jax.config.update(_FOLDER, str(folder))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    warnings.filterwarnings("always", _WARNING.pattern)  # not the first of its kind alone
    warnings.showwarning = _show


def _folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # By the XDG specification one that is no full path is to be passed over.
    return (base if base.is_absolute() else Path.home() / ".cache") / "bert-jax"


_show_others = warnings.showwarning


def _show(message: Any, *args: Any, **options: Any) -> None:
    """Shows a warning, but for those of programs; one that is damaged makes room for a new one."""
    found = _WARNING.match(str(message))
    if not found:
        _show_others(message, *args, **options)
    elif found[1] == "reading" and (folder := getattr(jax.config, _FOLDER)):
        for path in Path(folder).glob(f"{found[2]}-*-cache"):
            with contextlib.suppress(OSError):
                path.unlink()


def keep_host_memory() -> None:
    """Keeps memory that XLA frees on a CPU, so that the next step need not ask for it again.

    A step's temporaries are freed at its end. With the C library's defaults they go back to the
    system, and every page of the next step's is cleared and mapped anew: a third of the time of a
    step of the default config. Threads that run already keep to what they have: it is called before
    anything that asks JAX for its devices. Does nothing without glibc.
    """
    # From malloc.h: M_ARENA_MAX, M_MMAP_MAX, and M_TRIM_THRESHOLD, of which -1 is none. Two steps
    # of BERT-base are under way at once, and have more to give back than any threshold allows.
    _mallopt({-8: 1, -4: 0, -1: -1})


def return_host_memory() -> None:
    """Gives back the memory of every large array when it is freed: for a command that runs once.

    By default the C library keeps much of it, which is half as much again as a checkpoint takes.
    Does nothing without glibc.
    """
    _mallopt({-3: 1 << 16})  # M_MMAP_THRESHOLD


def _mallopt(options: Mapping[int, int]) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in options.items():
        mallopt(option, value)
