"""`config.json` of `transformers`: the model and its fine-tuning task, both ways."""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.config import DataFiles, ModelConfig, TaskConfig
from bert_jax.config.fields import MODEL_TYPES, TASKS
from bert_jax.config.settings import from_dict, resolve, resumable
from bert_jax.config.validation import validate_model
from bert_jax.convert import names
from bert_jax.errors import UserError
from bert_jax.tasks import task_class
from bert_jax.tasks.base import Task
from bert_jax.text.tokenizer import Tokenizer

# Fields of any `config.json` of `transformers` that change no result of an encoder.
_OF_NO_EFFECT = (
    *("architectures", "model_type", "transformers_version", "torch_dtype", "tokenizer_class"),
    *(
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "tie_word_embeddings",
    ),
    *("is_decoder", "is_encoder_decoder", "add_cross_attention", "chunk_size_feed_forward"),
    *("use_cache", "output_past", "output_attentions", "output_hidden_states", "return_dict"),
    *("gradient_checkpointing", "summary_last_dropout", "classifier_dropout", "language", "name"),
    # How a library reads the output of a single label; of others it is read as here.
    *("sentence_transformers", "sbert_ce_default_activation_function"),
    # Older versions also wrote the settings of generation.
    *("max_length", "num_beams", "num_beam_groups", "num_return_sequences", "temperature"),
    *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
)
# Other names of an activation that `transformers` has, and ours. Source: its `activations.ACT2FN`.
ACTIVATIONS = {
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",
}
# Fields that only our exports have.
_VOCAB_SIZE, _TASK, _DATA = "tokenizer_pieces", "bert_jax_task", "bert_jax_data"
_DATA_FIELDS = ("text", "label", "max_length")


