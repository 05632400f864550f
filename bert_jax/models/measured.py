"""What "auto" means on devices that were measured: a line of each, by JAX's name of the device.

`benchmarks/device.py` measures a device and writes its line. On a device without one
`model.attention` "auto" is plain, and `model.dtype` "auto" follows from the instructions it has.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Measured:
    """What trains fastest on a kind of device."""

    dtype: str = ""  # "" for that of a device which was not measured
    fused_from: int | None = None  # tokens of a sequence, from which fused attention is faster


MEASURED: dict[str, Measured] = {}


def measured(device_kind: str) -> Measured:
    """Return what was measured of a kind of device; the defaults where nothing was."""
    return MEASURED.get(device_kind, Measured())
