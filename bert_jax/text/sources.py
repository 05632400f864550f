"""The sources of text, by the beginning of their names; any other name is that of files."""

from bert_jax.config import DataConfig
from bert_jax.errors import UserError
from bert_jax.text.builtin_source import BuiltinSource
from bert_jax.text.file_source import FileSource
from bert_jax.text.source import Shard, Source
from bert_jax.text.tfds_source import TfdsSource

# A name is one of these, or one of these with ":" and what the source makes of the rest.
SOURCES: dict[str, type[Source]] = {"builtin": BuiltinSource, "tfds": TfdsSource}


def open_source(name: str, data: DataConfig, shard: Shard | None = None) -> Source:
    """Return the text that `data.source` or `data.eval_source` names, or a shard of it."""
    source = SOURCES.get(name.partition(":")[0], FileSource)
    if shard and not source.is_divisible:
        raise UserError(
            f"{name} cannot be divided into shards, as files can; drop --shard or --runner"
        )
    return source(name, data, shard)
