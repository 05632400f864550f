"""Data in memory: the same examples and texts as from files, from every kind of table."""

import copy
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refused
from training_runs import records

import bert_jax
from bert_jax.runs import origin
from bert_jax.text import memory

ROWS = [{"sentence": "fox", "label": "a"}, {"sentence": "the hen", "label": "b"}]
COLUMNS = {"sentence": ["fox", "the hen"], "label": ["a", "b"]}


class _Frame:
    """What is asked of a data frame of pandas."""

    columns = tuple(COLUMNS)

    def to_dict(self, orient):
        assert orient == "records"
        return ROWS


class _Repeated(_Frame):
    columns = ("sentence", "sentence")


class _Dataset:
    """What is asked of a `datasets.Dataset`, whose classes are numbers."""

    class _Label:
        def int2str(self, number):
            return "ab"[number]

    class _List:
        def __init__(self, feature):
            self.feature = feature

    column_names = tuple(COLUMNS)

    def with_format(self, name):
        assert name is None
        return self

    def __init__(self):
        self.features = {"sentence": object(), "label": self._Label()}

    def __iter__(self):
        return iter([{**row, "label": "ab".index(row["label"])} for row in ROWS])


@pytest.mark.parametrize(
    "data",
    [ROWS, tuple(ROWS), COLUMNS, _Frame(), _Dataset()],
    ids=["list", "tuple", "columns", "frame", "dataset"],
)
def test_records_of_each_kind(data):
    records = list(memory.records(data, "train"))
    assert [record.fields for record in records] == ROWS
    assert [record.where for record in records] == ["train[0]", "train[1]"]


@pytest.mark.parity
@pytest.mark.parametrize("module", ["pandas", "polars", "pyarrow", "datasets"])
def test_records_of_tables_of_other_libraries(module):
    library = pytest.importorskip(module)
    if module == "datasets":
        rows = library.Dataset.from_dict(COLUMNS).class_encode_column("label")
        for name in ("numpy", "torch", "pandas", "arrow"):
            formatted = rows.with_format(name)
            assert [record.fields for record in memory.records(formatted, "train")] == ROWS
    make = {
        "pandas": lambda: library.DataFrame(COLUMNS),
        "polars": lambda: library.DataFrame(COLUMNS),
        "pyarrow": lambda: library.table(COLUMNS),
        "datasets": lambda: library.Dataset.from_dict(COLUMNS).class_encode_column("label"),
    }
    assert [record.fields for record in memory.records(make[module](), "train")] == ROWS


def test_classes_in_lists_and_missing_ones_have_names():
    data = _Dataset()
    data.features = {"label": data._List(data._Label()), "other": data._Label()}
    data.__class__ = type("_Rows", (_Dataset,), {"__iter__": lambda self: iter(rows)})
    rows = [{"label": [1, 0], "other": 1}, {"label": [], "other": -1}, {"label": [], "other": None}]
    fields = [record.fields for record in memory.records(data, "train")]
    assert fields == [
        {"label": ["b", "a"], "other": "b"},
        {"label": [], "other": None},
        {"label": [], "other": None},
    ]


def test_a_missing_value_of_pandas_is_none():
    (record,) = memory.records([{"sentence": "fox", "label": float("nan")}], "train")
    assert record.fields == {"sentence": "fox", "label": None}
    missing = type("NAType", (), {"__ne__": lambda self, _: self, "__bool__": None})()
    (record,) = memory.records([{"sentence": "fox", "label": missing}], "train")
    assert record.fields == {"sentence": "fox", "label": None}


def test_columns_may_be_numbers():
    """As in a data frame that was read without a header."""
    (record,) = memory.records([{0: "fox", 1: "a"}], "train")
    assert record.fields == {"0": "fox", "1": "a"}


def test_columns_may_be_tuples():
    """As in a data frame with several rows of names."""
    (record,) = memory.records([{("a", 0): "fox"}], "train")
    assert record.fields == {"('a', 0)": "fox"}


def test_a_set_has_one_order():
    (record,) = memory.records([{"label": {"gamma", "alpha", "beta"}}], "train")
    assert record.fields == {"label": ["alpha", "beta", "gamma"]}


def test_values_of_numpy_are_plain():
    rows = ({"sentence": b"fox", "label": value} for value in np.arange(2))
    fields = [record.fields for record in memory.records(rows, "train")]
    assert fields == [{"sentence": "fox", "label": 0}, {"sentence": "fox", "label": 1}]
    assert type(fields[0]["label"]) is int
    (record,) = memory.records([{"label": jnp.int32(3), "texts": jnp.arange(2)}], "train")
    assert record.fields == {"label": 3, "texts": [0, 1]}


@pytest.mark.parametrize(
    ("data", "key_words"),
    [
        ("train.tsv", "train is 'train.tsv'; give a list"),
        (3, "train is 3; give a list"),
        (["fox"], "train[0] is 'fox'; give a dictionary of its columns"),
        ({"sentence": ["fox"], "label": []}, "the columns of train have [0, 1] values"),
        ([{"sentence": b"\xff"}], "train[0] has bytes that are no UTF-8"),
        ({"sentence": "fox", "label": "a"}, "train is one record; give a list of records"),
        (_Repeated(), "train has two columns of one name; rename one of them"),
        (
            {"dev": _Dataset(), "test": _Dataset()},
            "the splits dev, test; give one, as data['dev']",
        ),
    ],
)
def test_what_are_no_records(data, key_words):
    with refused(key_words):
        list(memory.records(data, "train"))


def in_memory(config) -> bert_jax.FinetuneConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, train=""))


