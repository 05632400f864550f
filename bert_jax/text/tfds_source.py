"""The source "tfds:NAME": a field of a dataset of TensorFlow Datasets."""

from collections.abc import Iterator
from typing import Any

from bert_jax.config import DataConfig
from bert_jax.text import tfds_rows
from bert_jax.text.source import Shard, Source, record_sentences


class TfdsSource(Source):
    """The text field of a TensorFlow dataset, `tfds:NAME[/CONFIG][:VERSION][@SPLIT]`."""

    def __init__(self, name: str, data: DataConfig, shard: Shard | None = None):
        self.name, self._text_field = name, data.text_field
        self._rows = tfds_rows.open_rows(name)
        self.size = len(self._rows)

    def identity(self) -> dict[str, Any]:
        dataset, split = self._rows.dataset_info.full_name, self.name.partition("@")[2]
        return {"tfds": dataset, "split": split, "rows": self.size}

    def texts(self, chunk: int = 0) -> Iterator[list[str]]:
        for record in tfds_rows.read_rows(self.name, self._rows):
            self.position = record.position
            yield record_sentences(record, self._text_field)
