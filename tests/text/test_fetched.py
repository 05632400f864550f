"""A store on a remote file system is copied once, whole, and is that of a disk."""

import threading

import fsspec
import numpy as np
import pytest
from test_shards import documents, prepare_shard, write_text

from bert_jax.config import DataConfig, TokenizerConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.text import fetched, mixture, remote
from bert_jax.text.prepare import prepare
from bert_jax.text.store import open_store

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A file system with a whole store, and two of three shards of the same text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fetched._files.cache_clear()
    write_text(tmp_path / "a.txt", documents(60))
    data = DataConfig(source=str(tmp_path / "a.txt"), eval_fraction=0.1)
    tokenizer = prepare(data, TokenizerConfig(kind="wordpiece"), 60, tmp_path / "first").tokenizer
    prepare(data, tokenizer, 0, tmp_path / "one")
    for number in range(3):
        prepare_shard(data, tokenizer, tmp_path / "three", number, 3)
    system = fsspec.filesystem("memory")
    for name in ("one", "three"):
        system.put(str(tmp_path / name), f"/bucket/{name}", recursive=True)
    system.pipe_file("/bucket/one/notes.txt", b"of somebody")
    yield system
    system.rm("/bucket", recursive=True)


def assert_same(one, other) -> None:
    assert one.fingerprint == other.fingerprint
    for split in ("train", "eval"):
        for name in ("tokens", "sentences", "documents"):
            found, expected = (getattr(getattr(c, split), name)[:] for c in (one, other))
            np.testing.assert_array_equal(found, expected)


def read(source: str, folder) -> mixture.Corpus:
    config = TrainConfig(data=DataConfig(source=source))
    config.model.vocab_size = 0
    return mixture.read(config, None, folder)


@pytest.mark.parametrize("name", ["one", "three"])  # which has no manifest
def test_it_is_copied_once(there, name, tmp_path, monkeypatch):
    expected = open_store(tmp_path / "one")
    url = f"memory://bucket/{name}"
    assert mixture.is_prepared(url)
    if name == "one":
        config = TrainConfig(data=DataConfig(source=url))
        config.model.vocab_size = 0
        assert mixture.resolve_vocab_size(config, None) == expected.tokenizer.vocab_size
        assert not list((tmp_path / "cache").rglob("tokens.bin"))
    assert fetched.tokenizer_folder(url).is_dir()
    assert_same(read(url, tmp_path / "run"), expected)
    assert not list((tmp_path / "cache").rglob("notes.txt"))
    monkeypatch.setattr(remote, "fetch", None)  # nothing is copied again
    assert_same(read(url, tmp_path / "run"), expected)
    a, b = read(f"{url}@1,{tmp_path}/one@3", tmp_path / "run").parts
    assert (a.weight, b.weight) == (0.25, 0.75)
    assert a.fingerprint == b.fingerprint


def test_a_copy_that_was_killed_continues(there, monkeypatch, tmp_path):
    fetch, copied = remote.fetch, []

    def killed(url, path):
        if url.endswith("tokens.bin"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"a part")
            raise UserError(f"{url} cannot be read (killed)")
        copied.append(path.name)
        fetch(url, path)

    monkeypatch.setattr(remote, "fetch", killed)
    with pytest.raises(UserError, match=r"one/(train|eval)/tokens.bin cannot be read \(killed\)"):
        fetched.folder("memory://bucket/one")
    assert "store.json" not in copied
    before = len(copied)
    monkeypatch.setattr(
        remote, "fetch", lambda url, path: (copied.append(path.name), fetch(url, path))
    )
    assert_same(open_store(fetched.folder("memory://bucket/one")), open_store(tmp_path / "one"))
    assert {"tokens.bin", "store.json"} <= {*copied[before:]}
    assert len(copied) == len({*copied}) + 3  # of training and held-out text


def test_processes_of_a_machine_copy_it_once(there, monkeypatch):
    fetch, copied = remote.fetch, []
    monkeypatch.setattr(remote, "fetch", lambda url, path: (copied.append(url), fetch(url, path)))
    threads = [
        threading.Thread(target=fetched.folder, args=["memory://bucket/one"]) for _ in range(4)
    ]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
    assert len(copied) == len({*copied}) > 5


def test_a_store_that_has_changed_is_copied_anew(there):
    first = fetched.folder("memory://bucket/one")
    fetched._files.cache_clear()  # as in another run
    assert fetched.folder("memory://bucket/one") == first
    there.pipe_file("/bucket/one/store.json", there.cat_file("/bucket/one/store.json"))
    fetched._files.cache_clear()
    assert fetched.folder("memory://bucket/one") != first


def test_what_is_refused(there, tmp_path, monkeypatch):
    there.rm("/bucket/three/shards/00001-of-00003/store.json")
    message = "1 of 3 shards of memory://bucket/three are missing or unfinished: 1; repeat the comm"
    with pytest.raises(UserError, match=f"^{message}") as error:
        read("memory://bucket/three", tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").rglob("tokens.bin"))  # before the long copy
    tokens = "/bucket/one/train/tokens.bin"
    there.pipe_file(tokens, b"x" * there.size(tokens))
    with pytest.raises(UserError, match=r"one-\w+: train/tokens.bin .*; remove the folder"):
        read("memory://bucket/one", tmp_path / "run").verify()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"one on a disk cannot be written .*; set XDG_CACHE_HOME"):
        read("memory://bucket/one", tmp_path / "run")
