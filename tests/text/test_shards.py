"""Stores of shards: the batches of the whole text, whatever their number, and what is refused."""

import contextlib
import dataclasses
import functools
import gzip
import json
import os
import random
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_same_arrays, flip_bit, train_batches
from texts import (
    TOKENIZER,
    WORDS,
    assert_same_files,
    interrupted,
    make_documents,
    prepare_shard,
    write_text,
)

from bert_jax.batches import loader
from bert_jax.config import DataConfig, TrainConfig
from bert_jax.config.schedule import make_schedule
from bert_jax.errors import UserError
from bert_jax.storage import json_files
from bert_jax.text import files, mixture, shards, sources, tokenizer_training
from bert_jax.text import prepare as prepare_lib
from bert_jax.text import store as store_lib
from bert_jax.text.prepare import prepare
from bert_jax.text.sources import open_source
from bert_jax.text.store import ShardedTokens, is_only_store, open_store

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text of three files, two of which are divided; one has a chunk's end in its last line."""
    folder = tmp_path_factory.mktemp("text")
    for name, number in (("a.txt", 90), ("b.txt", 3), ("c.txt", 70)):
        write_text(folder / name, make_documents(number))
    return DataConfig(source=str(folder / "*.txt"), eval_fraction=0.1)


@pytest.fixture(scope="module")
def whole(data, small_chunks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    tokenizer = prepare(data, TOKENIZER, 60, folder / "first").tokenizer
    return prepare(data, tokenizer, 0, folder / "whole")


def prepare_shards(data, tokenizer, folder, count: int, numbers) -> None:
    for number in numbers:
        prepare_shard(data, tokenizer, folder, number, count)


def write_shards(data, tokenizer, folder, count: int):
    prepare_shards(data, tokenizer, folder, count, reversed(range(count)))  # in any order
    shards.finish(folder)
    return open_store(folder)


def batches(corpus, data: DataConfig) -> list[dict[str, np.ndarray]]:
    """Some training batches, and all that are held out."""
    config = TrainConfig(data=data, steps=200, seed=3)
    train = train_batches(corpus, config)
    held_out = loader.EvalBatches(corpus, make_schedule(config).stages[-1], data, config.eval_rows)
    return [*(train[step] for step in (0, 1, 7, 150)), *held_out]


@pytest.mark.parametrize("count", [1, 3, 16])
def test_shards_have_the_batches_of_the_whole_text(data, whole, tmp_path, count):
    corpus = write_shards(data, whole.tokenizer, tmp_path / "store", count)
    corpus.verify()
    assert isinstance(corpus.train.tokens, ShardedTokens) == (count > 1)
    assert corpus.fingerprint == whole.fingerprint
    manifest = json.loads((tmp_path / "store/store.json").read_text())
    assert len(manifest["shards"]) == count
    assert min(sizes["train"] for sizes in manifest["shards"].values()) > 0
    for name in ("train", "eval"):
        one, other = getattr(corpus, name), getattr(whole, name)
        assert one.tokens.dtype == other.tokens.dtype
        for low, high in ((0, len(other.tokens)), (5, 999), (-7, None), (40, 10)):
            np.testing.assert_array_equal(one.tokens[low:high], other.tokens[low:high])
        index = np.random.default_rng(0).integers(0, len(other.tokens), (3, 4, 5))
        np.testing.assert_array_equal(one.tokens[index], other.tokens[index])
    for options in ({"pairs": "nsp"}, {"pairs": "sop", "packing": True}, {"pairs": "none"}):
        settings = DataConfig(**options, max_length=32, batch_size=16)
        found, expected = batches(corpus, settings), batches(whole, settings)
        assert len(found) > 5
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_arrays(ours, theirs)


@pytest.mark.parametrize(
    "form", ["plain", "lines", "wrapped", "jsonl", "fasta", "gz", "csv", "many"]
)
def test_every_form_of_text_is_divided_into_the_documents_that_it_has(tmp_path, monkeypatch, form):
    """They are those of the text as one chunk, since a chunk starts where a document does."""
    texts = make_documents(60)
    options = {"lines": "documents", "wrapped": "split"}.get(form, "auto")
    data = DataConfig(source=str(tmp_path / "text*"), sentences=options)
    if form in ("plain", "wrapped"):
        write_text(tmp_path / "text.txt", texts)
    elif form == "lines":
        (tmp_path / "text.txt").write_text("\n".join(t[0] for t in texts * 5))
    elif form == "fasta":
        lines = [f">{number}\n" + "\n".join(text) for number, text in enumerate(texts)]
        (tmp_path / "text.fa").write_text("\n".join(lines))
    elif form == "jsonl":
        lines = [json.dumps({"text": " ".join(text)}) for text in texts]
        (tmp_path / "text.jsonl").write_text("\n".join(lines))  # no end of the last line
    else:
        for number, part in enumerate(np.array_split(np.array(texts), 8)):
            name = tmp_path / f"text{number}"
            write_text(name.with_suffix(".txt"), part.tolist())
            content = name.with_suffix(".txt").read_bytes()
            if form != "many":
                name.with_suffix(".txt").unlink()
            if form == "gz":
                name.with_suffix(".txt.gz").write_bytes(gzip.compress(content, 0))
            if form == "csv":
                rows = [f'"{" ".join(text)}\n\n"' for text in part.tolist()]
                name.with_suffix(".csv").write_text("text\n" + "\n".join(rows))
    source = open_source(data.source, data)
    expected = list(source.documents())
    assert len(source.chunks) > 5
    for count in (1, 3, 16):
        parts = [open_source(data.source, data, (i, count)) for i in range(count)]
        assert [d for part in parts for d in part.documents()] == expected
        assert sum(part.size for part in parts) == source.size
        assert max(part.position - part.size for part in parts) <= 0
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 1 << 26)
    assert list(open_source(data.source, data).documents()) == expected


