"""The datasets of a run: splits, labels, several files by name, and refusals."""

import dataclasses
import json

import pytest

from bert_jax import console
from bert_jax.config import DataFiles, FinetuneConfig, TaskConfig
from bert_jax.config.fields import TASKS
from bert_jax.errors import UserError
from bert_jax.tasks import make_task, task_class
from bert_jax.tasks.base import Example
from bert_jax.tasks.classification import Classification
from bert_jax.tasks.datasets import Datasets, check_same_head, load_datasets, parse_sources


@pytest.fixture
def table(tmp_path):
    """Return a function that writes a file of texts and labels and returns its path."""

    def write(name, labels):
        path = tmp_path / name
        rows = (f"text {number}\t{label}\n" for number, label in enumerate(labels))
        path.write_text("sentence\tlabel\n" + "".join(rows))
        return str(path)

    return write


def config(train, *, task=None, **data) -> FinetuneConfig:
    return FinetuneConfig(task=task or TaskConfig(), data=DataFiles(train=train, **data))


def refusal(*args, **kwargs):
    with pytest.raises(UserError) as error:
        load_datasets(*args, **kwargs)
    return str(error.value)


def lines(examples):
    return [int(example.where.rpartition(":")[2]) for example in examples]


def test_held_out_examples(table):
    path = table("a.tsv", "ab" * 20)
    task, sets = load_datasets(config(path, eval_fraction=0.15))
    held_out = sets.evals["eval"]
    assert list(sets.evals) == ["eval"]
    assert sets.tests == {}
    assert len(held_out) == 6
    assert sorted(lines(sets.train) + lines(held_out)) == list(range(2, 42))
    for examples in (sets.train, held_out):
        assert lines(examples) == sorted(lines(examples))
    assert lines(held_out) != list(range(lines(held_out)[0], lines(held_out)[0] + 6))
    assert task.labels == ("a", "b")
    again = dataclasses.replace(config(path, eval_fraction=0.15), seed=7)
    assert load_datasets(again)[1] == sets


def test_at_least_one_example_is_held_out_and_one_is_not(table):
    _, sets = load_datasets(config(table("a.tsv", "ab"), eval_fraction=0.01))
    assert (len(sets.train), len(sets.evals["eval"])) == (1, 1)
    path = table("a.tsv", "a")
    assert refusal(config(path)) == f"{path} has too few examples to train on"


def test_a_label_that_is_only_held_out_is_known(table):
    """Held-out examples are drawn at random, so the labels are those of all training examples."""
    task, sets = load_datasets(config(table("a.tsv", "dcba"), eval_fraction=0.5))
    assert task.labels == ("a", "b", "c", "d")
    assert len(sets.train) == 2


def test_several_files_by_name(table):
    train, dev, other = table("a.tsv", "bab"), table("b.tsv", "ab"), table("c.tsv", ["", "a", ""])
    sources = {"eval": f"matched={dev}, mismatched={train}", "test": f"{other}"}
    task, sets = load_datasets(config(train, **sources))
    assert task.labels == ("a", "b")
    assert lines(sets.train) == [2, 3, 4]
    assert list(sets.evals) == ["matched", "mismatched"]
    assert [example.label for example in sets.evals["matched"]] == ["a", "b"]
    assert [example.label for example in sets.tests["test"]] == [None, "a", None]


def test_skipped_records_are_counted(tmp_path, capsys):
    header = "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2\tgold_label\n"
    row = "0\t1\t1n\tg\tA\tB\t"
    (tmp_path / "train.tsv").write_text(f"{header}{row}neutral\n{row}-\n{row}entailment\n")
    for name in ("dev_matched.tsv", "dev_mismatched.tsv"):
        (tmp_path / name).write_text(f"{header}{row}contradiction\n")
    labels = ("contradiction", "entailment", "neutral")
    with console.output(console.Level.PROGRESS):
        task, sets = load_datasets(
            config(str(tmp_path), task=TaskConfig(glue="mnli", labels=labels))
        )
    assert task.labels == labels
    assert lines(sets.train) == [2, 4]
    assert list(sets.evals) == ["matched", "mismatched"]
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"skipped    1 record of {tmp_path}/train.tsv, as the format's own readers do"]


def test_where_labels_come_from(table):
    path = table("a.tsv", ["b", "10", "9", "b", "a"])
    settings = config(path, eval=path)
    assert load_datasets(settings)[0].labels == ("10", "9", "a", "b")
    of_head = ("z", "b", "a", "9", "10")
    assert load_datasets(settings, of_head)[0].labels == of_head
    chosen = ("a", "b", "9", "10")
    settings.task.labels = chosen
    task, _ = load_datasets(settings, of_head)
    assert task.labels == task.config.labels == chosen


def test_labels_of_no_output(table):
    train, dev = table("a.tsv", "ab"), table("b.tsv", "abbc")
    for settings, labels in (
        (config(train, eval=dev), ()),
        (config(train, eval=train, test=dev), ()),
        (config(dev, eval=train), ("a", "b")),
        (config(dev, eval=train, task=TaskConfig(labels=("a", "b"))), ()),
    ):
        message = refusal(settings, labels)
        assert message.startswith(f"{dev}:5: the label 'c' is none of those of the training data")
        assert "head: a, b;" in message


def test_a_tag_of_no_output(tmp_path):
    train, dev = tmp_path / "a.conll", tmp_path / "b.conll"
    train.write_text("The O\nfox B-PER\n")
    dev.write_text("The O\n\nThe O\nfox B-LOC\n")
    task = TaskConfig("token_classification")
    message = refusal(config(str(train), eval=str(dev), task=task))
    assert message.startswith(f"{dev}:3, word 2 of the sentence ('fox'): the label 'B-LOC' is none")
    assert load_datasets(config(str(train), eval=str(train), task=task))[0].labels == ("O", "B-PER")


