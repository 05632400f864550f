"""`bert-jax mine`: the negatives that it writes, and its mistakes."""

import json

import pytest
from helpers import refused

from bert_jax import Index

TEXTS = ["The river bank.", "A model reads.", "the bank of the river", "head", "small river"]
FLAGS = ("--output=mined.jsonl", "--negatives=2")


@pytest.fixture
def index(tiny_bert, tmp_path, monkeypatch) -> Index:
    monkeypatch.chdir(tmp_path)
    tiny_bert.save("bert")
    rows = [("river", TEXTS[0], 1), ("river", TEXTS[2], 1), ("river", "head", 0), ("a", "head", 1)]
    lines = ["query\tpassage\tlabel", *("\t".join(map(str, row)) for row in rows)]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    return Index.build("bert", output="my.index", texts=TEXTS)


def test_negatives_are_the_nearest_texts_that_are_not_relevant(index, bert_jax_main, tmp_path):
    printed = bert_jax_main("mine", "pairs.tsv", "my.index", *FLAGS)
    assert printed == (
        "mined.jsonl: 3 relevant passages with 2 negatives each; to train on them: "
        "--config.data.train=mined.jsonl --config.data.eval=none "
        "--config.data.text=query,passage,negative1,negative2\n"
    )
    rows = [json.loads(line) for line in (tmp_path / "mined.jsonl").read_text().splitlines()]
    assert [(row["query"], row["passage"]) for row in rows] == [
        ("river", TEXTS[0]),
        ("river", TEXTS[2]),
        ("a", "head"),
    ]
    for query, relevant in (("river", {TEXTS[0], TEXTS[2]}), ("a", {"head"})):
        nearest = [hit.text for hit in index.search(query, 5) if hit.text not in relevant]
        if query == "river":  # one that the file has as not relevant comes first
            nearest = list(dict.fromkeys(["head", *nearest]))
        for row in rows:
            if row["query"] == query:
                assert [row["negative1"], row["negative2"]] == nearest[:2]
    bert_jax_main("mine", "pairs.tsv", "my.index", "--output=b.jsonl", "--negatives=1", "--skip=1")
    last = json.loads((tmp_path / "b.jsonl").read_text().splitlines()[-1])
    assert last["negative1"] == rows[-1]["negative2"]


def test_texts_that_are_skipped_are_none_that_the_file_has(index, bert_jax_main, tmp_path):
    near = [hit.text for hit in index.search("river", 5) if hit.text != TEXTS[0]]
    rows = ["query\tpassage\tlabel", f"river\t{TEXTS[0]}\t1", f"river\t{near[0]}\t0"]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows) + "\n")
    bert_jax_main("mine", "pairs.tsv", "my.index", *FLAGS, "--skip=1")
    values = json.loads((tmp_path / "mined.jsonl").read_text())
    assert (values["negative1"], values["negative2"]) == (near[0], near[2])


def test_texts_that_differ_in_spaces_alone_are_the_same(
    tiny_bert, tmp_path, monkeypatch, bert_jax_main
):
    monkeypatch.chdir(tmp_path)
    tiny_bert.save("bert")
    texts = ["river", "the  bank ", "a head", "a  head", "head"]
    Index.build("bert", output="my.index", texts=texts)
    rows = ["query\tpassage\tlabel", "river\tthe bank\t1", "river\ta   head\t0"]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows) + "\n")
    bert_jax_main("mine", "pairs.tsv", "my.index", "--output=a.jsonl", "--negatives=2")
    values = json.loads((tmp_path / "a.jsonl").read_text())
    assert (values["negative1"], values["negative2"]) == ("a   head", "head")
    with refused("the index has 2 negatives for 'river', of 3"):
        bert_jax_main("mine", "pairs.tsv", "my.index", "--output=b.jsonl", "--negatives=3")


def test_a_relevant_passage_with_other_spaces_is_no_negative(index, bert_jax_main, tmp_path):
    rows = ["query,passage,label", "river,the bank,1", "river,the  bank,0", "river,head,0"]
    (tmp_path / "pairs.csv").write_text("\n".join(rows) + "\n")
    bert_jax_main("mine", "pairs.csv", "my.index", "--output=a.jsonl", "--negatives=1")
    assert json.loads((tmp_path / "a.jsonl").read_text())["negative1"] == "head"


def test_mistakes(index, bert_jax_main, tmp_path):
    (tmp_path / "there.jsonl").write_text("")
    for flags, message in (
        (("--negatives=5",), "the index has 3 negatives for 'river', of 5; lower --negatives"),
        (("--negatives=0",), "--negatives is 0; give a whole number, 1 or more"),
        (("--skip=-1",), "--skip is -1; give a whole number, 0 or more"),
        (("--text=question,passage",), "has no column 'question'; set --text to one of"),
        (("--output=pairs.tsv",), "--output is pairs.tsv; name a .jsonl, since it has lines"),
        (("--output=no/a.jsonl",), "no/a.jsonl is in no folder; make the folder first"),
        (("--output=there.jsonl",), "there.jsonl exists; remove it, or choose another --output"),
    ):
        with refused(message):
            bert_jax_main("mine", "pairs.tsv", "my.index", *FLAGS, *flags)
    (tmp_path / "none.tsv").write_text("query\tpassage\tlabel\nriver\thead\t0\n")
    with refused("none.tsv has no relevant passage; give labels above 0"):
        bert_jax_main("mine", "none.tsv", "my.index", *FLAGS)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["bert", "my.index", "none.tsv", "pairs.tsv", "there.jsonl"]