def test_a_fine_tuning_on_rows_is_that_on_a_file(tiny_finetuning_config, shallow_bert, tmp_path):
    config = tiny_finetuning_config
    lines = Path(config.data.train).read_text().splitlines()
    rows = [dict(zip(("sentence", "label"), line.split("\t"), strict=True)) for line in lines[1:]]
    results = [
        bert_jax.finetune(copy.deepcopy(each), shallow_bert, tmp_path / name, quiet=True, **given)
        for name, each, given in (
            ("file", config, {}),
            ("rows", in_memory(config), {"train": iter(rows)}),
        )
    ]
    jax.tree.map(np.testing.assert_array_equal, *(each.bert.params for each in results))
    loaded = bert_jax.load(tmp_path / "rows")
    assert loaded.data == in_memory(config).data  # its columns are known
    loaded.save(tmp_path / "saved")
    for bert in (loaded, bert_jax.load(tmp_path / "saved")):
        with refused("examples[0] has 2 texts and the model was trained on 1"):
            bert.predict([("A river.", "A bank.")])
    again = {"train": rows, "quiet": True}
    bert_jax.finetune(in_memory(config), shallow_bert, tmp_path / "rows", **again)
    with refused("was trained on other text"):
        again["train"] = rows[1:]
        bert_jax.finetune(in_memory(config), shallow_bert, tmp_path / "rows", **again)
    with refused("data.train is", "and train is given too; leave one"):
        bert_jax.finetune(config, shallow_bert, tmp_path / "both", train=rows)
    with refused("train has no examples"):
        bert_jax.finetune(in_memory(config), shallow_bert, tmp_path / "no", train=iter([]))
    with refused("train[0] has no column 'sentence'; set data.text to one of text"):
        bert_jax.finetune(in_memory(config), shallow_bert, tmp_path / "no", train=[{"text": "fox"}])
    assert not (tmp_path / "no").exists()


def test_pretraining_on_texts_is_that_on_a_file_of_them(tiny_config, tiny_text, tmp_path):
    documents = [d for d in tiny_text.read_text().split("\n\n") if d.strip()]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    config = copy.deepcopy(tiny_config)
    config.model.num_hidden_layers = 1
    config.data.source = str(path)
    expected = bert_jax.pretrain(config, tmp_path / "file", quiet=True)
    config.data.source = "builtin"
    run = tmp_path / "run"
    found = bert_jax.pretrain(copy.deepcopy(config), run, texts=iter(documents), quiet=True)
    jax.tree.map(np.testing.assert_array_equal, expected.bert.params, found.bert.params)

    config.steps = 3
    rows = [{"text": text} for text in documents]
    longer = bert_jax.pretrain(copy.deepcopy(config), run, texts=rows, quiet=True)
    assert longer.checkpoint.name == "3"
    config.steps = 4
    with refused(f"{run / 'texts.jsonl'} has other texts than the ones given"):
        bert_jax.pretrain(copy.deepcopy(config), run, texts=documents[1:])
    assert not list(run.glob("*.tmp"))

    moved = run.rename(tmp_path / "moved")  # it has its text in it
    forked = {"fork": moved, "quiet": True}
    config.data.source = str(moved / "texts.jsonl")
    bert_jax.pretrain(copy.deepcopy(config), tmp_path / "fork", **forked)
    config.data.source = "builtin"
    bert_jax.pretrain(config, tmp_path / "other", texts=documents, **forked)
    epochs = [records(tmp_path / name)[-1]["epoch"] for name in ("fork", "other")]
    assert epochs[0] == epochs[1]  # the same text, which it reads on
    own = origin.own_config(moved)
    own.steps = 4
    assert bert_jax.pretrain(own, moved, quiet=True).checkpoint == moved / "checkpoints/4"


@pytest.mark.parametrize(
    ("texts", "key_words"),
    [
        (iter([]), "texts has no texts; give one or more (a generator"),
        (["fox", 3], "texts[1] is 3; give a text, or a dictionary with a text in 'text'"),
        ([{"body": "fox"}], "texts[0] is {'body': 'fox'}; give a text"),
        ("fox", "texts is 'fox'; give a list"),
    ],
)
def test_what_are_no_texts(tiny_config, tmp_path, texts, key_words):
    with refused(key_words):
        bert_jax.pretrain(copy.deepcopy(tiny_config), tmp_path / "run", texts=texts)
    assert not (tmp_path / "run/texts.jsonl").exists()


def test_a_text_may_be_as_long_in_every_script(tmp_path, monkeypatch):
    """JSON may write a letter of another script with six bytes, where UTF-8 has two."""
    monkeypatch.setattr(memory, "MAX_LINE_BYTES", 100)
    path = tmp_path / "texts.jsonl"
    memory.write_texts(["Слово и дело", "слово " * 7], path, "text", may_replace=True)
    lines = path.read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["Слово и дело", "слово " * 7]
    assert max(map(len, lines)) < 100
    with refused("texts[1] is longer than 0 MiB; give it as several texts"):
        memory.write_texts(["fox", "слово " * 9], path, "text", may_replace=True)


def test_texts_that_end_with_an_error_leave_nothing(tiny_config, tmp_path):
    def texts():
        yield "fox"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bert_jax.pretrain(copy.deepcopy(tiny_config), tmp_path / "run", texts=texts())
    assert not list((tmp_path / "run").glob("texts*"))
    (tmp_path / "run/texts.jsonl").mkdir()
    with refused("texts.jsonl cannot be written (Is a directory); choose another workdir"):
        memory.write_texts(["fox"], tmp_path / "run/texts.jsonl", "text", may_replace=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["texts.jsonl"]
