"""What is known of a fine-tuned model from elsewhere: its labels, and none of its columns."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bert_jax.config import DataFiles
from bert_jax.errors import UserError

_MAX_LABELS = 1 << 16  # a `num_labels` beyond it is damage


class UnknownColumns(DataFiles):
    """The columns of a model from elsewhere, which does not say what it was trained on."""

    @classmethod
    def read(cls, data: DataFiles) -> DataFiles:
        """Return the columns that a checkpoint has, which are unknown where `text` is empty."""
        if data.text:
            return data
        values: dict[str, Any] = {**dataclasses.asdict(data), "text": DataFiles().text}
        return cls(**values)

    @classmethod
    def written(cls, data: DataFiles) -> DataFiles:
        """Return columns as a checkpoint has them, for `read`."""
        return dataclasses.replace(data, text="") if isinstance(data, cls) else data


def read_labels(values: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return the labels in a `config.json` of `transformers`."""
    names = values.get("id2label")
    if names is None:  # the default names, of two labels unless the file says otherwise
        number = values.get("num_labels", 2)
        if not isinstance(number, int) or not 0 < number < _MAX_LABELS:
            raise UserError(f"{where}: num_labels is {number!r}; fetch it again")
        return tuple(f"LABEL_{index}" for index in range(number))
    names = names if isinstance(names, dict) else {}
    labels = [names.get(str(index)) for index in range(len(names))]
    strings = tuple(label for label in labels if isinstance(label, str))
    if not 0 < len(set(strings)) == len(names):
        raise UserError(f"{where}: id2label must name each number differently; correct it")
    return strings
