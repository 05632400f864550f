"""Where files and folders are written: on a disk, whole, and nowhere else."""

import dataclasses
import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import refused

import bert_jax
from bert_jax.errors import UserError
from bert_jax.storage import json_files, locks, paths, replacement
from bert_jax.text import files, memory, records, tokenizer_loading, tokenizer_training


@pytest.mark.parametrize("name", ["gs://bucket/model", "s3://bucket/model", "hf:me/model"])
def test_what_is_written_on_a_disk_alone(tiny_bert, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for write in (tiny_bert.save, *(() if name.startswith("hf:") else (tiny_bert.export,))):
        with refused(f"{name} is not on a disk, where this is written"):
            write(name)
    assert not [*tmp_path.iterdir()]


def test_the_home_of_the_user(tiny_bert, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_bert.save("~/saved")
    assert bert_jax.load("~/saved").source == tmp_path / "saved"
    index = bert_jax.Index.build(tiny_bert, output="~/index", texts=["the bank"])
    assert len(bert_jax.Index.load("~/index")) == len(index) == 1
    tiny_bert.attention("the bank").save("~/page.html")
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "index", "page.html"}


@pytest.mark.parametrize("name", ["run[1]", "[a]/run", "back\\slash"])
def test_a_path_that_orbax_takes_for_a_pattern(tiny_bert, tiny_config, tmp_path, name):
    with refused("has brackets or a backslash"):
        tiny_bert.save(tmp_path / name)
    with refused("has brackets or a backslash"):
        bert_jax.pretrain(tiny_config, tmp_path / name, quiet=True)
    assert not [*tmp_path.rglob("*.json")]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["new", "path"])
@pytest.mark.parametrize("is_after", [False, True])
def test_an_interrupted_replacement_loses_nothing(tmp_path, monkeypatch, error, name, is_after):
    is_new = is_after and name == "new"
    for each in ("new", "path"):
        (tmp_path / each).mkdir()
        (tmp_path / each / "file").write_text(each)
    rename = Path.rename

    def interrupted(path, target):
        if path.name != name:
            return rename(path, target)
        if is_after:
            rename(path, target)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)  # before or after it has renamed `name`
        with pytest.raises(error):
            replacement.replace(tmp_path / "new", tmp_path / "path")
    assert (tmp_path / "path/file").read_text() == ("new" if is_new else "path")


def test_processes_that_write_one_file_do_not_meet(tmp_path):
    path = tmp_path / "a.json"
    threads = [threading.Thread(target=write_often, args=(path, text)) for text in "ab"]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not path.exists() or path.read_text() in ("a" * 9999, "b" * 9999)
    assert [*tmp_path.iterdir()] == [path]


def write_often(path, text) -> None:
    for _ in range(200):
        json_files.write_text(path, text * 9999)


def test_links_and_pipes_of_strangers_are_not_followed(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("the only copy")
    for name in (".lock", "a.json.tmp"):
        (tmp_path / name).symlink_to(kept)
    with pytest.raises(OSError, match="symbolic link"), locks.locked(tmp_path):
        pass
    json_files.write_text(tmp_path / "a.json", "{}")
    (tmp_path / "texts.tmp").symlink_to(kept)
    memory.write_texts(["a text"], tmp_path / "texts.jsonl", "text", may_replace=True)
    assert (tmp_path / "texts.tmp").is_symlink()
    assert kept.read_text() == "the only copy"
    model = tmp_path / "model"
    model.mkdir()
    for name in (".lock", "config.json"):
        os.mkfifo(model / name)
        os.open(model / name, os.O_RDWR | os.O_NONBLOCK)  # or a reader would wait for a writer
    (model / "tokenizer.json").symlink_to("/dev/zero")
    locks.check_unlocked(model)
    with refused("config.json cannot be read (it is no regular file)"):
        json_files.read_json(model / "config.json", "fetch it")
    with refused("model: it has no sentencepiece .model, tokenizer.json"):
        tokenizer_loading.load(model)


def test_what_a_link_leads_to_is_replaced(tiny_bert, tmp_path):
    link, folder = tmp_path / "current", tmp_path / "large_disk"
    tiny_bert.save(folder)
    link.symlink_to(folder)
    before = (folder / "state").stat().st_ino
    tiny_bert.save(link, force=True)
    assert link.is_symlink()
    assert (folder / "state").stat().st_ino != before
    with pytest.raises(UserError, match="choose another"):
        tiny_bert.save("x" * 300)


def test_a_folder_whose_files_are_still_open_is_replaced(tmp_path, monkeypatch):
    """NFS keeps a file that is open under another name, and its folder is not empty then."""
    for each in ("new", "path"):
        (tmp_path / each).mkdir()
    monkeypatch.setattr(os, "rmdir", Mock(side_effect=OSError(39, "Directory not empty")))
    replacement.replace(tmp_path / "new", tmp_path / "path")
    monkeypatch.undo()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["results.json", "baselines.json", "metrics.jsonl"])
def test_a_file_of_the_user_is_not_replaced(tiny_config, tmp_path, name):
    (tmp_path / name).write_text("{}")
    with refused(f"has a {name}, and no config.json of a run; choose another folder"):
        bert_jax.pretrain(tiny_config, tmp_path, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_texts_of_the_user_are_not_replaced(tiny_config, tmp_path):
    (tmp_path / "texts.jsonl").write_text("my only copy")
    config = dataclasses.replace(tiny_config)
    with refused("texts.jsonl has other texts than the ones given"):
        bert_jax.pretrain(config, tmp_path, texts=["A text."] * 9, quiet=True)
    assert (tmp_path / "texts.jsonl").read_text() == "my only copy"


def test_the_name_of_a_file_on_the_web_has_no_query():
    url = "https://host/a/texts.jsonl.gz?download=true#part"
    assert paths.file_name(url) == "texts.jsonl.gz"
    assert paths.file_name("a?b#c.txt") == "a?b#c.txt"
    assert files.file_type("s3://b/shard#3.jsonl.gz") == ".jsonl"
    assert (files.file_type(url), files.suffix(url)) == (".jsonl", ".gz")
    assert records.reader("https://host/a.parquet?x=1.txt") is records.parquet_rows


def test_a_folder_has_one_tokenizer(tmp_path, tokenizer):
    other = tokenizer_training.train(
        ["a few words"] * 9, bert_jax.TokenizerConfig(kind="sentencepiece"), 25
    )
    for each in (tokenizer, other, tokenizer):
        each.save(tmp_path)
        assert tokenizer_loading.load(tmp_path).fingerprint == each.fingerprint
