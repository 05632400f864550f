"""An index: what it finds, what it keeps, and its mistakes."""

import dataclasses
import fcntl
import functools
import json
import os
import shutil
import tracemalloc

import jax
import numpy as np
import pytest
from helpers import refused, untrained

import bert_jax
from bert_jax import Index, UserError
from bert_jax.inference import index
from bert_jax.storage import checksums, json_files, replacement
from bert_jax.text import builtin

WORDS = ["river", "bank", "token", "model", "layer", "head", "reads", "sees", "the", "small"]


def sentences(number: int) -> list[str]:
    generator = np.random.default_rng(0)
    sizes = generator.integers(2, 9, number)
    return [" ".join(generator.choice(WORDS, size)) for size in sizes]


@pytest.fixture(scope="module")
def built(tiny_bert, tmp_path_factory) -> tuple[Index, list[str]]:
    folder, texts = tmp_path_factory.mktemp("index"), sentences(40)
    (folder / "texts.txt").write_text("\n\n".join(texts) + "\n")
    return Index.build(tiny_bert, folder / "texts.txt", folder / "my.index"), texts


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(sentences(40)))
    return tmp_path


def test_hits_are_those_of_all_cosines(built, tiny_bert):
    made, texts = built
    vectors = tiny_bert.encode(texts)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(made.vectors, vectors, atol=5e-4)
    queries = ["the small bank", "a layer of the model"]
    asked = tiny_bert.encode(queries)
    asked /= np.linalg.norm(asked, axis=1, keepdims=True)
    hits = made.search(queries, top_k=7)
    for found, scores in zip(hits, asked @ made.vectors.astype(np.float32).T, strict=True):
        order = np.argsort(-scores, kind="stable")[:7]
        assert [hit.text for hit in found] == [texts[i] for i in order]
        assert [hit.line for hit in found] == [2 * i + 1 for i in order]
        np.testing.assert_allclose([hit.score for hit in found], scores[order], atol=1e-5)
    assert made.search(queries[0], 7) == hits[0]
    assert len(made.search("bank", 1000)) == len(made) == 40
    with pytest.warns(UserWarning, match="the text is longer than the model's 32 tokens"):
        assert len(made.search("bank " * 100, 3)) == 3
    assert made.search([]) == []


@pytest.mark.filterwarnings("ignore:.*unknown to the tokenizer")
def test_functions_of_the_library(tiny_bert, tmp_path, monkeypatch):
    """In place of a file: each signature once, and what the function does."""
    found = builtin.functions()
    does = "Converts a finite Decimal instance to a rational number, exactly."
    assert f"fractions.Fraction.from_decimal(cls, dec): {does}" in found
    assert len({text.partition(": ")[0] for text in found}) > 3000
    assert len(set(found)) == len(found)
    monkeypatch.setattr(builtin, "functions", lambda: found[:5])
    made = Index.build(tiny_bert, "builtin", tmp_path / "my.index")
    hits = made.search("remove a file", 9)
    assert sorted((hit.line, hit.text) for hit in hits) == list(enumerate(found[:5], start=1))


def test_on_disk(built, tiny_run):
    made, texts = built
    path = made._path
    assert sorted(file.name for file in path.iterdir()) == sorted(
        ["index.json", "vectors.npy", "texts.bin", "entries.npy"]
    )
    assert [each.name for each in path.parent.iterdir() if each.name[0] != "t"] == ["my.index"]
    vectors = np.load(path / "vectors.npy", mmap_mode="r")
    assert (vectors.dtype, vectors.shape) == (np.float16, (40, 16))
    np.testing.assert_allclose(np.linalg.norm(vectors.astype(np.float32), axis=1), 1, atol=1e-3)
    again = Index.load(path)  # with the model that it names
    assert [again.text(number) for number in (0, 17, 39)] == [texts[i] for i in (0, 17, 39)]
    assert again.search("the bank", 3) == made.search("the bank", 3)
    assert isinstance(again.bert, bert_jax.Bert)
    assert again.bert.source == tiny_run.checkpoint


