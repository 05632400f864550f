"""Texts on the command line and from stdin: `fill-mask`, `predict` and `embed`."""

import itertools
import json
import os
import sys

import command_lines
import numpy as np
import pytest
from helpers import refused

from bert_jax import DataFiles, TaskConfig, UserError
from bert_jax.commands import texts
from bert_jax.tasks import make_task, task_class
from bert_jax.tasks.examples import Example
from bert_jax.tasks.foreign import UnknownColumns

LINES = ["The river bank.", "A model reads the (small) token.", "the"]


@pytest.fixture
def stdin():
    """Connects standard input to a pipe, and returns the file to write to it."""
    read, write = os.pipe()
    with (
        os.fdopen(read),
        os.fdopen(write, "wb", buffering=0) as file,
        command_lines.stdin_from(read),
    ):
        yield file


def feed(stdin, text: bytes) -> None:
    stdin.write(text)
    stdin.close()


def parse(printed: str) -> list[dict]:
    return [json.loads(line) for line in printed.splitlines()]


def test_lines_come_before_the_end(stdin):
    """An answer does not wait for the next line; empty lines are skipped."""
    parts = iter(texts.read_ahead(texts.numbered("-")))
    stdin.write(b"\xef\xbb\xbfone\r\n")
    assert next(parts) == [("stdin:1", "one")]
    feed(stdin, b"\n  \ntwo\nGr\xc3\xb6\xc3\x9fe")
    assert list(itertools.chain(*parts)) == [("stdin:4", "two"), ("stdin:5", "Größe")]


def test_lines_before_a_fault(stdin):
    feed(stdin, b"one\n\xff\n")
    parts = iter(texts.read_ahead(texts.numbered("-")))
    assert next(parts) == [("stdin:1", "one")]
    with pytest.raises(UserError, match="stdin: line 2 is not UTF-8"):
        next(parts)


def test_predict_of_lines(tiny_finetuning, stdin, tmp_path, monkeypatch, bert_jax_main):
    monkeypatch.chdir(tmp_path)
    bert, workdir = tiny_finetuning.bert, tiny_finetuning.checkpoint
    expected = list(bert.predict(LINES))
    feed(stdin, "\n\n".join(LINES).encode())
    read = parse(bert_jax_main("predict", workdir, "-", "--json"))
    for index, (each, text) in enumerate(zip(read, LINES, strict=True)):
        assert (each["id"], each["texts"]) == (index, [text])
        assert each["label"] == expected[index]["label"]
        assert each["probabilities"] == pytest.approx(expected[index]["probabilities"], abs=1e-5)
    best = expected[0]
    printed = bert_jax_main("predict", workdir, "--text", LINES[0])
    assert printed.split(maxsplit=2)[1:] == [best["label"], f"{LINES[0]}\n"]
    two = bert_jax_main("predict", workdir, "--text", *LINES[:2]).splitlines()
    assert [line.split(maxsplit=2)[2] for line in two] == LINES[:2]
    assert not list(tmp_path.iterdir())
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    bert_jax_main("predict", workdir, "a.txt", "--output=mine")
    assert len((tmp_path / "mine.jsonl").read_text().splitlines()) == len(LINES)


def test_predict_prints_a_table_as_json(tiny_finetuning, tmp_path, monkeypatch, bert_jax_main):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("id,review,label\nx,The river.,first\n")
    words = "a.csv", "--columns=review", "--json"
    (read,) = parse(bert_jax_main("predict", tiny_finetuning.checkpoint, *words))
    assert (read["id"], read["texts"]) == ("x", ["The river."])
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_predict_says_why_there_are_no_scores(
    tiny_finetuning, tmp_path, monkeypatch, bert_jax_main
):
    monkeypatch.chdir(tmp_path)
    for columns, reason in (
        ("sentence,Label", "a.csv:2 has no column 'label'; --label names another"),
        ("sentence,label", "not every example has a label"),
    ):
        (tmp_path / "a.csv").write_text(f"{columns}\nThe river.,\nThe bank.,first\n")
        assert f"no scores: {reason}\n" in bert_jax_main(
            "predict", tiny_finetuning.checkpoint, "a.csv"
        )


def test_fill_mask_of_lines(tiny_run, tiny_bert, stdin, bert_jax_main):
    feed(stdin, b"the [MASK] of [MASK]\n\na [MASK]\n")
    first, second = parse(bert_jax_main("fill-mask", tiny_run.checkpoint, "-", "--json"))
    assert first["text"] == "the [MASK] of [MASK]"
    assert (len(first["guesses"]), len(second["guesses"])) == (10, 5)
    guess, expected = second["guesses"][0], tiny_bert.fill_mask("a [MASK]")[0]
    assert (guess["token"], guess["text"]) == (expected.token, expected.text)
    assert guess["probability"] == pytest.approx(expected.probability, rel=1e-5)


