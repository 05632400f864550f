"""How long the train step takes to compile, without and with a cache of programs on disk."""

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program.

    Attributes:
      program: to run.
      cold: seconds from Python to the program, with nothing kept of an earlier time.
      warm: the same with what the first time left on disk, as when a command is given again; None
        where it left nothing.
    """

    program: Any
    cold: float
    warm: float | None


def compile_twice(make: Callable[[], Any]) -> Compiled:
    """Compiles a program with an empty cache, and once more with the one that this filled.

    Args:
      make: traces and compiles it.
    """
    with tempfile.TemporaryDirectory(prefix="bert-jax-") as folder, _cache(folder):
        program, cold = _timed(make)
        kept = set(os.listdir(folder))
        _, warm = _timed(make)
        is_hit = kept and kept == set(os.listdir(folder))
    return Compiled(program, cold, warm if is_hit else None)


def _timed(make: Callable[[], Any]) -> tuple[Any, float]:
    jax.clear_caches()  # of what is traced and compiled in this process
    started = time.perf_counter()
    return make(), time.perf_counter() - started


@contextmanager
def _cache(folder: str) -> Iterator[None]:
    """Keeps every program in a folder, whatever the process's own settings are."""
    before = [getattr(jax.config, name) for name in _SETTINGS]
    _set(folder, True, 0.0, -1)
    try:
        yield
    finally:
        _set(*before)


def _set(*values: Any) -> None:
    for name, value in zip(_SETTINGS, values, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # which is opened once, with the settings of that time
