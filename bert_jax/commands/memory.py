"""How the C library of a command's process keeps the memory of arrays."""

import ctypes
from collections.abc import Mapping
from pathlib import Path


def keep_host_memory() -> None:
    """Keep memory that XLA frees on a CPU for the next step, which saves a third of its time.

    A step allocates one block for all of its temporary arrays and frees it at its end. Steps run
    one after the other, since two that overlap have two blocks, and soon four: a small allocation
    beside one that is free takes a little of it, and the next step needs a new one.
    """
    # Before JAX has devices: the C library fixes its arenas when the first thread allocates.
    import jax

    platforms = jax.config.jax_platforms or ""  # pyright: ignore[reportAttributeAccessIssue]
    platform = platforms.split(",")[0]
    if platform == "cpu" or not (platform or _has_accelerator()):
        # From malloc.h: M_ARENA_MAX, M_MMAP_MAX, and M_TRIM_THRESHOLD, of which -1 is none.
        _mallopt({-8: 1, -4: 0, -1: -1})
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def _has_accelerator() -> bool:
    """Return whether Linux shows a GPU or a TPU, without JAX's devices."""
    files = ("nvidia[0-9]*", "kfd", "accel*", "vfio/[0-9]*")
    return any(any(Path("/dev").glob(pattern)) for pattern in files)


def _mallopt(options: Mapping[int, int]) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in options.items():
        mallopt(option, value)
