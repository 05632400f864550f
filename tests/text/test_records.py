"""Tables, JSON lines and TensorFlow datasets: their records, and malformed ones."""

import csv
import io
import json
import sys

import pytest
from helpers import refused, write_file
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.commands import process
from bert_jax.config import DataConfig
from bert_jax.text.records import Record, read_records
from bert_jax.text.sources import open_source


def fields(records):
    return [record.fields for record in records]


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
        path = write_file(tmp_path / (name + packed), content)
        records = list(read_records(path))
        assert fields(records) == ROWS
        first = 1 if ".jsonl" in name else 2
        assert [record.where for record in records] == [f"{path}:{first}", f"{path}:{first + 1}"]


@pytest.mark.parametrize(
    ("name", "content", "rows", "lines"),
    [
        # Half of a surrogate pair cannot be encoded.
        ("a.jsonl", '{"n": 3}\n\n{"s": ["\\ud800x"]}\n', [{"n": 3}, {"s": ["?x"]}], [1, 3]),
        # Quotes and spaces are text.
        ("a.tsv", 'a\tb\n "x\ty" \n\n\t\n', [{"a": ' "x', "b": 'y" '}, {"a": "", "b": ""}], [2, 4]),
        ("a.tsv", "\n\na\nx\n\ny\n", [{"a": "x"}, {"a": ""}, {"a": "y"}], [4, 5, 6]),
        (
            "a.csv",
            'a\n"1\n2"\n\n"3\n\n4"\nz\n',
            [{"a": "1\n2"}, {"a": "3\n\n4"}, {"a": "z"}],
            [2, 5, 8],
        ),
    ],
)
def test_empty_lines_quotes_and_fields_of_several_lines(tmp_path, name, content, rows, lines):
    records = list(read_records(write_file(tmp_path / name, content)))
    assert fields(records) == rows
    assert [record.line for record in records] == lines


@pytest.mark.parametrize(("name", "mark"), [("a.tsv", "\t"), ("a.csv", ",")])
def test_names_for_a_file_without_a_header(tmp_path, name, mark):
    path = write_file(tmp_path / name, f"1{mark}x\n2{mark}y\n")
    assert fields(read_records(path, ("n", "t"))) == [{"n": "1", "t": "x"}, {"n": "2", "t": "y"}]
    with refused(f"{path}:1: 2 fields where 3 are expected"):
        list(read_records(path, "abc"))
    header = write_file(tmp_path / f"with_header_{name}", f"t{mark}other\nx{mark}y\n")
    assert fields(read_records(header, ("n", "t"))) == [{"t": "x", "other": "y"}]


@pytest.mark.parametrize(("name", "mark"), [("a.tsv", "\t"), ("a.csv", ",")])
def test_ragged_rows_fail_or_are_marked(tmp_path, name, mark):
    lines = ["a b c", "1 2 3", "1 2", "", "4 5 6 7", "4", "7 8 9"]
    path = write_file(tmp_path / name, "\n".join(lines).replace(" ", mark))
    with refused(f"{path}:3: 2 fields where the header has 3"):
        list(read_records(path))
    records = list(read_records(path, skips_ragged=True))
    assert [record.fields.get("a") for record in records] == ["1", None, None, None, "7"]
    assert [record.line for record in records if not record.fields] == [3, 5, 6]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_names_of_columns_have_no_spaces_around_them(tmp_path, name):
    mark = "," if name == "a.csv" else "\t"
    path = write_file(tmp_path / name, f"label{mark} sentence \nb{mark} a river\n")
    assert fields(read_records(path)) == [{"label": "b", "sentence": " a river"}]


def test_a_field_by_its_setting():
    record = Record("a.tsv:2", {"text": "x", "label": None})
    assert (record.field("text", "data.text"), record.field("label", "data.label")) == ("x", None)
    with refused("a.tsv:2 has no column 'sentence'", "add the line of column names"):
        record.field("sentence", "data.text")
    with refused("did you mean text?"):
        record.field("txt", "data.text")


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
TABLE = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(TEXT, min_size=width, max_size=width), min_size=1, max_size=5)
)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | TEXT, st.lists, max_leaves=5)


