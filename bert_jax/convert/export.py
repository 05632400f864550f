"""Export a model: to the directory of a library, or to the Hugging Face hub."""

from pathlib import Path

from bert_jax.convert import (
    hub,
    huggingface,
    late_interaction,
    model_card,
    sentence_transformers,
    splade,
)
from bert_jax.convert.huggingface import Exportable, Exported
from bert_jax.storage import paths
from bert_jax.storage.paths import check_named
from bert_jax.tasks import make_task
from bert_jax.tasks.foreign import UnknownColumns

# By what a text becomes.
_SAVE = {
    "dense": sentence_transformers.save,
    "tokens": late_interaction.save,
    "sparse": splade.save,
}


def export(
    path: str | Path, model: Exportable, *, head: str | None, force: bool, private: bool
) -> Exported:
    """Write a model with its card to a directory or to the hub; `Bert.export` has the arguments."""
    check_named(path)
    task = make_task(model.task) if model.task and head is None else None
    max_length = model.config.max_position_embeddings
    if task:  # the directory says how a text is truncated
        max_length = min(model.data.max_length, max_length)
    name = str(path).removeprefix(paths.HUB) if paths.is_on_hub(path) else Path(path).name
    with hub.destination(path, force=force, private=private) as folder:
        if task and task.library == sentence_transformers.LIBRARY:
            save = _SAVE[task.vectors_kind]
            exported = save(model, folder, task, max_length)
        else:
            exported = huggingface.save(
                model.config,
                model.params,
                model.tokenizer,
                folder,
                head=head,
                task=task,
                data=None if isinstance(model.data, UnknownColumns) else model.data,
                max_length=max_length,
            )
        model_card.write(folder, name, model, exported, max_length)
    return exported