def test_missing_data(table, tmp_path):
    train, empty = table("a.tsv", "ab"), table("b.tsv", "")
    assert refusal(config("")).startswith("data.train is empty; give")
    assert refusal(config(empty)).startswith(f"{empty} has no examples; ")
    assert refusal(config(train, eval=empty)).startswith(f"{empty} has no examples; ")
    missing = str(tmp_path / "no.tsv")
    assert refusal(config(train, test=missing)).startswith(f"{missing} does not exist; ")
    some = table("c.tsv", ["a", ""])
    for settings in (config(some), config(train, eval=some)):
        assert refusal(settings).startswith(f"{some}:3 has no label; ")
    unknown = config(missing, task=TaskConfig(metrics=("bleu",)))
    assert refusal(unknown).startswith("task.metrics has 'bleu'")
    (tmp_path / "train.tsv").write_text("index\tsentence1\tsentence2\tgold_label\n0\tA\tB\t-\n")
    (tmp_path / "dev_matched.tsv").touch()
    mnli = config(str(tmp_path), task=TaskConfig(glue="mnli"))
    assert refusal(mnli) == f"{tmp_path}/train.tsv has no examples; give a file that has"


def test_named_sources(tmp_path, monkeypatch):
    assert parse_sources("", "eval") == {}
    assert parse_sources("matched=a,mismatched=b", "eval") == {"matched": "a", "mismatched": "b"}
    for source in ("a.tsv", "tfds:glue/mnli@validation", "/lang=en/a.tsv", "../x=1/a=b.tsv"):
        assert parse_sources(source, "eval") == {"eval": source}
    for source in ("data/a.tsv", "a.tsv", "tfds:x@y", "a=b.tsv"):
        assert parse_sources(f" dev={source} ", "eval") == {"dev": source}
    for wrong in ("a,b", "a=x,b", "a=x,a=y", "a b=x,c=y", "=x,b=y", "a=", "a=,b=x"):
        with pytest.raises(UserError, match=r"several sources are given as NAME=FILE,NAME=FILE$"):
            parse_sources(wrong, "eval")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lang=en").mkdir()
    (tmp_path / "lang=en" / "a.tsv").touch()
    assert parse_sources("lang=en/a.tsv", "eval") == {"eval": "lang=en/a.tsv"}


def test_make_task():
    for kind in TASKS:
        task = make_task(task_class(kind).settings(kind=kind, labels=("a", "b")))
        assert type(task) is task_class(kind)
        assert task.labels == ("a", "b")
    with pytest.raises(UserError, match=r"task\.kind is 'question_answering', .* write Question"):
        make_task(TaskConfig("question_answering"))


def test_an_initial_head_must_fit():
    task = Classification(TaskConfig(), ("a", "b"))
    check_same_head(task, TaskConfig(labels=("a", "b"), metrics=("f1",)))
    check_same_head(task, TaskConfig())  # one whose labels have no names
    for labels in (("b", "a"), ("a",), ("a", "b", "c")):
        with pytest.raises(UserError, match=r"^--init has the labels .* the task a, b: the order"):
            check_same_head(task, TaskConfig(labels=labels))
    with pytest.raises(UserError, match=r"^--init is for regression, the config for class"):
        check_same_head(task, TaskConfig("regression", labels=("a", "b")))


def test_fingerprint():
    def sets(train, evals, tests=()):
        def examples(pairs):
            return [Example(None, f"a:{n}", (text,), y) for n, (text, y) in enumerate(pairs)]

        named_tests = {"test": examples(tests)}
        return Datasets(examples(train), {"eval": examples(evals)}, named_tests)

    base = [("x", "a"), ("y", "b")], [("z", "a")]
    fingerprint = sets(*base).fingerprint()
    assert fingerprint == sets(*base, [("t", "a")]).fingerprint()
    changed = [
        ([("X", "a"), ("y", "b")], base[1]),
        ([("x", "b"), ("y", "b")], base[1]),
        ([("y", "b"), ("x", "a")], base[1]),
        (base[0], [("z", "b")]),
        (base[0], [("Z", "a")]),
        ([("x", "a")], [("y", "b"), ("z", "a")]),
        ([*base[0], ("z", "a")], []),
    ]
    others = [sets(*each).fingerprint() for each in changed]
    assert len({fingerprint, *others}) == len(changed) + 1


def test_a_fingerprint_of_every_kind_of_task(tmp_path):
    """Labels are strings, numbers, tags, and answers with their positions."""
    question = {"id": "q", "question": "Who?", "context": "The fox", "is_impossible": False}
    answers = {"text": ["fox"], "answer_start": [4]}
    choices = {"a": "A", "b": "B", "c": "C", "d": "D", "label": "1"}
    files = {
        "question_answering": {**question, "answers": answers},
        "multiple_choice": choices,
        "regression": {"a": "A", "label": 2.5},
        "token_classification": {"a": ["A", "b"], "label": ["O", "B-X"]},
    }
    prints = set()
    for kind, row in files.items():
        path = tmp_path / f"{kind}.jsonl"
        path.write_text(json.dumps(row))
        text = "a,b,c,d" if kind == "multiple_choice" else "a"
        settings = config(
            str(path), eval=str(path), text=text, task=task_class(kind).settings(kind=kind)
        )
        prints.add(load_datasets(settings)[1].fingerprint())
    assert len(prints) == 4
