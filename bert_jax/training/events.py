"""TensorBoard's event files, of scalars alone.

The usual writers import PyTorch where it is installed, which takes longer than a run's first step.
A file is a row of records, each of an `Event`. Source: TensorFlow's `tsl/lib/io/record_writer.cc`,
`core/util/event.proto` and `core/framework/summary.proto`, whose field numbers stand here.
"""

import os
import socket
import struct
import time
from pathlib import Path

import numpy as np

from bert_jax.convert.tensor_bundle import masked_crc


class EventFile:
    """A new file of events in a folder.

    Args:
      folder: where TensorBoard looks for all files of a run.
      first_step: what older files hold from this step on is no longer shown.
    """

    def __init__(self, folder: Path, first_step: int):
        folder.mkdir(parents=True, exist_ok=True)
        # In the order of their names TensorBoard reads them.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._append(_bytes(3, b"brain.Event:2"))
        began = _number(1, 1)  # SessionLog.status = START
        self._append(_number(2, first_step) + _bytes(7, began))

    def scalar(self, name: str, value: float, step: int) -> None:
        """Records the value of something after `step` steps."""
        summary = _bytes(1, _bytes(1, name.encode()) + _key(2, 5) + np.float32(value).tobytes())
        self._append(_number(2, step) + _bytes(5, summary))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _append(self, fields: bytes) -> None:
        event = _key(1, 1) + struct.pack("<d", time.time()) + fields
        size = struct.pack("<Q", len(event))
        crcs = (struct.pack("<I", masked_crc(part)) for part in (size, event))
        self._file.write(b"".join((size, next(crcs), event, next(crcs))))
        self._file.flush()


def _key(tag: int, kind: int) -> bytes:
    return bytes([tag << 3 | kind])


def _number(tag: int, value: int) -> bytes:
    return _key(tag, 0) + _varint(value)


def _bytes(tag: int, value: bytes) -> bytes:
    return _key(tag, 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
