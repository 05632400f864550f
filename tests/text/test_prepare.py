"""Preparing text: what a store holds, when it is reused, and how it resumes after a kill."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from helpers import flip_bit, refused
from texts import (
    TOKENIZER,
    VOCAB_SIZE,
    assert_same_files,
    assert_same_stores,
    interrupted,
    make_documents,
    write_text,
)

from bert_jax import console
from bert_jax.config import DataConfig, TokenizerConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.storage import json_files
from bert_jax.storage.locks import locked
from bert_jax.text import mixture, store, store_writer
from bert_jax.text import prepare as prepare_lib
from bert_jax.text.prepare import DEFAULT_VOCAB_SIZE, prepare
from bert_jax.text.store import open_store
from bert_jax.text.tokenizer import WordPieceTokenizer

FIRST_BATCH = 3  # its record, after two of the tokenizer


def read(config: TrainConfig, tokenizer, folder):
    return mixture.read(config, mixture.find(config.data.source), tokenizer, folder)


def vocab_size_of(config: TrainConfig, tokenizer=None) -> int:
    return mixture.resolve_vocab_size(config, mixture.find(config.data.source), tokenizer)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A text of many batches, of which six documents are held out."""
    monkeypatch.setattr(prepare_lib, "_BATCH_CHARACTERS", 500)
    write_text(tmp_path / "text.txt", make_documents(60))
    return DataConfig(source=str(tmp_path / "text.txt"), eval_fraction=0.1)


def texts(store, tokenizer) -> list[list[str]]:
    """The documents of a store, decoded."""
    ends = store.sentences
    return [
        [tokenizer.decode(store.tokens[ends[s] : ends[s + 1]]) for s in range(low, high)]
        for low, high in zip(store.documents, store.documents[1:], strict=False)
    ]


def test_holds_the_text(data, tmp_path):
    corpus = prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store")
    source = [d.splitlines() for d in (tmp_path / "text.txt").read_text().strip().split("\n\n")]
    expected = [
        [corpus.tokenizer.decode(corpus.tokenizer.encode([s])[0]) for s in d] for d in source
    ]
    held_out = [i for i in range(60) if (i + 1) % 10 == 0]
    assert texts(corpus.eval, corpus.tokenizer) == [expected[i] for i in held_out]
    assert texts(corpus.train, corpus.tokenizer) == [
        d for i, d in enumerate(expected) if i not in held_out
    ]


def test_is_reused_only_for_the_same_text_and_tokenizer(data, tmp_path):
    folder = tmp_path / "store"
    with locked(folder), pytest.raises(UserError, match="store is in use by process"):
        prepare(data, TOKENIZER, VOCAB_SIZE, folder)
    tokenizer = prepare(data, TOKENIZER, VOCAB_SIZE, folder).tokenizer
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*.bin")}
    prepare(data, TOKENIZER, VOCAB_SIZE, folder)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*.bin")} == before
    with pytest.raises(UserError, match="another tokenizer"):
        prepare(data, TOKENIZER, VOCAB_SIZE + 1, folder)
    other = DataConfig(source=data.source, eval_fraction=0.2)
    with locked(folder), pytest.raises(UserError, match="store is in use by process"):
        prepare(other, TOKENIZER, VOCAB_SIZE, folder)
    with pytest.raises(UserError, match="other held-out text"):
        prepare(other, TOKENIZER, VOCAB_SIZE, folder)
    write_text(tmp_path / "text.txt", make_documents(61))
    with pytest.raises(UserError, match="other text"):
        prepare(data, TOKENIZER, VOCAB_SIZE, folder)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*.bin")} == before
    assert prepare_lib.given_tokenizer(folder) is None  # it was trained for the store
    # A store is a text of its own, whatever happened to what it was prepared from.
    config = TrainConfig(data=DataConfig(source=str(folder)))
    for same in (None, tokenizer):
        assert read(config, same, tmp_path / "no").train
    with pytest.raises(UserError, match="is a store, whose text has been tokenized"):
        prepare(config.data, TOKENIZER, 0, tmp_path / "no")


