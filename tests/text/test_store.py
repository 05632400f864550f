"""Opening a token store: its counts, and damage to it."""

import dataclasses
import json
from concurrent.futures import Future
from unittest.mock import Mock

import pytest
from helpers import flip_bit, refused
from texts import TOKENIZER

from bert_jax.config import DataConfig
from bert_jax.errors import UserError
from bert_jax.storage import json_files
from bert_jax.text import store as store_lib
from bert_jax.text.prepare import prepare
from bert_jax.text.store import Corpus, open_store


@pytest.fixture
def folder(tmp_path):
    """A store of two words."""
    (tmp_path / "text.txt").write_text("ab ba ab.\nba.\n\n" * 20)
    data = DataConfig(source=str(tmp_path / "text.txt"), eval_fraction=0.1)
    prepare(data, TOKENIZER, 13, tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize("name", ["train/tokens.bin", "eval/documents.bin", "store.json"])
def test_damage_is_detected(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match="remove the folder, and prepare or copy it again"):
        open_store(folder)
    path.unlink()
    with pytest.raises(UserError):
        open_store(folder)


@pytest.mark.parametrize("name", ["tokens", "sentences", "documents"])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_damage_of_unchanged_size_is_detected(folder, split, name):
    flip_bit(folder / split / f"{name}.bin")
    with pytest.raises(UserError, match=f"store: {split}/{name}.bin has changed since it was"):
        open_store(folder)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("tokenizer/tokenizer.json", '"##a"', '"##c"', r"tokenizer/tokenizer.json has changed"),
        ("store.json", "0.1", "0.2", r"store.json is damaged: its checksum does not agree"),
        ("store.json", '"crc32c"', '"crc"', r"store.json is damaged: its checksum"),
    ],
)
def test_changes_of_the_tokenizer_and_the_record_are_detected(folder, name, old, new, message):
    path = folder / name
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=message):
        open_store(folder)


def write_record(folder, record) -> None:
    """Replace the record by one whose checksum agrees."""
    record = {name: x for name, x in record.items() if x is not None and name != "crc32c"}
    json_files.write_record(folder / "store.json", record)


@pytest.mark.parametrize(
    "changes",
    [
        {"splits": {"train": {}}},
        {"vocab_size": "13"},
        {"identity": None},
        {"checksums": {}},
        {"checksums": {"train/tokens.bin": "a"}},
    ],
)
def test_a_record_of_anything(folder, changes):
    write_record(folder, json.loads((folder / "store.json").read_text()) | changes)
    with pytest.raises(UserError, match="remove the folder, and prepare or copy it again"):
        open_store(folder)


@pytest.mark.parametrize("dtype", ["S0", "uint1e-999", "float32", None, []])
def test_a_record_of_tokens_of_another_type(folder, dtype):
    record = json.loads((folder / "store.json").read_text())
    record["splits"]["train"]["dtype"] = dtype
    write_record(folder, record)
    with pytest.raises(UserError, match=r"store.json is damaged .*tokens of type"):
        open_store(folder)


def test_a_large_store_is_verified_while_it_is_used(folder, monkeypatch):
    """Opening waits for a moment; training asks at each log, and waits before it saves."""
    started: list[str] = []
    verified: Future[str] = Future()
    monkeypatch.setattr(store_lib, "_VERIFIED_WITHIN", 0.01)

    def slow(folder, recorded):
        started.extend(recorded)
        return verified.result()

    monkeypatch.setattr(store_lib.checksums, "find_damage", slow)
    corpus = open_store(folder)
    corpus.verify(0)
    assert {"train/tokens.bin", "eval/documents.bin", "tokenizer/tokenizer.json"} <= {*started}
    verified.set_result("train/tokens.bin has changed")
    with pytest.raises(UserError, match=r"train/tokens.bin has changed; remove the folder"):
        corpus.verify()

    def failing(folder, recorded):
        raise OSError("unplugged")

    monkeypatch.setattr(store_lib.checksums, "find_damage", failing)
    with pytest.raises(UserError, match=r"it cannot be read .unplugged"):
        open_store(folder).verify()
    Corpus(corpus.tokenizer, corpus.train, corpus.eval).verify()


def test_every_text_of_a_mixture_is_verified():
    bad, good, nothing = Future(), Future(), Mock()
    bad.set_exception(UserError("damaged"))
    good.set_result(None)
    one, two = (Corpus(nothing, nothing, nothing, verified=each) for each in (good, bad))
    with refused("damaged"):
        dataclasses.replace(one, mixed=(one, two)).verify()
