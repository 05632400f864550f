"""Datasets of TensorFlow Datasets as records. No other module imports TFDS."""

import importlib
import os
from collections.abc import Iterator
from typing import Any

from bert_jax.console import show
from bert_jax.errors import UserError, first_line
from bert_jax.text.records import Record, plain_value

PREFIX = "tfds:"
# The groups of TFDS that have datasets for the tasks of this package.
_GROUPS = ("question_answering", "summarization", "text", "translate")


def open_rows(source: str) -> Any:
    """Return the rows of `tfds:NAME[/CONFIG][:VERSION][@SPLIT]`, by default of "train"."""
    # Imported in the function: it takes longer than all other imports of this module.
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import constants

    for group in _GROUPS:  # whose older datasets TFDS knows once they are imported
        importlib.import_module(f"tensorflow_datasets.{group}")
    folder = os.environ.get("TFDS_DATA_DIR") or constants.DATA_DIR
    dataset, _, split = source.removeprefix(PREFIX).partition("@")
    try:
        # Array records need no TensorFlow.
        options: dict[str, Any] = {"file_format": "array_record"}
        builder: Any = tfds.builder(dataset, data_dir=folder, **options)
        if not builder.is_prepared():
            show(f"preparing {source} in {folder}; without a network this fails after some minutes")
        builder.download_and_prepare(**options)
        rows = builder.as_data_source(split=split or "train")
        if len(rows):
            rows[0]  # raises if a file is missing or damaged
    except Exception as error:  # of nearly every type
        call = f"tfds.builder({dataset!r}, data_dir=DIR, file_format='array_record')"
        raise UserError(
            f"{source} cannot be read from {folder} ({first_line(error)}); check its name and its "
            f"split, or prepare it on another machine, by {call}.download_and_prepare(), and copy "
            "DIR; --data-dir or TFDS_DATA_DIR names another folder"
        ) from error
    return rows


def read_rows(source: str, rows: Any) -> Iterator[Record]:
    """Yield the rows of a TensorFlow dataset; a class is its name, None for -1."""
    for index in range(len(rows)):
        where = f"{source} #{index}"
        try:
            fields = _named(plain_value(rows[index]), rows.dataset_info.features)
        except Exception as error:  # TFDS raises nearly every kind for a file that is damaged
            reason = " ".join(str(error).split()) or repr(error)
            raise UserError(f"{where} cannot be read ({reason}); prepare it again") from error
        yield Record(where, fields, index + 1)


def _named(value: Any, feature: Any) -> Any:
    from tensorflow_datasets import features

    while isinstance(feature, features.Sequence):
        feature = feature.feature
    if isinstance(value, list):
        return [_named(item, feature) for item in value]
    if isinstance(value, dict):  # a sequence of dicts, too, is a dict of sequences in the file
        return {name: _named(item, feature[name]) for name, item in value.items()}
    if isinstance(feature, features.ClassLabel):
        return None if value < 0 else feature.int2str(value)
    return value
