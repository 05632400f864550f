"""`config.json` of `transformers`: the model and its fine-tuning task, both ways."""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.config import ModelConfig, TaskConfig
from bert_jax.config.fields import MODEL_TYPES, TASKS
from bert_jax.config.settings import from_dict, resolve
from bert_jax.config.validation import validate_model
from bert_jax.errors import UserError
from bert_jax.models.architecture import architecture as architecture_of
from bert_jax.tasks import task_class
from bert_jax.tasks.base import Task
from bert_jax.text.tokenizer import Tokenizer

# What the names of the classes of `transformers` begin with, by model type.
PREFIXES = {"bert": "Bert", "roberta": "Roberta", "modernbert": "ModernBert", "electra": "Electra"}


def _classes(suffix: str) -> dict[str, str]:
    return {model_type: prefix + suffix for model_type, prefix in PREFIXES.items()}


_PRETRAINING = {"bert": "BertForPreTraining", "electra": "ElectraForPreTraining"}
# What can be exported without a task: the modules, and the class of `transformers` by model type.
HEADS = {
    "pretraining": (("bert/pooler", "mlm_head", "nsp_head"), _PRETRAINING),
    "masked-lm": (("mlm_head",), _classes("ForMaskedLM")),
    "none": (("bert/pooler",), _classes("Model")),
}
# A ModernBERT's names of fields, and those of its switches whose other value is not supported.
_MODERNBERT = {
    "hidden_activation": "hidden_act",
    "norm_eps": "layer_norm_eps",
    "mlp_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
_MODERNBERT_SWITCHES = {
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
    "rope_scaling": None,
}
# What else its `config.json` may have: read below, or of no effect on a result.
_MODERNBERT_OTHERS = (
    *("layer_types", "rope_parameters", "classifier_activation", "embedding_dropout"),
    *("initializer_cutoff_factor", "sparse_prediction", "sparse_pred_ignore_index"),
    *("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"),
)
_ROPES = {"global_rope_theta": "full_attention", "local_rope_theta": "sliding_attention"}
_ELECTRA_SWITCHES = {
    "summary_type": "first",
    "summary_use_proj": True,
    "summary_activation": "gelu",
}
# Of an ELECTRA's `config.json` in `transformers`, where it says nothing.
_ELECTRA_DEFAULTS = {"embedding_size": 128, "num_attention_heads": 4, "intermediate_size": 1024}
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
    *("gradient_checkpointing", "summary_last_dropout", "classifier_dropout", "language"),
)
# Fields that only our exports have.
_VOCAB_SIZE, _TASK = "tokenizer_pieces", "bert_jax_task"


