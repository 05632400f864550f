"""Map tensor names to our parameters, both ways; standard names are those of Hugging Face's BERT.

As in PyTorch, the matrix of a dense layer is [out, in] in all tensors that are read and written.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util

from bert_jax.config import ModelConfig, TaskConfig
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForPreTraining, TaskModel
from bert_jax.tasks import make_task

_LAYER = {
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
_OUTSIDE = {
    "bert/embeddings": "bert.embeddings",
    "bert/embeddings/layer_norm": "bert.embeddings.LayerNorm",
    "bert/pooler": "bert.pooler.dense",
    "mlm_head": "cls.predictions",
    "mlm_head/transform": "cls.predictions.transform.dense",
    "mlm_head/layer_norm": "cls.predictions.transform.LayerNorm",
    "nsp_head": "cls.seq_relationship",
    "classifier": "classifier",
}
_LEAVES = {"kernel": "weight", "scale": "weight", "embeddings": "weight", "bias": "bias"}
TASK_MODULES = ("classifier", "mix")
# Modules that a pretrained checkpoint may lack; it must have all others.
OPTIONAL_MODULES = ("bert/pooler", "mlm_head", "nsp_head", *TASK_MODULES)

_ROBERTA = {
    "lm_head.dense.": "cls.predictions.transform.dense.",
    "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
    "lm_head.": "cls.predictions.",
    "roberta.": "bert.",
}
# Prefixes of single classes of `transformers`, which take precedence.
_CLASS_PREFIXES = {
    "RobertaForSequenceClassification": {
        "roberta.pooler.": "roberta.pooler.",  # unused, but in older files
        "classifier.dense.": "bert.pooler.dense.",
        "classifier.out_proj.": "classifier.",
    },
    "RobertaForQuestionAnswering": {"qa_outputs.": "classifier."},
    "BertForQuestionAnswering": {"qa_outputs.": "classifier."},
}
# Some files store the word embeddings a second time, as the output matrix.
_DECODER, _DECODER_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
_WORDS = "bert.embeddings.word_embeddings.weight"

_FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")

# Tensors by name; each is read from its file when it is called, so that one is in memory at a time.
Tensors = Mapping[str, Callable[[], np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Converted:
    """The contents of a foreign checkpoint."""

    params: dict[str, Any]  # float32, without the optional modules that the file lacks
    unused: Sequence[str]  # names of tensors that the model does not have
    task: TaskConfig | None = None


def standard_name(name: str, architecture: str = "") -> str:
    """Return the standard name of a tensor in a file of some class of `transformers`."""
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
    name = name.replace("LayerNorm.beta", "LayerNorm.bias")
    for prefix, standard in {**_CLASS_PREFIXES.get(architecture, {}), **_ROBERTA}.items():
        if name.startswith(prefix):
            name = standard + name.removeprefix(prefix)
            break
    if name.startswith(("embeddings.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    return "cls.predictions.bias" if name == _DECODER_BIAS else name


def name_in_class(name: str, architecture: str) -> str:
    """Return the name in a class of `transformers` of the tensor with this standard name."""
    if architecture.endswith("Model"):  # an encoder alone has no prefix of its own
        return name.removeprefix("bert.")
    roberta = _ROBERTA if architecture.startswith("Roberta") else {}
    for prefix, standard in {**_CLASS_PREFIXES.get(architecture, {}), **roberta}.items():
        if name.startswith(standard):
            return prefix + name.removeprefix(standard)
    return name


def foreign_name(path: str) -> str:
    """Return the standard name of a parameter, such as "bert/layer_0/up/kernel"."""
    module, leaf = path.rsplit("/", 1)
    layer = re.fullmatch(r"bert/layer_(\d+)/(.*)", module)
    name = f"bert.encoder.layer.{layer[1]}.{_LAYER[layer[2]]}" if layer else _OUTSIDE[module]
    return f"{name}.{_LEAVES.get(leaf, f'{leaf}.weight')}"


def module_names(params: Mapping[str, Any]) -> set[str]:
    """Return the modules of `OPTIONAL_MODULES` that the parameters have."""
    names = {*params, *(f"bert/{name}" for name in params["bert"])}
    return names.intersection(OPTIONAL_MODULES)


def to_foreign(
    params: Mapping[str, Any], dropped: Sequence[str] = ()
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors by standard name, sorted, without the modules `dropped`."""
    flat: Any = traverse_util.flatten_dict(params, sep="/")
    prefixes = tuple(f"{module}/" for module in dropped)
    kept = (path for path in flat if not f"{path}/".startswith(prefixes))
    for path in sorted(kept, key=foreign_name):
        value = np.asarray(flat[path])
        yield foreign_name(path), value.T if path.endswith("/kernel") else value


def from_foreign(
    tensors: Tensors, config: ModelConfig, where: str, task: TaskConfig | None = None
) -> Converted:
    """Build the parameters of a model, and all modules of a task, from tensors by their names."""
    layers = {m[1] for n in tensors if (m := re.match(r"bert\.encoder\.layer\.(\d+)\.", n))}
    if len(layers) != config.num_hidden_layers:  # checked before that many layers are made
        sizes = f"{len(layers)} layers of BERT and its config {config.num_hidden_layers}"
        raise UserError(f"{where} has {sizes}; fetch both from the same source")
    model = make_task(task).model(config) if task else BertForPreTraining(config)
    shapes = _param_shapes(model)
    paths_present = [path for path in shapes if foreign_name(path) in tensors]
    prefixes = () if task else tuple(f"{module}/" for module in OPTIONAL_MODULES)
    absent = tuple(p for p in prefixes if not any(path.startswith(p) for path in paths_present))
    params: dict[str, Any] = {}
    for path, expected in shapes.items():
        if path.startswith(absent):
            continue
        transposed = path.endswith("/kernel")
        shape = expected.shape[::-1] if transposed else expected.shape
        value = _read(tensors, foreign_name(path), shape, where)
        # Copied at once, so that only one tensor is in memory twice.
        params[path] = jnp.asarray(value.T if transposed else value)
    used = {foreign_name(path) for path in params}
    if _DECODER in tensors and "mlm_head/bias" in params:
        words = params["bert/embeddings/word_embeddings"]
        if not np.array_equal(_read(tensors, _DECODER, words.shape, where), words):
            raise UserError(f"{where}: {_DECODER} is not {_WORDS}; untied, it is not supported")
    unused = sorted(set(tensors) - used - {_DECODER})
    return Converted(traverse_util.unflatten_dict(params, sep="/"), unused, task)


def _param_shapes(model: BertForPreTraining | TaskModel) -> Mapping[str, Any]:
    shapes: Any = jax.eval_shape(model.init_params, jax.random.key(0))
    return traverse_util.flatten_dict(nn.unbox(shapes), sep="/")


def _read(tensors: Tensors, name: str, shape: tuple[int, ...], where: str) -> np.ndarray:
    if name not in tensors:
        raise UserError(f"{where} has no {name}; fetch it again, or the config that goes with it")
    tensor = tensors[name]()
    if tensor.shape != shape:
        shapes = f"{tensor.shape} and the config asks for {shape}"
        raise UserError(f"{where}: {name} is of shape {shapes}; fetch both again")
    if tensor.dtype.name not in _FLOAT_DTYPES:
        raise UserError(f"{where}: {name} is of type {tensor.dtype}; only floating point is read")
    return np.asarray(tensor, np.float32)
