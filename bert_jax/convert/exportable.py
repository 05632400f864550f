"""What a model must have to be exported; a `Bert` has it."""

from collections.abc import Mapping
from typing import Any, Protocol

from bert_jax.config import DataFiles, ModelConfig, TaskConfig
from bert_jax.storage.paths import AnyPath
from bert_jax.text.tokenizer import Tokenizer


class Exportable(Protocol):
    """A model with its tokenizer; `Bert` says what its attributes are."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def params(self) -> Mapping[str, Any]: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def task(self) -> TaskConfig | None: ...
    @property
    def data(self) -> DataFiles: ...
    @property
    def source(self) -> str | AnyPath | None: ...
