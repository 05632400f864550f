"""Text on remote file systems is the text of the same files on a disk; errors are one line."""

import errno
import functools
import gzip
import http.server
import importlib.util
import json
import lzma
import sys
import threading
from unittest import mock

import fsspec
import pytest
from texts import (
    assert_same_stores,
    make_documents,
    write_text,
)

from bert_jax.commands import main
from bert_jax.config import DataConfig, FinetuneConfig
from bert_jax.errors import UserError
from bert_jax.runs import finetune
from bert_jax.storage import remote
from bert_jax.text import fetched, shards, sources
from bert_jax.text.sources import open_source
from bert_jax.text.store import open_store

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def texts(tmp_path):
    """Files of each form, two of which are divided into chunks."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name, number in (("a.txt", 60), ("b.jsonl", 40), ("c.txt.gz", 9), ("d.txt.xz", 8)):
        write_text(folder / name, texts := make_documents(number))
        content = (folder / name).read_bytes()
        if name == "b.jsonl":
            content = "".join(json.dumps({"text": " ".join(t)}) + "\n" for t in texts).encode()
        packed = {"z": gzip.compress, "x": lzma.compress}
        (folder / name).write_bytes(packed.get(name[-1], bytes)(content))
    (folder / "d.txt.xz").write_bytes(lzma.compress(content))
    (folder / "e.csv").write_text("text,n\n" + "".join(f'"{" ".join(t)}",1\n' for t in texts))
    return folder


@pytest.fixture
def memory(texts, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    system.put(f"{texts}/", "/bucket/text/", recursive=True)
    yield system
    system.rm("/bucket", recursive=True)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, which are sent whole."""

    def log_message(self, *_):
        pass


@pytest.fixture
def server(texts):
    handler = functools.partial(Handler, directory=str(texts))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_documents_and_the_identity_are_those_of_the_files_on_a_disk(texts, memory):
    local = open_source(f"{texts}/*", DataConfig())
    there = open_source("memory://bucket/text/*", DataConfig())
    assert len(there.chunks) > 5
    assert list(there.documents()) == list(local.documents())
    assert (there.size, there.identity()) == (local.size, local.identity())
    part = open_source(there.name, DataConfig(), (1, 3))
    expected = open_source(local.name, DataConfig(), (1, 3))
    assert list(part.documents()) == list(expected.documents())
    assert part.identity() == expected.identity()
    both = open_source(f"memory://bucket/text/a.txt, {texts}/b.jsonl", DataConfig())
    expected = open_source(f"{texts}/a.txt,{texts}/b.jsonl", DataConfig())
    assert both.identity() == expected.identity()


@pytest.fixture
def run_prepare(capsys):
    """Runs `bert-jax prepare`, and returns what it prints."""

    def run(*words: str) -> str:
        main._run("bert-jax", ["prepare", *words], "bert-jax prepare")
        return capsys.readouterr().out

    return run


def test_a_remote_store_has_the_shards_of_one_on_a_disk(
    texts, memory, tmp_path, run_prepare, monkeypatch
):
    source, store, sent, send = f"{texts}/*.txt", "memory://bucket/store", [], shards.remote.send

    def recorded(path, url):
        sent.append(path.name)
        send(path, url)

    monkeypatch.setattr(shards.remote, "send", recorded)
    printed = run_prepare(source, store, "--sample=1", "--vocab-size=60")
    assert f"tokenizer: {store}/tokenizer" in printed
    with pytest.raises(UserError, match=r"^memory.*tokenizer already exists; .* remove that"):
        run_prepare(source, store, "--sample=1")
    for number in (1, 0):
        printed = run_prepare(source, store, f"--shard={number}/2")
        assert f"train on it with: bert-jax pretrain --config.data.source={store}" in printed
        # Last the record, which says that all of the shard is there.
        assert sent.index("store.json") == len(sent) - 1 > 3
        sent.clear()
    before = memory.info("/bucket/store/shards/00001-of-00002/train/tokens.bin")
    run_prepare(source, store, "--shard=1/2")  # does nothing
    assert memory.info("/bucket/store/shards/00001-of-00002/train/tokens.bin") == before
    assert not memory.glob("/bucket/store/**/.lock")
    with pytest.raises(UserError, match="00001-of-00002 was prepared from other held-out text"):
        run_prepare(source, store, "--shard=1/2", "--eval-fraction=0.5")
    run_prepare(source, str(tmp_path / "whole"), f"--tokenizer={fetched.tokenizer_folder(store)}")
    assert_same_stores(open_store(fetched.folder(store)), open_store(tmp_path / "whole"))


