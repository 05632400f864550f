"""Text on remote file systems is the text of the same files on a disk; errors are one line."""

import gzip
import http.server
import importlib.util
import json
import lzma
import sys
import threading
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pytest
from test_shards import documents, prepare_shard, write_text

from bert_jax.commands import main
from bert_jax.config import DataConfig, TokenizerConfig
from bert_jax.errors import UserError
from bert_jax.storage import remote
from bert_jax.text import fetched, file_source, shards
from bert_jax.text.prepare import prepare
from bert_jax.text.sources import open_source
from bert_jax.text.store import open_store
from bert_jax.training import workdir

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def texts(tmp_path):
    """Files of each form, two of which are divided into chunks."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name, number in (("a.txt", 60), ("b.jsonl", 40), ("c.txt.gz", 9), ("d.txt.xz", 8)):
        write_text(folder / name, texts := documents(number))
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
    def handler(*args):
        return Handler(*args, directory=str(texts))

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
    part = open_source("memory://bucket/text/*", DataConfig(), (1, 3))
    assert list(part.documents()) == list(open_source(local.name, DataConfig(), (1, 3)).documents())
    both = open_source(f"memory://bucket/text/a.txt, {texts}/b.jsonl", DataConfig())
    expected = open_source(f"{texts}/a.txt,{texts}/b.jsonl", DataConfig())
    assert both.identity() == expected.identity()


def test_a_store_of_remote_text_is_that_of_the_text_on_a_disk(texts, memory, tmp_path):
    config = TokenizerConfig(kind="wordpiece")
    data = DataConfig(source=f"{texts}/*.txt", eval_source=f"{texts}/*.gz", eval_fraction=0.1)
    prepare(data, config, 60, tmp_path / "local")
    tokenizer = open_store(tmp_path / "local").tokenizer
    there = DataConfig(
        source="memory://bucket/text/*.txt",
        eval_source="memory://bucket/text/*.gz",
        eval_fraction=0.1,
    )
    for number, options in enumerate((data, there, data)):
        prepare_shard(options, tokenizer, tmp_path / "store", number, 3)
    shards.finish(tmp_path / "store")
    one, other = open_store(tmp_path / "store"), prepare(data, tokenizer, 0, tmp_path / "whole")
    assert one.fingerprint == other.fingerprint
    np.testing.assert_array_equal(one.train.tokens[:], other.train.tokens[:])
    prepare(there, tokenizer, 0, tmp_path / "whole")  # is complete, of the same text


def test_a_remote_store_has_the_shards_of_one_on_a_disk(
    texts, memory, tmp_path, capsys, monkeypatch
):
    def run(*words: str) -> str:
        main._run("bert-jax", ["prepare", *words], "bert-jax prepare")
        return capsys.readouterr().out

    source, store = f"{texts}/*.txt", "memory://bucket/store"
    assert f"tokenizer: {store}/tokenizer" in run(source, store, "--sample=1", "--vocab-size=60")
    for number in (1, 0):
        printed = run(source, store, f"--shard={number}/2")
        assert (
            f"after all others: train on it with: bert-jax pretrain --config.data.source={store}"
            in printed
        )
    before = memory.info("/bucket/store/shards/00001-of-00002/train/tokens.bin")
    run(source, store, "--shard=1/2")  # does nothing
    assert memory.info("/bucket/store/shards/00001-of-00002/train/tokens.bin") == before
    assert not memory.glob("/bucket/store/**/.lock")
    message = "^memory://bucket/store/shards/00001-of-00002 was prepared from other held-out text"
    with pytest.raises(UserError, match=message):
        run(source, store, "--shard=1/2", "--eval-fraction=0.5")

    run(source, str(tmp_path / "whole"), f"--tokenizer={fetched.tokenizer_folder(store)}")
    one, other = open_store(fetched.folder(store)), open_store(tmp_path / "whole")
    assert one.fingerprint == other.fingerprint
    np.testing.assert_array_equal(one.train.tokens[:], other.train.tokens[:])
    for words in ((source, store), ("--finish", store)):
        with pytest.raises(
            UserError, match="store is not on a disk, where whole stores are written"
        ):
            run(*words)
    with pytest.raises(UserError, match="--force replaces one store, or one shard, on a disk"):
        run(source, store, "--shard=1/2", "--force")
    for url in ("https://host/store", "file:///store"):
        with pytest.raises(UserError, match=f"^{url} cannot be written; give a folder"):
            run(source, url, "--shard=1/2")
    monkeypatch.setattr(remote, "send", fail := mock.Mock(side_effect=UserError("no network")))
    with pytest.raises(UserError, match="no network"):
        run(source, "memory://bucket/other", "--sample=1")
    assert fail.called
    assert "tokenizer:" not in capsys.readouterr().out


def test_a_remote_workdir_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match="--workdir gs:/bucket/run is not on a disk, which fine-tuning needs"
    ):
        workdir.check_path(Path("gs://bucket/run"))
    assert not list(tmp_path.iterdir())


@pytest.mark.remote
@pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="needs pip install 'bert-jax[remote]'"
)
def test_text_of_a_web_server(texts, server, monkeypatch):
    with pytest.raises(UserError, match=r"a.txt cannot be read .*support range requests"):
        open_source(f"{server}/a.txt", DataConfig()).identity()
    monkeypatch.setattr(file_source, "_CHUNK_BYTES", 1 << 26)  # which are one request each
    name = ",".join(f"{server}/{path.name}" for path in sorted(texts.iterdir()))
    found, expected = open_source(name, DataConfig()), open_source(f"{texts}/*", DataConfig())
    assert list(found.documents()) == list(expected.documents())
    assert found.identity() == expected.identity()
    with pytest.raises(UserError, match=r"none.txt does not exist \(404.*; give files or a glob"):
        open_source(f"{server}/none.txt", DataConfig())
    with pytest.raises(UserError, match=r"a.txt does not exist \(Cannot connect"):
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
        (
            "memory://bucket/store",
            "is a store, .*; give text, or copy the store to a disk, as data.source",
        ),
        ("nonsense://bucket/a.txt", "Protocol not known: nonsense"),
    ],
)
def test_what_is_refused(memory, name, message):
    memory.pipe_file("/bucket/store/store.json", b"{}")
    with pytest.raises(UserError, match=message) as error:
        open_source(name, DataConfig())
    assert "\n" not in str(error.value)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        UserError, match=r"\(Install s3fs.*; install it; pip install 'bert-jax\[remote\]'"
    ):
        remote.find("s3://bucket/*.txt")