def test_a_file_that_is_renamed_is_read_anew(data, tmp_path):
    """Its name says how it is read; also after a text that was refused."""
    plain, records = tmp_path / "text.txt", tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"The river {i}. A bank."}) for i in range(60)]
    plain.write_text("\n".join(lines))  # one document
    renamed = dataclasses.replace(data, source=str(records))
    with refused("data.eval_fraction holds out none of"):
        prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store")
    plain.rename(records)
    corpus = prepare(renamed, TOKENIZER, VOCAB_SIZE, tmp_path / "store")
    assert (corpus.train.num_documents, corpus.eval.num_documents) == (54, 6)
    assert texts(corpus.train, corpus.tokenizer)[0][0].startswith("the river 0")
    records.rename(plain)
    with refused("store was prepared from another file format; choose another folder, or remove"):
        prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store")
    # A store of an earlier version does not say it.
    record = store.read_record(tmp_path / "store/store.json")
    del record["formats"]
    json_files.write_record(tmp_path / "store/store.json", record)
    assert prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store").train.num_documents == 54


def test_a_temporary_file_of_a_killed_process_is_no_part_of_a_store(data, tmp_path):
    left = tmp_path / "store/tokenizer/tokenizer.json.0a1b2c3d.tmp"
    left.parent.mkdir(parents=True)
    left.touch()
    json_files.write_record(tmp_path / "store/progress.json", {"identity": {}, "failed": ""})
    prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store")
    left.unlink()
    open_store(tmp_path / "store").verify()


@pytest.mark.parametrize("after", [1, 2, FIRST_BATCH, 8])
def test_resumes_where_it_was_interrupted(data, tmp_path, monkeypatch, capsys, after):
    """The files are the same as without interruption, and earlier work is not repeated."""
    folder, tokens = tmp_path / "interrupted", tmp_path / "interrupted/train/tokens.bin"
    prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "uninterrupted")
    with interrupted(after):
        prepare(data, TOKENIZER, VOCAB_SIZE, folder)
    with pytest.raises(UserError, match="unfinished"):
        open_store(folder)
    if after > 1:
        with tokens.open("ab") as file:
            file.write(b"what was not recorded")
    append, encoded = store_writer._append, []

    def counting(folder, sizes, sums, documents):
        encoded.append(len(documents))
        append(folder, sizes, sums, documents)

    monkeypatch.setattr(store_writer, "_append", counting)
    clock = types.SimpleNamespace(monotonic=itertools.count(0, 2).__next__)
    monkeypatch.setattr(prepare_lib, "time", clock)
    with console.output(console.Level.PROGRESS):
        prepare(data, TOKENIZER, VOCAB_SIZE, folder)
    printed = capsys.readouterr().out
    assert "in 2.0 s (" in printed
    assert (", the last " in printed) == (after >= FIRST_BATCH)
    assert after < FIRST_BATCH or sum(encoded) < 60
    assert_same_files(tmp_path / "uninterrupted", folder)
    assert not (folder / "progress.json").exists()


def rename_token(path) -> None:
    path.write_text(path.read_text().replace('"c"', '"v2"'))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train/tokens.bin", lambda path: os.truncate(path, 9), "is shorter than"),
        ("train/tokens.bin", flip_bit, r"train/tokens.bin has changed since it was written"),
        ("tokenizer/tokenizer.json", rename_token, r"store: tokenizer/.* has changed since"),
    ],
)
def test_damage_before_a_store_is_resumed_is_detected(data, tmp_path, name, damage, message):
    with interrupted(after=8):
        prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store")
    damage(tmp_path / "store" / name)
    with pytest.raises(UserError, match=message):
        prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store")