def test_a_remote_store_may_end_in_a_slash(texts, memory, run_prepare):
    for option in ("--sample=1", "--shard=0/1"):
        words = ("--vocab-size=60",) if option == "--sample=1" else ()
        printed = run_prepare(f"{texts}/*.txt", "memory://bucket/store/", option, *words)
        assert "memory://bucket/store" in printed
        assert "store/ " not in printed
    assert not [name for name in memory.find("/bucket") if "//" in name]
    assert fetched.folder("memory://bucket/store")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["SOURCE", "memory://bucket/store"], "is not on a disk, where whole stores are written"),
        (["SOURCE", "memory://bucket/store", "--shard=1/2", "--force"], "--force replaces .* disk"),
        (["SOURCE", "https://host/store", "--shard=1/2"], "^https://host/store cannot be written"),
        (["SOURCE", "file:///store", "--shard=1/2"], "^file:///store cannot be written"),
    ],
)
def test_remote_stores_that_are_refused(texts, run_prepare, words, message):
    with pytest.raises(UserError, match=message):
        run_prepare(*(word.replace("SOURCE", f"{texts}/*.txt") for word in words))


def test_a_tokenizer_that_cannot_be_sent(texts, run_prepare, monkeypatch, capsys):
    monkeypatch.setattr(remote, "send", mock.Mock(side_effect=UserError("no network")))
    with pytest.raises(UserError, match="no network"):
        run_prepare(f"{texts}/*.txt", "memory://bucket/other", "--sample=1")
    assert "tokenizer:" not in capsys.readouterr().out


def test_a_full_disk_is_no_fault_of_the_network():
    with pytest.raises(OSError, match="No space"), remote.reading("gs://bucket/store"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_remote_workdir_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="gs://bucket/run is not on a disk"):
        finetune.start(FinetuneConfig(), "x", "gs://bucket/run")
    assert not list(tmp_path.iterdir())


@pytest.mark.remote
@pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="needs pip install 'bert-jax[remote]'"
)
def test_text_of_a_web_server(texts, server, monkeypatch):
    with pytest.raises(UserError, match=r"a.txt cannot be read .*support range requests"):
        open_source(f"{server}/a.txt", DataConfig()).identity()
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 1 << 26)  # which are one request each
    name = ",".join(f"{server}/{path.name}" for path in sorted(texts.iterdir()))
    found, expected = open_source(name, DataConfig()), open_source(f"{texts}/*", DataConfig())
    assert list(found.documents()) == list(expected.documents())
    assert found.identity() == expected.identity()
    with pytest.raises(UserError, match=r"none.txt does not exist; give files or a glob"):
        open_source(f"{server}/none.txt", DataConfig())
    with pytest.raises(UserError, match=r"a.txt cannot be read \(Cannot connect"):
        open_source("http://127.0.0.1:9/a.txt", DataConfig())


def test_a_file_that_changes_is_an_error(memory):
    source = open_source("memory://bucket/text/a.txt", DataConfig())
    source.identity()
    memory.pipe_file("/bucket/text/a.txt", memory.cat_file("/bucket/text/a.txt"))
    with pytest.raises(UserError, match=r"a.txt was changed while it was read"):
        list(source.documents())
    memory.pipe_file("/bucket/text/a.txt", b"short")
    with pytest.raises(UserError, match=r"a.txt was changed while it was read"):
        list(source.documents())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("memory://bucket/text/*.none", "does not exist; give files or a glob"),
        ("memory://bucket/text", "is a folder, not a file; give files or a glob"),
        ("nonsense://bucket/a.txt", "Protocol not known: nonsense"),
    ],
)
def test_what_is_refused(memory, name, message):
    with pytest.raises(UserError, match=message):
        open_source(name, DataConfig())


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=r"Install s3fs.*pip install 'bert-jax\[remote\]'"):
        remote.find("s3://bucket/*.txt")
