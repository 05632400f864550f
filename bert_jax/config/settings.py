"""Typed settings: a dataclass whose fields carry their own description, choices and range.

The same declaration serves the check of a config, its JSON, `--config.FIELD=VALUE` and `--help`.
A group of settings may be of several classes, one of which a field of it chooses: see `Variants`.
"""

import ast
import dataclasses
import json
import math
import operator
import pkgutil
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from bert_jax.config.ranges import LIMIT, POSITIVE, Range
from bert_jax.errors import UserError, nearest

_EMPTY = "none"  # on the command line, where an empty value may be an unset shell variable


def setting(default: Any, help: str, range: Range = POSITIVE, *, resumable: bool = False) -> Any:
    """Return a dataclass field; a run may resume with another value of a `resumable` one."""
    metadata = {"help": help, "range": range, "resumable": resumable}
    return dataclasses.field(default=default, metadata=metadata)


def resumable(cls: type) -> list[str]:
    """Return the names of the fields of a class that a run may resume with another value of."""
    return [field.name for field in dataclasses.fields(cls) if field.metadata["resumable"]]


class Variants(NamedTuple):
    """The classes of a group of settings, by the value of the one field that chooses among them.

    The base class has them as a class variable, and each class is the base or a subclass of it:

        KINDS = {"circle": "shapes.circle:Circle", "square": Square}

        @dataclasses.dataclass(slots=True)
        class ShapeConfig:
            variants: ClassVar[Variants] = Variants("kind", KINDS)
            kind: str = setting("circle", "kind of shape")

        @dataclasses.dataclass(slots=True)
        class SquareConfig(ShapeConfig):
            kind: str = setting("square", "kind of shape")
            side: int = setting(1, "length of a side")

        class Square:
            settings = SquareConfig

    `from_dict` then reads {"kind": "square", "side": 3} as a `SquareConfig`, `override` of "kind"
    makes a config one (`as_variant`), and `check` refuses a `ShapeConfig(kind="square")`.

    Attributes:
      field: the name of the field.
      registry: by the field's value, an object whose `settings` is the class, or "module:object",
        which is imported when it is asked for.
      dropped: fields that files of version 0.2.0 have in every class; a class without them drops
        them when it is read.
    """

    field: str
    registry: Mapping[str, Any]
    dropped: Sequence[str] = ()


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


def resolve(registry: Mapping[str, Any], name: str) -> Any:
    """Return an entry of a registry, imported if it is given as "module:object"."""
    entry = registry[name]
    return pkgutil.resolve_name(entry) if isinstance(entry, str) else entry


def as_variant(config: Any, name: str, prefix: str = "") -> Any:
    """Return settings as the class that `name` chooses among the `Variants` of their class.

    A field that both classes have keeps its value, unless that is the default of the one class and
    the other has another default.
    """
    variants: Variants = config.variants
    cls = _find_variant(type(config), {variants.field: name}, prefix)
    default, result = type(config)(), cls()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if hasattr(result, field.name) and value != getattr(default, field.name):
            setattr(result, field.name, value)
    setattr(result, variants.field, name)
    return result


def _find_variant(cls: type, values: Mapping[str, Any], prefix: str) -> type:
    """Return the class of settings with these values: `cls`, or one of its `Variants`."""
    variants: Variants | None = getattr(cls, "variants", None)
    name = variants and values.get(variants.field, getattr(cls(), variants.field))
    if not variants or not isinstance(name, str):  # another type is refused as that of any field
        return cls
    return look_up(variants.registry, name, f"{prefix}{variants.field}").settings


def look_up(registry: Mapping[str, Any], name: str, what: str) -> Any:
    """Return `resolve(registry, name)`; UserError, which names `what`, for a name it has not."""
    if name not in registry:
        every = f"choose one of {', '.join(registry)}, or import the file of your own"
        raise UserError(f"{what} is {name!r}; {nearest(name, registry.keys(), every)}")
    return resolve(registry, name)


def names(cls: type) -> list[str]:
    """Return the dotted names of all fields of a config, those of imported variants included."""
    result = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if not dataclasses.is_dataclass(hint):
            result.append(field.name)
            continue
        group = typing.cast(type, hint)
        subclasses = group.__subclasses__() if hasattr(group, "variants") else []
        of_group = [name for each in (group, *subclasses) for name in names(each)]
        result += [f"{field.name}.{name}" for name in dict.fromkeys(of_group)]
    return result


