"""GLUE's tasks, in its own files and as TensorFlow datasets: columns, labels, skipped records."""

import gzip
import json
import sys
from typing import ClassVar

import numpy as np
import pytest
from helpers import refused

from bert_jax.errors import UserError
from bert_jax.tasks import glue
from bert_jax.tasks.readers import Record

# Of each task the header of its training file and two of its lines, the header of its test file and
# a line of that, in the form in which gluebenchmark.com has them.
FILES = {
    "cola": (
        "",
        "gj04\t1\t\tThey drank.\ncj99\t0\t*\tThey drank the pub\n",
        "index\tsentence",
        "0\tBill whistled.\n",
    ),
    "sst2": ("sentence\tlabel", "hide \t0\na gem \t1\n", "index\tsentence", "0\tuneasy .\n"),
    "mrpc": (
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        '1\t70\t71\tA "one\tB\n0\t72\t73\tC\tD\n',
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "0\t10\t11\tE\tF\n",
    ),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "0\tm\tf\ty\t1\tn\tn\tA\tB\t5.000\n1\tm\tf\ty\t2\tn\tn\tC\tD\t3.8\n",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2",
        "0\tm\tf\ty\t1\tn\tn\tE\tF\n",
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "133\t1\t2\tHow?\tWhy?\t0\n134\t3\t4\tHow?\tHow so?\t1\n",
        "id\tquestion1\tquestion2",
        "0\tWho?\tWhat?\n",
    ),
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label",
        "0\t3\t3n\tg\tA\tB\tneutral\tneutral\n1\t4\t4e\tg\tC\tD\tentailment\tentailment\n",
        "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2",
        "0\t5\t5x\tg\tE\tF\n",
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel",
        "0\tWhen?\tThen.\tentailment\n1\tWho?\tIt.\tnot_entailment\n",
        "index\tquestion\tsentence",
        "0\tWhat?\tThat.\n",
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel",
        "0\tA\tB\tnot_entailment\n1\tC\tD\tentailment\n",
        "index\tsentence1\tsentence2",
        "0\tE\tF\n",
    ),
    "wnli": (
        "index\tsentence1\tsentence2\tlabel",
        "0\tA\tB\t1\n1\tC\tD\t0\n",
        "index\tsentence1\tsentence2",
        "0\tE\tF\n",
    ),
}
TRAIN = {
    "cola": [
        (None, ("They drank.",), "acceptable"),
        (None, ("They drank the pub",), "unacceptable"),
    ],
    "sst2": [(None, ("hide ",), "negative"), (None, ("a gem ",), "positive")],
    "mrpc": [(None, ('A "one', "B"), "equivalent"), (None, ("C", "D"), "not_equivalent")],
    "stsb": [(0, ("A", "B"), 5.0), (1, ("C", "D"), 3.8)],
    "qqp": [(133, ("How?", "Why?"), "not_duplicate"), (134, ("How?", "How so?"), "duplicate")],
    "mnli": [(0, ("A", "B"), "neutral"), (1, ("C", "D"), "entailment")],
    "qnli": [(0, ("When?", "Then."), "entailment"), (1, ("Who?", "It."), "not_entailment")],
    "rte": [(0, ("A", "B"), "not_entailment"), (1, ("C", "D"), "entailment")],
    "wnli": [(0, ("A", "B"), "entailment"), (1, ("C", "D"), "not_entailment")],
}
TEST = {
    "cola": ("Bill whistled.",),
    "sst2": ("uneasy .",),
    "mrpc": ("E", "F"),
    "stsb": ("E", "F"),
    "qqp": ("Who?", "What?"),
    "mnli": ("E", "F"),
    "qnli": ("What?", "That."),
    "rte": ("E", "F"),
    "wnli": ("E", "F"),
}


def values(records):
    return [tuple(r.fields.get(key) for key in ("id", "texts", "label")) for r in records]


@pytest.mark.parametrize("name", glue.LAYOUTS)
def test_own_files(tmp_path, name):
    header, lines, test_header, test_lines = FILES[name]
    train, test = tmp_path / "train.tsv", tmp_path / "test.tsv.gz"
    train.write_text(f"{header}\n{lines}" if header else lines)
    test.write_bytes(gzip.compress(f"{test_header}\n{test_lines}".encode()))
    records = list(glue.read(name, str(train)))
    assert values(records) == TRAIN[name]
    assert records[0].where == f"{train}:{2 if header else 1}"
    assert values(glue.read(name, str(test))) == [(0, TEST[name], None)]