@settings(deadline=None)
@given(rows=TABLE)
def test_tables_come_back(tmp_path_factory, rows):
    folder, header = tmp_path_factory.mktemp("tables"), [f"c{i}" for i in range(len(rows[0]))]
    file = io.StringIO(newline="")
    csv.writer(file).writerows([header, *rows])
    path = write_file(folder / "a.csv", file.getvalue())
    assert [list(record.values()) for record in fields(read_records(path))] == rows
    rows = [["".join(set(field) - set("\t\r\n")) for field in row] for row in rows]
    path = write_file(folder / "a.tsv", "".join("\t".join(row) + "\n" for row in [header, *rows]))
    assert [list(record.values()) for record in fields(read_records(path))] == rows


@settings(deadline=None)
@given(rows=st.lists(st.dictionaries(TEXT, JSON, max_size=4), min_size=1, max_size=4))
def test_json_comes_back(tmp_path_factory, rows):
    content = "".join(json.dumps(row) + "\n" for row in rows)
    path = write_file(tmp_path_factory.mktemp("json") / "a.jsonl", content)
    assert fields(read_records(path)) == rows


@pytest.mark.parametrize(
    ("name", "content", "key_words"),
    [
        ("a.tsv", "a\tb\ta\n1\t2\t3\n", "a.tsv:1: two columns are named 'a'"),
        ("a.csv", "\na,a\n", "a.csv:2: two columns are named 'a'"),
        ("a.txt", "a\n", "unknown kind"),
        ("a", "a\n", "unknown kind"),
        ("a.csv", 'a,b\n1,"x\n2,y\n', "a.csv:2: unexpected end of data"),
        ("a.csv", "a,b\r1,x\r", "a.csv:1: a line ends in CR alone, and only LF and CRLF are read"),
        ("a.tsv", "text\rc\rd\r", "a.tsv: line 1 ends in CR alone"),
        ("a.fa", ">c\rMKVL\r", "a.fa: line 1 ends in CR alone"),
        ("a.csv", 'a,b\n1,"x"y\n', "a.csv:2: ',' expected after '\"'"),
        ("a.csv", "a,b\n1,2\r3,4\n", "a.csv:2: a line ends in CR alone"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl:2 is not JSON"),
        ("a.jsonl", '{"a": 1}\n1\n', "a.jsonl:2 is no JSON object"),
        ("a.json", '[{"a": 1}, {"a": 2}]\n', "a.json:1 begins a JSON array; write each of its"),
        ("a.json", '\n[\n  {"a": 1}\n]\n', "a.json:2 begins a JSON array; write each of its"),
        ("a.jsonl", '{"a": 1, "a": 2}\n', "'a' occurs twice"),
        ("a.jsonl", '{"a": ' + "[" * 200_000 + "\n", "a.jsonl:1 is not JSON"),
        ("a.jsonl", '{"a": ' + "9" * 5000 + "}\n", "a.jsonl:1 is not JSON"),
    ],
)
def test_malformed_files(tmp_path, name, content, key_words):
    path = write_file(tmp_path / name, content)
    with refused(path, key_words, "; "):  # and what to do
        list(read_records(path))


def test_a_field_beyond_the_limit_of_the_csv_module(tmp_path):
    path = write_file(tmp_path / "a.csv", f"a,b\n1,{'x' * 200_000}\n")
    (record,) = read_records(path)
    assert len(record.fields["b"]) == 200_000


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A dataset prepared by the test as array records, with classes at every depth."""
    package = tmp_path / "code" / "spot_records"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "spot_records_dataset_builder.py").write_text(BUILDER)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path / "data"))
    from spot_records.spot_records_dataset_builder import SpotRecords

    SpotRecords(data_dir=str(tmp_path / "data"), file_format="array_record").download_and_prepare()
    return "tfds:spot_records"


def test_tfds_without_tensorflow(dataset):
    records = list(read_records(f"{dataset}@train"))
    assert [record.where for record in records] == [f"{dataset}@train #{i}" for i in (0, 1)]
    first, second = sorted(fields(records), key=lambda row: row["idx"])
    assert first == {
        "id": "a",
        "context": "Fiancé is red. So?",
        "answers": {"text": ["Fiancé", "red"], "answer_start": [0, 10]},
        "label": "yes",
        "tags": ["no", "yes", None],
        "parts": {"kind": ["yes", None], "of": ["p", "q"]},
        "rows": [{"kind": "no"}],
        "idx": 0,
        "score": 0.5,
    }
    assert json.loads(json.dumps(first)) == first  # no types of NumPy's
    assert second["label"] is None
    assert (second["tags"], second["answers"]["text"], second["rows"]) == ([], [], [])
    text = DataConfig(text_field="context")
    documents = list(open_source(dataset, text).documents())  # TFDS has shuffled them
    assert sorted(documents) == [["Fiancé is red.", "So?"], ["Two."]]
    part = open_source(f"{dataset}:1.0.0@train[1:]", text)
    assert list(part.documents()) == documents[1:]
    identity = {"tfds": "spot_records/1.0.0", "split": "train[1:]", "rows": 1}
    assert part.identity() == {**identity, "text_field": "context"}
    assert "tensorflow" not in sys.modules
    for source, key_words in (
        (dataset, "tfds:spot_records names no split"),
        (f"{dataset}@", "add one, such as tfds:spot_records@train"),
        (f"{dataset}@test", "check its name and its split"),
        ("tfds:zzz@train", "cannot be read from"),
        (f"{dataset}@bytes", "tfds:spot_records@bytes #0 cannot be read"),
        (f"{dataset}@train[:0]", "cannot be read"),
    ):
        with refused(source, key_words):
            list(read_records(source))


def test_tfds_that_cannot_be_prepared(tmp_path, monkeypatch):
    """The line has the folder that was searched, the call that prepares it, and the flag."""
    import tensorflow_datasets as tfds

    def fail(self, **options):
        raise ConnectionError("no network\nat all")

    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "unused"))
    process.use_data_dir(None)
    process.use_data_dir(str(tmp_path))
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", fail)
    # An older dataset, which TFDS knows once its group is imported, and a newer one.
    for name in ("glue/sst2", "imdb_reviews"):
        call = f"tfds.builder('{name}', data_dir=DIR, file_format='array_record').download_and_prep"
        folder = f"cannot be read from {tmp_path} (no network); "
        with refused(folder, call, "--data-dir or TFDS_DATA_DIR names another folder"):
            open_source(f"tfds:{name}", DataConfig())


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
            "answers": tfds.features.Sequence(
                {"text": tfds.features.Text(), "answer_start": np.int32}
            ),
            "label": CLASS,
            "tags": tfds.features.Sequence(CLASS),
            "parts": tfds.features.Sequence({"kind": CLASS, "of": tfds.features.Text()}),
            "rows": tfds.features.Dataset({"kind": CLASS}),
            "idx": np.int32,
            "score": np.float32,
        })
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(), "bytes": self._generate_examples(b"\\xff")}

    def _generate_examples(self, context="Fiancé is red. So?"):
        yield 0, {
            "id": "a", "context": context,
            "answers": {"text": ["Fiancé", "red"], "answer_start": [0, 10]},
            "label": 1, "tags": [0, 1, -1],
            "parts": {"kind": [1, -1], "of": ["p", "q"]},
            "rows": [{"kind": 0}], "idx": 0, "score": 0.5,
        }
        yield 1, {
            "id": "b", "context": "Two.",
            "answers": {"text": [], "answer_start": []},
            "label": -1, "tags": [], "parts": {"kind": [], "of": []},
            "rows": [], "idx": 1, "score": 1.5,
        }
"""


@pytest.mark.parametrize(
    ("name", "separator", "right"),
    [("a.csv", ";", "commas"), ("a.csv", "\t", "commas"), ("a.tsv", ",", "tabs")],
)
def test_a_table_with_another_separator_is_named(name, separator, right, tmp_path):
    path = tmp_path / name
    path.write_text(f"id{separator}text\n1{separator}a b\n")
    (record,) = read_records(str(path))
    with refused(f"the columns of a {path.suffix} are separated by {right}"):
        record.field("text", "data.text_field")
    path.write_text(f"id{separator}text\n1{separator}a, b\tc;d\n")
    if len(path.read_text().splitlines()[1].split("," if right == "commas" else "\t")) > 1:
        with refused(f"a{path.suffix}:2: 2 fields", f"; the columns of a {path.suffix} are"):
            list(read_records(str(path)))


def test_quotes_of_a_tsv_are_named(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('"id"\t"text"\n"1"\t"a b"\n')
    (record,) = read_records(str(path))
    with refused("a .tsv has no quotes; remove them, or write a .csv"):
        record.field("text", "data.text_field")
