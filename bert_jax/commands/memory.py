"""How the C library of a command's process keeps the memory of arrays."""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

# Sizes of the holes, in MiB: an array takes the smallest one that it fits in. They hold a copy of
# the state, whose arrays are smaller, and no step's block, which then has one place in all steps.
_HOLES = (*(64,) * 20, 256, 256)


def keep_host_memory() -> None:
    """Keep memory that XLA frees on a CPU for the next step, which saves a third of its time.

    A step allocates one block for all of its temporary arrays and frees it at its end. The next
    step's block fits there only if nothing has taken a part of it meanwhile, as a checkpoint's copy
    of the weights would. So steps run one after the other, since two that overlap have two blocks;
    and free holes of several sizes lie apart from the blocks, for all that is smaller. A hole takes
    no memory until it is written.
    """
    # Before JAX has devices: the C library fixes its arenas when the first thread allocates.
    import jax

    platforms = jax.config.jax_platforms or ""  # pyright: ignore[reportAttributeAccessIssue]
    platform = platforms.split(",")[0]
    if platform == "cpu" or not (platform or _has_accelerator()):
        # From malloc.h: M_ARENA_MAX, M_MMAP_MAX, and M_TRIM_THRESHOLD, of which -1 is none.
        _configure_malloc({-8: 1, -4: 0, -1: -1}, _HOLES)
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def _has_accelerator() -> bool:
    """Return whether Linux shows a GPU or a TPU, without JAX's devices."""
    files = ("nvidia[0-9]*", "kfd", "accel*", "vfio/[0-9]*", "dxg")  # the last of Windows' Linux
    return any(any(Path("/dev").glob(pattern)) for pattern in files)


def _configure_malloc(options: Mapping[int, int], holes: Sequence[int]) -> None:
    """Set options of glibc's allocator, and leave holes of MiB in its heap, where there is one."""
    try:
        library = ctypes.CDLL(None)
        mallopt, malloc, free = library.mallopt, library.malloc, library.free
    except (OSError, AttributeError):
        return
    for option, value in options.items():
        mallopt(option, value)
    malloc.restype, malloc.argtypes, free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = []
    for size in holes:
        blocks.append(malloc(size << 20))
        malloc(1 << 20)  # is kept, so that two holes do not become one
    for block in blocks:
        free(block)