KILLED = """
import os, signal, sys
from pathlib import Path
from bert_jax.config import DataConfig, TokenizerConfig, TrainConfig
from bert_jax.text import prepare, store_writer

append, calls = store_writer._append, []

def killing(*args):
    append(*args)
    calls.append(args)
    if len(calls) == 5:  # of the third batch, the training text alone
        os.kill(os.getpid(), signal.SIGKILL)

store_writer._append, prepare._BATCH_CHARACTERS = killing, 500
data = DataConfig(source=sys.argv[1], eval_fraction=0.1)
prepare.prepare(data, TokenizerConfig(kind="wordpiece"), int(sys.argv[3]), Path(sys.argv[2]))
"""


def test_survives_sigkill(data, tmp_path):
    """A process that is killed in the middle of a batch loses only that batch."""
    folder = tmp_path / "interrupted"
    command = [sys.executable, "-c", KILLED, data.source, str(folder), str(VOCAB_SIZE)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert json.loads((folder / "progress.json").read_text())["documents"] > 0
    with pytest.raises(UserError, match="unfinished"):
        open_store(folder)
    prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "uninterrupted")
    prepare(data, TOKENIZER, VOCAB_SIZE, folder)
    assert_same_files(tmp_path / "uninterrupted", folder)


def test_texts_that_cannot_be_trained_on(tmp_path):
    for name, content, message in (
        ("empty", "", "no text to train a tokenizer on"),
        ("blank", "\n \n\n", "no text to train a tokenizer on"),
        ("short", "Only the one sentence of one document here.\n", "holds out none of 1 document "),
    ):
        path = tmp_path / f"{name}.txt"
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            prepare(DataConfig(source=str(path)), TOKENIZER, 60, tmp_path / name)


def test_a_source_that_is_too_long_for_a_path(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        prepare(DataConfig(source=",".join(["a.txt"] * 900)), TOKENIZER, 9, tmp_path)


@pytest.mark.parametrize("is_another_tokenizer", [False, True])
def test_corrected_text_is_started_again(data, tmp_path, is_another_tokenizer):
    """Text with an error, part of which was tokenized before it was corrected."""
    text = (tmp_path / "text.txt").read_bytes()
    expected = prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "expected")
    first = wanted = expected.tokenizer
    if is_another_tokenizer:
        first = prepare(data, TokenizerConfig(), 40, tmp_path / "first").tokenizer
        wanted = TOKENIZER
    (tmp_path / "text.txt").write_bytes(text + b"a bad byte \xff\n")
    data.sentences = "lines"  # or else the error is raised when the form of the text is detected
    with pytest.raises(UserError, match="is not UTF-8"):
        prepare(data, first, 0, tmp_path / "store")
    assert (tmp_path / "store/progress.json").exists()
    (tmp_path / "text.txt").write_bytes(text)
    corpus = prepare(data, wanted, VOCAB_SIZE, tmp_path / "store")
    np.testing.assert_array_equal(corpus.train.tokens, expected.train.tokens)


def test_a_text_that_is_changed_back_is_resumed_without_the_change(data, tmp_path, monkeypatch):
    """A batch that was read while the text was another is not recorded."""
    path = tmp_path / "text.txt"
    write_text(path, make_documents(600))
    expected = prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "expected")
    text, append, appended = path.read_text(), store_writer.StoreWriter.append, []

    def changing(writer, documents):
        append(writer, documents)
        appended.append(documents)
        if len(appended) == 2:
            path.write_text(text.replace("cat", "dog"))

    with monkeypatch.context() as patch:
        patch.setattr(store_writer.StoreWriter, "append", changing)
        with pytest.raises(UserError, match="was changed while it was read; repeat the command"):
            prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store")
    assert len(appended) <= 3  # of which one had been read before
    path.write_text(text)
    corpus = prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store")
    np.testing.assert_array_equal(corpus.train.tokens, expected.train.tokens)
    assert_same_files(tmp_path / "expected", tmp_path / "store")


