"""Map tensor names to our parameters, both ways.

The standard names of a BERT and a RoBERTa are those of Hugging Face's BERT; a ModernBERT has its
own.

As in PyTorch, the matrix of a dense layer is [out, in] in all tensors that are read and written.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util

from bert_jax.config import ModelConfig, TaskConfig
from bert_jax.errors import UserError
from bert_jax.models.architecture import make_encoder
from bert_jax.models.heads import (
    TaskModel,
)
from bert_jax.objectives import pretraining_model
from bert_jax.tasks import make_task

_BERT_LAYER = {
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/distance": "attention.self.distance_embedding",
    "attention/output": "attention.output.dense",
    "attention_layer_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "feed_forward_layer_norm": "output.LayerNorm",
}
_BERT = {
    "bert/embeddings": "bert.embeddings",
    "bert/embeddings/layer_norm": "bert.embeddings.LayerNorm",
    "bert/embeddings_project": "bert.embeddings_project",
    "bert/pooler": "bert.pooler.dense",
    "mlm_head": "cls.predictions",
    "mlm_head/transform": "cls.predictions.transform.dense",
    "mlm_head/layer_norm": "cls.predictions.transform.LayerNorm",
    "nsp_head": "cls.seq_relationship",
    "generator_head": "generator_lm_head",
    "generator_head/dense": "generator_predictions.dense",
    "generator_head/layer_norm": "generator_predictions.LayerNorm",
    "discriminator_head/dense": "discriminator_predictions.dense",
    "discriminator_head/output": "discriminator_predictions.dense_prediction",
    "classifier": "classifier",
}
_MODERNBERT_LAYER = {
    "attention/query": "attn.Wqkv.0",
    "attention/key": "attn.Wqkv.1",
    "attention/value": "attn.Wqkv.2",
    "attention/output": "attn.Wo",
    "attention_layer_norm": "attn_norm",
    "up": "mlp.Wi.0",
    "gate": "mlp.Wi.1",
    "down": "mlp.Wo",
    "feed_forward_layer_norm": "mlp_norm",
}
_MODERNBERT = {
    "bert/embeddings": "model.embeddings",
    "bert/embeddings/layer_norm": "model.embeddings.norm",
    "bert/final_layer_norm": "model.final_norm",
    "bert/head/dense": "head.dense",
    "bert/head/layer_norm": "head.norm",
    "mlm_head": "decoder",
    "classifier": "classifier",
}
# Matrices that are several of ours, one after the other, and how many.
_STACKED = {"attn.Wqkv": 3, "mlp.Wi": 2}
_LEAVES = {"kernel": "weight", "scale": "weight", "embeddings": "weight", "bias": "bias"}
# Modules that a pretrained checkpoint may lack; it must have all others.
OPTIONAL_MODULES = ("bert/pooler", "bert/head", "mlm_head", "nsp_head", "generator")
OPTIONAL_MODULES += ("generator_head", "discriminator_head")

# Prefixes of the classes of a model type, by the beginning of their names.
_ROBERTA = {
    "lm_head.dense.": "cls.predictions.transform.dense.",
    "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
    "lm_head.": "cls.predictions.",
    "roberta.": "bert.",
}
_TYPE_PREFIXES = {"Roberta": _ROBERTA, "Electra": {"electra.": "bert."}}
# Prefixes of single classes of `transformers`, which take precedence.
_CLASS_PREFIXES = {
    "RobertaForSequenceClassification": {
        "roberta.pooler.": "roberta.pooler.",  # unused, but in older files
        "classifier.dense.": "bert.pooler.dense.",
        "classifier.out_proj.": "classifier.",
    },
    "RobertaForQuestionAnswering": {"qa_outputs.": "classifier."},
    "BertForQuestionAnswering": {"qa_outputs.": "classifier."},
    "ElectraForSequenceClassification": {
        "classifier.dense.": "bert.pooler.dense.",
        "classifier.out_proj.": "classifier.",
    },
    "ElectraForMultipleChoice": {"sequence_summary.summary.": "bert.pooler.dense."},
    "ElectraForQuestionAnswering": {"qa_outputs.": "classifier."},
}
# Some files store the word embeddings a second time, as the output matrix.
_DECODER, _DECODER_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"


@dataclasses.dataclass(frozen=True)
class _Names:
    """The standard names of a model type."""

    modules: Mapping[str, str]
    layers: str  # what the names of all layers begin with
    layer_modules: Mapping[str, str]
    decoder: str  # the output matrix
    words: str = "word_embeddings"


_BERT_NAMES = _Names(_BERT, "bert.encoder.layer.", _BERT_LAYER, _DECODER)
_NAMES = {
    "bert": _BERT_NAMES,
    "roberta": _BERT_NAMES,
    "electra": dataclasses.replace(_BERT_NAMES, decoder="generator_lm_head.weight"),
    "modernbert": _Names(
        _MODERNBERT, "model.layers.", _MODERNBERT_LAYER, "decoder.weight", "tok_embeddings"
    ),
}

_FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")

# Tensors by name; each is read from its file when it is called, so that one is in memory at a time.
Tensors = Mapping[str, Callable[[], np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Converted:
    """The contents of a foreign checkpoint."""

    params: dict[str, Any]  # float32, without the optional modules that the file lacks
    unused: Sequence[str]  # names of tensors that the model does not have
    task: TaskConfig | None = None
    # Tokens of a sequence of the task, at most; the default is of google-research `run_squad.py`.
    max_length: int = 384


def standard_name(name: str, architecture: str = "", model_type: str = "bert") -> str:
    """Return the standard name of a tensor in a file of some class of `transformers`."""
    if model_type == "modernbert":
        is_of_encoder = name.startswith(("embeddings.", "layers.", "final_norm."))
        return f"model.{name}" if is_of_encoder else name
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
    name = name.replace("LayerNorm.beta", "LayerNorm.bias")
    every = {**_CLASS_PREFIXES.get(architecture, {}), **_ROBERTA, **_TYPE_PREFIXES["Electra"]}
    for prefix, standard in every.items():
        if name.startswith(prefix):
            name = standard + name.removeprefix(prefix)
            break
    if name.startswith(("embeddings.", "embeddings_project.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    return "cls.predictions.bias" if name == _DECODER_BIAS else name


def name_in_class(name: str, architecture: str) -> str:
    """Return the name in a class of `transformers` of the tensor with this standard name."""
    if architecture.endswith("Model"):  # an encoder alone has no prefix of its own
        return name.removeprefix("bert.").removeprefix("model.")
    of_type = next((p for t, p in _TYPE_PREFIXES.items() if architecture.startswith(t)), {})
    for prefix, standard in {**_CLASS_PREFIXES.get(architecture, {}), **of_type}.items():
        if name.startswith(standard):
            return prefix + name.removeprefix(standard)
    return name


def foreign_name(path: str, model_type: str = "bert") -> str:
    """Return the standard name of a parameter, such as "bert/layer_0/up/kernel"."""
    names = _NAMES[model_type]
    module, leaf = path.rsplit("/", 1)
    layer = re.fullmatch(r"bert/layer_(\d+)/(.*)", module)
    name = f"{names.layers}{layer[1]}.{names.layer_modules[layer[2]]}" if layer else ""
    leaf = names.words if leaf == "word_embeddings" else leaf
    return f"{name or names.modules[module]}.{_LEAVES.get(leaf, f'{leaf}.weight')}"


def _unstacked(tensors: Tensors) -> Tensors:
    """Return tensors by name, with each stack of matrices as its matrices, by number."""
    result: dict[str, Callable[[], np.ndarray]] = {}
    for name, read in tensors.items():
        number = next((n for suffix, n in _STACKED.items() if f".{suffix}.weight" in name), 0)
        for index in range(number):
            part = name.replace(".weight", f".{index}.weight")
            result[part] = lambda r=read, i=index, n=number: np.split(r(), n)[i]
        if not number:
            result[name] = read
    return result


def _stacked(tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors, with matrices that `_unstacked` has split joined again."""
    for name, group in itertools.groupby(
        tensors, lambda item: re.sub(r"(Wqkv|Wi)\.\d+", r"\1", item[0])
    ):
        arrays = [array for _, array in group]
        yield name, arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def module_names(params: Mapping[str, Any]) -> set[str]:
    """Return the modules of the parameters that are no part of every encoder: heads, a pooler."""
    of_encoder = {f"bert/{name}" for name in params["bert"]}
    return params.keys() - {"bert"} | of_encoder.intersection(OPTIONAL_MODULES)


