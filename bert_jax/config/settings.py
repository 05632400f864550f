"""Typed settings: a dataclass whose fields carry their own description, choices and range.

The same declaration serves the check of a config, its JSON, `--config.FIELD=VALUE` and `--help`.
"""

import ast
import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from bert_jax.errors import UserError, nearest
from bert_jax.storage.paths import AnyPath

_LIMIT = 2**32


class Range(NamedTuple):
    """The numbers that a field accepts, in words and as a predicate."""

    description: str
    contains: Callable[[float], bool]


POSITIVE = Range("a positive number below 2**32", lambda x: 0 < x < _LIMIT)


def setting(default: Any, help: str, range: Range = POSITIVE, *, resumable: bool = False) -> Any:
    """Return a dataclass field; a run may resume with another value of a `resumable` one."""
    metadata = {"help": help, "range": range, "resumable": resumable}
    return dataclasses.field(default=default, metadata=metadata)


class Field(NamedTuple):
    """One leaf of a config: its dotted name, value, type and metadata."""

    name: str
    value: Any
    hint: Any
    metadata: typing.Mapping[str, Any]


def fields(config: Any, prefix: str = "") -> Iterator[Field]:
    """Yield the leaves of nested dataclasses."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from fields(value, name + ".")
        else:
            yield Field(name, value, hints[field.name], field.metadata)


def flatten(config: Any) -> dict[str, Any]:
    """Return the values of nested dataclasses by dotted name."""
    return {field.name: field.value for field in fields(config)}


def spellings(names: Iterable[str], value: str = "") -> dict[str, str]:
    """Return the flag of each field by its dotted name, and by the last part of it."""
    flags = {name: f"--config.{name}{value}" for name in names}
    return {name.rpartition(".")[2]: flag for name, flag in flags.items()} | flags


def check(config: Any, prefix: str = "") -> None:
    """Refuse a field of another type, none of its choices or out of range."""
    _read(type(config), dataclasses.asdict(config), prefix)


def check_class(config: Any, cls: type, name: str = "config") -> None:
    """Refuse a config of another class, or one that holds something else than its settings."""
    if not isinstance(config, cls):
        wrong = f"{name} is of the class {type(config).__name__}, not {cls.__name__}"
        raise UserError(f"{wrong}; bert_jax.recipe(NAME) returns a config to be changed")
    for group, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            check_class(getattr(config, group), typing.cast(type, hint), f"{name}.{group}")


def to_json(config: Any) -> str:
    """Return a config as indented JSON, the form of a workdir's `config.json`."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def read_json(path: AnyPath, remedy: str, kind: type = dict) -> Any:
    """Return the object of a JSON file, or its list; `remedy` is what to do if it is damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, kind):
            raise ValueError(f"it is not a JSON {'object' if kind is dict else kind.__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); {remedy}") from error
    return values


def from_dict(cls: type, values: Any, where: str) -> Any:
    """Return a config from its JSON's dictionary; `where` begins the message of an error."""
    return _read(cls, values, f"{where}: ")


def _read(cls: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{prefix}holds no fields; it was written by another program")
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        hint = nearest(unknown[0], list(hints), "it was written by another version")
        raise UserError(f"{prefix}unknown field {unknown[0]}; {hint}")
    read = {name: _from_json(hints[name], v, prefix + name) for name, v in values.items()}
    for field in dataclasses.fields(cls):
        value = read.get(field.name)
        if type(value) in (int, float) and not field.metadata["range"].contains(value):
            accepted = field.metadata["range"].description
            raise UserError(f"{prefix}{field.name} is {value}; it must be {accepted}")
    try:
        return cls(**read)
    except TypeError as error:
        raise UserError(f"{prefix}{error}") from error


def override(config: Any, name: str, text: str | None) -> None:
    """Set a field by its dotted name to a value from the command line; None is a bare flag."""
    known = {field.name: field for field in fields(config)}
    if name not in known:
        hint = nearest(name, spellings(known), "--help lists the fields")
        raise UserError(f"--config.{name}: no such field; {hint}")
    hint = known[name].hint
    if text is None:
        if hint is not bool:
            raise UserError(f"--config.{name} needs a value: --config.{name}=VALUE")
        text = "True"
    try:
        value = _from_json(hint, _parse(hint, text), f"--config.{name}")
    except (ValueError, KeyError, SyntaxError, TypeError) as error:
        kind = getattr(hint, "__name__", hint)
        raise UserError(f"--config.{name}={text}: a value of type {kind} is wanted") from error
    *groups, last = name.split(".")
    for group in groups:
        config = getattr(config, group)
    setattr(config, last, value)


def _parse(hint: Any, text: str) -> Any:
    """Return what a text on the command line stands for, as JSON could hold it."""
    if hint is bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if hint in (int, float):
        return hint(text)
    if typing.get_origin(hint) is Literal:
        return next((c for c in typing.get_args(hint) if str(c) == text), text)
    if typing.get_origin(hint) is tuple:
        is_literal = text.lstrip().startswith(("(", "["))
        if is_literal:
            return list(ast.literal_eval(text))
        return [_parse(typing.get_args(hint)[0], item) for item in text.split(",") if item]
    return text


def _from_json(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _read(typing.cast(type, hint), value, f"{where}.")
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        item = typing.get_args(hint)[0]
        return tuple(_from_json(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            every = f"choose one of {', '.join(map(str, choices))}"
            hint = nearest(str(value), map(str, choices), every)
            raise UserError(f"{where} is {value!r}; {hint}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) <= _LIMIT else math.inf  # which no field accepts
    wanted = typing.get_origin(hint) is tuple  # and the value is none
    wanted |= isinstance(hint, type | types.UnionType) and not isinstance(value, hint)
    if wanted or (hint is int and isinstance(value, bool)):
        kind = getattr(hint, "__name__", hint)
        raise UserError(f"{where} is {value!r}, of another type than {kind}")
    return value
