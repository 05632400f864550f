"""A task's data, in the files that people have: tables, CoNLL columns, SQuAD, TensorFlow datasets."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Record:
    """What a line, a sentence or a question of a file holds.

    Attributes:
      where: the file and the line, for messages.
      fields: by name, as the file names them.
    """

    where: str
    fields: Mapping[str, Any]


def table(source: str, columns: Sequence[str] = ()) -> Iterator[Record]:
    """Yields the rows of a .tsv, .csv or .jsonl file (or .gz, .xz of it), or of tfds:NAME@SPLIT.

    Args:
      source: the file or dataset.
      columns: names for those of a file without a header; empty where the first line names them.
    """
    raise UserError


def conll(source: str) -> Iterator[Record]:
    """Yields sentences of a CoNLL file: {"tokens": [...], "tags": [...]}, "tags" None without."""


def squad(source: str) -> Iterator[Record]:
    """Yields the questions of a SQuAD file, version 1.1 or 2.0."""
