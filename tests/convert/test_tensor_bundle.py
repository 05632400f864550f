"""TensorFlow 1 checkpoints, whole and damaged; tests/test_faults.py damages the other formats."""

import random
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import refused, refuses_to_load
from make_golden import GOLDEN, google_variables

import bert_jax
from bert_jax.convert.tensor_bundle import open_bundle
from bert_jax.errors import UserError

NAME = "bert_model.ckpt"
INDEX, DATA = f"{NAME}.index", f"{NAME}.data-00000-of-00001"


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copytree(GOLDEN / "google", tmp_path / "google")
    return tmp_path / "google"


def read_all(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor() for name, tensor in open_bundle(folder / NAME).items()}


def same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(actual) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, strict=True)


def survives(run: Callable[[], object]) -> bool:
    """Whether `run` accepted well; otherwise it refused. Neither may take 2 s."""
    start, accepted = time.process_time(), True
    try:
        run()
    except UserError:
        accepted = False
    assert time.process_time() - start < 2
    return accepted


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# A table of our own, so that damage can be put below the checksums.


def varint(value: int) -> bytes:
    end = b""
    while value >= 128:
        end += bytes([value & 127 | 128])
        value >>= 7
    return end + bytes([value])


def field(tag: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(tag << 3) + varint(value)
    return varint(tag << 3 | 2) + varint(len(value)) + value


def masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def closed(block: bytes) -> bytes:
    """A block with its kind and its checksum behind it."""
    return block + b"\0" + struct.pack("<I", masked_crc(block + b"\0"))


def block_of(entries: list[tuple[bytes, bytes]]) -> bytes:
    content, last = b"", b""
    for key, value in entries:
        shared = next((i for i, (a, b) in enumerate(zip(last, key, strict=False)) if a != b), 0)
        content += varint(shared) + varint(len(key) - shared) + varint(len(value))
        content += key[shared:] + value
        last = key
    return content + struct.pack("<II", 0, 1)


def table_of(block: bytes, handles: list[bytes] | None = None) -> bytes:
    """A table of one block of data, valid or not."""
    empty, data = closed(block_of([])), closed(block)
    handle = varint(0) + varint(len(block))
    index = block_of([(b"z", value) for value in handles or [handle]])
    locations = varint(len(data)) + varint(len(empty) - 5)
    locations += varint(len(data) + len(empty)) + varint(len(index))
    footer = locations.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)
    return data + empty + closed(index) + footer


HEADER = (b"", field(1, 1))


def entry(dtype: int, shape: tuple[int, ...], data: bytes, offset: int = 0, **more: bytes) -> bytes:
    sizes = b"".join(field(2, field(1, size)) for size in shape)
    content = field(1, dtype) + field(2, sizes) + field(4, offset) + field(5, len(data))
    return content + varint(6 << 3 | 5) + struct.pack("<I", masked_crc(data))


def write(folder: Path, entries: list[tuple[bytes, bytes]], data: bytes = b"") -> None:
    (folder / INDEX).write_bytes(table_of(block_of(entries)))
    (folder / DATA).write_bytes(data)


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (1, np.float32),
        (2, np.float64),
        (3, np.int32),
        (9, np.int64),
        (14, ml_dtypes.bfloat16),
        (19, np.float16),
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_types_and_shapes(number, dtype, shape, tmp_path):
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    data = values.tobytes()
    entries = [HEADER, (b"a", entry(number, shape, data, 7)), (b"text", entry(7, (), b""))]
    write(tmp_path, entries, b"before " + data)
    same(read_all(tmp_path), {"a": values})  # strings are skipped


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "no header"),
        ([(b"a", b"")], "no header"),
        ([(b"", field(1, 1) + field(2, 1))], "big-endian"),
        ([HEADER, (b"a", entry(1, (1,), b"1234") + field(7, b"x"))], "partitioned"),
        ([HEADER, (b"a", entry(1, (2,), b"1234"))], "agree"),
        ([HEADER, (b"a", entry(1, (1 << 62,), b"1234"))], "an impossible entry"),
        ([HEADER, (b"a", entry(1, (1,) * 30, b"1234"))], "an impossible entry"),
        ([HEADER, (b"a", entry(1, (1,), b"1234") + field(3, 9))], "an impossible entry"),
        ([HEADER, (b"a", entry(1, (1,), b"1234") + field(3, b"x"))], "another type"),
        ([HEADER, (b"a", b"\x0f")], "parsing"),
        ([HEADER, (b"a", b"\x0a\x7f")], "parsing"),
        ([HEADER, (b"a", b"\xff" * 20)], "parsing"),
        ([HEADER, (b"\xff", entry(1, (1,), b"1234"))], "damaged"),
    ],
)
def test_invalid_tables(entries, said, tmp_path):
    write(tmp_path, entries, b"1234")
    with refused(said, str(tmp_path)):
        read_all(tmp_path)


