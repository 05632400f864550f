"""Load a checkpoint of any kind as a `Bert`."""

import dataclasses
from pathlib import Path

from bert_jax import console
from bert_jax.bert import Bert
from bert_jax.config import DataFiles, FinetuneConfig, TrainConfig
from bert_jax.config.settings import from_dict
from bert_jax.config.validation import validate_model
from bert_jax.convert import google, hub, huggingface, names, sentence_transformers
from bert_jax.errors import UserError
from bert_jax.storage import paths
from bert_jax.storage.paths import AnyPath
from bert_jax.text import tokenizer_loading
from bert_jax.training import checkpoint


@console.working("loading the model", says_end=False)
def load(path: str | AnyPath) -> Bert:
    """Load a checkpoint.

    Args:
      path: a workdir, for its latest checkpoint; one of its checkpoints; a Hugging Face or Google
        checkpoint directory; or "hf:OWNER/NAME", which is downloaded from the hub.

    Raises:
      UserError: there is no checkpoint, or it is damaged, or of another architecture.

    >>> path = getfixture("tmp_path") / "tiny"
    >>> getfixture("tiny_bert").save(path)
    >>> load(path)
    Bert(bert, 2 layers of 16, 2 heads, 6,722 parameters, wordpiece of 64 tokens)
    """
    if hub.is_name(path):
        return dataclasses.replace(load(hub.fetch(str(path))), source=str(path))
    for module, is_its in (
        (google, google.is_google),
        (sentence_transformers, sentence_transformers.is_sentence_transformers),
        (huggingface, huggingface.is_huggingface),
    ):
        if not paths.is_remote(path) and is_its(path := Path(path)):
            config, converted, tokenizer = module.load(path)
            params, task = converted.params, converted.task
            model = names.make_model(config, task, modules=names.module_names(params))
            longest = min(converted.max_length, config.max_position_embeddings)
            data = DataFiles(max_length=longest)
            return Bert(config, params, tokenizer, model, converted.unused, task, data, path)
    folder = checkpoint.find(path)
    where, description = f"{folder}/config", checkpoint.read_json(folder, "config")
    has_task = isinstance(description, dict) and "task" in description
    run = from_dict(FinetuneConfig if has_task else TrainConfig, description, where)
    validate_model(run.model, where)
    task, probe, data = (run.task, run.probe, run.data) if has_task else (None, "", DataFiles())
    try:
        model = names.make_model(run.model, task, probe)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    content = checkpoint.read_json(folder, "tokenizer")
    tokenizer = tokenizer_loading.from_json(content, f"{folder}/tokenizer")
    shapes, optional = names.stored_shapes(model)
    params = checkpoint.read_params(folder, shapes, optional)
    model = names.make_model(run.model, task, probe, modules=names.module_names(params))
    return Bert(run.model, params, tokenizer, model, task=task, data=data, source=folder)
