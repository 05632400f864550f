"""Parquet files: the same records, texts and examples as JSON lines; damaged and missing ones."""

import json
import sys

import fsspec
import pytest
from helpers import refused

from bert_jax.config import DataConfig, DataFiles, TaskConfig
from bert_jax.tasks import make_task, task_class
from bert_jax.tasks.datasets import read_examples
from bert_jax.text import memory
from bert_jax.text.records import read_records
from bert_jax.text.sources import open_source

pytestmark = pytest.mark.parity

ROWS = [{"text": f"The fox {i}. It runs.", "label": "ab"[i % 2], "number": i} for i in range(2500)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path_factory.mktemp("parquet") / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=700)
    return path


def test_records(path):
    records = list(read_records(str(path)))
    assert [record.fields for record in records] == ROWS
    assert records[4].where == f"{path}:5"
    positions = [record.position for record in records]
    assert positions == sorted(positions)
    assert positions[-1] == path.stat().st_size


def test_a_text_source(path):
    lines = path.with_suffix(".jsonl")
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    documents = [list(open_source(str(each), DataConfig()).documents()) for each in (path, lines)]
    assert documents[0] == documents[1]
    assert documents[0][0] == ["The fox 0.", "It runs."]
    source = open_source(f"{path},{lines}", DataConfig(text_field="text"))
    assert len(list(source.documents())) == 2 * len(ROWS)
    with refused("has no column 'body'; set data.text_field to one of text, label, number"):
        list(open_source(str(path), DataConfig(text_field="body")).documents())
    with refused("rows.parquet:1 has no text in 'number'; set data.text_field"):
        list(open_source(str(path), DataConfig(text_field="number")).documents())


def test_other_columns_of_a_text_are_not_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"text": "A bank.", "image": b"\xff\xfe"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = open_source(f"{tmp_path}/a.parquet", DataConfig())
    assert list(source.documents()) == [["A bank."]]


