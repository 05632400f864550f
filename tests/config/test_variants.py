"""A group of settings whose class one of its fields chooses."""

import dataclasses
import json
from typing import ClassVar

import pytest
from helpers import refused

from bert_jax.config import FinetuneConfig, TrainConfig, settings
from bert_jax.config.settings import Variants, setting
from bert_jax.tasks.embedding import EmbeddingTaskConfig


class Circle:
    """Found by the name "test_variants:Circle" where it is asked for."""


KINDS = {"circle": Circle}


@dataclasses.dataclass(slots=True)
class ShapeConfig:
    variants: ClassVar = Variants("kind", KINDS, dropped=("side", "corners"))
    kind: str = setting("circle", "kind of shape")
    size: int = setting(1, "of both")
    color: str = setting("red", "of both")


@dataclasses.dataclass(slots=True)
class SquareConfig(ShapeConfig):
    kind: str = setting("square", "kind of shape")
    color: str = setting("blue", "of both")
    side: int = setting(2, "of a square alone")


class Square:
    settings = SquareConfig


Circle.settings = ShapeConfig
KINDS["square"] = f"{__name__}:Square"


@dataclasses.dataclass(slots=True)
class Drawing:
    width: int = setting(5, "of the paper")
    shape: ShapeConfig = dataclasses.field(default_factory=ShapeConfig)


def test_json_is_read_as_the_class_that_it_names():
    drawing = Drawing(shape=SquareConfig(side=3))
    values = json.loads(settings.to_json(drawing))
    assert settings.from_dict(Drawing, values, "here") == drawing
    assert settings.from_dict(Drawing, {"shape": {"kind": "square"}}, "").shape == SquareConfig()
    assert settings.from_dict(Drawing, {"shape": {}}, "").shape == ShapeConfig()


def test_fields_that_other_classes_had_in_older_files_are_dropped():
    values = {"kind": "square", "size": 4, "side": 3, "corners": 4}
    assert settings.from_dict(ShapeConfig, values, "here") == SquareConfig(size=4, side=3)
    values["kind"] = "circle"
    assert settings.from_dict(ShapeConfig, values, "here") == ShapeConfig(size=4)


@pytest.mark.parametrize(
    ("drawing", "words", "expected"),
    [
        (Drawing(), {"kind": "square"}, SquareConfig()),
        (Drawing(), {"side": "3", "kind": "square"}, SquareConfig(side=3)),
        (Drawing(shape=ShapeConfig(size=7)), {"kind": "square"}, SquareConfig(size=7)),
        (
            Drawing(shape=ShapeConfig(color="green")),
            {"kind": "square"},
            SquareConfig(color="green"),
        ),
        (Drawing(shape=SquareConfig(side=3, size=4)), {"kind": "circle"}, ShapeConfig(size=4)),
    ],
)
def test_the_command_line_chooses_a_class_and_keeps_what_was_set(drawing, words, expected):
    settings.override_all(drawing, [(f"shape.{name}", text) for name, text in words.items()])
    assert drawing.shape == expected
    settings.check(drawing)


@pytest.mark.parametrize(
    ("call", "key_words"),
    [
        (lambda: settings.override(Drawing(), "shape.kind", "sqare"), "mean square"),
        (lambda: settings.override(Drawing(), "shape.side", "3"), "shape.side: no such field"),
        (lambda: settings.check(Drawing(shape=ShapeConfig(kind="square"))), "SquareConfig(...)"),
        (lambda: settings.check(Drawing(shape=ShapeConfig(kind="oval"))), "of your own"),
        (lambda: settings.check(Drawing(shape=SquareConfig(side=0))), "shape.side is 0"),
        (lambda: settings.check(Drawing(shape={})), "config.shape is of the class dict, not"),
        (
            lambda: settings.check(FinetuneConfig(task=EmbeddingTaskConfig(embedding={}))),
            "config.task.embedding is of the class dict, not EmbeddingConfig",
        ),
        (lambda: settings.from_dict(Drawing, {"shape": {"sise": 1}}, "x"), "mean size"),
        (lambda: settings.from_dict(Drawing, {"shape": {"kind": 3}}, "x"), "shape.kind is 3"),
        (lambda: settings.from_dict(Drawing, {"widht": 3}, "x"), "x: unknown field widht"),
        (
            lambda: settings.override(TrainConfig(), "data.phases", "[{'begin': 0.5}]"),
            "data.phases[0]: unknown field begin; there are start, max_length",
        ),
        (lambda: settings.from_dict(Drawing, {"width": "wide"}, "x"), "width is 'wide'"),
    ],
)
def test_what_is_refused(call, key_words):
    with refused(key_words):
        call()


def test_names_and_defaults_are_those_of_the_class():
    assert settings.names(Drawing) == [
        "width",
        *(f"shape.{name}" for name in ("kind", "size", "color", "side")),
    ]
    drawing = Drawing(width=6, shape=SquareConfig(side=3))
    assert settings.defaults(drawing) == settings.flatten(Drawing(shape=SquareConfig()))