def test_text_without_blank_lines_is_divided_at_lines(tmp_path):
    lines = [line for document in make_documents(100) for line in document]
    (tmp_path / "a.txt").write_text("\ufeff" + "\n".join(lines))
    found = list(open_source(str(tmp_path / "a.txt"), DataConfig(sentences="lines")).documents())
    assert [line for document in found for line in document] == lines
    assert 5 < len(found) < 100


def test_lines_longer_than_chunks(tmp_path):
    lines = ["word " * 1000 + "end.", "short.", "", "word " * 700 + "end."] * 3
    (tmp_path / "a.txt").write_text("\n".join(lines))
    data = DataConfig(source=str(tmp_path / "a.txt"), sentences="lines")
    expected = [line for line in lines if line]
    for count in (1, 7):
        parts = [open_source(data.source, data, (i, count)) for i in range(count)]
        assert [line for p in parts for d in p.documents() for line in d] == expected


def test_an_error_in_a_later_chunk_says_where_it_is(tmp_path):
    data = DataConfig(sentences="lines")
    good = json.dumps({"text": "one. " * 140}).encode() + b"\n"
    for bad, message in (
        (b'{"text": \xff}\n', rf"a.jsonl: line 2 after byte {3 * len(good)} is not UTF-8"),
        (b'{"text": 7}\n', rf"a.jsonl:2 after byte {3 * len(good)} has no text in"),
    ):
        (tmp_path / "a.jsonl").write_bytes(good * 4 + bad)
        with pytest.raises(UserError, match=message):
            list(open_source(str(tmp_path / "a.jsonl"), data).documents())
    (tmp_path / "b.txt").write_bytes(b"x" * ((1 << 26) + 9))
    with pytest.raises(UserError, match="line at byte 3 is longer than 64 MiB"):
        files.line_start(tmp_path / "b.txt", 3, 0)