def read_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the model that a `config.json` describes; refuse what is not supported."""
    model_type = values.get("model_type", "bert")  # the oldest files, and Google's, do not say
    known = [name for name in MODEL_TYPES if resolve(MODEL_TYPES, name).exchange]
    if model_type not in known:
        known = ", ".join(known)
        raise UserError(f"{where} is of model type {model_type!r}; only these are read: {known}")
    for name in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
        if values.get(name):
            raise UserError(f"{where} has {name}; only encoders are read")
    for name in ("vocab_size", "hidden_size"):
        if name not in values:
            raise UserError(f"{where} has no {name}; it is not the config of a BERT")
    if values["vocab_size"] == 0:  # which in our configs is that of the tokenizer
        raise UserError(f"{where} has a vocab_size of 0; fetch it again")
    if not isinstance(values.get(_VOCAB_SIZE, 0), int):
        size = repr(values[_VOCAB_SIZE])[:60]
        raise UserError(f"{where}: {_VOCAB_SIZE} is {size}, which is no number; fetch it again")
    values = {
        name: ACTIVATIONS.get(value, value)
        if name.endswith(("_act", "_activation")) and isinstance(value, str)
        else value
        for name, value in values.items()
    }
    exchange = names.exchange_of(model_type)
    values = exchange.read_fields(values, where)
    _check_known(values, model_type, (*exchange.switches, *exchange.others), where)
    # A missing value is the default of `transformers`: the erf form of GELU, for one.
    fields = _fields(model_type)
    known = {"hidden_act": "gelu", **{k: v for k, v in values.items() if k in fields}}
    known |= {"model_type": model_type, "dtype": "float32"}
    config = from_dict(ModelConfig, known, where)
    config.max_position_embeddings -= exchange.first_position(values)
    validate_model(config, where)
    return config


def _fields(model_type: str) -> set[str]:
    settings = resolve(MODEL_TYPES, model_type).settings
    return {field.name for field in dataclasses.fields(settings)}


def _check_known(
    values: Mapping[str, Any], model_type: str, names: Iterable[str], where: str
) -> None:
    """Refuse a field that is none of `names`, of `ModelConfig`, empty, or without effect."""
    known = _fields(model_type)
    known = known.union(_OF_NO_EFFECT, names, (_VOCAB_SIZE, _TASK, _DATA))
    for name, value in values.items():
        if name.startswith("_") or name.endswith("_token_id"):
            continue
        if value and name not in known:
            raise UserError(
                f"{where} has {name}, which is not known of a model of type "
                f"{model_type}; remove it if the model does not depend on it"
            )


def write_config(
    config: ModelConfig,
    architecture: str,
    tokenizer: Tokenizer,
    task: Task | None,
    data: DataFiles | None = None,
) -> dict[str, Any]:
    """Return the `config.json` of an export, from which the `read_` functions read.

    `data` has the columns that the task was trained on; None where they are unknown.
    """
    values = {"architectures": [architecture], **dataclasses.asdict(config)}
    # They change no result, or the tokenizer says it.
    for name in (*resumable(ModelConfig), "pair_separators", "pair_token_types"):
        del values[name]
    values |= {"dtype": "float32", "pad_token_id": tokenizer.pad_id, "tie_word_embeddings": True}
    values |= {"position_embedding_type": "absolute", _VOCAB_SIZE: tokenizer.vocab_size}
    exchange = names.exchange_of(config.model_type)
    for theirs, ours in exchange.config_names.items():
        values[theirs] = values.pop(ours)
    for name in exchange.not_written:
        del values[name]
    values |= {**exchange.switches, **exchange.write_fields(config, tokenizer)}
    values["max_position_embeddings"] += exchange.first_position(values)
    if task:
        values |= {_TASK: dataclasses.asdict(task.config), **task.transformers_config()}
        values |= {_DATA: {name: getattr(data, name) for name in _DATA_FIELDS}} if data else {}
    return values


def read_task(values: Mapping[str, Any], config: ModelConfig, where: str) -> TaskConfig | None:
    """Return the task of a fine-tuned model; None of an encoder alone, or of several numbers."""
    labels = dict[str, Sequence[str]]()  # of the kinds of task that it may be
    for kind in TASKS:
        task = task_class(kind)
        if task.transformers_class and architecture(values) == class_name(config, task):
            found = task.transformers_labels(values, where)
            labels |= {} if found is None else {kind: found}
    if _TASK in values:
        own = from_dict(TaskConfig, values[_TASK], f"{where}: {_TASK}")
        # With another kind or labels, `transformers` has trained the model again since the export.
        is_same = own.kind in labels and labels[own.kind] in ((), own.labels)
        if is_same:  # a `CrossEncoder` that has saved it may have changed its settings
            theirs = task_class(own.kind).transformers_settings(values, where)
            return dataclasses.replace(own, **theirs)
    kind = next(reversed(labels), None)  # the user's own come last
    if kind is None:
        return None
    own = task_class(kind).transformers_settings(values, where)
    return task_class(kind).settings(kind=kind, labels=tuple(labels[kind]), **own)


def read_data(values: Mapping[str, Any], task: TaskConfig, where: str) -> DataFiles | None:
    """Return the columns that a task was trained on, where our export of it says so."""
    if _DATA not in values or values.get(_TASK, {}).get("kind") != task.kind:
        return None
    return from_dict(DataFiles, values[_DATA], f"{where}: {_DATA}")


def architecture(values: Mapping[str, Any]) -> str:
    """Return the class of `transformers` that a `config.json` names, "" for none."""
    classes = values.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else ""


def class_name(config: ModelConfig, task: Task | type[Task]) -> str:
    """Return the class of `transformers` that a task of a model is exported as."""
    return names.exchange_of(config.model_type).class_prefix + task.transformers_class


def check_tokenizer(
    path: Path, tokenizer: Tokenizer, config: ModelConfig, values: Mapping[str, Any] | None = None
) -> None:
    """Refuse a vocabulary that does not fit the model; warn of 128 embeddings without a token."""
    size, most = (values or {}).get(_VOCAB_SIZE), config.vocab_size
    # A library that adds or removes tokens changes the embeddings, and keeps our field.
    least = min(size or 0, most)
    if not least <= tokenizer.vocab_size <= most:
        has = f", and the model has {least} or more" if tokenizer.vocab_size < least else ""
        raise UserError(
            f"{path} has a vocabulary of {tokenizer.vocab_size} tokens for {most} embeddings{has}; "
            "fetch the one of the model"
        )
    if not size and (padding := most - tokenizer.vocab_size) >= 128:
        warnings.warn(f"{path}: {padding:,} of {most:,} embeddings have no token", stacklevel=2)
