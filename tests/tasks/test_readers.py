"""Tables, CoNLL, SQuAD and TensorFlow datasets: their records, and malformed ones."""

import contextlib
import csv
import gzip
import io
import json
import lzma
import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.config import DataFiles
from bert_jax.errors import UserError
from bert_jax.tasks import make_task, readers, task_class
from bert_jax.tasks.base import Example
from bert_jax.tasks.datasets import read_examples
from bert_jax.tasks.question_answering import QuestionAnswering, QuestionAnsweringConfig
from bert_jax.text.readers import read_records


def write(path, content):
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(content))
    return str(path)


def fields(records):
    return [record.fields for record in records]


def fails(read, *args, **more) -> str:
    """Return the message of the error."""
    with pytest.raises(UserError) as error:
        list(read(*args, **more))
    message = str(error.value)
    assert "; " in message  # what to do
    return message


ROWS = [{"id": "1", "text": "Fiancé"}, {"id": "2", "text": 'a "quoted" one'}]
TABLES = {
    "a.tsv": 'id\ttext\n1\tFiancé\n2\ta "quoted" one\n',
    "a.csv": 'id,text\n1,Fiancé\n2,"a ""quoted"" one"\n',
    "a.jsonl": "\n".join(json.dumps(row) for row in ROWS),
}


@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
@pytest.mark.parametrize("name", TABLES)
def test_tables(tmp_path, name, packed):
    windows = b"\xef\xbb\xbf" + TABLES[name].replace("\n", "\r\n").encode()
    for content in (TABLES[name], windows):
        path = write(tmp_path / (name + packed), content)
        records = list(read_records(path))
        assert fields(records) == ROWS
        first = 1 if ".jsonl" in name else 2
        assert [record.where for record in records] == [f"{path}:{first}", f"{path}:{first + 1}"]


def test_json_lines_may_be_empty_and_half_a_surrogate_is_a_question_mark(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"n": 3}\n\n{"s": ["\\ud800x"]}\n')
    records = list(read_records(path))
    assert fields(records) == [{"n": 3}, {"s": ["?x"]}]
    assert records[1].where == f"{path}:3"


def test_tsv_keeps_quotes_spaces_and_empty_fields(tmp_path):
    path = write(tmp_path / "a.tsv", 'a\tb\tc\n "x\t\ty" \n\n\t\t\n')
    assert fields(read_records(path)) == [
        {"a": ' "x', "b": "", "c": 'y" '},
        {"a": "", "b": "", "c": ""},
    ]
    path = write(tmp_path / "one.tsv", "a\nx\n\ny\n")
    assert fields(read_records(path)) == [{"a": "x"}, {"a": ""}, {"a": "y"}]


def test_csv_fields_of_several_lines(tmp_path):
    records = list(read_records(write(tmp_path / "a.csv", 'a,b\n"1\n2",x\n\n"3\n\n4",y\nz,w\n')))
    assert [record.where.split(":")[-1] for record in records] == ["2", "5", "8"]
    assert [record.fields["a"] for record in records] == ["1\n2", "3\n\n4", "z"]


@pytest.mark.parametrize("name", ["a.tsv", "a.csv"])
def test_names_for_a_file_without_a_header(tmp_path, name):
    mark = "," if name == "a.csv" else "\t"
    path = write(tmp_path / name, f"1{mark}x\n2{mark}y\n")
    assert fields(read_records(path, ("n", "t"))) == [{"n": "1", "t": "x"}, {"n": "2", "t": "y"}]
    header = write(tmp_path / f"with_header_{name}", f"t{mark}other\nx{mark}y\n")
    assert fields(read_records(header, ("n", "t"))) == [{"t": "x", "other": "y"}]
    one = write(tmp_path / "one.tsv", "\nx\n")
    assert fields(read_records(one, "t")) == [{"t": ""}, {"t": "x"}]
    assert fields(read_records(write(tmp_path / "one.tsv", "\n\nt\nx\n"))) == [{"t": "x"}]
    assert f"{path}:1: 2 fields where 3 are expected" in fails(read_records, path, "abc")


def test_ragged_rows_fail_or_are_marked(tmp_path):
    for name, mark in (("a.tsv", "\t"), ("a.csv", ",")):
        lines = ["a b c", "1 2 3", "1 2", "", "4 5 6 7", "4", "7 8 9"]
        path = write(tmp_path / name, "\n".join(lines).replace(" ", mark))
        assert f"{path}:3: 2 fields where the header has 3" in fails(read_records, path)
        records = list(read_records(path, skips_ragged=True))
        assert [record.fields.get("a") for record in records] == ["1", None, None, None, "7"]
        assert [record.where for record in records if not record.fields] == [
            f"{path}:{number}" for number in (3, 5, 6)
        ]


