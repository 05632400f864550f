"""Records and texts that a program has in memory: of lists, generators, tables and datasets."""

import filecmp
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.text.records import Record, plain_value

TEXTS = "texts.jsonl"  # the file of a workdir with the texts of its run


def records(data: Any, name: str) -> Iterator[Record]:
    """Yield the records of data, whose places in it are named "NAME[0]" and so on.

    Args:
      data: dictionaries of columns, in a list or any iterable; a dictionary of columns; a data
        frame of pandas or polars, a table of Arrow, or a `datasets.Dataset`.
      name: of the argument, for messages.
    """
    for index, value in enumerate(_rows(data, name)):
        where = f"{name}[{index}]"
        if not isinstance(value, Mapping):
            raise UserError(f"{where} is {reprlib.repr(value)}; give a dictionary of its columns")
        try:
            yield Record(where, plain_value(dict(value)))
        except UnicodeDecodeError as error:
            raise UserError(f"{where} has bytes that are no UTF-8; decode them") from error


def write_texts(data: Any, path: Path, text_field: str) -> None:
    """Write texts as JSON lines, unless the file has the same ones; refuse others than it has.

    Args:
      data: texts, each a document; or what `records` takes, with a text in `text_field`.
      path: of the file.
      text_field: the column of the text.
    """
    temporary = path.with_suffix(".tmp")
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            for index, value in enumerate(_rows(data, "texts")):
                text = value.get(text_field) if isinstance(value, Mapping) else value
                if not isinstance(text, str):
                    raise UserError(
                        f"texts[{index}] is {reprlib.repr(value)}; give a text, or a dictionary "
                        f"with a text in {text_field!r}, which data.text_field names"
                    )
                file.write(json.dumps({text_field: plain_value(text)}) + "\n")
                count += 1
        if not count:
            raise UserError(
                "texts has no texts; give one or more, and a generator anew, as it is read once"
            )
        if path.exists() and not filecmp.cmp(path, temporary, shallow=False):
            raise UserError(
                f"{path.parent} has a run on other texts; give the same ones, or choose another "
                "workdir"
            )
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another") from error
    finally:
        temporary.unlink(missing_ok=True)


def _rows(data: Any, name: str) -> Iterable[Any]:
    """Return the rows of a table by its own method, those of columns, or the values of others."""
    if hasattr(data, "to_pylist"):  # pyarrow.Table
        return data.to_pylist()
    if hasattr(data, "to_dicts"):  # polars.DataFrame
        return data.to_dicts()
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas.DataFrame
        return data.to_dict("records")
    if isinstance(data, Mapping):
        columns = {key: list(values) for key, values in data.items()}
        sizes = {len(values) for values in columns.values()}
        if len(sizes) > 1:
            raise UserError(f"the columns of {name} have {sorted(sizes)} values; give all as many")
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise UserError(
            f"{name} is {reprlib.repr(data)}; give a list, a generator or a table, and a file by "
            "its name in the config"
        )
    features = getattr(data, "features", None)  # of a `datasets.Dataset`, whose classes are numbers
    if not isinstance(features, Mapping):
        return data
    classes = {key: each.int2str for key, each in features.items() if hasattr(each, "int2str")}
    return ({**row, **{key: name(row[key]) for key, name in classes.items()}} for row in data)