def test_another_text_over_a_complete_store_is_resumed(data, tmp_path):
    """The record of the text that is written over goes, or the store would pass for complete."""
    other = dataclasses.replace(data, eval_fraction=0.3)
    folder = tmp_path / "store"
    tokenizer = prepare(data, TOKENIZER, VOCAB_SIZE, folder).tokenizer
    with interrupted(after=4):
        prepare_lib.write(other, tokenizer, 0, folder, restarts=True)
    assert not (folder / "store.json").exists()
    with interrupted(after=1) as records:
        prepare_lib.write(other, tokenizer, 0, folder, restarts=True)
    assert records[0]["splits"]["train"]["tokens"] > 0
    prepare_lib.write(other, tokenizer, 0, folder, restarts=True)
    assert_same_stores(prepare(other, tokenizer, 0, tmp_path / "expected"), open_store(folder))


def test_a_store_is_no_text(data, tmp_path):
    prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store")
    folder = str(tmp_path / "store")
    for source, eval_source in ((folder, ""), (data.source, folder)):
        with refused("store is a store, whose text has been tokenized; give the text itself"):
            prepare_lib.open_sources(DataConfig(source=source, eval_source=eval_source))


def test_the_size_of_the_vocabulary(data, tmp_path):
    """`model.vocab_size` 0 is the tokenizer's size, known before a long preparation."""
    config = TrainConfig(data=data, tokenizer=TOKENIZER)
    assert vocab_size_of(config) == 30522
    config.model.vocab_size = 0
    assert vocab_size_of(config) == DEFAULT_VOCAB_SIZE
    shrunk = read(config, None, tmp_path / "large").tokenizer.vocab_size
    assert shrunk < 1000
    for size in (0, shrunk):  # as the same command resumes, and its config.json
        config.model.vocab_size = size
        assert read(config, None, tmp_path / "large")
    config.model.vocab_size = VOCAB_SIZE
    corpus = read(config, None, tmp_path / "store")
    config.model.vocab_size = 0
    assert vocab_size_of(config, corpus.tokenizer) == VOCAB_SIZE
    config.data.source = str(tmp_path / "store")
    assert vocab_size_of(config) == VOCAB_SIZE
    assert read(config, None, tmp_path / "none").fingerprint == corpus.fingerprint
    config.tokenizer = TokenizerConfig(path=str(tmp_path / "store/tokenizer"))
    config.model.vocab_size = VOCAB_SIZE - 1
    with pytest.raises(UserError, match="is smaller than the tokenizer's 60 tokens"):
        read(config, None, tmp_path / "none")


@pytest.mark.parametrize(
    ("folder", "message"),
    [("mine", "mine is not empty and not a store"), ("mine/notes.txt/store", "cannot be written")],
)
def test_a_folder_of_something_else_is_left_alone(data, tmp_path, folder, message):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("precious")
    with pytest.raises(UserError, match=message):
        prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / folder)
    assert [p.name for p in tmp_path.glob("mine/**/*")] == ["notes.txt"]


@pytest.mark.parametrize("change", ["text", "tokenizer"])
def test_an_unfinished_store_of_something_else_is_left_alone(data, tmp_path, change):
    folder = tmp_path / "store"
    with interrupted(FIRST_BATCH):
        prepare(data, TOKENIZER, VOCAB_SIZE, folder)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    if change == "text":
        write_text(tmp_path / "text.txt", make_documents(61))
    with pytest.raises(UserError, match=r"store was prepared from (other|another) .*; choose"):
        prepare(data, TOKENIZER, VOCAB_SIZE + (change == "tokenizer"), folder)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 10_000, b"\xff", b'{"identity": []}'])
def test_progress_of_anything(data, tmp_path, content):
    (tmp_path / "store").mkdir()
    (tmp_path / "store/progress.json").write_bytes(content)
    with pytest.raises(UserError, match=r"progress.json (cannot be read|is damaged)|was prepared"):
        prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store")


@pytest.mark.parametrize(
    "changes",
    [
        {"documents": "7"},
        {"unknown_characters": float("inf")},
        {"splits": {"train": {}}},
        {"splits": {"train": {"tokens": "0", "sentences": 8, "documents": 8}}},
        {"checksums": 7},
    ],
)
def test_progress_of_other_types(data, tmp_path, changes):
    with interrupted(FIRST_BATCH):
        prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store")
    path = tmp_path / "store/progress.json"
    json_files.write_record(path, {**json_files.read_record(path, ""), **changes})
    with pytest.raises(UserError, match=r"progress.json is damaged .*; remove the folder"):
        prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store")