def test_embed_prints_json(tiny_run, tiny_bert, stdin, bert_jax_main):
    lines = [*LINES[:2], "", "bank " * 40]
    feed(stdin, "\n".join(lines).encode())
    read = parse(bert_jax_main("embed", tiny_run.checkpoint, "-", "--json", "--pooling=words"))
    assert [each["text"] for each in read] == [line.strip() for line in lines]
    with pytest.warns(UserWarning, match="1 of 4"):
        expected = tiny_bert.encode(lines, pooling="words")
    for each, vectors in zip(read, expected, strict=True):
        assert len(each["spans"]) == len(vectors)
        for vector, row in zip(each["vectors"], vectors, strict=True):
            assert (vector is None) == np.isnan(row).any()
            assert vector is None or vector == pytest.approx(row.tolist(), abs=2e-5)


def test_json_is_in_letters_of_stdout(monkeypatch, capsys):
    texts.print_json({"text": "Größe"})
    monkeypatch.setattr(type(sys.stdout), "encoding", "latin-1", raising=False)
    texts.print_json({"text": "Größe"})
    assert capsys.readouterr().out == '{"text": "Größe"}\n{"text": "Gr\\u00f6\\u00dfe"}\n'


@pytest.mark.parametrize(
    ("kind", "line", "inputs"),
    [
        ("classification", "A film.", ("A film.",)),
        ("classification", "A man eats.\tSomeone eats.", ("A man eats.", "Someone eats.")),
        ("token_classification", "Ann lives  in\tBonn", ("Ann", "lives", "in", "Bonn")),
        ("question_answering", "Who?\tAnn did.", ("Who?", "Ann did.")),
        ("question_answering", "Who?", "x:1 is 'Who?'; give a question and a context"),
        ("multiple_choice", "Who?", "x:1: a line cannot have the choices of an example; give"),
    ],
)
def test_a_line_of_each_task(kind, line, inputs):
    task, data = make_task(task_class(kind).settings(kind=kind), ("O", "B-PER")), UnknownColumns()

    def read():
        return task.example_from(task.line_value(line, "x:1", data), "x:1", data)

    if isinstance(inputs, tuple):
        assert read().texts == inputs
    else:
        with refused(inputs):
            read()


@pytest.mark.parametrize(
    ("kind", "inputs", "result", "line"),
    [
        ("regression", ("a", "b"), {"value": -1.5}, " -1.5000  a | b"),
        ("classification", ("a",), {"label": "good", "probability": 0.5}, " 50.0%  good"),
        (
            "question_answering",
            ("Who?", "x"),
            {"answer": "", "probability": 1.0},
            "100.0%  no answer",
        ),
        ("token_classification", ("a", "b"), {"tokens": ["a", "b"], "labels": "OX"}, "a/O b/X"),
    ],
)
def test_a_prediction_for_a_reader(kind, inputs, result, line):
    task = make_task(task_class(kind).settings(kind=kind))
    printed = task.as_line(Example(None, "x:1", inputs, None), result)
    assert printed.startswith(line)
    assert kind != "question_answering" or printed.endswith("  Who?")


def test_a_tab_is_no_pair_of_a_task_with_one_text():
    data = DataFiles(train="train.tsv")
    for config, line in ((TaskConfig(), "A film.\tgood"), (TaskConfig(glue="mrpc"), "A film.")):
        task = make_task(config, ("a", "b"))
        value = task.line_value(line, "x:1", data)
        with pytest.raises(UserError, match=r"x:1 has \d texts? and the model was trained on"):
            task.example_from(value, "x:1", data)


@pytest.mark.parametrize(
    ("words", "key_words"),
    [
        ("predict RUN", "give a FILE, whose columns --columns names, or texts as --text; not both"),
        ("predict RUN -", "stdin has no text; give one a line"),
        ("predict RUN none.txt", "none.txt does not exist; give a file with a text a line, or -"),
        ("predict RUN --text a\udcff", "'a\\udcff' is not UTF-8"),
        ("predict RUN --text a --columns=a,b b", "give a FILE, whose columns --columns names, or"),
        ("predict RUN --text a --json b", "give a FILE, whose columns --columns names, or"),
        ("predict RUN --columns=a,b --text a b", "--text has 2 texts and the model was trained"),
        ("predict RUN --json a.tsv b", "'b' is one word too many"),
        ("predict RUN --json none.txt", "none.txt does not exist; give a file with a text a line"),
        ("predict RUN --json -", "stdin has no text; give one a line"),
        ("fill-mask RUN a.tsv", "a.tsv is a file, and no text with [MASK]; give - < a.tsv"),
        ("embed RUN a.tsv", "one of the arguments --output --json is required"),
        ("embed RUN none --json", "none does not exist"),
    ],
)
def test_mistakes(words, key_words, tiny_finetuning, stdin, tmp_path, monkeypatch, bert_jax_main):
    monkeypatch.chdir(tmp_path)
    stdin.close()
    (tmp_path / "a.tsv").write_text("sentence\nx\n")
    words = [tiny_finetuning.checkpoint if word == "RUN" else word for word in words.split()]
    with refused(key_words):
        bert_jax_main(*words)


def test_the_lines_before_a_wrong_one_are_predicted(tiny_finetuning, stdin, bert_jax_main, capsys):
    feed(stdin, b"the river bank\nthe\triver\n")
    with refused("stdin:2 has 2 texts and the model was trained on 1"):
        bert_jax_main("predict", tiny_finetuning.checkpoint, "-", "--json")
    (answer,) = parse(capsys.readouterr().out)
    assert answer["texts"] == ["the river bank"]
