"""Plain Python values of JSON, of Arrow tables and of other libraries."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bert_jax.errors import UserError, first_line
from bert_jax.text.classes import ClassName


def parse_json(text: str, where: str) -> Any:
    """Return the value of a JSON text; UserError if it is not JSON, or has a name twice."""
    try:
        return plain_value(json.loads(text, object_pairs_hook=_object))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); fix or remove it") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = _repeated([name for name, _ in pairs])
    if repeated is not None:
        raise ValueError(f"{repeated!r} occurs twice")
    return dict(pairs)


def _repeated(names: Sequence[str]) -> str | None:
    if len(set(names)) == len(names):
        return None
    return next(name for name in names if names.count(name) > 1)


def plain_value(value: Any) -> Any:
    """Return a value of JSON: bytes become text, arrays and sets become lists."""
    if isinstance(value, ClassName):
        return value
    if isinstance(value, str):
        # JSON may escape half of a surrogate pair, which UTF-8 cannot encode, nor any tokenizer.
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray | np.generic):
        return plain_value(value.tolist())
    if isinstance(value, dict):
        # A tuple, the name of a column of a data frame with several rows of names, stays.
        return {
            name if isinstance(name, tuple) else plain_value(name): plain_value(item)
            for name, item in value.items()
        }
    if isinstance(value, set | frozenset):  # whose order is another in each process
        return sorted((plain_value(item) for item in value), key=str)
    if getattr(value, "shape", None) == ():  # a number of another library
        return value.item()
    return [plain_value(item) for item in value] if isinstance(value, Iterable) else value


def check_columns(names: Sequence[str], where: str) -> None:
    """Refuse a table in which two columns have one name."""
    if (repeated := _repeated(names)) is not None:
        raise UserError(f"{where}: two columns are named {repeated!r}; rename one of them")


def arrow_rows(table: Any, where: str) -> list[dict[str, Any]]:
    """Return the rows of an Arrow table or of a batch of its rows.

    UserError names `where`, which is that of the first row, and a bad column.
    """
    columns = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        try:
            columns[name] = column.to_pylist()
        except (ValueError, OverflowError, LookupError) as error:  # such as a date of year 12000
            is_bytes = isinstance(error, UnicodeDecodeError)
            what = "bytes that are not UTF-8" if is_bytes else "a value that Python cannot have"
            raise UserError(
                f"{where} or a later row has {what} in column {name!r} ({first_line(error)}); "
                "remove or convert the column"
            ) from error
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
