"""The names of classes that datasets and tables have by number."""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

_METADATA = b"huggingface"  # of the schema of a table, where `datasets` describes its columns


class ClassName(str):
    """The name of a class, with its number for tasks whose labels are numbers."""

    number: int


class _Classes:
    """A column of classes that a table describes, as a feature of `datasets`."""

    def __init__(self, names: Sequence[str]):
        self._names = names

    def int2str(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else str(number)


def table_features(schema: Any) -> Any:
    """Return the features of an Arrow table that `datasets` made, for `class_names`.

    None for another table, and for one whose description is damaged.
    """
    metadata = getattr(schema, "metadata", None) or {}
    with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
        return _feature(json.loads(metadata[_METADATA])["info"]["features"])
    return None


def _feature(described: Any) -> Any:
    """Return what the JSON of a feature describes; of a list, the feature of its items."""
    while isinstance(described, dict) and isinstance(described.get("_type"), str):
        names = described.get("names")
        if described["_type"] == "ClassLabel" and isinstance(names, list):
            return _Classes(names) if all(isinstance(name, str) for name in names) else None
        described = described.get("feature")
    if isinstance(described, list):
        return _feature(described[0]) if described else None
    if isinstance(described, dict):
        return {name: _feature(item) for name, item in described.items()}
    return None


def class_names(value: Any, feature: Any) -> Any:
    """Return a value with the name of each class in place of its number, None for -1.

    `feature` describes the value, as a feature of TFDS or of `datasets` does; None if nothing does.
    """
    if feature is None:
        return value
    while hasattr(feature, "feature"):  # of a sequence
        feature = feature.feature
    if isinstance(value, list):
        return [class_names(item, feature) for item in value]
    if isinstance(value, dict) and hasattr(feature, "items"):
        # A sequence of dicts, too, is a dict of sequences in the file of TFDS.
        known = dict(feature.items())
        return {name: class_names(item, known.get(name)) for name, item in value.items()}
    if not hasattr(feature, "int2str") or not isinstance(value, int):
        return value
    if value < 0:
        return None
    # JSON may escape half of a surrogate pair, which UTF-8 cannot encode.
    name = ClassName(feature.int2str(value).encode("utf-8", "replace").decode())
    name.number = value
    return name
