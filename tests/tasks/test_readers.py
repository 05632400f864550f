"""CoNLL and SQuAD files: their records, malformed ones, and files without examples."""

import contextlib
import json
import os

import pytest
from helpers import refused, write_file
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.config import DataFiles
from bert_jax.errors import UserError
from bert_jax.tasks import make_task, readers, task_class
from bert_jax.tasks.datasets import read_examples
from bert_jax.tasks.examples import Example
from bert_jax.tasks.question_answering import QuestionAnswering, QuestionAnsweringConfig
from bert_jax.text.records import read_records

READERS = [read_records, readers.conll, readers.squad]


def fields(records):
    return [record.fields for record in records]


@settings(deadline=None)
@given(
    content=st.binary(max_size=60),
    name=st.sampled_from(["a.tsv", "a.csv", "a.jsonl", "a.tsv.gz", "a.csv.xz"]),
)
def test_no_content_raises_anything_but_a_user_error(tmp_path_factory, content, name):
    path = tmp_path_factory.mktemp("any") / name
    path.write_bytes(content)
    for read in READERS:
        with contextlib.suppress(UserError):
            for record in read(str(path)):
                assert record.where.startswith(str(path))


PARAGRAPH = '{"data": [{"paragraphs": [%s]}]}'


@pytest.mark.parametrize(
    ("name", "content", "key_words"),
    [
        ("a.conll", "a O\n\nb X O\n", ":3: 3 columns where the first word has 2"),
        ("a.conll", "a O\nb\n", ":2: 1 column where the first word has 2"),
        ("a.conll", "a\tO\n\tO\n", ":2: an empty column"),
        ("a.conll", "a\tO\nb\t\n", ":2: an empty column"),
        (
            "q.csv",
            "id,question\n1,Who?\n",
            "is a table, in which answers have no form; give SQuAD's",
        ),
        ("q.tsv.xz", "id\tquestion\n1\tWho?\n", "or a .jsonl or .parquet of id, question, context"),
        ("a.json", "{", "is not JSON"),
        ("a.json", '{"id": 1}\n{"id": 2}\n', "has JSON lines; give it a name that ends in .jsonl"),
        ("a.json", '\n{"data": {}}\n\n', "has no list 'data'"),
        ("a.json", '{"data": "}\u2028"}', "has no list 'data'"),
        ("a.json", '{"data": {}}', "has no list 'data'"),
        ("a.json", '{"data": [3]}', "data[0] has no list 'paragraphs'"),
        ("a.json", PARAGRAPH % "{}", "data[0].paragraphs[0] has no list 'qas'"),
        ("a.json", PARAGRAPH % '{"qas": []}', "data[0].paragraphs[0] has no context"),
        ("a.json", PARAGRAPH % '{"context": " ", "qas": []}', "paragraphs[0] has no context"),
        ("a.json", PARAGRAPH % '{"context": "x", "qas": [3]}', "qas[0] is no JSON object"),
    ],
)
def test_malformed_files(tmp_path, name, content, key_words):
    path = write_file(tmp_path / name, content)
    with refused(path, key_words, "; "):  # and what to do
        list((readers.conll if name == "a.conll" else readers.squad)(path))


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [
        ("classification", "a.tsv", ""),
        ("classification", "a.jsonl", "\n \n"),
        ("classification", "a.csv", "a,b\n"),
        ("token_classification", "a.conll", "\n\n-DOCSTART- O\n\n"),
        ("question_answering", "a.json", ""),
        ("question_answering", "a.json", '{"data": []}'),
    ],
)
def test_files_without_examples(tmp_path, kind, name, content):
    path = write_file(tmp_path / name, content)
    task = make_task(task_class(kind).settings(kind=kind))
    with refused(path, "has no examples; "):
        read_examples(task, path, DataFiles(), labelled=True)


@pytest.mark.parametrize("read", READERS)
def test_missing_files(tmp_path, read):
    path = write_file(tmp_path / "a.jsonl", "{}")
    os.chmod(path, 0)
    for name, key_words in (("no.jsonl", "does not exist"), (".", "is a folder")):
        with refused(key_words):
            list(read(str(tmp_path / name)))
    if not os.access(path, os.R_OK):  # root reads everything
        with refused("cannot be read"):
            list(read(path))


# CoNLL

