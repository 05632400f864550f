"""The datasets of a run: splits, labels, several files by name, and refusals."""

import dataclasses

import pytest
from helpers import refused, write_file

from bert_jax import console
from bert_jax.config import DataFiles, FinetuneConfig, TaskConfig
from bert_jax.config.validation import validate_finetuning
from bert_jax.errors import UserError
from bert_jax.tasks import datasets
from bert_jax.tasks.classification import Classification
from bert_jax.tasks.datasets import Datasets, check_same_head, load_datasets, parse_sources
from bert_jax.tasks.examples import Example
from bert_jax.tasks.question_answering import QuestionAnsweringConfig


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


def test_at_least_one_example_is_held_out(table):
    """They are drawn at random, so the labels are those of all training examples."""
    task, sets = load_datasets(config(table("a.tsv", "dcba"), eval_fraction=0.01))
    assert (len(sets.train), len(sets.evals["eval"])) == (3, 1)
    assert task.labels == ("a", "b", "c", "d")


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


TAGS, AB = TaskConfig("token_classification"), TaskConfig(labels=("a", "b"))
UNKNOWN, HEAD = "the label 'c' is none of those of the training data", "head: a, b;"


@pytest.mark.parametrize(
    ("sources", "others", "key_words"),
    [
        ({"train": ""}, {}, ["data.train is empty; give"]),
        ({"train": "empty.tsv"}, {}, ["empty.tsv has no examples; "]),
        ({"train": "ab.tsv", "eval": "empty.tsv"}, {}, ["empty.tsv has no examples; "]),
        ({"train": "ab.tsv", "eval_fraction": 0.0}, {}, ["data.eval_fraction is 0, and there are"]),
        (
            {"train": "one.tsv"},
            {},
            ["one.tsv has too few examples to hold out"],
        ),
        (
            {"train": "ab.tsv"},
            {"task": TaskConfig("classification", labels=("a",))},
            ["task.labels has fewer than 2 labels: a; give all, or leave it out"],
        ),
        ({"train": "ab.tsv", "test": "no.tsv"}, {}, ["no.tsv does not exist; "]),
        ({"train": "some.tsv"}, {}, ["some.tsv:3 has no label; "]),
        ({"train": "ab.tsv", "eval": "some.tsv"}, {}, ["some.tsv:3 has no label; "]),
        ({"train": "no.tsv"}, {"task": TaskConfig(metrics=("bleu",))}, ["task.metrics has 'bleu'"]),
        (
            {"train": "ab.tsv"},
            {"task": TaskConfig("question_answering")},
            ["task.kind is 'question_answering'", "QuestionAnsweringConfig(...)"],
        ),
        ({"train": "ab.tsv", "eval": "x=ab.tsv,y=builtin@eval"}, {}, ["builtin@eval", "eval=none"]),
        (
            {"train": "ab.tsv", "test": "eval=ab.tsv"},
            {},
            ["data.test has a set eval, and the held-out examples are one too; give"],
        ),
        (
            {"train": "a.json", "test": "nbest=b.json"},
            {"task": QuestionAnsweringConfig()},
            ["a set is named nbest, and another file of predictions has its name; give it another"],
        ),
        ({"train": "."}, {"task": TaskConfig(glue="mnli")}, ["./train.tsv has no examples; give"]),
        ({"train": "ab.tsv", "eval": "abbc.tsv"}, {}, ["abbc.tsv:5: ", UNKNOWN, HEAD]),
        ({"train": "ab.tsv", "eval": "ab.tsv", "test": "abbc.tsv"}, {}, ["abbc.tsv:5: ", UNKNOWN]),
        (
            {"train": "abbc.tsv", "eval": "ab.tsv"},
            {"labels": ("a", "b")},
            ["abbc.tsv:5: ", UNKNOWN, HEAD],
        ),
        ({"train": "cafe.tsv", "eval": "cafes.tsv"}, {}, ["cafes.tsv:2: ", "how Unicode composes"]),
        ({"train": "abbc.tsv", "eval": "ab.tsv"}, {"task": AB}, ["abbc.tsv:5: ", UNKNOWN, HEAD]),
        (
            {"train": "per.conll", "eval": "loc.conll"},
            {"task": TAGS},
            ["loc.conll:3, word 2 of the sentence ('fox'): the label 'B-LOC' is none"],
        ),
    ],
)
def test_what_is_refused(table, tmp_path, monkeypatch, sources, others, key_words):
    monkeypatch.chdir(tmp_path)
    for name, labels in (("empty", ""), ("one", "a"), ("ab", "ab"), ("abbc", "abbc")):
        table(f"{name}.tsv", labels)
    table("some.tsv", ["a", ""])
    table("cafe.tsv", ["caf\u00e9", "b"])
    table("cafes.tsv", ["cafe\u0301", "b"])
    write_file(tmp_path / "per.conll", "The O\nfox B-PER\n")
    write_file(tmp_path / "loc.conll", "The O\n\nThe O\nfox B-LOC\n")
    write_file(tmp_path / "train.tsv", "index\tsentence1\tsentence2\tgold_label\n0\tA\tB\t-\n")
    write_file(tmp_path / "dev_matched.tsv", "")
    settings = config(**sources, task=others.get("task"))
    with refused(*key_words):
        load_datasets(settings, others.get("labels", ()))