@pytest.mark.filterwarnings("ignore:.*unknown to the tokenizer")
def test_tables_and_text_in_any_script(tiny_bert, folder):
    (folder / "a.tsv").write_text("id\ttext\n1\tthe bank\n2\t\n3\tthe river\n")
    (folder / "b.csv").write_text('text,id\n"two\nlines",1\n,2\nhead,3\n')
    lines = [{"text": "größer als 文字"}, {"text": None}, {"text": " "}, {"text": "layer"}]
    (folder / "c.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    files = ["a.tsv", "b.csv", "c.jsonl"]
    made = Index.build(tiny_bert, files, "my.index")
    hits = sorted(made.search("x", 10), key=lambda hit: hit.number)
    expected = [("the bank", 0, 2), ("the river", 0, 4), ("two\nlines", 1, 2), ("head", 1, 5)]
    expected += [("größer als 文字", 2, 1), ("layer", 2, 4)]
    assert [(hit.text, files.index(hit.file), hit.line) for hit in hits] == expected
    assert made.search("größer als 文字", 1)[0].text == "größer als 文字"


def test_a_model_of_another_folder_is_the_same_if_its_parameters_are(built, tiny_bert, tmp_path):
    made, _ = built
    tiny_bert.save(tmp_path / "copy")
    copy = bert_jax.load(tmp_path / "copy")
    assert Index.load(made._path, copy).search("the", 3) == made.search("the", 3)
    params = jax.tree.map(lambda x: x * 1.001, tiny_bert.params)
    other = bert_jax.Bert(tiny_bert.config, params, tiny_bert.tokenizer, tiny_bert.model)
    with refused("my.index is of another model"):
        Index.load(made._path, other)
    changed = dataclasses.replace(tiny_bert, params=params, source_params=params)
    with refused("it has other weights now; build the index again"):
        Index.load(made._path, changed)
    config = dataclasses.replace(tiny_bert.config, num_attention_heads=1)
    with refused("it has other weights now; build the index again"):
        Index.load(made._path, dataclasses.replace(tiny_bert, config=config))
    config = dataclasses.replace(tiny_bert.config, remat=True, hidden_dropout_prob=0.3)
    Index.load(made._path, dataclasses.replace(tiny_bert, config=config))


def test_a_file_that_changes_while_it_is_read_is_refused(tiny_bert, folder, monkeypatch):
    read, calls = index._read, []

    def changed(*arguments):
        calls.append(arguments)
        yield from read(*arguments)
        if len(calls) == 2:  # first they are counted
            yield index._Entry("another text", 0, 99)

    monkeypatch.setattr(index, "_read", changed)
    with refused("a file was changed while it was read; repeat the command"):
        Index.build(tiny_bert, output=folder / "made", texts=["the bank", "a river"])
    assert not (folder / "made").exists()


def test_a_build_that_fails_leaves_nothing(tiny_bert, folder, monkeypatch):
    monkeypatch.setattr(index, "chunks", functools.partial(index.chunks, most=8))
    embed, calls = index._embed, []

    def interrupted(encoder, texts):
        calls.append(len(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return embed(encoder, texts)

    with monkeypatch.context() as patch:
        patch.setattr(index, "_embed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Index.build(tiny_bert, "texts.txt", "my.index")
    assert calls == [8, 8, 8]
    assert [path.name for path in folder.iterdir()] == ["texts.txt"]


def test_memory_is_bounded(tiny_bert, folder, monkeypatch):
    """Texts and vectors of a chunk are in memory, and no more."""
    text = "the bank " * 500
    (folder / "texts.txt").write_text(f"{text}\n" * 4000)  # 18 MB
    vectors = np.ones((1, 16), np.float32)
    monkeypatch.setattr(index, "_embed", lambda encoder, texts: (vectors.repeat(len(texts), 0), 0))
    tracemalloc.start()
    made = Index.build(tiny_bert, "texts.txt", "my.index")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(made) == 4000
    assert most < 6e6


@pytest.mark.parametrize(
    ("change", "key_words"),
    [
        (lambda p: (p / "vectors.npy").write_bytes(b"x"), "vectors.npy has changed since"),
        (lambda p: (p / "texts.bin").unlink(), "it cannot be read ([Errno 2] No such file"),
        (lambda p: (p / "index.json").write_text("{"), "index.json cannot be read"),
        (lambda p: edit(p / "index.json", "truncated"), "its checksum does not agree"),
        (lambda p: drop_checksum(p / "index.json"), "its checksum does not agree"),
        (lambda p: rewrite(p / "index.json", checksums=3), "index.json is damaged"),
        (lambda p: forge(p, [[9999, 0, 1]] * 7), "texts that end before"),
        (lambda p: forge(p, [[0, 99, 1]] * 7), "texts of a file that is not named"),
        (lambda p: forge(p, [[0, 0, 1]]), "entries of shape (1, 3) for"),
        (lambda p: rewrite(p / "index.json", format=9), "is of another version"),
        (lambda p: (p / "index.json").unlink(), "is no index; build one by bert-jax index"),
    ],
)
def test_damage(built, tiny_bert, tmp_path, change, key_words):
    path = shutil.copytree(built[0]._path, tmp_path / "my.index")
    change(path)
    with refused(key_words):
        Index.load(path, tiny_bert)


def edit(path, name: str) -> None:
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {name: 7}))


def drop_checksum(path) -> None:
    record = json.loads(path.read_text())
    path.write_text(json.dumps({name: record[name] for name in record if name != "crc32c"}))


def forge(path, entries) -> None:
    count = len(np.load(path / "vectors.npy")) if len(entries) > 1 else 1
    np.save(path / "entries.npy", np.resize(entries, (count, 3)))
    sums = json_files.read_record(path / "index.json", "")["checksums"]
    rewrite(path / "index.json", checksums=sums | checksums.of_files(path, [path / "entries.npy"]))


def rewrite(path, **values) -> None:
    json_files.write_record(path, json_files.read_record(path, "") | values)


@pytest.mark.parametrize(
    ("files", "output", "key_words"),
    [
        ([], "my.index", "no texts; give files with a text a line"),
        (["blank.txt"], "my.index", "blank.txt has no texts; give files"),
        (["none.txt"], "my.index", "none.txt does not exist; give files with a text a line"),
        (["."], "my.index", ". is a folder, not a file"),
        (["latin.txt"], "my.index", "latin.txt: line 2 is not UTF-8 (byte 0xf6"),
        (["a.tsv"], "my.index", "a.tsv:2 has no column 'text'; set column to one of id, txt; did"),
        (["a.jsonl"], "my.index", "a.jsonl:1 has no text in 'text'; set column to another"),
        (["texts.txt"], "a.tsv", "a.tsv is not what this writes"),
    ],
)
def test_mistakes_of_building(tiny_bert, folder, files, output, key_words):
    (folder / "blank.txt").write_text("\n \n")
    (folder / "latin.txt").write_bytes("ok\ngrößer".encode("latin-1"))
    (folder / "a.tsv").write_text("id\ttxt\n1\tthe bank\n")
    (folder / "a.jsonl").write_text('{"text": 3}\n')
    before = sorted(folder.iterdir())
    with refused(key_words):
        Index.build(tiny_bert, files, output, force=True)
    assert sorted(folder.iterdir()) == before


def test_files_and_a_list_of_texts_replace_an_index(tiny_run, tiny_bert, folder):
    """Where that is asked for, and of a model by its path."""
    first = Index.build(tiny_bert, "texts.txt", "my.index")
    with refused("my.index already exists"):
        Index.build(tiny_bert, "texts.txt", "my.index")
    texts = ["the bank", " ", "a", "bank " * 100]
    made = Index.build(tiny_run.checkpoint, "texts.txt", "my.index", texts=texts, force=True)
    assert len(first.search("the", 50)) == 40  # which is open still
    again = Index.load("my.index", str(tiny_run.checkpoint))
    assert (len(again), len(made), made.num_truncated) == (43, 43, 1)
    found = {hit.number: (hit.file, hit.line, hit.text) for hit in again.search("the bank", 50)}
    assert (found[40], found[41]) == (("texts", 1, "the bank"), ("texts", 3, "a"))
    assert "texts:1, 'the bank')" in repr(again.search("the bank", 42))
    (folder / "my.index/notes.txt").touch()
    with refused("has other files too, and is not replaced"):
        Index.build(tiny_bert, "texts.txt", "my.index", force=True)


@pytest.mark.parametrize("force", [False, True])
def test_another_process_that_is_first(tiny_bert, folder, monkeypatch, force):
    """An index that was written meanwhile is replaced if that was asked for."""
    (folder / "two.txt").write_text("bank\nhead\n")
    embed, has_built = index._embed, []

    def overtaken(encoder, texts):
        if not has_built:
            has_built.append(True)
            Index.build(tiny_bert, "two.txt", "my.index")
        return embed(encoder, texts)

    monkeypatch.setattr(index, "_embed", overtaken)
    if force:
        assert len(Index.build(tiny_bert, "texts.txt", "my.index", force=True)) == 40
    else:
        with refused("my.index already exists"):
            Index.build(tiny_bert, "texts.txt", "my.index")
        assert len(Index.load("my.index")) == 2


def test_the_last_check_is_under_the_lock_of_the_replacement(tmp_path, monkeypatch):
    """So that no process can write the output between the two."""
    states = []

    def is_locked(*_) -> None:
        folder = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            states.append("free")
        except BlockingIOError:
            states.append("locked")
        finally:
            os.close(folder)

    for name in ("check_replaceable", "replace"):
        monkeypatch.setattr(replacement, name, is_locked)
    with replacement.replacing(tmp_path / "output"):
        states.append("written")
    assert states == ["free", "written", "locked", "locked"]


@pytest.mark.parametrize(
    ("name", "key_words"),
    [
        ("gone", "model as --checkpoint"),
        ("", "no checkpoint; give its model: --checkpoint=CHECKPOINT"),
        ("hf:google/bert", "--checkpoint=hf:google/bert, or Index.load"),
    ],
)
def test_a_model_that_is_gone(built, tmp_path, name, key_words):
    """None is downloaded without being told."""
    path = shutil.copytree(built[0]._path, tmp_path / "copy")
    rewrite(path / "index.json", checkpoint=name)
    with refused(key_words):
        Index.load(path).search("the bank")


@pytest.mark.parametrize(
    ("call", "key_words"),
    [
        (lambda made: made.text(40), "number is 40; the index has 0 to 39"),
        (lambda made: made.text(-1), "number is -1"),
        (lambda made: made.text("1"), "number is '1'"),
        (lambda made: made.search("the", top_k="3"), "top_k is '3'; give a whole number"),
        (lambda made: made.search("the", top_k=0), "top_k is 0; give a whole number"),
        (lambda made: made.search("the", top_k=True), "top_k is True; give a whole number"),
        (lambda made: made.search(" \n"), "the query is empty; give a text"),
        (lambda made: made.search(["the bank", ""]), "query 2 of 2 is empty; give a text"),
        (lambda made: made.search("\ud800"), "is not Unicode"),
        (lambda made: Index.load(made._path, 3), "bert is 3; give a model, or the path"),
        (lambda made: Index.load(made._path, "none"), "none"),
        (lambda made: Index.build("none", "x", "y"), "x does not exist"),
        (lambda made: Index.build(made.bert, output="y", texts=["\ud800"]), "is not Unicode"),
        (lambda made: Index.build(made.bert, ["texts.txt"], "/"), "/ already exists"),
        (lambda made: Index.load("/"), "/ is no index"),
        (lambda made: Index.load("gs://b/i"), "gs://b/i is not on a disk; copy the index to one"),
    ],
)
def test_mistakes_of_arguments(built, folder, call, key_words):
    with refused(key_words):
        call(built[0])


def content(made: Index) -> tuple[bytes, list[str]]:
    return made.vectors.tobytes(), [made.text(number) for number in range(len(made))]


def test_a_flipped_bit_is_noticed(built, tmp_path):
    """Wherever it is, before a vector or a text is read."""
    path = shutil.copytree(built[0]._path, tmp_path / "copy")
    expected, generator = content(built[0]), np.random.default_rng(0)
    noticed = 0
    for name in ("entries.npy", "vectors.npy", "texts.bin", "index.json"):
        whole = (path / name).read_bytes()
        for bit in generator.integers(0, 8 * min(len(whole), 1000), 100).tolist():
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(flipped)
            try:
                assert content(Index.load(path)) == expected
            except UserError:
                noticed += 1
        (path / name).write_bytes(whole)
    assert noticed == 400
    assert content(Index.load(path)) == expected


def test_an_index_of_several_chunks(tiny_bert, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "chunks", functools.partial(index.chunks, most=2))
    texts = ["river " * 99, "the river", "a bank", "model"]
    made = Index.build(tiny_bert, output=tmp_path / "index", texts=texts)
    assert made.num_truncated == 1
    assert [made.text(number) for number in range(4)] == texts
    reranker = untrained(tiny_bert, "reranker")
    assert len(made.search("river", 4, reranker=reranker, candidates=2)) == 4