def test_a_text_in_a_bucket(path, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    system = fsspec.filesystem("memory")
    system.put(str(path), "/bucket/rows.parquet")
    there = open_source("memory://bucket/rows.parquet", DataConfig())
    local = open_source(str(path), DataConfig())
    assert list(there.documents()) == list(local.documents())
    assert there.identity() == local.identity()
    system.rm("/bucket", recursive=True)


def test_examples_of_a_task(path):
    task = make_task(TaskConfig(labels=("a", "b")))
    examples = read_examples(task, str(path), DataFiles(text="text"), labelled=True)
    assert [example.label for example in examples[:3]] == ["a", "b", "a"]


def test_nested_columns_and_nulls(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    rows = [{"tokens": ["a", "fox"], "ner_tags": ["O", "B-X"], "text": {"a": 1}, "label": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    task = make_task(TaskConfig("token_classification"))
    data = DataFiles(text="tokens", label="ner_tags")
    (example,) = read_examples(task, str(path), data, labelled=True)
    assert (example.texts, example.label) == (("a", "fox"), ("O", "B-X"))
    with refused("a.parquet:1: a text is {'a': 1}"):
        read_examples(make_task(TaskConfig()), str(path), DataFiles(text="text"), labelled=False)


def test_a_file_that_is_damaged_and_one_without_the_library(path, tmp_path, monkeypatch):
    whole = path.read_bytes()
    for name, content in {"cut": whole[:-20], "other": b"fox\n", "empty": b""}.items():
        damaged = tmp_path / f"{name}.parquet"
        damaged.write_bytes(content)
        with refused(f"{damaged} cannot be read after row 0"):
            list(read_records(str(damaged)))
    middle = tmp_path / "middle.parquet"
    middle.write_bytes(whole[:60] + bytes(400) + whole[460:])
    with refused(f"{middle} cannot be read after row"):
        list(read_records(str(middle)))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused("rows.parquet needs pyarrow, which is not installed; pip install"):
        list(read_records(str(path)))


def test_columns_that_python_cannot_have(tmp_path):
    """They are named, also where nobody asks for them."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    dates = pyarrow.array([4_000_000], pyarrow.int32()).cast(pyarrow.date32())
    parquet.write_table(pyarrow.table({"text": ["a fox"], "date": dates}), path)
    with refused("a.parquet:1 or a later row has a value that", "'date'", "convert the column"):
        list(read_records(str(path)))
    no_text = pyarrow.array([b"fox", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    twice = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    for table, key_words in (
        (pyarrow.table({"date": dates}), "or a later row has a value that Python cannot have in"),
        (pyarrow.table({"text": no_text}), "has bytes that are not UTF-8 in column 'text'"),
        (twice, "two columns are named 'text'; rename one of them"),
    ):
        with refused("train", key_words):
            list(memory.records(table, "train"))
        parquet.write_table(table, path)
        with refused("a.parquet", key_words):
            list(read_records(str(path)))


def test_classes_have_names_as_in_memory(tmp_path):
    datasets = pytest.importorskip("datasets")
    label, tag = datasets.ClassLabel(names=["bad", "good"]), datasets.ClassLabel(names=["O", "B-X"])
    features = {
        "text": datasets.Value("string"),
        "label": label,
        "tags": datasets.Sequence(tag),
        "nested": {"tags": [[tag]]},
    }
    columns = {
        "text": ["a", "b", "c"],
        "label": [1, 0, -1],
        "tags": [[0, 1], [], [1]],
        "nested": [{"tags": [[1], [0]]}, {"tags": []}, {"tags": [[]]}],
    }
    rows = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    path = tmp_path / "a.parquet"
    rows.to_parquet(path)
    records = [record.fields for record in read_records(str(path))]
    assert [record["label"] for record in records] == ["good", "bad", None]
    assert [record["tags"] for record in records] == [["O", "B-X"], [], ["B-X"]]
    assert records[0]["nested"] == {"tags": [["B-X"], ["O"]]}
    for table in (rows, rows.with_format("arrow")[:], rows.with_format("arrow")[:].to_batches()[0]):
        assert [record.fields for record in memory.records(table, "train")] == records


@pytest.mark.parametrize(
    "described",
    [
        *(b"", b"\xff", b"[" * 100_000, b"3", b'{"info": []}', b'{"info": {"features": 3}}'),
        b'{"info": {"features": {"label": {"_type": "ClassLabel"}}}}',
        b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": [3]}}}}',
        b'{"info": {"features": {"label": [], "text": {"_type": "Value"}}}}',
    ],
)
def test_a_damaged_description_of_classes_is_ignored(tmp_path, described):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"text": "a", "label": 1}]
    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata({"huggingface": described})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [record.fields for record in read_records(f"{tmp_path}/a.parquet")] == rows
    assert [record.fields for record in memory.records(table, "train")] == rows


def test_a_task_of_numbers_has_those_of_the_classes(tmp_path):
    """Else a pair of which the class says that it is none would be trained as one."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = ["\ud800apart", "alike"]
    described = {"info": {"features": {"label": {"_type": "ClassLabel", "names": names}}}}
    path, metadata = str(tmp_path / "a.parquet"), {"huggingface": json.dumps(described)}
    rows = [{**dict.fromkeys("abcd", "x"), "label": label} for label in (0, 1, 2)]
    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata(metadata)
    parquet.write_table(table, path)
    for kind, text, labels in (
        ("classification", "a,b", ["?apart", "alike", "2"]),
        ("regression", "a,b", [0.0, 1.0, 2.0]),
        ("embedding", "a,b", [0.0, 1.0, 2.0]),
        ("reranker", "a,b", [(0.0,), (1.0,), (2.0,)]),
    ):
        task = make_task(task_class(kind).settings(kind))
        for source in (path, table):
            examples = read_examples(task, source, DataFiles(text=text), labelled=False)
            assert [example.label for example in examples] == labels
    task = make_task(task_class("multiple_choice").settings("multiple_choice"))
    examples = read_examples(task, table.slice(0, 2), DataFiles(text="a,b,c,d"), labelled=True)
    assert [example.label for example in examples] == ["0", "1"]