def test_named_sources(tmp_path, monkeypatch):
    assert parse_sources("", "eval") == {}
    assert parse_sources("matched=a,mismatched=b", "eval") == {"matched": "a", "mismatched": "b"}
    for source in ("a.tsv", "tfds:glue/mnli@validation", "/lang=en/a.tsv", "../x=1/a=b.tsv"):
        assert parse_sources(source, "eval") == {"eval": source}
    for source in ("data/a.tsv", "a.tsv", "tfds:x@y", "a=b.tsv"):
        assert parse_sources(f" dev={source} ", "eval") == {"dev": source}
    with refused("a=x,a=y: two sources have the name a; rename one"):
        parse_sources("a=x,a=y", "eval")
    with refused("data.test is ','; name a file, or leave it out"):
        parse_sources(",", "test")
    for wrong in ("a,b", "a=x,b", "a b=x,c=y", "=x,b=y", "a=", "a=,b=x"):
        with pytest.raises(UserError, match=r"several sources are given as NAME=FILE,NAME=FILE$"):
            parse_sources(wrong, "eval")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lang=en").mkdir()
    (tmp_path / "lang=en" / "a.tsv").touch()
    assert parse_sources("lang=en/a.tsv", "eval") == {"eval": "lang=en/a.tsv"}
    (tmp_path / "x,y.tsv").touch()
    assert parse_sources("x,y.tsv", "eval") == {"eval": "x,y.tsv"}
    with pytest.raises(UserError, match="train is what is trained on; choose another name"):
        parse_sources("dev=a,train=b", "eval")


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
        (base[0], [("z", 0.5)]),  # labels are numbers, tags, or answers with their positions
        (base[0], [("z", ("O", "B-X"))]),
        (base[0], [("z", (("fox", 4),))]),
        ([("x", "a")], [("y", "b"), ("z", "a")]),
        ([*base[0], ("z", "a")], []),
    ]
    others = [sets(*each).fingerprint() for each in changed]
    assert len({fingerprint, *others}) == len(changed) + 1


def test_a_setting_of_another_kind_of_task_is_refused(table):
    scored = FinetuneConfig(task=TaskConfig("regression", labels=("low", "high")))
    with refused("task.labels are low, high, and regression has no labels", "leave it out"):
        validate_finetuning(scored)
    similar = config(table("a.tsv", "ab" * 9), task=TaskConfig(glue="stsb"))
    with refused("task.glue is stsb, a regression, and task.kind is classification"):
        load_datasets(similar)
    with refused("task.glue is stsb, a regression, and task.kind is classification"):
        rows = [{"text": "a", "label": "b"}]
        load_datasets(dataclasses.replace(similar, data=DataFiles()), train=rows)


def test_examples_of_ones_own_beside_held_out_ones_of_tfds(capsys):
    """As of the recipes of SQuAD, whose scores would be of another text without a word."""
    held_out = "tfds:squad/v1.1@validation"
    for train, warns in (("a.json", True), ("tfds:squad/v1.1@train", False)):
        run = FinetuneConfig(data=DataFiles(train=train, eval=held_out))
        assert datasets._sources(run, None, None) == (train, {"eval": held_out}, {})
        assert ("perhaps the recipe's own" in capsys.readouterr().out) == warns
