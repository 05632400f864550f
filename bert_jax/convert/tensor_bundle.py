"""Reads the checkpoints that TensorFlow 1's `Saver` writes, without TensorFlow.

Such a checkpoint is a "tensor bundle": `PREFIX.index`, a sorted table in the format of LevelDB, of
name to where its tensor lies, and `PREFIX.data-00000-of-0000N`, the raw values. Every block and
every tensor has a checksum, which is checked.

Covered: any number of data files; float32, float64, float16, bfloat16 and integers. Refused: parts
of tensors (partitioned variables), strings and resources, big-endian machines, compressed tables
(TensorFlow writes none). Sources: `tensorflow/core/util/tensor_bundle`,
`tensorflow/core/protobuf/tensor_bundle.proto` and LevelDB's `doc/table_format.md`.
"""

import dataclasses
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import ml_dtypes
import numpy as np

from bert_jax.errors import UserError

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
# An index of BERT-large has 60 kB; what is far larger, or would be once read, is no index.
_MOST_INDEX_BYTES = 1 << 24
# From `tensorflow/core/framework/types.proto`.
_DTYPES = {
    1: np.float32,
    2: np.float64,
    3: np.int32,
    9: np.int64,
    14: ml_dtypes.bfloat16,
    19: np.float16,
}


class _DamagedError(Exception):
    """The bytes are not what the format asks for."""


@dataclasses.dataclass(frozen=True)
class BundleTensor:
    """A tensor of a bundle, not yet read.

    Attributes:
      shape: of its values.
      dtype: of its values.
      file: that holds them.
      offset: where they begin, in bytes.
      checksum: of their bytes, CRC32C, masked.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    offset: int
    checksum: int

    def read(self) -> np.ndarray:
        """Returns the values.

        Raises:
          UserError: the file is damaged.
        """
        size = self.dtype.itemsize * math.prod(self.shape)
        try:
            with self.file.open("rb") as file:
                if self.offset + size > os.fstat(file.fileno()).st_size:
                    raise UserError(f"{self.file} is cut short; fetch it again")
                file.seek(self.offset)
                data = file.read(size)
        except OSError as error:
            raise UserError(f"{self.file} cannot be read ({error.strerror})") from error
        if _masked_crc(data) != self.checksum:
            raise UserError(f"{self.file} is damaged: a checksum does not agree; fetch it again")
        return np.frombuffer(data, self.dtype).reshape(self.shape)


def open_bundle(prefix: Path) -> dict[str, BundleTensor]:
    """Returns the tensors of a checkpoint by name; their values are read later.

    Args:
      prefix: the checkpoint's path without `.index`.

    Raises:
      UserError: the index is damaged, or has what is not covered.
    """
    path = prefix.with_name(prefix.name + ".index")
    try:
        if path.stat().st_size > _MOST_INDEX_BYTES:
            raise _DamagedError("far too large")
        table = list(_table(path.read_bytes()))
        if not table or table[0][0] != b"":
            raise _DamagedError("no header")
        header = _fields(table[0][1])
        if header.get(2, 0) != 0:
            raise UserError(f"{path} was written on a big-endian machine, which is not read")
        shards = _number(header, 1)
        tensors = {key.decode(): _tensor(prefix, shards, value) for key, value in table[1:]}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except (_DamagedError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}); fetch it again") from error


def _tensor(prefix: Path, shards: int, value: bytes) -> BundleTensor | None:
    """Reads a BundleEntryProto; None for what is no array of numbers."""
    entry = _fields(value)
    if 7 in entry:
        raise UserError(f"{prefix} has variables in parts, which are not read")
    shape, number = [], _number(entry, 1)
    for tag, dimension in _all_fields(_bytes(entry, 2)):
        if tag == 2:
            shape.append(_number(_fields(_as_bytes(dimension)), 1))
    shard = _number(entry, 3)
    if shard >= shards or max(shape, default=0) >= 1 << 40 or len(shape) > 8:
        raise _DamagedError("an entry that cannot be")
    if number not in _DTYPES:
        return None
    dtype = np.dtype(_DTYPES[number])
    if dtype.itemsize * math.prod(shape) != _number(entry, 5):
        raise _DamagedError("a size that does not agree with the shape")
    name = f"{prefix.name}.data-{shard:05d}-of-{shards:05d}"
    return BundleTensor(
        tuple(shape), dtype, prefix.with_name(name), _number(entry, 4), _number(entry, 6)
    )


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a LevelDB table, in their order."""
    if len(data) < _FOOTER_BYTES or struct.unpack("<Q", data[-8:])[0] != _MAGIC:
        raise _DamagedError("it does not end as such a file does")
    place = len(data) - _FOOTER_BYTES
    for _ in range(2):  # where a block of metadata lies, which is empty
        _, place = _varint(data, place)
    read = 0
    for _, handle in _block(data, *_handle(data, place)):
        for key, value in _block(data, *_handle(handle, 0)):
            # Keys share bytes and handles may agree, so that a small file could hold no end of it.
            read += len(key) + len(value) + 16
            if read > _MOST_INDEX_BYTES:
                raise _DamagedError("far too large")
            yield key, value


def _handle(data: bytes, place: int) -> tuple[int, int]:
    offset, place = _varint(data, place)
    return offset, _varint(data, place)[0]


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a block, whose keys leave out what they share."""
    end = offset + size
    if size < 4 or end + 5 > len(data):
        raise _DamagedError("a block outside the file")
    kind, checksum = struct.unpack("<BI", data[end : end + 5])
    if _masked_crc(data[offset : end + 1]) != checksum:
        raise _DamagedError("a checksum does not agree")
    if kind != 0:
        raise _DamagedError("it is compressed, which TensorFlow does not do")
    restarts = struct.unpack("<I", data[end - 4 : end])[0]
    end -= 4 * (restarts + 1)
    key, place = b"", offset
    while place < end:
        shared, place = _varint(data, place)
        unshared, place = _varint(data, place)
        length, place = _varint(data, place)
        if shared > len(key) or place + unshared + length > end:
            raise _DamagedError("an entry outside its block")
        key = key[:shared] + data[place : place + unshared]
        place += unshared
        yield key, data[place : place + length]
        place += length


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Returns a number in base 128, and where it ends."""
    value = 0
    for shift in range(0, 64, 7):
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise _DamagedError("a number without end")


def _all_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the tag and the value of each field of a protocol buffer."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(data, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value = int.from_bytes(data[place : place + size], "little")
            place += size
        elif kind == 2:
            size, place = _varint(data, place)
            value = data[place : place + size]
            place += size
        else:
            raise _DamagedError("an unknown kind of field")
        if place > len(data):
            raise _DamagedError("a field without end")
        yield key >> 3, value


def _fields(data: bytes) -> dict[int, int | bytes]:
    return dict(_all_fields(data))


def _number(fields: dict[int, int | bytes], tag: int) -> int:
    value = fields.get(tag, 0)
    if not isinstance(value, int):
        raise _DamagedError("a field of another kind")
    return value


def _bytes(fields: dict[int, int | bytes], tag: int) -> bytes:
    return _as_bytes(fields.get(tag, b""))


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise _DamagedError("a field of another kind")
    return value