@pytest.mark.parametrize("suffix", ["csv", "txt", "txt.gz"])
def test_the_sample_of_a_tokenizer_is_from_the_whole_text(tmp_path, samples, monkeypatch, suffix):
    """Also where a file is only in the chunk of its first byte, whatever its size."""
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 20_000)
    # Of which Python 3.12 reads more at a time than these files have.
    monkeypatch.setattr(gzip, "READ_BUFFER_SIZE", 1 << 13, raising=False)
    pack = functools.partial(gzip.compress, compresslevel=0) if suffix == "txt.gz" else bytes
    for name in "abcdefgh":
        lines = "".join(f"{name} {number:9d}.\n\n" for number in range(10_000))
        header = "text\n" * (suffix == "csv")
        (tmp_path / f"{name}.{suffix}").write_bytes(pack(f"{header}{lines}".encode()))
    data = DataConfig(source=f"{tmp_path}/*.{suffix}", sentences="lines")
    for number in (4, 16):
        folder = tmp_path / str(number)
        sample = shards.train_tokenizer(data, TOKENIZER, 60, folder, number * 20_000 / 1e9)
        assert re.fullmatch(f"{number} of 5[67] chunks of the text, at even distances", sample)
        lines = samples.pop()
        assert {line[0] for line in lines} >= {*("aceg" if number == 4 else "abcdefgh")}
        size = sum(len(line) + 2 for line in lines)  # without what is held out
        assert size == pytest.approx(number * 20_000 * 0.95, rel=0.2)


def test_chunks_of_few_documents_hold_out_their_share(tmp_path):
    """Counted from 0 in each, four documents a chunk would never hold out one of twenty."""
    write_text(tmp_path / "a.txt", [[" ".join(WORDS * 7)] for _ in range(2000)])
    data = DataConfig(source=str(tmp_path / "a.txt"), eval_fraction=0.05)
    splits = [split for split, _ in prepare_lib._documents([open_source(data.source, data)], 0.05)]
    assert len(splits) == 2000
    assert splits.count("eval") == pytest.approx(100, abs=10)


def test_a_killed_shard_resumes_to_the_same_bytes(data, whole, tmp_path):
    prepare_shard(data, whole.tokenizer, tmp_path / "one", 1, 3)
    with interrupted(after=5) as records:
        prepare_shard(data, whole.tokenizer, tmp_path / "two", 1, 3)
    assert records[-1]["documents"] > 0
    with pytest.raises(UserError, match=r"3 of 3 shards of .*two are missing or unfinished: 0, 1"):
        shards.finish(tmp_path / "two")
    prepare_shard(data, whole.tokenizer, tmp_path / "two", 1, 3)
    assert_same_files(tmp_path / "one", tmp_path / "two")


def refused(folder, message: str) -> None:
    with pytest.raises(UserError, match=message):
        shards.finish(folder)
    assert not (folder / "store.json").exists()


def test_missing_shards_are_refused(data, whole, tmp_path):
    folder = tmp_path / "store"
    refused(folder, "has no shards; prepare them first: bert-jax prepare")
    prepare_shards(data, whole.tokenizer, folder, 3, (0, 2))
    refused(folder, r"1 of 3 shards .* unfinished: 1; .* --shard=1/3")
    with pytest.raises(UserError, match="not empty and not a store"):
        prepare(data, whole.tokenizer, 0, folder)
    with pytest.raises(UserError, match="is an unfinished store; prepare all of its shards"):
        open_store(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_fraction": 0.2}, "00001-of-00003 was prepared from other held-out text than 00000"),
        ({"source": "[ab].txt"}, "from other text or set"),
    ],
)
def test_a_shard_of_other_settings_is_refused(data, whole, tmp_path, monkeypatch, changes, message):
    """Each shard is complete by itself."""
    monkeypatch.chdir(Path(data.source).parent)
    folder, other = tmp_path / "store", tmp_path / "other"
    prepare_shards(data, whole.tokenizer, folder, 3, (0, 2))
    prepare_shard(dataclasses.replace(data, **changes), whole.tokenizer, other, 1, 3)
    os.rename(other / "shards/00001-of-00003", folder / "shards/00001-of-00003")
    refused(folder, message)


def test_a_shard_whose_files_were_read_otherwise_is_refused(data, whole, tmp_path):
    folder = tmp_path / "store"
    prepare_shards(data, whole.tokenizer, folder, 2, range(2))
    path = folder / "shards/00001-of-00002/store.json"
    record = store_lib.read_record(path)
    json_files.write_record(path, {**record, "formats": "others"})
    refused(folder, "00001-of-00002 was prepared from another file format than 00000-of-00002; ")
    del record["formats"]  # of an earlier version
    json_files.write_record(path, record)
    shards.finish(folder)
    first = store_lib.read_record(folder / "shards/00000-of-00002/store.json")
    assert store_lib.read_record(folder / "store.json")["formats"] == first["formats"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokens.bin", lambda x: x[:-2], r"tokens.bin has \d+ bytes instead of"),
        ("sentences.bin", lambda x: x[:8] + bytes([x[8] ^ 1]) + x[9:], "sentences.bin has changed"),
        ("../store.json", lambda x: x.replace(b"0.1", b"0.2"), "store.json is damaged"),
    ],
)
def test_a_damaged_shard_is_refused(data, whole, tmp_path, name, change, message):
    prepare_shards(data, whole.tokenizer, tmp_path / "store", 2, range(2))
    path = tmp_path / "store/shards/00001-of-00002/train" / name
    path.write_bytes(change(path.read_bytes()))
    refused(tmp_path / "store", message)


