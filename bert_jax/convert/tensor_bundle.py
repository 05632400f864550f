"""TensorFlow 1 checkpoints: tensorflow's `tensor_bundle.proto`, LevelDB's `table_format.md`."""

import math
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from bert_jax.convert.names import Tensors
from bert_jax.errors import UserError

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
# The index of a BERT-large has 60 kB; one that is far larger, in the file or once read, is damaged.
_MAX_INDEX_BYTES = 1 << 24
# From `tensorflow/core/framework/types.proto`.
_NUMPY = {1: np.float32, 2: np.float64, 3: np.int32, 9: np.int64, 19: np.float16}
_DTYPES = {**_NUMPY, 14: ml_dtypes.bfloat16}


def open_bundle(prefix: Path) -> Tensors:
    """Return the tensors of a checkpoint by name; `prefix` is its path without `.index`."""
    path = prefix.with_name(f"{prefix.name}.index")
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError("far too large")
        table = list(_table(path.read_bytes()))
        if not table or table[0][0] != b"":
            raise ValueError("no header")
        header = dict(_fields(table[0][1], 3))
        if header.get(2):
            raise UserError(f"{path} was written on a big-endian machine, which is not read")
        shards = header.get(1, 0)
        tensors = {key.decode(): _tensor(prefix, shards, value) for key, value in table[1:]}
        return {name: tensor for name, tensor in tensors.items() if tensor}
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except (DecodeError, IndexError, ValueError, struct.error) as error:
        raise UserError(f"{path} is damaged ({error}); fetch it again") from error


def _tensor(prefix: Path, shards: int, value: bytes) -> Callable[[], np.ndarray] | None:
    """Return the tensor of a BundleEntryProto; None if it has no numbers."""
    entry = {**dict.fromkeys((1, 3, 4, 5, 6), 0), 2: b"", **dict(_fields(value, 2, 7))}
    if 7 in entry:
        raise UserError(f"{prefix} has partitioned variables, which are not read")
    number, shape, shard, offset, size, checksum = (entry[tag] for tag in range(1, 7))
    dimensions = [value for tag, value in _fields(shape, 2) if tag == 2]
    shape = tuple(dict(_fields(value, 2)).get(1, 0) for value in dimensions)
    if shard >= shards or max(shape, default=0) >= 1 << 40 or len(shape) > 8:
        raise ValueError("an impossible entry")
    if number not in _DTYPES:
        return None
    dtype = np.dtype(_DTYPES[number])
    if dtype.itemsize * math.prod(shape) != size:
        raise ValueError("a size that does not agree with the shape")
    file = prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}")
    return partial(_read, file, offset, shape, dtype, checksum)


def _read(
    file: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype, checksum: int
) -> np.ndarray:
    size = dtype.itemsize * math.prod(shape)
    try:
        with file.open("rb") as opened:
            if offset + size > os.fstat(opened.fileno()).st_size:
                raise UserError(f"{file} is truncated; fetch it again")
            opened.seek(offset)
            data = opened.read(size)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error
    if _masked_crc(data) != checksum:
        raise UserError(f"{file} is damaged: a checksum does not agree; fetch it again")
    return np.frombuffer(data, dtype).reshape(shape)


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a LevelDB table, in order."""
    if len(data) < _FOOTER_BYTES or struct.unpack("<Q", data[-8:])[0] != _MAGIC:
        raise ValueError("no footer")
    position = len(data) - _FOOTER_BYTES
    for _ in range(2):  # the location of the metadata, which is empty
        _, position = _varint(data, position)
    size = 0
    for _, handle in _block(data, data, position):
        for key, value in _block(data, handle, 0):
            # Keys share bytes and handles may repeat, so a small file could expand without limit.
            size += len(key) + len(value) + 16
            if size > _MAX_INDEX_BYTES:
                raise ValueError("far too large")
            yield key, value


def _block(data: bytes, handle: bytes, position: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block, whose offset and size are at a position of `handle`."""
    offset, position = _varint(handle, position)
    size, _ = _varint(handle, position)
    end = offset + size
    if size < 4 or end + 5 > len(data):
        raise ValueError("a block outside the file")
    compression, checksum = struct.unpack("<BI", data[end : end + 5])
    if _masked_crc(data[offset : end + 1]) != checksum:
        raise ValueError("a checksum does not agree")
    if compression != 0:
        raise ValueError("it is compressed, which TensorFlow does not do")
    end -= 4 * (struct.unpack("<I", data[end - 4 : end])[0] + 1)  # the restarts, and their number
    key, position = b"", offset
    while position < end:
        shared, position = _varint(data, position)
        unshared, position = _varint(data, position)
        length, position = _varint(data, position)
        if shared > len(key) or position + unshared + length > end:
            raise ValueError("an entry outside its block")
        key = key[:shared] + data[position : position + unshared]
        position += unshared
        yield key, data[position : position + length]
        position += length


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number in base 128, and the position after it."""
    value = 0
    for shift in range(0, 64, 7):
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError("a number without end")


def _fields(data: bytes, *tags_of_bytes: int) -> Iterator[tuple[int, Any]]:
    """Yield the tag and the value of each field of a protocol buffer, an integer or bytes."""
    for field in UnknownFieldSet(Empty.FromString(data)):
        if type(field.data) is not (bytes if field.field_number in tags_of_bytes else int):
            raise ValueError("a field of another type")
        yield field.field_number, field.data