def read_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the model that a `config.json` describes; refuse what is not supported."""
    model_type = values.get("model_type", "bert")  # the oldest files, and Google's, do not say
    if model_type not in [*HEADS["none"][1]]:
        known = ", ".join(HEADS["none"][1])
        raise UserError(f"{where} is of model type {model_type!r}; only these are read: {known}")
    for name in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
        if values.get(name):
            raise UserError(f"{where} has {name}; only encoders are read")
    for name in ("vocab_size", "hidden_size"):
        if name not in values:
            raise UserError(f"{where} has no {name}; it is not the config of a BERT")
    if not isinstance(values.get(_VOCAB_SIZE, 0), int):
        size = repr(values[_VOCAB_SIZE])[:60]
        raise UserError(f"{where}: {_VOCAB_SIZE} is {size}, which is no number; fetch it again")
    fields = _fields(model_type)
    if model_type == "modernbert":
        values = _from_modernbert(values, where)
    elif model_type == "electra":
        values = _from_electra(values, where)
    # A missing value is the default of `transformers`: the erf form of GELU, for one.
    known = {"hidden_act": "gelu", **{k: v for k, v in values.items() if k in fields}}
    config = from_dict(ModelConfig, {**known, "model_type": model_type, "dtype": "float32"}, where)
    if config.hidden_act == "gelu_pytorch_tanh":  # two names of one function
        config.hidden_act = "gelu_new"
    if model_type == "roberta":
        if config.position_embedding_type != "absolute":
            raise UserError(f"{where}: relative positions are read of a bert only")
        config.max_position_embeddings -= first_position(values)
    validate_model(config, where)
    return config


def _fields(model_type: str) -> set[str]:
    settings = resolve(MODEL_TYPES, model_type).settings
    return {field.name for field in dataclasses.fields(settings)}


def _from_modernbert(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a ModernBERT by the names of `ModelConfig`."""
    same = {"classifier_activation": "hidden_activation", "embedding_dropout": "mlp_dropout"}
    of_head = {"classifier_activation": "gelu", "hidden_activation": "gelu", "mlp_dropout": 0.0}
    whole = {**of_head, **values}
    switches = {name: whole[other] for name, other in same.items()}
    _check_switches(whole, _MODERNBERT_SWITCHES | switches, where)
    _check_known(values, (*_MODERNBERT, *_MODERNBERT_SWITCHES, *_MODERNBERT_OTHERS), where)
    result = {_MODERNBERT.get(name, name): value for name, value in values.items()}
    defaults = {"layer_norm_eps": 1e-5, "hidden_dropout_prob": 0.0}
    defaults["attention_probs_dropout_prob"] = 0.0
    result = {**defaults, **result, "type_vocab_size": 1, "position_embedding_type": "rotary"}
    if (kinds := values.get("layer_types")) is not None:  # the newer form
        result["global_attn_every_n_layers"] = _global_every(
            kinds, values.get("num_hidden_layers", 22), where
        )
    if isinstance(window := values.get("local_attention"), int):
        result["local_attention"] = window // 2 * 2  # `transformers` halves it
    ropes = values.get("rope_parameters") or {}
    for field, kind in _ROPES.items():
        rope = (ropes.get(kind) or {}) if isinstance(ropes, dict) else ropes
        plain = {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": None}
        if not isinstance(rope, dict) or {**plain, **rope, "rope_theta": None} != plain:
            raise UserError(f"{where} has rope_parameters {rope!r}; only rope_theta is read")
        default = getattr(resolve(MODEL_TYPES, "modernbert").settings(), field)
        result[field] = rope.get("rope_theta", values.get(field, default))
    if result["local_rope_theta"] is None:  # then it is that of all layers
        result["local_rope_theta"] = result["global_rope_theta"]
    return result


def _from_electra(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of an ELECTRA; refuse those that it does not have here."""
    _check_switches(values, _ELECTRA_SWITCHES, where)
    _check_known(values, _ELECTRA_SWITCHES, where)
    # Its encoder is the generator itself.
    is_generator = values.get("architectures") == ["ElectraForMaskedLM"]
    alone = {"generator_hidden_size": 0.0} if is_generator else {}
    return {**_ELECTRA_DEFAULTS, **values, **alone}


def _check_switches(values: Mapping[str, Any], switches: Mapping[str, Any], where: str) -> None:
    for name, expected in switches.items():
        if values.get(name, expected) != expected:
            raise UserError(f"{where} has {name} {values[name]}; only {expected} is read")


def _check_known(values: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Refuse a field that is none of `names`, of `ModelConfig`, or without effect."""
    known = _fields(values["model_type"])
    known = known.union(_OF_NO_EFFECT, names, (_VOCAB_SIZE, _TASK))
    for name in values:
        if name not in known and not name.startswith("_") and not name.endswith("_token_id"):
            wrong = f"{where} has {name}, which is not known of a model of type"
            advice = "remove it if the model does not depend on it"
            raise UserError(f"{wrong} {values['model_type']}; {advice}")


def _global_every(kinds: Any, layers: Any, where: str) -> int:
    """Return the layers from one of global attention to the next."""
    kinds = kinds if isinstance(kinds, list) else []
    if kinds and len(kinds) != layers:
        wrong = f"{where} has layer_types of {len(kinds)} layers, and num_hidden_layers {layers}"
        raise UserError(f"{wrong}; fetch it again")
    every = next((i for i, k in enumerate(kinds) if i and k == "full_attention"), len(kinds))
    regular = ["sliding_attention" if i % every else "full_attention" for i in range(len(kinds))]
    if not kinds or kinds != regular:
        raise UserError(f"{where}: global layers are not at even distances; it is not read")
    return every


def write_config(
    config: ModelConfig, architecture: str, tokenizer: Tokenizer, task: Task | None
) -> dict[str, Any]:
    """Return the `config.json` of an export, from which `read_config` and `read_task` read."""
    values = {"architectures": [architecture], **dataclasses.asdict(config)}
    for name in ("remat", "scan_layers", "attention"):  # they change no result
        del values[name]
    values |= {"dtype": "float32", "pad_token_id": tokenizer.pad_id, "tie_word_embeddings": True}
    values |= {"position_embedding_type": "absolute", _VOCAB_SIZE: tokenizer.vocab_size}
    if config.model_type == "modernbert":
        for theirs, ours in _MODERNBERT.items():
            values[theirs] = values.pop(ours)
        values |= {**_MODERNBERT_SWITCHES, "embedding_dropout": config.hidden_dropout_prob}
        values["classifier_dropout"] = config.hidden_dropout_prob
        values["classifier_activation"] = config.hidden_act
        del values["position_embedding_type"], values["type_vocab_size"]
        for role in ("bos", "cls"):
            values[f"{role}_token_id"] = tokenizer.cls_id
        for role in ("eos", "sep"):
            values[f"{role}_token_id"] = tokenizer.sep_id
    if config.model_type == "electra":
        values |= {**_ELECTRA_SWITCHES, "summary_last_dropout": config.hidden_dropout_prob}
        values["embedding_size"] = architecture_of(config).embedding_size(config)
    if config.model_type == "roberta":
        values["max_position_embeddings"] += first_position(values)
        values |= {"bos_token_id": tokenizer.cls_id, "eos_token_id": tokenizer.sep_id}
    if task:
        values |= {_TASK: dataclasses.asdict(task.config), **task.transformers_config()}
    return values


def read_task(values: Mapping[str, Any], config: ModelConfig, where: str) -> TaskConfig | None:
    """Return the task of a fine-tuned model; None too for several labels or numbers a text."""
    labels = dict[str, Sequence[str]]()  # of the kinds of task that it may be
    for kind in TASKS:
        task = task_class(kind)
        if task.transformers_class and architecture(values) == class_name(config, task):
            found = task.transformers_labels(values, where)
            labels |= {} if found is None else {kind: found}
    if _TASK in values:
        own = from_dict(TaskConfig, values[_TASK], f"{where}: {_TASK}")
        # With another kind or labels, `transformers` has trained the model again since the export.
        if own.kind in labels and labels[own.kind] in ((), own.labels):
            return own
    kind = next(iter(labels), None)
    return task_class(kind).settings(kind=kind, labels=tuple(labels[kind])) if kind else None


def architecture(values: Mapping[str, Any]) -> str:
    """Return the class of `transformers` that a `config.json` names, "" for none."""
    classes = values.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else ""


def class_name(config: ModelConfig, task: Task | type[Task]) -> str:
    """Return the class of `transformers` that a task of a model is exported as."""
    return PREFIXES[config.model_type] + task.transformers_class


def first_position(values: Mapping[str, Any]) -> int:
    """Return where the positions of a RoBERTa begin (`create_position_ids_from_input_ids`)."""
    padding = values.get("pad_token_id", 1)
    return padding + 1 if isinstance(padding, int) and padding >= 0 else 2


def check_tokenizer(
    path: Path, tokenizer: Tokenizer, config: ModelConfig, values: Mapping[str, Any] | None = None
) -> None:
    """Refuse a vocabulary that does not fit the model; warn of 128 embeddings without a token."""
    size = (values or {}).get(_VOCAB_SIZE)
    least, most = (size, size) if size else (0, config.vocab_size)
    if not least <= tokenizer.vocab_size <= most:
        size = f"{tokenizer.vocab_size} tokens for {most} embeddings"
        raise UserError(f"{path} has a vocabulary of {size}; fetch the one of the model")
    if not size and (padding := most - tokenizer.vocab_size) >= 128:
        warnings.warn(f"{path}: {padding:,} of {most:,} embeddings have no token", stacklevel=2)