def test_shards_are_joined_when_they_are_first_read(data, whole, tmp_path):
    """Other folders beside them are left alone."""
    folder = tmp_path / "store"
    for name in ("00000-of-00003.bak", "00000-of-00003x1", "00007-of-00003"):
        (folder / "shards" / name).mkdir(parents=True)
    prepare_shards(data, whole.tokenizer, folder, 3, range(3))
    config = TrainConfig(data=DataConfig(source=str(folder)))
    corpus = mixture.read(config, mixture.find(str(folder)), None, tmp_path / "run")
    assert corpus.fingerprint == whole.fingerprint


@pytest.mark.parametrize("is_there", [True, False])
def test_a_kill_while_shards_are_joined_leaves_no_part_of_a_tokenizer(
    data, whole, tmp_path, monkeypatch, is_there
):
    def interrupted_copy(source, target):
        Path(target).mkdir()
        raise KeyboardInterrupt

    folder = tmp_path / "store"
    prepare_shards(data, whole.tokenizer, folder, 2, range(2))
    if is_there:
        whole.tokenizer.save(folder / "tokenizer")
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(shutil, "copytree", interrupted_copy)
        shards.finish(folder)
    assert (folder / "tokenizer").exists() == is_there
    assert (folder / "store.json").exists() == is_there  # as nothing was to be copied
    shards.finish(folder)
    assert shards.load_tokenizer(folder).fingerprint == whole.tokenizer.fingerprint


def test_a_finished_store_is_left_as_it_is(data, whole, tmp_path):
    folder = tmp_path / "store"
    write_shards(data, whole.tokenizer, folder, 3)
    before = (folder / "store.json").read_bytes()
    shards.finish(folder)
    prepare_shard(data, whole.tokenizer, folder, 1, 3)
    prepare(data, whole.tokenizer, 0, folder)  # of the same text
    assert (folder / "store.json").read_bytes() == before
    assert open_store(folder).fingerprint == whole.fingerprint
    assert is_only_store(folder)
    (folder / "mine.txt").touch()
    assert not is_only_store(folder)
    path = folder / "shards/00001-of-00003/train/tokens.bin"
    flip_bit(path)
    with pytest.raises(UserError, match=r"00001-of-00003/train/tokens.bin has changed since"):
        open_store(folder).verify()
    path.unlink()
    with pytest.raises(UserError, match=r"tokens.bin has 0 bytes instead of"):
        open_store(folder)


def mutate(record: dict, generator: random.Random) -> None:
    """Remove or replace one value of a JSON object, at any depth."""
    places, nodes = [], [record]
    for node in nodes:
        keys = [*node] if isinstance(node, dict) else [*range(len(node))]
        places += [(node, key) for key in keys]
        nodes += [node[key] for key in keys if isinstance(node[key], dict | list)]
    node, key = generator.choice(places)
    value = generator.choice(["removed", None, -1, 2**70, 0.5, "x", [], {}, [1], {"a": 1}, True])
    if value == "removed":
        del node[key]
    else:
        node[key] = value


def test_a_malformed_record_is_refused_or_makes_no_difference(data, whole, tmp_path):
    """Of a shard or of a store; its checksum agrees."""
    write_shards(data, whole.tokenizer, tmp_path / "joined", 2)
    shutil.copytree(tmp_path / "joined", tmp_path / "shards")
    (tmp_path / "shards/store.json").unlink()
    generator, num_refused = random.Random(0), 0
    for number in range(100):
        is_joined = number % 2
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / ("joined" if is_joined else "shards"), folder)
        path = folder / ("store.json" if is_joined else "shards/00000-of-00002/store.json")
        mutate(record := store_lib.read_record(path), generator)
        json_files.write_record(path, record)
        try:
            shards.finish(folder)
            corpus = open_store(folder)
            corpus.verify()
        except UserError:
            num_refused += 1
            continue
        for split in ("train", "eval"):
            for name in ("tokens", "sentences", "documents"):
                found, expected = (getattr(getattr(c, split), name)[:] for c in (corpus, whole))
                np.testing.assert_array_equal(found, expected, str(record))
    assert 25 < num_refused < 100