def test_text_that_is_unknown_to_the_tokenizer(tmp_path, capsys):
    """Its share is counted in characters: words of 300 letters are one [UNK] each."""
    letters = ["".join(np.random.default_rng(i).choice(list("acgt"), 300)) for i in range(40)]
    tokenizer = WordPieceTokenizer.from_vocabulary(
        [*WordPieceTokenizer.special, *"acgt", "##a", "##c", "##g", "##t"], lowercase=True
    )
    for share, long_words in ((0.99, 40), (0.03, 1), (0.0, 0)):
        lines = [" ".join(s[i : i + 5] for i in range(0, 300, 5)) for s in letters]
        lines[:long_words] = letters[:long_words]
        path = tmp_path / f"{long_words}.txt"
        path.write_text("\n".join(lines))
        data = DataConfig(source=str(path), eval_fraction=0.1, sentences="documents")
        if share > 0.2:
            for _ in range(2):  # and again, where all of it has been tokenized
                with pytest.raises(UserError, match=r"100% of .* tokenizer.kind byte_bpe or"):
                    prepare(data, tokenizer, 0, tmp_path / "store")
            continue
        corpus = prepare(data, tokenizer, 0, tmp_path / f"store{long_words}")
        assert corpus.unknown == pytest.approx(share, abs=0.01)
        assert ("tokenizer.kind" in corpus.warning) == (share > 0.01)
    assert prepare(data, TOKENIZER, 400, tmp_path / "store").unknown == 0
    capsys.readouterr()
    with console.output(console.Level.PROGRESS):
        corpus = prepare(data, TokenizerConfig(), 4000, tmp_path / "shrunk")
    assert f"vocabulary {corpus.tokenizer.vocab_size} tokens" in capsys.readouterr().out


def test_an_interruption_while_a_tokenizer_is_trained(data, tmp_path, monkeypatch):
    """It comes at once, as itself, though the library that trains returns much later."""
    training, trained = threading.Event(), threading.Event()

    def train(*_):
        training.set()
        with contextlib.suppress(KeyboardInterrupt):
            trained.wait(20)
        raise RuntimeError("what a library makes of it, or that it did not come")

    def interrupt():
        training.wait(20)
        time.sleep(0.1)  # until the main thread waits
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(prepare_lib.tokenizer_training, "train", train)
    # A shell starts what it runs in the background with SIGINT ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            prepare(data, TOKENIZER, VOCAB_SIZE, tmp_path / "store")
    finally:
        trained.set()
        signal.signal(signal.SIGINT, handler)
    assert not (tmp_path / "store").exists()


def test_a_text_without_tokens_on_one_side_is_refused():
    full, empty = {"tokens": 5, "documents": 1}, {"tokens": 0, "documents": 0}
    for splits, held_out, key_words in (
        ({"train": empty, "eval": full}, "", "a.txt has no text to train on; give more text"),
        ({"train": full, "eval": empty}, "b.txt", "b.txt has no text to evaluate on; give more"),
    ):
        with refused(key_words):
            prepare_lib.check_text({"splits": splits}, "a.txt", "wordpiece", held_out)


def test_ids_beyond_16_bits(tmp_path):
    tokens = [*WordPieceTokenizer.special, *(f"w{i}" for i in range(1 << 16))]
    tokenizer = WordPieceTokenizer.from_vocabulary(tokens, lowercase=True)
    (tmp_path / "a.txt").write_text("w0 w65535\n\n" * 40)
    data = DataConfig(source=str(tmp_path / "a.txt"), eval_fraction=0.1, sentences="lines")
    corpus = prepare(data, tokenizer, 0, tmp_path / "store")
    assert corpus.train.tokens[:2].tolist() == [5, 5 + 65535]