def test_tasks_are_those_of_the_benchmark():
    tasks = map(glue.task, glue.LAYOUTS)
    assert {task.glue: (task.kind, *task.metrics) for task in tasks} == {
        "cola": ("classification", "matthews"),
        "sst2": ("classification", "accuracy"),
        "mrpc": ("classification", "accuracy", "f1"),
        "stsb": ("regression", "pearson", "spearman"),
        "qqp": ("classification", "accuracy", "f1"),
        "mnli": ("classification", "accuracy"),
        "qnli": ("classification", "accuracy"),
        "rte": ("classification", "accuracy"),
        "wnli": ("classification", "accuracy"),
    }


@pytest.mark.parametrize("name", glue.LAYOUTS)
def test_labels_and_fields_are_those_of_tfds(name):
    from tensorflow_datasets.text.glue import Glue

    config = Glue.builder_configs[name]
    task = glue.LAYOUTS[name]
    assert task.labels == tuple(config.label_classes or ())
    assert task.fields == tuple(config.text_features)
    if name not in ("mrpc", "cola"):  # which TFDS reads by other means
        assert (*task.texts, task.label) == (*config.text_features.values(), config.label_column)


def test_sources():
    assert glue.sources("rte") == (
        "tfds:glue/rte@train",
        {"eval": "tfds:glue/rte@validation"},
        {"test": "tfds:glue/rte@test"},
    )
    parts = ("matched", "mismatched")
    assert glue.sources("mnli") == (
        "tfds:glue/mnli@train",
        {part: f"tfds:glue/mnli@validation_{part}" for part in parts},
        {f"test_{part}": f"tfds:glue/mnli@test_{part}" for part in parts},
    )