def to_foreign(
    params: Mapping[str, Any], dropped: Sequence[str] = (), model_type: str = "bert"
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors by standard name, sorted, without the modules `dropped`."""
    flat: Any = traverse_util.flatten_dict(params, sep="/")
    prefixes = tuple(f"{module}/" for module in dropped)
    paths = {foreign_name(p, model_type): p for p in flat if not f"{p}/".startswith(prefixes)}
    arrays = ((name, np.asarray(flat[path])) for name, path in sorted(paths.items()))
    kernels = (
        (name, value.T if paths[name].endswith("/kernel") else value) for name, value in arrays
    )
    yield from _stacked(kernels)


def from_foreign(
    tensors: Tensors, config: ModelConfig, where: str, task: TaskConfig | None = None
) -> Converted:
    """Build the parameters of a model, and all modules of a task, from tensors by their names."""
    standard = _NAMES[config.model_type]
    prefix, foreign = (
        re.escape(standard.layers),
        partial(foreign_name, model_type=config.model_type),
    )
    layers = {m[1] for n in tensors if (m := re.match(rf"{prefix}(\d+)\.", n))}
    if len(layers) != config.num_hidden_layers:  # checked before that many layers are made
        sizes = f"{len(layers)} layers of BERT and its config {config.num_hidden_layers}"
        raise UserError(f"{where} has {sizes}; fetch both from the same source")
    tensors = _unstacked(tensors)
    # The pooler of a RoBERTa is read, too.
    has_pooler = config.model_type != "modernbert"
    model: Any = pretraining_model(config, pairs=has_pooler)
    if task:
        model = make_task(task).model(config)
    # A generator is a checkpoint of its own.
    shapes = {p: x for p, x in _param_shapes(model).items() if not p.startswith("generator/")}
    paths_present = [path for path in shapes if foreign(path) in tensors]
    prefixes = () if task else tuple(f"{module}/" for module in OPTIONAL_MODULES)
    absent = tuple(p for p in prefixes if not any(path.startswith(p) for path in paths_present))
    params: dict[str, Any] = {}
    for path, expected in shapes.items():
        if path.startswith(absent):
            continue
        transposed = path.endswith("/kernel")
        shape = expected.shape[::-1] if transposed else expected.shape
        value = read_tensor(tensors, foreign(path), shape, where)
        # Copied at once, so that only one tensor is in memory twice.
        params[path] = jnp.asarray(value.T if transposed else value)
    used = {foreign(path) for path in params}
    if standard.decoder in tensors and not {"mlm_head/bias", "generator_head/bias"}.isdisjoint(
        params
    ):
        path = "bert/embeddings/word_embeddings"
        if not np.array_equal(
            read_tensor(tensors, standard.decoder, params[path].shape, where), params[path]
        ):
            tied = f"{standard.decoder} is not {foreign(path)}"
            raise UserError(f"{where}: {tied}; untied, it is not supported")
    unused = sorted(set(tensors) - used - {standard.decoder})
    return Converted(traverse_util.unflatten_dict(params, sep="/"), unused, task)


def make_model(
    config: ModelConfig,
    task: TaskConfig | None,
    probe: str = "",
    modules: Iterable[str] = OPTIONAL_MODULES,
) -> nn.Module:
    """Return the module whose parameters a checkpoint has, which has some optional modules."""
    if task:
        return make_task(task).model(config, probe)
    has_pairs = {"bert/pooler", "nsp_head"} <= set(modules)
    return pretraining_model(config, pairs=has_pairs)


def stored_shapes(model: nn.Module) -> tuple[Any, Sequence[str]]:
    """Return the shapes of a checkpoint's parameters, and the modules that it may lack."""
    key, ids = jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
    shapes: Any = jax.eval_shape(model.init_params, key)
    optional: Sequence[str] = () if isinstance(model, TaskModel) else OPTIONAL_MODULES
    if isinstance(model, TaskModel) and model.keeps_pooler:
        encoder = make_encoder(model.config, add_pooling_layer=True)
        whole: Any = jax.eval_shape(encoder.init, key, ids, ids, ids)
        shapes, optional = {**shapes, "bert": whole["params"]}, ("bert/pooler", "bert/head")
    return nn.unbox(shapes), optional


def _param_shapes(model: nn.Module) -> Mapping[str, Any]:
    shapes: Any = jax.eval_shape(model.init_params, jax.random.key(0))
    return traverse_util.flatten_dict(nn.unbox(shapes), sep="/")


def read_tensor(tensors: Tensors, name: str, shape: tuple[int, ...], where: str) -> np.ndarray:
    """Return a tensor in float32; refuse one of another shape, or not of floating point."""
    if name not in tensors:
        raise UserError(f"{where} has no {name}; fetch it again, or the config that goes with it")
    tensor = tensors[name]()
    if tensor.shape != shape:
        shapes = f"{tensor.shape} and the config asks for {shape}"
        raise UserError(f"{where}: {name} is of shape {shapes}; fetch both again")
    if tensor.dtype.name not in _FLOAT_DTYPES:
        raise UserError(f"{where}: {name} is of type {tensor.dtype}; only floating point is read")
    return np.asarray(tensor, np.float32)
