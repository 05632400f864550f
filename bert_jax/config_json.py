"""Config dataclasses as JSON, and back: every field checked against its type."""

import dataclasses
import json
import types
import typing
from typing import Any

from bert_jax.errors import UserError


def to_json(config: Any) -> str:
    """Returns the config as indented JSON, the form of a workdir's `config.json`."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_dict(cls: type, values: Any, where: str) -> Any:
    """Builds a config dataclass from the dictionary that its JSON holds.

    Raises:
      UserError: a field is unknown, missing without a default, or of another type.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where} holds no fields; it was written by another program")
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise UserError(f"{where}: unknown field {unknown[0]}; it was written by another version")
    try:
        return cls(**{k: _from_json(hints[k], v, f"{where}: {k}") for k, v in values.items()})
    except TypeError as error:
        raise UserError(f"{where}: {error}") from error


def _from_json(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_dict(typing.cast(type, hint), value, where)
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        item = typing.get_args(hint)[0]
        return tuple(_from_json(item, v, where) for v in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type | types.UnionType) and not isinstance(value, hint):
        raise UserError(
            f"{where} is {value!r}, of another type than {getattr(hint, '__name__', hint)}"
        )
    return value
