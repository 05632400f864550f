"""Whether a step fits into the devices' memory, and how much of it was used."""

import contextlib
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from bert_jax.config import Phase
from bert_jax.errors import UserError

_KIB = 1024


@contextlib.contextmanager
def fits(phase: Phase, device: Any) -> Iterator[None]:
    """Turns the failure of a compiler or of a device for want of memory into the user's error.

    Raises:
      UserError: what runs inside does not fit.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        words = ("RESOURCE_EXHAUSTED", "Out of memory")  # a CPU's step has the latter alone
        if not isinstance(error, MemoryError) and not any(each in str(error) for each in words):
            raise
        raise _does_not_fit(phase, device, "") from error


def check(phase: Phase, needed: int, devices: Sequence[Any]) -> None:
    """Refuses a program that needs more than there is, before it is run.

    Args:
      phase: whose program it is.
      needed: bytes of each device, by the compiler.
      devices: all of them here; those of a CPU share its memory.

    Raises:
      UserError: it does not fit.
    """
    device = devices[0]
    if device.platform == "cpu":
        needed, there = needed * len(devices), _available()
    else:
        there = (device.memory_stats() or {}).get("bytes_limit")
    if there is not None and needed > there:
        sizes = f": {needed / 2**30:,.1f} GiB of {there / 2**30:,.1f}"
        raise _does_not_fit(phase, device, sizes)


def _does_not_fit(phase: Phase, device: Any, sizes: str) -> UserError:
    whose = "this machine" if device.platform == "cpu" else device.device_kind
    return UserError(
        f"a batch of {phase.batch_size:,} × {phase.max_length:,} does not fit in the memory of "
        f"{whose}{sizes}; lower data.batch_size, or raise optimizer.microbatches"
    )


def _available() -> int | None:
    """Returns the bytes that the system has left, where it says so, as Linux does."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines)
    return next((int(size) * _KIB for name, size, *_ in found if name == "MemAvailable:"), None)


class Peak:
    """The most memory that was used, on each device or, of CPUs, by the process."""

    def __init__(self, devices: Sequence[Any]):
        self._devices = devices
        try:
            # On Linux, "5" sets the peak of what is resident back to what there is now (proc(5)).
            Path("/proc/self/clear_refs").write_text("5")
            self._is_reset = True
        except OSError:  # another system, or one that does not let us: `read` says so
            self._is_reset = False

    def read(self) -> tuple[int | None, str]:
        """Returns the bytes since then, and what they are of; None where the platform is silent."""
        if self._devices[0].platform != "cpu":
            found = [(each.memory_stats() or {}).get("peak_bytes_in_use") for each in self._devices]
            known = [each for each in found if each is not None]
            return max(known, default=None), "of one device"
        if self._is_reset:
            lines = Path("/proc/self/status").read_text().splitlines()
            (size,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
            return int(size) * _KIB, "resident, of the whole process during the steps"
        unit = 1 if sys.platform == "darwin" else _KIB
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return size, "resident, of the whole process since its start"
