"""`bert-jax index` and `bert-jax search`: what they print, and their mistakes."""

import json
import os
import shutil

import command_lines
import pytest
from helpers import refused

from bert_jax import Index, UserError

TEXTS = ["The river bank.", "A model reads the (small) token.", "the bank of the river", "head"]


@pytest.fixture
def folder(tiny_run, tmp_path, monkeypatch, bert_jax_main):
    """A folder with an index of `texts.txt`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join([*TEXTS, "bank  " * 90]))
    (tmp_path / "a.tsv").write_text("id\tbody\n1\tthe bank\n2\ta layer\n")
    words = "texts.txt", "a.tsv", "--column=body", "--output=my.index"
    printed = bert_jax_main("index", tiny_run.checkpoint, *words)
    assert printed.splitlines() == [
        'my.index: 7 texts of 2 files; to search: bert-jax search my.index "a question"',
        "truncated 1 text to what the model reads",
    ]
    return tmp_path


def test_the_command_that_searches_a_model_of_the_hub(
    folder, tiny_bert, bert_jax_main, monkeypatch
):
    monkeypatch.setattr("bert_jax.commands.process.load_checkpoint", lambda *_: tiny_bert)
    printed = bert_jax_main("index", "hf:me/model", "texts.txt", "--output=hub.index")
    assert 'search hub.index "a question" --checkpoint=hf:me/model\n' in printed


def test_a_line_a_hit(folder, bert_jax_main):
    lines = bert_jax_main("search", "my.index", TEXTS[0], "--top-k=7").splitlines()
    assert lines[0] == f" 1.000  texts.txt:1  {TEXTS[0]}"
    hits = Index.load("my.index").search(TEXTS[0], 7)
    assert [line.split()[:2] for line in lines] == [
        [f"{hit.score:.3f}", f"{hit.file}:{hit.line}"] for hit in hits
    ]
    (long,) = (line for line in lines if "texts.txt:5" in line)
    assert long.endswith("bank…")
    assert len(long.partition("texts.txt:5  ")[2]) == 160


def test_control_characters_are_escaped(folder, tiny_run, bert_jax_main):
    """So that an indexed text cannot change the terminal."""
    (folder / "escape.txt").write_text("a \x1b[31mriver\x1b[0m bank\n")
    bert_jax_main("index", tiny_run.checkpoint, "escape.txt", "--output=escape")
    assert "a \\x1b[31mriver\\x1b[0m bank" in bert_jax_main("search", "escape", "river")


def test_queries_of_stdin(folder, bert_jax_main, capsys):
    (folder / "queries.txt").write_text("the bank\n\na layer\n")
    for flags in ((), ("--json",)):
        with open("queries.txt") as queries, command_lines.stdin_from(os.dup(queries.fileno())):
            printed = bert_jax_main("search", "my.index", "-", "--top-k=1", *flags)
        if not flags:
            blocks = [block.splitlines() for block in printed.split("\n\n")]
            assert [block[0] for block in blocks] == ["the bank", "a layer"]
            assert [block[1][:18] for block in blocks] == [
                " 1.000  a.tsv:2  t",
                " 1.000  a.tsv:3  a",
            ]
            continue
        first, second = map(json.loads, printed.splitlines())
        assert (first["query"], second["query"]) == ("the bank", "a layer")
        (hit,) = second["hits"]
        assert hit.pop("score") == pytest.approx(1, abs=1e-3)
        assert hit == {"text": "a layer", "file": "a.tsv", "line": 3, "number": 6}


def test_a_checkpoint_that_has_moved(folder, tiny_run, tmp_path, bert_jax_main):
    shutil.copytree(tiny_run.checkpoint, tmp_path / "moved")
    words = "search", "my.index", "the bank", "--checkpoint=moved", "--top-k=1"
    assert "a.tsv:2" in bert_jax_main(*words)


@pytest.mark.parametrize(
    ("words", "key_words"),
    [
        ("index RUN texts.txt", "the following arguments are required: --output"),
        ("index RUN --output=x", "the following arguments are required: FILE"),
        ("index RUN texts.txt --output=x --column=b", "--column has no effect on texts.txt; leave"),
        ("index RUN a.tsv --output=x", "a.tsv:2 has no column 'text'; set --column to one of id"),
        ("search my.index", "the following arguments are required: QUERY"),
        ("search my.index the bank", "'bank' is one word too many; put quotes around text"),
        ("search my.index bank --top-k=0", "--top-k is 0; give a whole number"),
        ("search my.index bank --top-k=x", "argument --top-k: invalid int value: 'x'"),
    ],
)
def test_mistakes(words, key_words, folder, tiny_run, bert_jax_main):
    words = [tiny_run.checkpoint if word == "RUN" else word for word in words.split()]
    with refused(key_words):
        bert_jax_main(*words)


def test_a_message_names_a_folder_as_it_is(folder, bert_jax_main):
    with pytest.raises(UserError, match=r"^candidates is no index; build one by"):
        bert_jax_main("search", "candidates", "bank")