@pytest.mark.parametrize("name", ["glue", "a,b=c"])
def test_sources_in_a_folder(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    train, dev = f"{folder}/train.tsv", f"{folder}/dev.tsv"
    assert glue.sources("rte", str(folder)) == (train, {"eval": dev}, {})
    (folder / "test.tsv").touch()
    (folder / "test_mismatched.tsv").touch()
    assert glue.sources("rte", f"{folder}/")[2] == {"test": f"{folder}/test.tsv"}
    parts = ("matched", "mismatched")
    assert glue.sources("mnli", str(folder)) == (
        train,
        {part: f"{folder}/dev_{part}.tsv" for part in parts},
        {f"test_{part}": f"{folder}/test_{part}.tsv" for part in parts},
    )


def test_unknown_tasks():
    names = "cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli"
    for call in (glue.layout, glue.task, glue.sources, lambda name: list(glue.read(name, "x.tsv"))):
        with pytest.raises(UserError, match=r"^GLUE has no task 'sst'; did you mean sst2"):
            call("sst")
    with pytest.raises(UserError, match=f"choose one of {names}$"):
        glue.layout("zzz")


def test_ragged_lines_have_no_fields_where_the_usual_readers_skip_them(tmp_path):
    header, lines, *_ = FILES["qqp"]
    path = tmp_path / "train.tsv"
    path.write_text(f"{header}\n1\t2\t3\tHow\n or why?\tWho?\t1\n{lines}")
    records = list(glue.read("qqp", str(path)))
    assert records[:2] == [Record(f"{path}:2", {}), Record(f"{path}:3", {})]
    assert values(records[2:]) == TRAIN["qqp"]
    header, lines, *_ = FILES["rte"]
    path.write_text(f"{header}\n{lines}2\tA\tB\n")
    with pytest.raises(UserError, match=r"train\.tsv:4: 3 fields where the header has 4"):
        list(glue.read("rte", str(path)))


def test_examples_without_an_agreed_label_have_no_fields(tmp_path):
    header, lines, *_ = FILES["mnli"]
    path = tmp_path / "dev_matched.tsv"
    path.write_text(f"{header}\n9\t3\t3n\tg\tA\tB\tneutral\t-\n{lines}")
    records = list(glue.read("mnli", str(path)))
    assert records[0] == Record(f"{path}:2", {})
    assert values(records[1:]) == TRAIN["mnli"]


@pytest.mark.parametrize(
    ("name", "label", "key_words"),
    [
        ("sst2", "2", "it must be negative, positive, or its number"),
        ("sst2", "0.5", "the label is '0.5'"),
        ("sst2", "", "the label is ''"),
        ("sst2", "nan", "the label is 'nan'"),
        ("sst2", "Positive", "the label is 'Positive'"),
        ("stsb", "5.1", "it must be a number from 0 to 5"),
        ("stsb", "nan", "the label is 'nan'"),
        ("stsb", "high", "the label is 'high'"),
    ],
)
def test_labels_that_a_task_does_not_have(tmp_path, name, label, key_words):
    task = glue.LAYOUTS[name]
    values = dict.fromkeys(task.texts, "x") | {task.label: label}
    (tmp_path / "a.tsv").write_text("\t".join(values) + "\n" + "\t".join(values.values()) + "\n")
    with refused("a.tsv:2", key_words):
        list(glue.read(name, str(tmp_path / "a.tsv")))


def test_a_file_of_another_task(tmp_path):
    (tmp_path / "train.tsv").write_text("\n".join(FILES["rte"][:2]))
    with refused("train.tsv:2 has no column 'question1'", "qqp"):
        list(glue.read("qqp", str(tmp_path / "train.tsv")))
    (tmp_path / "train.tsv").write_text("a\t1\t\tb\na\t1\tb\n")
    with refused("train.tsv:2: 3 fields where 4 are expected"):
        list(glue.read("cola", str(tmp_path / "train.tsv")))


def test_hugging_face_files(tmp_path):
    rows = [
        {"premise": "A", "hypothesis": "B", "label": 2, "idx": 7},
        {"premise": "C", "hypothesis": "D", "label": -1, "idx": 8},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    expected = [(7, ("A", "B"), "contradiction"), (8, ("C", "D"), None)]
    assert values(glue.read("mnli", str(tmp_path / "a.jsonl"))) == expected
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    assert values(glue.read("mnli", str(tmp_path / "a.csv"))) == expected
    (tmp_path / "b.jsonl").write_text(json.dumps({**rows[0], "label": True}))
    with pytest.raises(UserError, match="the label is True"):
        list(glue.read("mnli", str(tmp_path / "b.jsonl")))


def small_glue():
    """Return a builder of small datasets, which TFDS then loads instead of downloading GLUE."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import registered

    with registered.skip_registration():

        class Glue(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("2.0.0")
            BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name=n) for n in glue.LAYOUTS]

            @property
            def task(self):
                return glue.LAYOUTS[self.builder_config.name]

            def _info(self):
                names = list(self.task.labels)
                features = {name: tfds.features.Text() for name in self.task.fields}
                features["label"] = tfds.features.ClassLabel(names=names) if names else np.float32
                features["idx"] = np.int32
                return tfds.core.DatasetInfo(
                    builder=self, features=tfds.features.FeaturesDict(features)
                )

            def _split_generators(self, dl_manager):
                labels = [0, len(self.task.labels) - 1] if self.task.labels else [0.0, 3.8]
                parts = [f"_{part}" for part in self.task.parts] or [""]
                splits = {"train": self._generate_examples(labels)}
                splits |= {f"validation{part}": self._generate_examples(labels) for part in parts}
                return splits | {f"test{part}": self._generate_examples([-1]) for part in parts}

            def _generate_examples(self, labels):
                for index, label in enumerate(labels):
                    texts = (("First é.", "Second.")[index], "Other.")
                    fields = dict(zip(self.task.fields, texts, strict=False))
                    yield index, {**fields, "label": label, "idx": index}

    return Glue


def test_tfds_without_tensorflow(tmp_path, monkeypatch):
    """GLUE's features under its own name, prepared on the spot with a few examples."""
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path))
    for name in ("cola", "stsb", "mnli"):
        builder = small_glue()(config=name, data_dir=str(tmp_path), file_format="array_record")
        builder.download_and_prepare()

    def read(name, source):
        return sorted(values(glue.read(name, source)))

    cola = glue.sources("cola")
    assert read("cola", cola[0]) == [
        (0, ("First é.",), "unacceptable"),
        (1, ("Second.",), "acceptable"),
    ]
    assert read("cola", cola[2]["test"]) == [(0, ("First é.",), None)]
    stsb = glue.sources("stsb")
    assert read("stsb", stsb[0]) == [
        (0, ("First é.", "Other."), 0.0),
        (1, ("Second.", "Other."), pytest.approx(3.8)),
    ]
    assert read("stsb", stsb[2]["test"]) == [(0, ("First é.", "Other."), None)]
    for source in glue.sources("mnli")[1].values():
        assert [label for _, _, label in read("mnli", source)] == ["entailment", "contradiction"]
    assert "tensorflow" not in sys.modules
    assert not isinstance(read("stsb", stsb[0])[0][2], np.generic)
