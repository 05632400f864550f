"""GLUE's tasks, in its own files and as datasets: columns, labels, skipped records."""

import json
import math

import pytest
from helpers import refused, write_file

from bert_jax.config import DataFiles, FinetuneConfig, TaskConfig
from bert_jax.tasks import glue, make_task
from bert_jax.tasks.datasets import load_datasets, read_examples
from bert_jax.tasks.readers import Record

COLUMNS = DataFiles()  # none that is named

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
    train = write_file(tmp_path / "train.tsv", header + lines)
    texts = ("E",) if name in SINGLE else ("E", "F")
    content = f"{FILES[name][3]}\n{FILES[name][4]}{'|'.join(texts)}\n"
    test = write_file(tmp_path / "test.tsv.gz", content.replace("|", "\t"))
    records = list(glue.read(name, train, COLUMNS))
    assert values(records) == TRAIN[name]
    assert records[0].where == f"{train}:{2 if header else 1}"
    assert values(glue.read(name, test, COLUMNS)) == [(0, texts, None)]


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


@pytest.mark.parametrize(
    ("name", "skipped"),
    [
        ("qqp", "1\t2\t3\tHow\n or why?\tWho?\t1\n"),  # ragged
        ("mnli", "9\t3\t3n\tg\tA\tB\tneutral\t-\n"),  # without an agreed label
    ],
)
def test_lines_that_the_usual_readers_skip_have_no_fields(tmp_path, name, skipped):
    header, lines = training_file(name)
    path = write_file(tmp_path / "train.tsv", header + skipped + lines)
    empty = [Record(f"{path}:{2 + number}", {}) for number in range(skipped.count("\n"))]
    records = list(glue.read(name, path, COLUMNS))
    assert records[: len(empty)] == empty
    assert values(records[len(empty) :]) == TRAIN[name]


REVIEW, SCORE = "sentence\tlabel\nA\t", "sentence1\tsentence2\tscore\nA\tB\t"


@pytest.mark.parametrize(
    ("name", "content", "key_words"),
    [
        ("sst2", f"{REVIEW}2\n", "2: the label is '2'; it must be negative, positive, or its"),
        ("sst2", f"{REVIEW}Positive\n", "2: the label is 'Positive'"),
        ("stsb", f"{SCORE}5.1\n", "2: the label is '5.1'; it must be a number from 0 to 5"),
        ("stsb", f"{SCORE}nan\n", "2: the label is 'nan'"),
        ("cola", "a\t1\t\tb\na\t1\tb\n", "2: 3 fields where 4 are expected"),
        ("rte", "".join(training_file("rte")) + "2\tA\tB\n", "4: 3 fields where the header has 4"),
        ("qqp", "".join(training_file("rte")), "2 has no column 'question1', as qqp has"),
        ("sst", REVIEW, "GLUE has no task 'sst'; did you mean sst2"),
        ("zzz", REVIEW, "choose one of cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli"),
    ],
)
def test_what_is_refused(tmp_path, name, content, key_words):
    with refused(key_words):
        list(glue.read(name, write_file(tmp_path / "a.tsv", content), COLUMNS))


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_datasets_of_hugging_face_and_tensorflow(tmp_path, kind):
    """Labels are numbers or names, and -1 or none where they are not known."""
    rows = [
        {"premise": "A", "hypothesis": "B", "label": label, "idx": number}
        for number, label in enumerate((2, "neutral", -1))
    ]
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    if kind == "jsonl":
        lines = map(json.dumps, [*rows, {**rows[0], "label": None}, {**rows[0], "label": True}])
    path = write_file(tmp_path / f"a.{kind}", "\n".join(lines))
    records = glue.read("mnli", path, COLUMNS)
    for number, label in enumerate(("contradiction", "neutral", None)):
        assert values([next(records)]) == [(number, ("A", "B"), label)]
    if kind == "jsonl":
        assert next(records).fields["label"] is None
        with refused("the label is True"):
            next(records)


def test_empty_labels_and_ids(tmp_path):
    """An example to predict has no label; an id that is missing is no text "None"."""
    path = write_file(tmp_path / "a.tsv", f"{REVIEW}\n")
    task = make_task(glue.task("sst2"))
    assert [each.label for each in read_examples(task, path, COLUMNS, labelled=False)] == [None]
    with refused("a.tsv:2 has no label"):
        read_examples(task, path, COLUMNS, labelled=True)
    rows = [{"sentence": "A", "label": 1, "idx": number} for number in (3.0, math.nan)]
    found = read_examples(task, rows, COLUMNS, labelled=True)
    assert [each.id for each in found] == [3, None]


def test_columns_that_the_user_names(tmp_path):
    """They are read in place of the task's own, and a label may still be its number."""
    header, *lines = "sentence\tlabel\tgold\treview\n", "A\t0\t1\tB\n", "C\t1\t-1\tD\n"
    path = write_file(tmp_path / "a.tsv", header + "".join(lines))
    named = DataFiles(text="review", label="gold")
    assert values(glue.read("sst2", path, named)) == [
        (None, ("B",), "positive"),
        (None, ("D",), None),
    ]
    assert values(glue.read("sst2", path, DataFiles(label="gold")))[0] == (None, ("A",), "positive")
    with refused("a.tsv:2 has no column 'absent'"):
        list(glue.read("sst2", path, DataFiles(text="absent")))


@pytest.mark.parametrize("name", ["cola", "mrpc", "mnli"])
def test_a_task_that_is_named_without_its_recipe(tmp_path, name):
    """It has the labels of that task in their order, and its metrics, unless others are set."""
    for file in ("train", "dev", "dev_matched", "dev_mismatched"):
        write_file(tmp_path / f"{file}.tsv", "".join(training_file(name)))
    usual, data = glue.task(name), DataFiles(train=str(tmp_path))

    def completed(labels_of_head=(), **fields) -> TaskConfig:
        config = FinetuneConfig(task=TaskConfig(glue=name, **fields), data=data)
        return load_datasets(config, labels_of_head)[0].config

    assert completed() == usual
    others = usual.labels[::-1]
    assert completed(others).labels == others
    own = completed(usual.labels, labels=others, metrics=("accuracy",))
    assert (own.labels, own.metrics) == (others, ("accuracy",))