def test_a_field_by_its_setting():
    record = readers.Record("a.tsv:2", {"text": "x", "label": None})
    assert (record.field("text", "data.text"), record.field("label", "data.label")) == ("x", None)
    assert "a.tsv:2 has no column 'sentence'" in fails(record.field, "sentence", "data.text")
    assert "did you mean text?" in fails(record.field, "txt", "data.text")


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
TABLE = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(TEXT, min_size=width, max_size=width), min_size=1, max_size=5)
)


def names_of(rows):
    return [f"c{number}" for number in range(len(rows[0]))]


@settings(deadline=None)
@given(rows=TABLE)
def test_csv_round_trip(tmp_path_factory, rows):
    file = io.StringIO(newline="")
    csv.writer(file).writerows([names_of(rows), *rows])
    path = write(tmp_path_factory.mktemp("csv") / "a.csv", file.getvalue())
    assert [list(record.values()) for record in fields(read_records(path))] == rows


@settings(deadline=None)
@given(rows=TABLE)
def test_tsv_round_trip(tmp_path_factory, rows):
    rows = [["".join(set(field) - set("\t\r\n")) for field in row] for row in rows]
    content = "".join("\t".join(row) + "\n" for row in [names_of(rows), *rows])
    path = write(tmp_path_factory.mktemp("tsv") / "a.tsv", content)
    assert [list(record.values()) for record in fields(read_records(path))] == rows


JSON = st.recursive(st.none() | st.booleans() | st.integers() | TEXT, st.lists, max_leaves=5)


@settings(deadline=None)
@given(rows=st.lists(st.dictionaries(TEXT, JSON, max_size=4), min_size=1, max_size=4))
def test_json_round_trip(tmp_path_factory, rows):
    content = "".join(json.dumps(row) + "\n" for row in rows)
    path = write(tmp_path_factory.mktemp("json") / "a.jsonl", content)
    assert fields(read_records(path)) == rows


@settings(deadline=None)
@given(content=st.binary(max_size=60), name=st.sampled_from([*TABLES, "a.tsv.gz", "a.csv.xz"]))
def test_no_content_raises_anything_but_a_user_error(tmp_path_factory, content, name):
    path = tmp_path_factory.mktemp("any") / name
    path.write_bytes(content)
    for read in (read_records, readers.conll, readers.squad):
        with contextlib.suppress(UserError):
            for record in read(str(path)):
                assert record.where.startswith(str(path))


MALFORMED_TABLES = [
    ("a.tsv", "a\tb\ta\n1\t2\t3\n", "a.tsv:1: two columns are named 'a'"),
    ("a.csv", "\na,a\n", "a.csv:2: two columns are named 'a'"),
    ("a.txt", "a\n", "unknown kind"),
    ("a", "a\n", "unknown kind"),
    ("a.tsv", "a\tb\n1\t\0\n", "line 2 has a NUL byte"),
    ("a.csv", "a,b\n1,\0\n", "line 2 has a NUL byte"),
    ("a.csv", f"a,b\n1,{'x' * 200_000}\n", "a.csv:2: field larger than field limit"),
    ("a.csv", 'a,b\n1,"x\n2,y\n', "a.csv:2: unexpected end of data"),
    ("a.csv", 'a,b\n1,"x"y\n', "a.csv:2: ',' expected after '\"'"),
    ("a.csv", "a,b\n1,2\r3,4\n", "a.csv:2: new-line character seen in unquoted field"),
    ("a.tsv", b"a\tb\n1\t\xff\n", "line 2 is not UTF-8"),
    ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl:2 is not JSON"),
    ("a.jsonl", '{"a": 1}\n[1]\n', "a.jsonl:2 is no JSON object"),
    ("a.jsonl", '{"a": 1, "a": 2}\n', "'a' occurs twice"),
    ("a.jsonl", '{"a": ' + "[" * 200_000 + "\n", "a.jsonl:1 is not JSON"),
    ("a.jsonl", '{"a": ' + "9" * 5000 + "}\n", "a.jsonl:1 is not JSON"),
]
MALFORMED_CONLL = [
    ("a O\n\nb X O\n", ":3: 3 columns where the first word has 2"),
    ("a O\nb\n", ":2: 1 columns where the first word has 2"),
    ("a\tO\n\tO\n", ":2: an empty column"),
    ("a\tO\nb\t\n", ":2: an empty column"),
    ("a O\nb\0 O\n", "line 2 has a NUL byte"),
    (b"a O\n\xff O\n", "line 2 is not UTF-8"),
]
PARAGRAPH = '{"data": [{"paragraphs": [%s]}]}'
MALFORMED_SQUAD = [
    ("{", "is not JSON"),
    ('{"data": {}}', "has no list 'data'"),
    ('{"data": [3]}', "data[0] has no list 'paragraphs'"),
    (PARAGRAPH % "{}", "data[0].paragraphs[0] has no list 'qas'"),
    (PARAGRAPH % '{"qas": []}', "data[0].paragraphs[0] has no context"),
    (PARAGRAPH % '{"context": " ", "qas": []}', "data[0].paragraphs[0] has no context"),
    (PARAGRAPH % '{"context": "x", "qas": [3]}', "paragraphs[0].qas[0] is no JSON object"),
]


