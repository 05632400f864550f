"""A store on a remote file system is copied once, whole, and is that of a disk."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import fsspec
import pytest
from texts import (
    TOKENIZER,
    VOCAB_SIZE,
    assert_same_stores,
    make_documents,
    prepare_shard,
    write_text,
)

from bert_jax.config import DataConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.storage import remote
from bert_jax.text import fetched, mixture, tokenizer_training
from bert_jax.text.prepare import prepare
from bert_jax.text.store import open_store

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture(scope="module")
def here(small_chunks, tmp_path_factory):
    """A folder of a whole store, and of three shards of the same text."""
    folder = tmp_path_factory.mktemp("here")
    write_text(folder / "a.txt", make_documents(60))
    data = DataConfig(source=str(folder / "a.txt"), eval_fraction=0.1)
    tokenizer = prepare(data, TOKENIZER, VOCAB_SIZE, folder / "first").tokenizer
    prepare(data, tokenizer, 0, folder / "one")
    for number in range(3):
        prepare_shard(data, tokenizer, folder / "three", number, 3)
    return folder


@pytest.fixture
def there(here, tmp_path, monkeypatch):
    """A file system with the same stores."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    for name in ("one", "three"):
        system.put(str(here / name), f"/bucket/{name}", recursive=True)
    system.pipe_file("/bucket/one/notes.txt", b"of somebody")
    yield system
    system.rm("/bucket", recursive=True)


def config_of(source: str) -> TrainConfig:
    config = TrainConfig(data=DataConfig(source=source))
    config.model.vocab_size = 0
    return config


def vocab_size(source: str) -> int:
    return mixture.resolve_vocab_size(config_of(source), mixture.find(source), None)


def read(source: str, folder) -> mixture.Corpus:
    return mixture.read(config_of(source), mixture.find(source), None, folder)


@pytest.mark.parametrize("name", ["one", "three"])  # which has no manifest
def test_it_is_copied_once(here, there, name, tmp_path, monkeypatch):
    expected = open_store(here / "one")
    url = f"memory://bucket/{name}"
    assert mixture.find(url).is_prepared
    if name == "one":
        assert vocab_size(url) == expected.tokenizer.vocab_size
        assert not list((tmp_path / "cache").rglob("tokens.bin"))
    assert fetched.tokenizer_folder(url).is_dir()
    assert_same_stores(read(url, tmp_path / "run"), expected)
    assert not list((tmp_path / "cache").rglob("notes.txt"))
    monkeypatch.setattr(remote, "fetch_files", None)  # nothing is copied again
    assert_same_stores(read(url, tmp_path / "run"), expected)
    a, b = read(f"{url}@1,{here}/one@3", tmp_path / "run").parts
    assert (a.weight, b.weight) == (0.25, 0.75)
    assert a.fingerprint == b.fingerprint


@pytest.fixture
def copied(monkeypatch):
    """The files that are copied, and how often."""
    fetch_files, names = remote.fetch_files, []

    def recorded(url, chosen, *args):
        names.extend(chosen)
        fetch_files(url, chosen, *args)

    monkeypatch.setattr(remote, "fetch_files", recorded)
    return names


def test_a_copy_that_was_killed_continues(here, there, copied):
    """With the files that are missing, and those that are not whole."""
    folder = fetched.folder("memory://bucket/one")
    (folder / "store.json").unlink()
    (folder / "train/tokens.bin").write_bytes(b"x")
    (folder / "eval/documents.bin").unlink()
    copied.clear()
    copy = open_store(fetched.folder("memory://bucket/one/"))
    assert_same_stores(copy, open_store(here / "one"))
    assert {*copied} == {"train/tokens.bin", "eval/documents.bin"}


def test_processes_of_a_machine_copy_it_once(there, copied):
    with ThreadPoolExecutor(4) as processes:
        list(processes.map(fetched.folder, ["memory://bucket/one"] * 4))
    assert len(copied) == len({*copied}) > 5


def test_a_store_that_has_changed_is_copied_anew(there):
    first = fetched.folder("memory://bucket/one")
    assert fetched.folder("memory://bucket/one") == first
    there.pipe_file("/bucket/one/store.json", there.cat_file("/bucket/one/store.json") + b" ")
    assert fetched.folder("memory://bucket/one") != first
    shards = fetched.folder("memory://bucket/three")
    name = "/bucket/three/shards/00000-of-00003/store.json"
    there.pipe_file(name, there.cat_file(name))  # later
    assert fetched.folder("memory://bucket/three") != shards


def test_a_long_name_and_a_tokenizer_that_only_shards_have(here, there, tmp_path):
    name = "語" * 80
    there.copy("/bucket/three", f"/bucket/{name}", recursive=True)
    url, expected = f"memory://bucket/{name}", open_store(here / "one")
    assert vocab_size(url) == expected.tokenizer.vocab_size
    assert not list((tmp_path / "cache").rglob("tokens.bin"))
    assert_same_stores(read(url, tmp_path / "run"), expected)


def test_shards_of_another_tokenizer_than_their_store_has(here, there, tmp_path):
    tokenizer = open_store(here / "one").tokenizer
    other = tokenizer_training.train(["another text"] * 9, TOKENIZER, 40)
    other.save(tmp_path / "other")
    there.put(str(tmp_path / "other"), "/bucket/three/tokenizer", recursive=True)
    url, words = "memory://bucket/three", "were prepared with another tokenizer than"
    refused(url, f"^the shards of {url} {words} {url}/tokenizer; prepare", tmp_path / "run")
    there.rm("/bucket/three/tokenizer", recursive=True)
    assert read(url, tmp_path / "run").tokenizer.fingerprint == tokenizer.fingerprint


def test_text_needs_no_permission_to_list(there, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(type(there), "ls", mock.Mock(side_effect=PermissionError("no listing")))
        for name in ("a.txt", "*.gz", "a.txt,memory://bucket/b.txt", "text"):
            assert not fetched.is_store(f"memory://bucket/{name}")


def refused(source: str, message: str, folder) -> None:
    with pytest.raises(UserError, match=message):
        read(source, folder).verify()


def test_what_is_refused(there, tmp_path, monkeypatch):
    one, three, run = "memory://bucket/one", "memory://bucket/three", tmp_path / "run"
    there.rm("/bucket/three/shards/00001-of-00003/store.json")
    missing = f"^1 of 3 shards of {three} are missing or unfinished: 1; repeat bert-jax prepare"
    refused(three, missing, run)
    assert not list((tmp_path / "cache").rglob("tokens.bin"))  # before the long copy
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
        refused(one, "has 0.0 GB to copy to .*, where 0.0 are free", run)
    there.pipe_file("/bucket/one/train/../../../evil.txt", b"")
    refused(one, r"one has a file 'train/../../../evil.txt', which is not copied", run)
    there.rm("/bucket/one/train/../../../evil.txt")
    tokens = "/bucket/one/train/tokens.bin"
    content = there.cat_file(tokens)
    there.rm(tokens)
    refused(one, r"stores/one-\w+/train/tokens.bin has 0 bytes instead of", run)
    there.pipe_file(tokens, b"x" * len(content))
    refused(one, r"stores/one-\w+: train/tokens.bin .*; remove the folder", run)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refused(one, r"^the copy of .*/one cannot be written .*; set XDG_CACHE_HOME", run)
