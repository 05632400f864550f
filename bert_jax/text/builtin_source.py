"""The source "builtin": English that every Python has, so that a first run needs no text."""

from collections.abc import Iterator
from typing import Any

from bert_jax.config import DataConfig
from bert_jax.text import builtin, sentences
from bert_jax.text.source import Shard, Source


class BuiltinSource(Source):
    """Python's language reference and the docstrings of its standard library."""

    size = 100  # per cent: the number of texts is unknown before they are read

    def __init__(self, name: str, data: DataConfig, shard: Shard | None = None):
        self.name = "the documentation of Python's standard library"

    def identity(self) -> dict[str, Any]:
        return {"builtin": builtin.fingerprint()}

    def texts(self, chunk: int = 0) -> Iterator[list[str]]:
        texts = builtin.documents()
        for number, text in enumerate(texts, start=1):
            self.position = self.size * number // len(texts)
            yield sentences.split_text(text)