@pytest.mark.parametrize(
    ("read", "name", "content", "key_words"),
    [
        *((read_records, *case) for case in MALFORMED_TABLES),
        *((readers.conll, "a.conll", *case) for case in MALFORMED_CONLL),
        *((readers.squad, "a.json", *case) for case in MALFORMED_SQUAD),
    ],
)
def test_malformed_files(tmp_path, read, name, content, key_words):
    path = write(tmp_path / name, content)
    limit = csv.field_size_limit(131_072)  # Python's own; commands raise it for their process
    try:
        message = fails(read, path)
    finally:
        csv.field_size_limit(limit)
    assert path in message
    assert key_words in message


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
    path = write(tmp_path / name, content)
    task = make_task(task_class(kind).settings(kind=kind))
    assert "has no examples" in fails(read_examples, task, path, DataFiles(), labelled=True)


def test_damaged_archives(tmp_path):
    whole = b"".join(b"%d\tword %d\n" % (n, n * n) for n in range(1000))
    packed = gzip.compress(whole, mtime=0)
    for content in (packed[:10] + b"\xff" * 9 + packed[19:], packed[:-30], b"not gzip"):
        (tmp_path / "a.tsv.gz").write_bytes(content)
        assert "a.tsv.gz is damaged" in fails(read_records, str(tmp_path / "a.tsv.gz"), "ab")


@pytest.mark.parametrize("read", [read_records, readers.conll, readers.squad])
def test_missing_files(tmp_path, read):
    assert "no.jsonl does not exist" in fails(read, str(tmp_path / "no.jsonl"))
    assert "is a folder" in fails(read, str(tmp_path))
    path = write(tmp_path / "a.jsonl", "{}")
    os.chmod(path, 0)
    if not os.access(path, os.R_OK):  # root reads everything
        assert "cannot be read" in fails(read, path)


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
    path = write(tmp_path / "a.conll", content)
    records = list(readers.conll(path))
    assert fields(records) == SENTENCES
    assert [record.where for record in records] == [f"{path}:{line}" for line in lines]
    assert fields(readers.conll(write(tmp_path / "a.conll.xz", content))) == SENTENCES


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a\nb\n\n\n\nc\n", [(["a", "b"], None), (["c"], None)]),
        ("\u00a0\tO\na\u3000b\tX\n", [(["\u00a0", "a\u3000b"], ["O", "X"])]),
    ],
)
def test_conll_of_words_alone_and_of_other_white_space(tmp_path, content, expected):
    records = fields(readers.conll(write(tmp_path / "a.txt", content)))
    assert records == [{"tokens": tokens, "tags": tags} for tokens, tags in expected]


WORD = st.text(st.characters(codec="utf-8", exclude_characters="\0\t\r\n "), min_size=1, max_size=5)
SENTENCE = st.lists(st.tuples(WORD, WORD), min_size=1, max_size=4)


@settings(deadline=None)
@given(sentences=st.lists(SENTENCE, min_size=1, max_size=4), mark=st.sampled_from(["\t", " "]))
def test_conll_round_trip(tmp_path_factory, sentences, mark):
    # A byte order mark before the first word is one of the file.
    sentences = [[(f".{word}", tag) for word, tag in sentence] for sentence in sentences]
    lines = ["".join(mark.join(pair) + "\n" for pair in sentence) for sentence in sentences]
    path = write(tmp_path_factory.mktemp("conll") / "a.conll", "\n".join(lines))
    records = [[*zip(f["tokens"], f["tags"], strict=True)] for f in fields(readers.conll(path))]
    assert records == sentences


# SQuAD


def squad_file(path, *questions, context="It was red. \ud83d\ude00 So."):
    paragraph = {"context": context, "qas": list(questions)}
    data = [{"title": "T", "paragraphs": [paragraph]}]
    return write(path, json.dumps({"version": "2.0", "data": data}))


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
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    examples = asked(path)
    assert [example.label for example in examples] == [(("red", 7), ("It", 0)), (), None]
    assert [example.id for example in examples] == ["q1", "q2", "q3"]
    rows[0]["answers"]["text"].pop()
    path = write(tmp_path / "b.jsonl", "\n".join(map(json.dumps, rows)))
    assert "question q1: an answer is" in fails(asked, path)


