"""Export a model: to the directory of a library, or to the Hugging Face hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.config import DataFiles, ModelConfig
from bert_jax.convert import (
    hub,
    huggingface,
    late_interaction,
    model_card,
    sentence_transformers,
    splade,
)
from bert_jax.convert.huggingface import Exported
from bert_jax.storage.paths import AnyPath, check_named
from bert_jax.tasks.base import Task, UnknownColumns
from bert_jax.tasks.retrieval import EncodingTask
from bert_jax.text.tokenizer import Tokenizer

# By what a text becomes.
_SAVE = {
    "dense": sentence_transformers.save,
    "tokens": late_interaction.save,
    "sparse": splade.save,
}


def export(
    path: str | Path,
    *,
    config: ModelConfig,
    params: Mapping[str, Any],
    tokenizer: Tokenizer,
    task: Task | None,
    head: str | None,
    data: DataFiles,
    source: str | AnyPath | None,
    force: bool,
    private: bool,
) -> Exported:
    """Write a model with its card to a directory or to the hub, all of it or nothing.

    The arguments are those of `Bert.export`, and fields of `Bert`.
    """
    check_named(path)
    is_of_embeddings = task and head is None and task.library == sentence_transformers.LIBRARY
    max_length = config.max_position_embeddings
    has_head = task and head is None and not is_of_embeddings
    if is_of_embeddings or has_head:  # the directory says how a text is truncated
        max_length = min(data.max_length, max_length)
    name = str(path).removeprefix("hf:") if hub.is_name(path) else Path(path).name
    with hub.destination(path, force=force, private=private) as folder:
        if task and is_of_embeddings:
            save = _SAVE[task.vectors_kind if isinstance(task, EncodingTask) else "dense"]
            exported = save(config, params, tokenizer, folder, task=task, max_length=max_length)
        else:
            exported = huggingface.save(
                config,
                params,
                tokenizer,
                folder,
                head=head,
                task=task,
                data=None if isinstance(data, UnknownColumns) else data,
                max_length=max_length if has_head else None,
            )
        model_card.write(
            folder,
            name=name,
            exported=exported,
            config=config,
            tokenizer=tokenizer,
            data=data,
            source=source,
            max_length=max_length,
        )
    return exported