def defaults(config: Any) -> dict[str, Any]:
    """Return the default of each field of a config by its dotted name."""
    default = type(config)()
    for field in dataclasses.fields(config):
        group, own = getattr(config, field.name), getattr(default, field.name)
        if dataclasses.is_dataclass(group) and type(group) is not type(own):
            setattr(default, field.name, type(group)())
    return flatten(default)


def spellings(names: Iterable[str], value: str = "") -> dict[str, str]:
    """Return the flag of each field by its dotted name, and by the last part of it."""
    flags = {name: f"--config.{name}{value}" for name in names}
    return {name.rpartition(".")[2]: flag for name, flag in flags.items()} | flags


def check(config: Any, prefix: str = "") -> Any:
    """Refuse a field of another type, none of its choices or out of range.

    Returns a copy as it would be read from a file: a list of Python is the tuple of a setting.
    """
    _check_groups(config, prefix)
    return _read(type(config), dataclasses.asdict(config), prefix)


def _check_groups(config: Any, prefix: str) -> None:
    """Refuse settings of another class than that of their field, or than one of them chooses."""
    if variants := getattr(config, "variants", None):
        name = getattr(config, variants.field)
        cls = _find_variant(type(config), {variants.field: name}, prefix)
        if type(config) is not cls:
            raise UserError(
                f"{prefix}{variants.field} is {name!r}, and these settings are of the class "
                f"{type(config).__name__}; write {cls.__module__}.{cls.__name__}(...)"
            )
    for name, hint in typing.get_type_hints(type(config)).items():
        value, item = getattr(config, name, ()), next(iter(typing.get_args(hint)), None)
        groups = {}
        if dataclasses.is_dataclass(hint):
            groups = {f"{prefix}{name}": (value, hint)}
        elif dataclasses.is_dataclass(item) and isinstance(value, tuple | list):
            groups = {f"{prefix}{name}[{i}]": (each, item) for i, each in enumerate(value)}
        for where, (group, cls) in groups.items():
            check_class(group, typing.cast(type, cls), f"config.{where}")
            _check_groups(group, f"{where}.")


def check_class(config: Any, cls: type, name: str = "config") -> None:
    """Refuse settings of another class."""
    if not isinstance(config, cls):
        raise UserError(
            f"{name} is of the class {type(config).__name__}, not {cls.__name__}; write "
            f"{cls.__name__}(…), or change a config that bert_jax.recipe(NAME) returns"
        )


def to_json(config: Any) -> str:
    """Return a config as indented JSON, the form of a workdir's `config.json`."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_dict(cls: type, values: Any, where: str) -> Any:
    """Return a config from its JSON's dictionary; `where` begins the message of an error."""
    return _read(cls, values, f"{where}: ")