@pytest.mark.parametrize(
    ("question", "key_words"),
    [
        ({"question": ""}, "question q1 has no question"),
        ({"id": None}, "data[0].paragraphs[0].qas[0] has no id"),
        ({"answers": "red"}, "an answer is 'red' at None"),
        ({"answers": [{"text": 3, "answer_start": 0}]}, "an answer is"),
        ({"answers": [{"text": "red"}]}, "an answer is"),
        ({"answers": [{"text": "red", "answer_start": "7"}]}, "an answer is"),
        ({"answers": [{"text": "red", "answer_start": 7.0}]}, "an answer is"),
        ({"answers": [{"text": "red", "answer_start": True}]}, "an answer is"),
        ({"answers": [{"text": "red", "answer_start": -1}]}, "an answer is"),
        ({"answers": {"text": ["red"], "answer_start": 7}}, "an answer is ['red'] at 7"),
        ({"is_impossible": "no"}, "is_impossible is 'no'"),
    ],
)
def test_malformed_questions(tmp_path, question, key_words):
    assert key_words in fails(asked, squad_file(tmp_path / "a.json", {**ASKED, **question}))
    path = squad_file(tmp_path / "a.json", ASKED, ASKED)
    assert "question q1: its id occurs twice" in fails(readers.squad, path)


# TensorFlow datasets


def test_tfds_without_tensorflow(tmp_path, monkeypatch):
    """A dataset prepared by the test, with classes at every depth."""
    package = tmp_path / "code" / "spot_records"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "spot_records_dataset_builder.py").write_text(BUILDER)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path / "data"))
    from spot_records.spot_records_dataset_builder import SpotRecords

    SpotRecords(data_dir=str(tmp_path / "data"), file_format="array_record").download_and_prepare()
    records = list(read_records("tfds:spot_records@train"))
    assert [record.where for record in records] == [f"tfds:spot_records@train #{i}" for i in (0, 1)]
    first, second = sorted(fields(records), key=lambda row: row["idx"])
    assert first == {
        "id": "a",
        "context": "Fiancé is red.",
        "question": "What?",
        "answers": {"text": ["Fiancé", "red"], "answer_start": [0, 10]},
        "label": "yes",
        "tags": ["no", "yes", None],
        "tokens": ["x", "y", "z"],
        "parts": {"kind": ["yes", None], "of": ["p", "q"]},
        "rows": [{"kind": "no"}],
        "idx": 0,
        "score": 0.5,
    }
    assert json.loads(json.dumps(first)) == first  # no types of NumPy's
    assert second["label"] is None
    assert (second["tags"], second["answers"]["text"], second["rows"]) == ([], [], [])
    labels = {example.id: example.label for example in asked("tfds:spot_records@train[:2]")}
    assert labels == {"a": (("Fiancé", 0), ("red", 10)), "b": ()}
    assert "tensorflow" not in sys.modules
    for source, message in (
        ("tfds:spot_records", "tfds:spot_records names no split"),
        ("tfds:spot_records@", "add one, such as tfds:spot_records@train"),
        ("tfds:spot_records@test", "cannot be read"),
        ("tfds:zzz@train", "cannot be read from"),
        ("tfds:spot_records@bytes", "tfds:spot_records@bytes #0 cannot be read"),
        ("tfds:spot_records@train[:0]", "cannot be read"),
    ):
        assert message in fails(read_records, source)


BUILDER = """
import numpy as np
import tensorflow_datasets as tfds

CLASS = tfds.features.ClassLabel(names=["no", "yes"])

class SpotRecords(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({
            "id": np.str_,
            "context": tfds.features.Text(),
            "question": tfds.features.Text(),
            "answers": tfds.features.Sequence(
                {"text": tfds.features.Text(), "answer_start": np.int32}
            ),
            "label": CLASS,
            "tags": tfds.features.Sequence(CLASS),
            "tokens": tfds.features.Sequence(tfds.features.Text()),
            "parts": tfds.features.Sequence(
                {"kind": CLASS, "of": tfds.features.Text()}
            ),
            "rows": tfds.features.Dataset({"kind": CLASS}),
            "idx": np.int32,
            "score": np.float32,
        })
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(), "bytes": self._generate_examples(b"\\xff")}

    def _generate_examples(self, question="What?"):
        yield 0, {
            "id": "a", "context": "Fiancé is red.", "question": question,
            "answers": {"text": ["Fiancé", "red"], "answer_start": [0, 10]},
            "label": 1, "tags": [0, 1, -1], "tokens": ["x", "y", "z"],
            "parts": {"kind": [1, -1], "of": ["p", "q"]},
            "rows": [{"kind": 0}], "idx": 0, "score": 0.5,
        }
        yield 1, {
            "id": "b", "context": "Two.", "question": question,
            "answers": {"text": [], "answer_start": []},
            "label": -1, "tags": [], "tokens": [], "parts": {"kind": [], "of": []},
            "rows": [], "idx": 1, "score": 1.5,
        }
"""
