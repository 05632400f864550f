"""Records and texts that a program has in memory: of lists, generators, tables and datasets."""

import contextlib
import filecmp
import json
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bert_jax.errors import UserError, refuse
from bert_jax.storage.json_files import replacement
from bert_jax.text.classes import class_names, table_features
from bert_jax.text.files import MAX_LINE_BYTES
from bert_jax.text.records import Record
from bert_jax.text.values import arrow_rows, check_columns, plain_value

_Text = TypeVar("_Text")
TEXTS = "texts.jsonl"  # the file of a workdir with the texts of its run


def records(data: Any, name: str) -> Iterator[Record]:
    """Yield the records of data, whose places in it are named "NAME[0]" and so on.

    Args:
      data: dictionaries of columns, in a list or any iterable; a dictionary of columns; a data
        frame of pandas or polars, a table of Arrow, or a `datasets.Dataset`.
      name: of the argument, for messages.
    """
    for index, value in enumerate(rows(data, name)):
        where = f"{name}[{index}]"
        if not isinstance(value, Mapping):
            raise UserError(f"{where} is {reprlib.repr(value)}; give a dictionary of its columns")
        yield Record(where, plain_row(value, where))


def plain_row(value: Any, where: str) -> Any:
    """Return a record, or another value, as a file would hold it: without arrays and NaN."""
    if isinstance(value, str | tuple | list):  # of texts
        return value
    try:
        plain = plain_value(dict(value) if isinstance(value, Mapping) else value)
    except UnicodeDecodeError as error:
        raise UserError(f"{where} has bytes that are no UTF-8; decode them") from error
    if not isinstance(plain, dict):
        return plain
    return {str(key): None if _is_missing(x) else x for key, x in plain.items()}


def _is_missing(value: Any) -> bool:
    """Return whether a value is what pandas has where there is none: NaN, NaT or NA."""
    if isinstance(value, float):
        return math.isnan(value)
    return type(value).__name__ in ("NaTType", "NAType")


def write_texts(data: Any, path: Path, text_field: str, *, may_replace: bool) -> None:
    """Write texts as JSON lines; raise UserError for others than a run has been trained on.

    The file is there once all are written.

    Args:
      data: texts, each a document; or what `records` takes, with a text in `text_field`.
      path: of the file.
      text_field: the column of the text.
      may_replace: whether no run has been trained on the texts of the file.
    """
    lines, count = _lines_of_texts(data, text_field), 0
    with contextlib.ExitStack() as stack:
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(replacement(path))
        for count, line in enumerate(lines, start=1):  # noqa: B007 - it is read below
            with _writing(path):
                file.write(line.encode())
        if not count:
            raise UserError(
                "texts has no texts; give one or more (a generator can be read only once)"
            )
        with _writing(path):
            file.flush()
        if path.exists() and not may_replace and not filecmp.cmp(path, file.name, shallow=False):
            raise UserError(
                f"{path} has other texts than the ones given; give the same texts, choose another "
                "workdir, or remove it if no run has been trained on it"
            )
        with _writing(path):
            stack.pop_all().close()  # which renames it


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise UserError where a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); choose another workdir"
        ) from error


def _lines_of_texts(data: Any, text_field: str) -> Iterator[str]:
    for index, value in enumerate(rows(data, "texts")):
        text = value.get(text_field) if isinstance(value, Mapping) else value
        if not isinstance(text, str):
            raise UserError(
                f"texts[{index}] is {reprlib.repr(value)}; give a text, or a dictionary with a "
                f"text in {text_field!r}, which data.text_field names"
            )
        record = {text_field: plain_value(text)}
        line = json.dumps(record) + "\n"
        if len(line) > MAX_LINE_BYTES:  # of other scripts, three times as long as in UTF-8
            line = json.dumps(record, ensure_ascii=False) + "\n"
            refuse(
                len(line.encode()) > MAX_LINE_BYTES,
                f"texts[{index}] is longer than {MAX_LINE_BYTES >> 20} MiB",
                fix="give it as several texts",
            )
        yield line


def is_iterable(values: Any) -> bool:
    """Return whether values can be read one by one; NumPy's without an axis say so and cannot."""
    return isinstance(values, Iterable) and getattr(values, "ndim", 1) > 0


def has_splits(data: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is a `datasets.DatasetDict`, or one of tables."""
    return any(hasattr(values, "column_names") for values in data.values())


def rows(data: Any, name: str) -> Iterable[Any]:
    """Return the rows of a table or of a dictionary of columns, or the values of an iterable."""
    if hasattr(data, "to_pylist") and hasattr(data, "schema"):  # pyarrow.Table
        check_columns(data.schema.names, name)
        features = table_features(data.schema)
        return [class_names(row, features) for row in arrow_rows(data, f"{name}[0]")]
    if hasattr(data, "to_pylist"):  # a column of it
        return data.to_pylist()
    if hasattr(data, "to_dicts"):  # polars.DataFrame
        return data.to_dicts()
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas.DataFrame
        if len(set(data.columns)) < len(data.columns):
            raise UserError(f"{name} has two columns of one name; rename one of them")
        return data.to_dict("records")
    if isinstance(data, Mapping):
        if has_splits(data):
            splits = ", ".join(map(str, data))
            raise UserError(
                f"{name} has the splits {splits}; give one, as data[{next(iter(data))!r}]"
            )
        if any(isinstance(x, str) or not is_iterable(x) for x in data.values()):
            raise UserError(f"{name} is one record; give a list of records")
        columns = {key: list(values) for key, values in data.items()}
        sizes = {len(values) for values in columns.values()}
        if len(sizes) > 1:
            raise UserError(f"the columns of {name} have {sorted(sizes)} values; give all as many")
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if isinstance(data, str | bytes) or not is_iterable(data):
        raise UserError(
            f"{name} is {reprlib.repr(data)}; give a list, a generator or a table; a file is named "
            "in the config, or for predict a Path"
        )
    features = getattr(data, "features", None)  # of a `datasets.Dataset`, whose classes are numbers
    if not isinstance(features, Mapping):
        return data
    if as_format := getattr(data, "with_format", None):
        data = as_format(None)  # Python's own values
    return (class_names(dict(row), features) for row in data)


def chunks(
    texts: Iterable[_Text],
    length: Callable[[_Text], int] = len,
    *,
    most: float = 4096,
    enough_characters: int = 400_000,
) -> Iterator[list[_Text]]:
    """Yield lists of some thousands of texts, of fewer where they are long.

    Args:
      texts: any items that have characters.
      length: returns the number of characters of an item.
      most: the largest number of items of a list; math.inf for any.
      enough_characters: a list ends with the item that gives it so many.
    """
    chunk: list[_Text] = []
    characters = 0
    for text in texts:
        chunk.append(text)
        characters += length(text)
        if len(chunk) == most or characters >= enough_characters:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
