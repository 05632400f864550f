"""What the machine, or the container of a process, gives to it: cores and memory."""

import os
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Of version 1 and version 2: where the groups of memory are, the files with the limit and with what
# is taken, and the name of the part of that which holds files, and so can be freed.
_LIMITS = (
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("", "memory.max", "memory.current", "inactive_file"),
)


def num_cores() -> int:
    """Return the cores that this process may use, where the system tells, or else has."""
    if hasattr(os, "sched_getaffinity"):  # of Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int | None:
    """Return the bytes that this process can still take; None if they are unknown.

    Of a system without Linux's /proc they are all that it has.
    """
    kilobytes = proc_field("meminfo", "MemAvailable").removesuffix(" kB")
    if kilobytes:
        return min([int(kilobytes) << 10, *_left_of_groups()])
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _left_of_groups() -> Iterator[int]:
    """Yield what each control group of this process, and each above it, leaves of its limit."""
    groups = [line.split(":", 2) for line in _lines(PROC / "self/cgroup")]
    for controller, limit, used, files in _LIMITS:
        path = next((path for _, names, path in groups if controller in names.split(",")), None)
        for folder in (Path(path or "/"), *Path(path or "/").parents):
            group = CGROUPS / controller / folder.relative_to("/")
            freeable = dict(line.split() for line in _lines(group / "memory.stat"))
            try:
                taken = int(_lines(group / used)[0]) - int(freeable.get(files, 0))
                yield max(0, int(_lines(group / limit)[0]) - taken)
            except (IndexError, ValueError):  # there is no such file, or it says "max"
                continue


def proc_field(file: str, name: str) -> str:
    """Return the first value of a field in a file of Linux's /proc; "" on other systems."""
    fields = (line.partition(":") for line in _lines(PROC / file))
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