@pytest.mark.parametrize("offset", [1, 1 << 62, (1 << 64) - 1])
def test_values_beyond_the_file(offset, tmp_path):
    write(tmp_path, [HEADER, (b"a", entry(1, (1,), b"1234", offset))], b"1234")
    with refused(f"{DATA} is truncated"):
        read_all(tmp_path)
    (tmp_path / DATA).unlink()
    with refused(f"{DATA} cannot be read"):
        read_all(tmp_path)


def test_a_small_table_that_would_expand_to_a_large_one(tmp_path):
    block, handle = block_of([(b"k" * 999, b"")]), b"\0"
    (tmp_path / INDEX).write_bytes(table_of(block, [handle + varint(len(block))] * 100_000))
    assert not survives(lambda: read_all(tmp_path))
    # Each key is a byte longer than the last, of which it shares all.
    content = b"".join(varint(shared) + b"\1\0k" for shared in range(100_000))
    (tmp_path / INDEX).write_bytes(table_of(content + struct.pack("<II", 0, 1)))
    tracemalloc.start()
    try:
        assert not survives(lambda: read_all(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


def test_damage_below_the_checksums(tmp_path):
    """Damaged blocks with correct checksums are read or refused, fast and in little memory."""
    generator, values = random.Random(0), google_variables()
    entries, data = [HEADER], b""
    for name, value in sorted(values.items()):
        raw = value.tobytes()
        number = 1 if value.dtype == np.float32 else 9
        entries.append((name.encode(), entry(number, value.shape, raw, len(data))))
        data += raw
    write(tmp_path, entries, data)
    same(read_all(tmp_path), values)
    block, accepted = block_of(entries), 0
    tracemalloc.start()
    try:
        for _ in range(300):
            changed = block
            for _ in range(generator.choice((1, 1, 2, 8))):
                changed = flipped(changed, generator.randrange(8 * len(changed)))
            if generator.random() < 0.2:
                position = generator.randrange(len(changed))
                changed = changed[:position] + changed[position + generator.randrange(1, 40) :]
            (tmp_path / INDEX).write_bytes(table_of(changed))
            accepted += survives(lambda: read_all(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()
    assert 0 < accepted < 250


@pytest.mark.parametrize(
    ("name", "by_size", "by_flip", "most_accepted"),
    [
        (INDEX, 7, 3, 19),  # in what the footer does not use
        (DATA, 499, 101, 0),
    ],
)
def test_no_damage_changes_a_value(name, by_size, by_flip, most_accepted, folder):
    content, values = (folder / name).read_bytes(), google_variables()
    for size in range(0, len(content), by_size):
        (folder / name).write_bytes(content[:size])
        assert not survives(lambda: read_all(folder))
    generator, accepted = random.Random(1), 0
    for position in range(0, len(content), by_flip):
        (folder / name).write_bytes(flipped(content, 8 * position + generator.randrange(8)))
        if survives(lambda: read_all(folder)):
            same(read_all(folder), values)
            accepted += 1
    assert accepted <= most_accepted


def test_names_of_checkpoints(folder):
    expected = bert_jax.load(folder).params
    for name in (INDEX, DATA):  # the names after fine-tuning
        (folder / name).rename(folder / name.replace(NAME, "model.ckpt-1234"))
    jax.tree.map(np.testing.assert_array_equal, bert_jax.load(folder).params, expected)
    (folder / "model.ckpt-99.index").touch()
    refuses_to_load(folder, "several: model.ckpt-1234, model.ckpt-99")


@pytest.mark.parametrize("name", [INDEX, DATA, "vocab.txt"])
def test_a_missing_file(name, folder):
    (folder / name).unlink()
    refuses_to_load(folder, name)
