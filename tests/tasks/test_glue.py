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

# Of each task the header of its training file, two of its lines, the header of its test file and
# the start of a line of that, as gluebenchmark.com has them; here with "|" for tabs.
PAIRS = ("index|sentence1|sentence2|label", "index|sentence1|sentence2", "0|")
MNLI = "index|promptID|pairID|genre|sentence1|sentence2"
STSB = "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2"
MRPC = "#1 ID|#2 ID|#1 String|#2 String"
FILES = {
    "cola": ("", "gj04|1||A", "cj99|0|*|C", "index|sentence", "0|"),
    "sst2": ("sentence|label", "A |0", "C |1", "index|sentence", "0|"),
    "mrpc": (f"Quality|{MRPC}", '1|70|71|A "one|B', "0|72|73|C|D", f"index|{MRPC}", "0|10|11|"),
    "stsb": (f"{STSB}|score", "0|m|f|y|1|n|n|A|B|5.000", "1|m|f|y|2|n|n|C|D|3.8", STSB, "0|" * 7),
    "qqp": (
        "id|qid1|qid2|question1|question2|is_duplicate",
        *("133|1|2|A|B|0", "134|3|4|C|D|1"),
        *("id|question1|question2", "0|"),
    ),
    "mnli": (
        f"{MNLI}|label1|gold_label",
        *("0|3|3n|g|A|B|neutral|neutral", "1|4|4e|g|C|D|entailment|entailment"),
        *(MNLI, "0|5|5x|g|"),
    ),
    "qnli": (
        "index|question|sentence|label",
        *("0|A|B|entailment", "1|C|D|not_entailment"),
        *("index|question|sentence", "0|"),
    ),
    "rte": (PAIRS[0], "0|A|B|not_entailment", "1|C|D|entailment", *PAIRS[1:]),
    "wnli": (PAIRS[0], "0|A|B|1", "1|C|D|0", *PAIRS[1:]),
}
LABELS = {  # of the two lines
    "cola": ("acceptable", "unacceptable"),
    "sst2": ("negative", "positive"),
    "mrpc": ("equivalent", "not_equivalent"),
    "stsb": (5.0, 3.8),
    "qqp": ("not_duplicate", "duplicate"),
    "mnli": ("neutral", "entailment"),
    "qnli": ("entailment", "not_entailment"),
    "rte": ("not_entailment", "entailment"),
    "wnli": ("entailment", "not_entailment"),
}
SINGLE = {"cola": (("A",), ("C",)), "sst2": (("A ",), ("C ",))}
TEXTS = dict.fromkeys(FILES, (("A", "B"), ("C", "D"))) | SINGLE
TEXTS["mrpc"] = (('A "one', "B"), ("C", "D"))
IDS = dict.fromkeys(FILES, (0, 1)) | {"qqp": (133, 134)}
IDS |= dict.fromkeys(("cola", "sst2", "mrpc"), (None, None))
TRAIN = {name: [*zip(IDS[name], TEXTS[name], LABELS[name], strict=True)] for name in FILES}


def training_file(name: str) -> tuple[str, str]:
    """Return the header, empty where there is none, and the lines, each with its end."""
    header, *lines = (line.replace("|", "\t") + "\n" for line in FILES[name][:3])
    return header.lstrip("\n"), "".join(lines)


def values(records):
    return [tuple(r.fields.get(key) for key in ("id", "texts", "label")) for r in records]


@pytest.mark.parametrize("name", glue.LAYOUTS)
def test_own_files(tmp_path, name):
    header, lines = training_file(name)
    train, test = tmp_path / "train.tsv", tmp_path / "test.tsv.gz"
    train.write_text(header + lines)
    texts = ("E",) if name in SINGLE else ("E", "F")
    content = f"{FILES[name][3]}\n{FILES[name][4]}{'|'.join(texts)}\n"
    test.write_bytes(gzip.compress(content.replace("|", "\t").encode()))
    records = list(glue.read(name, str(train)))
    assert values(records) == TRAIN[name]
    assert records[0].where == f"{train}:{2 if header else 1}"
    assert values(glue.read(name, str(test))) == [(0, texts, None)]


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
    header, lines = training_file("qqp")
    path = tmp_path / "train.tsv"
    path.write_text(f"{header}1\t2\t3\tHow\n or why?\tWho?\t1\n{lines}")
    records = list(glue.read("qqp", str(path)))
    assert records[:2] == [Record(f"{path}:2", {}), Record(f"{path}:3", {})]
    assert values(records[2:]) == TRAIN["qqp"]
    path.write_text("".join(training_file("rte")) + "2\tA\tB\n")
    with pytest.raises(UserError, match=r"train\.tsv:4: 3 fields where the header has 4"):
        list(glue.read("rte", str(path)))


def test_examples_without_an_agreed_label_have_no_fields(tmp_path):
    header, lines = training_file("mnli")
    path = tmp_path / "dev_matched.tsv"
    path.write_text(f"{header}9\t3\t3n\tg\tA\tB\tneutral\t-\n{lines}")
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
    (tmp_path / "train.tsv").write_text("".join(training_file("rte")))
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
