"""Shards by Apache Beam: its workers write what --shard writes, also after one is killed.

What needs Apache Beam is skipped without it: pip install 'bert-jax[beam]'
"""

import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from texts import CHUNK_BYTES, TOKENIZER, VOCAB_SIZE, make_documents, prepare_shard, write_text

from bert_jax.commands import main
from bert_jax.config import DataConfig
from bert_jax.errors import UserError
from bert_jax.text import beam, shards, sources

needs_beam = pytest.mark.usefixtures("apache_beam")


@pytest.fixture
def apache_beam():
    """Import it, since it may be installed without what it requires."""
    pytest.importorskip("apache_beam", exc_type=ImportError)


# What each process of a run does first: chunks are small, and a worker dies at work, once.
SITE = f"""
import os
from bert_jax.storage import json_files
from bert_jax.text import sources, prepare

sources._CHUNK_BYTES = {CHUNK_BYTES}
prepare._BATCH_CHARACTERS = 400
write = json_files.write_record

def write_or_die(path, record):
    write(path, record)
    if record.get("documents", 0) > 10 and "00001-of" in str(path):
        try:
            open(os.environ["KILLED"], "x")
        except FileExistsError:
            return
        os.kill(os.getpid(), 9)

json_files.write_record = write_or_die
"""


@pytest.fixture
def data(tmp_path, small_chunks):
    """A text of some 30 chunks."""
    write_text(tmp_path / "a.txt", make_documents(200))
    return DataConfig(source=str(tmp_path / "a.txt"))


@pytest.fixture
def tokenizer(data, tmp_path):
    shards.train_tokenizer(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store", 1)
    return shards.load_tokenizer(tmp_path / "store")


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@needs_beam
def test_a_killed_worker_leaves_what_the_same_command_completes(data, tokenizer, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    folder = tmp_path / "store"
    words = f"prepare {data.source} {folder} --shards=3 --runner=DirectRunner --"
    words += " --direct_running_mode=multi_processing --direct_num_workers=3"
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "KILLED": str(tmp_path / "killed")}

    def run() -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "bert_jax.commands", *words.split()]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)

    done = run()
    assert (tmp_path / "killed").exists()
    assert done.returncode == 69
    (line,) = (x for x in done.stderr.splitlines() if x.startswith("bert-jax prepare: "))
    assert line.startswith("bert-jax prepare: a worker has ended (Worker subprocess exited with")
    assert line.endswith("repeat the command, which resumes")
    assert not (folder / "store.json").exists()
    assert (folder / "shards/00001-of-00003/progress.json").exists()
    done = run()
    assert done.returncode == 0, done.stderr
    assert "training: " in done.stdout

    for number in range(3):
        prepare_shard(data, tokenizer, tmp_path / "by hand", number, 3)
    shards.finish(tmp_path / "by hand")
    found = contents(folder)
    assert found == contents(tmp_path / "by hand")
    times = {name: (folder / name).stat().st_mtime_ns for name in found}
    assert run().returncode == 0  # does nothing
    assert {name: (folder / name).stat().st_mtime_ns for name in found} == times


@needs_beam
@pytest.mark.filterwarnings("default")
def test_what_beam_and_its_workers_refuse_is_one_line(data, tokenizer, tmp_path):
    def prepare(runner: str = "DirectRunner", *options: str) -> None:
        beam.prepare_shards(data, tokenizer, f"{tmp_path}/store", 2, runner, options)

    with pytest.raises(UserError, match=r"^--runner=Drect: Unexpected pipeline runner"):
        prepare("Drect")
    with pytest.raises(UserError, match=r"--direct_num_workers: invalid int value: 'x'$"):
        prepare("DirectRunner", "--direct_num_workers=x")
    prepare()
    with pytest.raises(UserError, match=r"has shards of 2, not of 3; .* or give --shards=2$"):
        beam.prepare_shards(data, tokenizer, f"{tmp_path}/store", 3, "DirectRunner")
    write_text(tmp_path / "a.txt", make_documents(199))
    with pytest.raises(UserError, match=r"00000-of-00002 was prepared from other text; .*again$"):
        prepare()


@needs_beam
@pytest.mark.filterwarnings("default")
def test_shards_of_a_remote_store(data, tokenizer, tmp_path):
    beam.prepare_shards(data, tokenizer, "memory://beam/store", 0, "DirectRunner")
    names = fsspec.filesystem("memory").glob("/beam/store/shards/*/store.json")
    assert len(names) == len(sources.open_source(data.source, data).chunks)
    fsspec.filesystem("memory").rm("/beam", recursive=True)


def test_without_beam(data, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(UserError, match=r"needs Apache Beam .*; pip install 'bert-jax\[beam\]'$"):
        beam.prepare_shards(data, tokenizer, f"{tmp_path}/store", 2, "DirectRunner")
    for name, message in (("builtin", "cannot be divided into shards"), ("none", "does not exist")):
        with pytest.raises(UserError, match=message):
            beam.prepare_shards(DataConfig(source=name), tokenizer, "store", 2, "DirectRunner")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--shards=3", "are for Apache Beam; add --runner="),
        ("-- --region=here", "are for Apache Beam; add --runner="),
        ("--runner=Direct --shard=0/3", "drop --shard and --sample"),
        ("--runner=Direct --shards=-1", "no number of shards; give 1 to"),
        ("--runner=Direct --region=here", "not a flag; those of Apache Beam follow --"),
        ("--runner=Direct", "store has no tokenizer, .* train one first"),
    ],
)
def test_flags(flags, message, tmp_path):
    words = ["prepare", "builtin", str(tmp_path / "store"), *flags.split()]
    with pytest.raises(UserError, match=message):
        main._run("bert-jax", words, "bert-jax prepare")