def _read(cls: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{prefix}holds no fields; it was written by another program")
    cls = _find_variant(cls, values, prefix)
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    variants: Variants | None = getattr(cls, "variants", None)
    dropped = {*variants.dropped}.difference(known) if variants else set[str]()
    values = {name: value for name, value in values.items() if name not in dropped}
    unknown = sorted(set(values) - set(known))
    if unknown:
        is_of_file = ": " in prefix
        there = (
            "it was written by another version" if is_of_file else f"there are {', '.join(known)}"
        )
        place = prefix.removesuffix(": ").removesuffix(".")
        raise UserError(f"{place}: unknown field {unknown[0]}; {nearest(unknown[0], known, there)}")
    read = {name: _from_json(hints[name], v, prefix + name) for name, v in values.items()}
    for field in dataclasses.fields(cls):
        value = read.get(field.name)
        if isinstance(value, tuple) and not value and isinstance(field.default, int | float):
            raise UserError(f"{prefix}{field.name} is empty; give a number, or several")
        for number in value if isinstance(value, tuple) else (value,):
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if is_number and not field.metadata["range"].contains(number):
                accepted = field.metadata["range"].description
                raise UserError(f"{prefix}{field.name} is {number}; it must be {accepted}")
    try:
        return cls(**read)
    except TypeError as error:
        raise UserError(f"{prefix}{error}") from error


def override_all(config: Any, values: Sequence[tuple[str, str | None]]) -> None:
    """Set fields as `override` does, those first that choose which other fields there are."""
    for name, text in sorted(values, key=lambda item: not _is_choice(config, item[0])):
        override(config, name, text)


def _is_choice(config: Any, name: str) -> bool:
    """Return whether a field chooses among the `Variants` of its group."""
    *groups, last = name.split(".")
    for group in groups:
        config = getattr(config, group, None)
    variants: Variants | None = getattr(config, "variants", None)
    return variants is not None and variants.field == last


def override(config: Any, name: str, text: str | None) -> None:
    """Set a field by its dotted name to a value from the command line; None is a bare flag."""
    known = {field.name: field for field in fields(config)}
    if name not in known:
        hint = _field_of_variant(config, name)
        hint = hint or nearest(name, spellings(known), "--help-all lists the fields")
        raise UserError(f"--config.{name}: no such field; {hint}")
    hint = known[name].hint
    if text is None:
        if hint is not bool:
            raise UserError(f"--config.{name} needs a value: --config.{name}=VALUE")
        text = "True"
    if hint is str and text in ("", _EMPTY):
        if not text:
            raise UserError(f"--config.{name} is empty; give a value, or {_EMPTY} for no value")
        text = ""
    if typing.get_origin(hint) is tuple and text == _EMPTY:
        text = "()"
    try:
        value = _from_json(hint, _parse(hint, text), f"--config.{name}")
    except (ValueError, KeyError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        hint = _alternative(hint, is_several=False)
        kind = getattr(hint, "__name__", hint)
        raise UserError(f"--config.{name}={text}: a value of type {kind} is wanted") from error
    if _is_choice(config, name):
        group, _, last = name.rpartition(".")
        chosen = operator.attrgetter(group)(config)
        value, name = as_variant(chosen, value, f"--config.{name[: -len(last)]}"), group
    assign(config, name, value)


def assign(config: Any, name: str, value: Any) -> None:
    """Set a field, or a group of fields, by its dotted name."""
    groups, _, last = name.rpartition(".")
    setattr(operator.attrgetter(groups)(config) if groups else config, last, value)


def _field_of_variant(config: Any, name: str) -> str:
    """Return which value of another field makes a group have a field, in words; "" if none does."""
    group, _, last = name.rpartition(".")
    settings = getattr(config, group, None) if group else None
    variants: Variants | None = getattr(settings, "variants", None)
    if not variants:
        return ""
    for choice in variants.registry:
        cls = resolve(variants.registry, choice).settings
        if last in {field.name for field in dataclasses.fields(cls)}:
            return f"{choice} has it: add --config.{group}.{variants.field}={choice}"
    return ""


def _parse(hint: Any, text: str) -> Any:
    """Return what a text on the command line stands for, as JSON could hold it."""
    hint = _alternative(hint, is_several="," in text)
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


def as_text(value: Any) -> str:
    """Return a value of a field as it is typed on the command line, which `override` reads."""
    if isinstance(value, tuple) and not any(map(dataclasses.is_dataclass, value)):
        return ",".join(map(str, value)) or _EMPTY
    return str(value) or _EMPTY


def _alternative(hint: Any, *, is_several: bool) -> Any:
    """Return the type of several values, or of one, of a field that is of either."""
    if not isinstance(hint, types.UnionType):
        return hint
    each = typing.get_args(hint)
    return next((h for h in each if is_several == (typing.get_origin(h) is tuple)), hint)


def _from_json(hint: Any, value: Any, where: str) -> Any:
    hint = _alternative(hint, is_several=isinstance(value, list | tuple))
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
        return float(value) if abs(value) <= LIMIT else math.inf  # which no field accepts
    if not _fits(value, hint):
        kind = getattr(hint, "__name__", hint)
        raise UserError(f"{where} is {value!r}, of another type than {kind}")
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value of JSON, and no list for a tuple, has the type of a field."""
    if typing.get_origin(hint) is tuple or (hint is int and isinstance(value, bool)):
        return False
    return not isinstance(hint, type | types.UnionType) or isinstance(value, hint)