SENTENCES = [
    {"tokens": ["EU", "#", "x"], "tags": ["B-ORG", "O", "O"]},
    {"tokens": ["One"], "tags": ["O"]},
]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("EU\tB-ORG\n#\tO\nx\tO\n\nOne\tO\n", (1, 5)),
        ("EU B-ORG\n# O\nx  O \n \t\n\nOne O", (1, 6)),
        ("-DOCSTART- -X- O\n\nEU NNP B-ORG\n# : O\nx X O\n\nOne CD O\n\n", (3, 7)),
        ("EU\tB-ORG\r\n#\tO\r\nx\tO\r\n\r\n-DOCSTART-\tO\r\n\r\nOne\tO\r\n", (1, 7)),
        ("EU B-ORG\n# O\nx O\n-DOCSTART- O\nOne O\n", (1, 5)),
    ],
)
def test_conll(tmp_path, content, lines):
    path = write_file(tmp_path / "a.conll", content)
    records = list(readers.conll(path))
    assert fields(records) == SENTENCES
    assert [record.where for record in records] == [f"{path}:{line}" for line in lines]
    assert fields(readers.conll(write_file(tmp_path / "a.conll.xz", content))) == SENTENCES


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a\nb\n\n\n\nc\n", [(["a", "b"], None), (["c"], None)]),
        ("\u00a0\tO\na\u3000b\tX\n", [(["\u00a0", "a\u3000b"], ["O", "X"])]),
    ],
)
def test_conll_of_words_alone_and_of_other_white_space(tmp_path, content, expected):
    records = fields(readers.conll(write_file(tmp_path / "a.txt", content)))
    assert records == [{"tokens": tokens, "tags": tags} for tokens, tags in expected]


WORD = st.text(st.characters(codec="utf-8", exclude_characters="\0\t\r\n "), min_size=1, max_size=5)
SENTENCE = st.lists(st.tuples(WORD, WORD), min_size=1, max_size=4)


@settings(deadline=None)
@given(sentences=st.lists(SENTENCE, min_size=1, max_size=4), mark=st.sampled_from(["\t", " "]))
def test_conll_round_trip(tmp_path_factory, sentences, mark):
    # A byte order mark before the first word is one of the file.
    sentences = [[(f".{word}", tag) for word, tag in sentence] for sentence in sentences]
    lines = ["".join(mark.join(pair) + "\n" for pair in sentence) for sentence in sentences]
    path = write_file(tmp_path_factory.mktemp("conll") / "a.conll", "\n".join(lines))
    records = [[*zip(f["tokens"], f["tags"], strict=True)] for f in fields(readers.conll(path))]
    assert records == sentences


# SQuAD


def squad_file(path, *questions, context="It was red. \ud83d\ude00 So."):
    paragraph = {"context": context, "qas": list(questions)}
    data = [{"title": "T", "paragraphs": [paragraph]}]
    return write_file(path, json.dumps({"version": "2.0", "data": data}))


def asked(source):
    """Return the examples of a source of questions."""
    reader = QuestionAnswering(QuestionAnsweringConfig(with_unanswerable=True))
    return [reader.make_example(record) for record in readers.squad(source)]


RED = {"text": "red", "answer_start": 7}
ASKED = {"id": "q1", "question": "What was it?", "answers": [RED]}


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_squad(tmp_path, name):
    second = {"id": "q2", "question": "Why?", "answers": [], "is_impossible": True}
    second["plausible_answers"] = [RED]
    path = squad_file(tmp_path / name, ASKED, second, {"id": 3, "question": "Who?"})
    context = "It was red. 😀 So."
    assert asked(path) == [
        Example("q1", f"{path}: question q1", ("What was it?", context), (("red", 7),)),
        Example("q2", f"{path}: question q2", ("Why?", context), ()),
        Example("3", f"{path}: question 3", ("Who?", context), None),
    ]


def test_flat_squad(tmp_path):
    rows = [
        {"id": "q1", "context": "It was red.", "question": "What was it?", "title": "T"},
        {"id": "q2", "context": "It was red.", "question": "Why?"},
        {"id": "q3", "context": "It was red.", "question": "Why?"},
    ]
    rows[0]["answers"] = {"text": ["red", "It"], "answer_start": [7, 0]}
    rows[1]["answers"] = {"text": [], "answer_start": []}
    path = write_file(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    examples = asked(path)
    assert [example.label for example in examples] == [(("red", 7), ("It", 0)), (), None]
    assert [example.id for example in examples] == ["q1", "q2", "q3"]
    rows[0]["answers"]["text"].pop()
    path = write_file(tmp_path / "b.jsonl", "\n".join(map(json.dumps, rows)))
    with refused("question q1: an answer is", "; "):
        asked(path)


@pytest.mark.parametrize(
    ("question", "key_words"),
    [
        ({"question": ""}, "question q1 has no question"),
        ({}, "the id q1 occurs twice"),
        ({"id": None}, "data[0].paragraphs[0].qas[0] has no id"),
        ({"answers": "red"}, "an answer is 'red' at None"),
        ({"answers": [{"text": 3, "answer_start": 0}]}, "an answer is"),
        ({"answers": [{"text": "red", "answer_start": "7"}]}, "an answer is"),
        ({"answers": [{"text": "red", "answer_start": True}]}, "an answer is"),
        ({"answers": [{"text": "red", "answer_start": -1}]}, "an answer is"),
        ({"answers": {"text": ["red"], "answer_start": 7}}, "an answer is ['red'] at 7"),
        ({"is_impossible": "no"}, "is_impossible is 'no'"),
    ],
)
def test_malformed_questions(tmp_path, question, key_words):
    with refused(key_words, "; "):
        asked(squad_file(tmp_path / "a.json", {**ASKED, **question}, ASKED))