@pytest.mark.parametrize("text", ["\u0660/\u0663", "1_0/20", " 1/3"])
def test_other_digits_are_no_shard(text):
    with pytest.raises(UserError, match="is no shard; give its number"):
        shards.parse(text)


def test_shards_of_two_numbers_are_refused(data, whole, tmp_path):
    for number, count in ((2, 3), (2, 4)):
        prepare_shard(data, whole.tokenizer, tmp_path / "store", number, count)
    refused(tmp_path / "store", "has shards of 3 and of 4; remove those of one number")


def test_shards_of_two_tokenizers_are_refused(data, whole, tmp_path):
    other = tokenizer_training.train(["another text"] * 9, TOKENIZER, 40)
    for number, tokenizer in enumerate((whole.tokenizer, other)):
        prepare_shard(data, tokenizer, tmp_path / "store", number, 2)
    refused(tmp_path / "store", "00001-of-00002 was prepared from another tokenizer than")


def test_held_out_files_are_divided_too(data, whole, tmp_path):
    write_text(tmp_path / "held.text", make_documents(30, seed=1))
    data = DataConfig(source=data.source, eval_source=str(tmp_path / "held.text"))
    expected = prepare(data, whole.tokenizer, 0, tmp_path / "expected")
    given = prepare_lib.given_tokenizer(tmp_path / "expected")
    assert given
    assert given.fingerprint == whole.tokenizer.fingerprint
    corpus = write_shards(data, whole.tokenizer, tmp_path / "store", 3)
    assert corpus.fingerprint == expected.fingerprint
    assert corpus.eval.num_documents == 30
    np.testing.assert_array_equal(corpus.eval.tokens[:], expected.eval.tokens)


def test_shards_with_a_held_out_text_of_nothing_name_it(data, whole, tmp_path):
    (tmp_path / "blank.txt").write_text("\n")
    data = DataConfig(source=data.source, eval_source=str(tmp_path / "blank.txt"))
    prepare_shards(data, whole.tokenizer, tmp_path / "store", 3, range(3))
    refused(tmp_path / "store", "the held-out text of .*store has no text to evaluate on")


def test_a_thousand_shards_are_opened_in_two_seconds(tmp_path):
    """Of which a hundred have a file open: a process may have 1,024 of them."""
    sizes = {tmp_path / str(i): 2 * i for i in range(1000)}
    for path, size in sizes.items():
        path.write_bytes(np.full(size // 2, size // 2, np.uint16).tobytes())
    files, start = len(os.listdir("/proc/self/fd")), time.perf_counter()
    mapped = ShardedTokens(sizes, "uint16")
    assert time.perf_counter() - start < 2
    expected = np.repeat(np.arange(1000), np.arange(1000))
    np.testing.assert_array_equal(mapped[:], expected)
    assert len(os.listdir("/proc/self/fd")) <= files + 100
    assert len(mapped) == len(expected)


def test_eight_terabytes_of_tokens(tmp_path):
    """Of sparse files: positions beyond 32 bits, and blocks of two files."""
    size = 1_000_000_000_002
    sizes = {tmp_path / str(i): size for i in range(8)}
    for number, path in enumerate(sizes):
        with path.open("wb") as file:
            file.write(np.uint16(number + 1).tobytes())
            file.truncate(size)
    mapped = ShardedTokens(sizes, "uint16")
    assert len(mapped) == 8 * size // 2
    starts = np.arange(8) * (size // 2)
    np.testing.assert_array_equal(mapped[starts], np.arange(8) + 1)
    around = mapped[starts[1:, None] + np.arange(-2, 3)]
    np.testing.assert_array_equal(around, (np.arange(2, 9)[:, None]) * [0, 0, 1, 0, 0])
