"""Multiple choice: features by hand, SWAG's columns, and refusals."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import model_config, refused

from bert_jax.batches.buckets import NO_LABEL, Features
from bert_jax.config import DataFiles, TaskConfig
from bert_jax.errors import UserError
from bert_jax.tasks.datasets import read_examples
from bert_jax.tasks.examples import Example
from bert_jax.tasks.foreign import UnknownColumns
from bert_jax.tasks.multiple_choice import MultipleChoice
from bert_jax.tasks.readers import to_number
from bert_jax.text.classes import ClassName

MODEL = model_config()
SWAG = "sent1,sent2,ending0,ending1,ending2,ending3"
HEADER = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,"
HEADER += "ending0,ending1,ending2,ending3,label"
LINE = '0,v,3,"The fox jumps, over. The dog","The fox jumps, over.",The dog,gold,'
LINE += 'jumps.,is lazy.,"jumps, over.",who?,'
TEXTS = ("The fox jumps, over.", "The dog", "jumps.", "is lazy.", "jumps, over.", "who?")


def task(*labels, **fields) -> MultipleChoice:
    return MultipleChoice(TaskConfig("multiple_choice", labels=labels, **fields))


def read(path, task=None, *, is_labelled=True, text=SWAG):
    task, data = task or MultipleChoice(TaskConfig()), DataFiles(text=text)
    return read_examples(task, str(path), data, labelled=is_labelled)


def test_swag(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text(f"{HEADER}\n{LINE}2\n{LINE}\n")
    assert read(path, is_labelled=False) == [
        Example(None, f"{path}:2", TEXTS, "2"),
        Example(None, f"{path}:3", TEXTS, None),
    ]
    with pytest.raises(UserError, match=r"train\.csv:3 has no label; "):
        read(path)
    assert task().label_names(read(path, is_labelled=False)) == ("0", "1", "2", "3")


def test_a_model_from_elsewhere_reads_the_columns_of_swag(tmp_path):
    path = tmp_path / "dev.csv"
    path.write_text(f"{HEADER}\n{LINE}1\n")
    (example,) = read_examples(task(), str(path), UnknownColumns(), labelled=True)
    assert example.texts == TEXTS
    other = UnknownColumns(text="sent1,sent2,ending0,ending1")
    (example,) = read_examples(task(), str(path), other, labelled=False)
    assert example.texts == TEXTS[:4]


def test_a_dictionary_of_choices_has_its_label_and_its_id():
    value = {"context": "A fox", "choices": ["runs", "reads"], "label": 1, "id": "x"}
    example = task("0", "1").example_from(value, 0, UnknownColumns())
    assert (example.label, example.id, example.texts) == ("1", "x", ("A fox", "", "runs", "reads"))
    named = dataclasses.replace(UnknownColumns(), label="gold")
    value = {"context": "A fox", "choices": ["runs", "reads"], "gold": 0}
    assert task("0", "1").example_from(value, 0, named).label == "0"
    value["label"] = value.pop("gold")
    assert task("0", "1").example_from(value, 0, named).label == "0"


def test_each_choice_is_a_pair_of_context_and_ending(wordpiece):
    texts = ("The fox jumps.", "The dog", "jumped", "over the lazy fox")
    examples = [
        Example(None, "a:1", texts, "1"),
        Example(None, "a:2", (*texts[:1], "", "fox", "."), None),
    ]
    features = task("0", "1").features(examples, wordpiece, MODEL, 16)
    context = [2, 5, 6, 7, 8, 15, 3]
    assert [sequence.tolist() for sequence in features.sequences] == [
        [*context, 5, 12, 7, 9, 3],
        [*context, 5, 12, 10, 5, 11, 6, 3],
        [*context, 6, 3],
        [*context, 15, 3],
    ]
    assert features.second_starts == [7] * 4
    assert features.labels == [1, NO_LABEL]
    assert features.example_indices == [0, 1]
    assert (features.choices, features.truncated, len(features)) == (2, 0, 2)
    shorter = task("0", "1").features(examples, wordpiece, MODEL, 12)
    assert shorter.sequences[0].tolist() == [*context, 5, 12, 7, 9, 3]
    assert shorter.sequences[1].tolist() == [*context, 5, 12, 10, 5, 3]  # by itself
    assert shorter.truncated == 1
    fewer = Example(None, "a:3", texts[:3], "0")
    with refused("a:3 has 1 choices, and the first example 2; give each as many"):
        task("0", "1").features([*examples, fewer], wordpiece, MODEL, 16)


def test_a_number_of_pandas_is_a_choice():
    record = {"sent1": "a", "sent2": "b", **{f"ending{i}": "c" for i in range(2)}}
    data = DataFiles(text="sent1,sent2,ending0,ending1")
    found = MultipleChoice(TaskConfig()).example_from({**record, "label": 1.0}, 0, data)
    assert found.label == "1"


def test_a_class_is_a_choice_by_its_number():
    """Its name may be another number."""
    name = ClassName("1")
    name.number = 0
    record = {"sent1": "a", "sent2": "b", "ending0": "c", "ending1": "c", "label": name}
    data = DataFiles(text="sent1,sent2,ending0,ending1")
    assert MultipleChoice(TaskConfig()).example_from(record, 0, data).label == "0"
    assert to_number(name) == 0.0


def test_an_empty_start_of_a_data_frame():
    record = {"sent1": "a", "sent2": None, **{f"ending{i}": "c" for i in range(2)}}
    data = DataFiles(text="sent1,sent2,ending0,ending1")
    assert MultipleChoice(TaskConfig()).example_from(record, 0, data).texts[1] == ""


@pytest.mark.parametrize("label", ["4", "-2", "1.0", "first", " 1"])
def test_labels_that_are_no_choice(tmp_path, label):
    path = tmp_path / "a.csv"
    path.write_text(f"{HEADER}\n{LINE}0\n{LINE}{label}\n")
    with refused(f"{path}:3: the label {label!r} is none of the 4 choices"):
        read(path)


ROW = {"sent1": "A", "sent2": "", "ending0": "b", "ending1": "c", "label": 1}
COLUMNS = "sent1,sent2,ending0,ending1"


@pytest.mark.parametrize(
    ("changes", "text", "key_words"),
    [
        ({}, SWAG, "has no column 'ending2'"),
        ({}, "sent1,sent2,ending0", "has 3 texts"),
        ({"ending1": " "}, COLUMNS, "ending1 is empty"),
        ({"sent1": ""}, COLUMNS, "sent1 is empty"),
        ({"sent2": 3}, COLUMNS, "the number 3 is where a text is expected; put it in quotes"),
        ({"sent2": [3]}, COLUMNS, "sent2 is empty"),
    ],
)
def test_rows_that_are_refused(tmp_path, changes, text, key_words):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({**ROW, **changes}))
    with refused(f"{path}:1", key_words):
        read(path, text=text)


def test_a_head_of_another_number_of_choices(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"{HEADER}\n{LINE}1\n")
    assert len(read(path, task("0", "1", "2", "3"))) == 1
    with refused("has 4 choices, and the task has 2; give as many"):
        read(path, task("0", "1"))
    for labels in (("1", "0", "2", "3"), ("a", "b", "c", "d")):
        with pytest.raises(UserError, match=r"has 4 choices, .* must be 0, 1, 2, 3$"):
            read(path, task(*labels))


def test_predictions():
    examples = [Example(None, "a:1", TEXTS, "2"), Example("x", "a:2", TEXTS, "0")]
    chooser, predictions = task("0", "1", "2", "3"), [None] * 2
    features = Features(notes=[(0, 1)] * 2)
    predictions[0] = chooser.collect(None, features, 0, np.array([0, 1, 4, 2], np.float32))
    predictions[1] = chooser.collect(None, features, 1, np.array([0, 0, 0, 9], np.float32))
    assert chooser.score(examples, predictions)["accuracy"] == 0.5
    assert chooser.constant_score([*examples, examples[0]]) == pytest.approx(2 / 3)
    values = chooser.to_json(examples[1], predictions[1])
    softmax = np.exp([0, 0, 0, 9]) / np.exp([0, 0, 0, 9]).sum()
    assert (values["choice"], values["probability"]) == (3, pytest.approx(softmax[3], rel=1e-6))
    assert values["probabilities"] == pytest.approx(softmax.tolist(), rel=1e-5)
    file = chooser.files(examples, predictions)[".jsonl"]
    lines = [json.loads(line) for line in file.splitlines()]
    assert [(line["id"], line["prediction"], line["label"]) for line in lines] == [
        (0, "2", "2"),
        ("x", "3", "0"),
    ]
