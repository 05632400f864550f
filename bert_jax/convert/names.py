"""What the parameters are called elsewhere, and how they lie there.

The names of Hugging Face's BERT stand for all: Google's are the same but for their spelling, and
those of a RoBERTa and of older files are brought to them by `standard`. PyTorch keeps the matrix of
a dense layer as [out, in], and so do the tensors that are read and written here.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import linen as nn
from flax import traverse_util

from bert_jax.config import ModelConfig, TaskConfig
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForPreTraining, task_model

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
# What is learned for a task alone, and nothing else has a use for.
TASK_MODULES = ("classifier", "mix")
# What a pretrained model may come without; everything else it must have.
OPTIONAL_MODULES = ("bert/pooler", "mlm_head", "nsp_head", *TASK_MODULES)

_ROBERTA = {
    "lm_head.dense.": "cls.predictions.transform.dense.",
    "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
    "lm_head.": "cls.predictions.",
    "roberta.": "bert.",
}
# Of single classes of `transformers`, before the names above.
_OF_CLASS = {
    "RobertaForSequenceClassification": {
        "roberta.pooler.": "roberta.pooler.",  # in older files, besides the one that is used
        "classifier.dense.": "bert.pooler.dense.",
        "classifier.out_proj.": "classifier.",
    },
    "RobertaForQuestionAnswering": {"qa_outputs.": "classifier."},
    "BertForQuestionAnswering": {"qa_outputs.": "classifier."},
}
# The product with the word embeddings written out once more, which some files do.
_DECODER, _DECODER_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
_WORDS = "bert.embeddings.word_embeddings.weight"


class Tensor(Protocol):
    """A tensor in a file, not yet read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        ...

    def read(self) -> np.ndarray:
        """Returns its values."""
        ...


@dataclasses.dataclass(frozen=True)
class Converted:
    """What a foreign directory holds.

    Attributes:
      params: float32, without the parts of `OPTIONAL_MODULES` that are not there.
      unused: names of tensors that the model has no place for.
      task: what the model was fine-tuned for, if it was.
    """

    params: dict[str, Any]
    unused: Sequence[str]
    task: TaskConfig | None = None


def standard(name: str, architecture: str = "") -> str:
    """Returns the name that Hugging Face's BERT has today for a tensor of some other spelling.

    Args:
      name: of the tensor in its file.
      architecture: the class of `transformers` that the file is of, if it is a task's.
    """
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
    name = name.replace("LayerNorm.beta", "LayerNorm.bias")
    for prefix, usual in {**_OF_CLASS.get(architecture, {}), **_ROBERTA}.items():
        if name.startswith(prefix):
            name = usual + name.removeprefix(prefix)
            break
    if name.startswith(("embeddings.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    return "cls.predictions.bias" if name == _DECODER_BIAS else name


def named_in(architecture: str, name: str) -> str:
    """Returns the name in a class of `transformers` of a tensor named as in its pretrained BERT."""
    if architecture.endswith("Model"):  # an encoder alone has no prefix of its own
        return name.removeprefix("bert.")
    others = _ROBERTA if architecture.startswith("Roberta") else {}
    for prefix, usual in {**_OF_CLASS.get(architecture, {}), **others}.items():
        if name.startswith(usual):
            return prefix + name.removeprefix(usual)
    return name


def foreign_name(path: str) -> str:
    """Returns the name of a parameter, such as "bert/layer_0/up/kernel", in Hugging Face's BERT."""
    module, leaf = path.rsplit("/", 1)
    layer = re.fullmatch(r"bert/layer_(\d+)/(.*)", module)
    where = f"bert.encoder.layer.{layer[1]}.{_LAYER[layer[2]]}" if layer else _OUTSIDE[module]
    return f"{where}.{_LEAVES.get(leaf, f'{leaf}.weight')}"


def module_names(params: Mapping[str, Any]) -> set[str]:
    """Returns which of the parts of `OPTIONAL_MODULES` there are."""
    return {
        part
        for part in OPTIONAL_MODULES
        if part in params or part.removeprefix("bert/") in params["bert"]
    }


def to_foreign(
    params: Mapping[str, Any], dropped: Sequence[str] = ()
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of some parameters by name, in the order of the names.

    Args:
      params: of the model.
      dropped: parts that are passed over, such as "bert/pooler".
    """
    flat: Any = traverse_util.flatten_dict(params, sep="/")
    absent = tuple(f"{part}/" for part in dropped)
    kept = (path for path in flat if not f"{path}/".startswith(absent))
    for path in sorted(kept, key=foreign_name):
        value = np.asarray(flat[path])
        yield foreign_name(path), value.T if path.endswith("/kernel") else value


def from_foreign(
    tensors: Mapping[str, Tensor], config: ModelConfig, where: str, task: TaskConfig | None = None
) -> Converted:
    """Builds the parameters of a model.

    Args:
      tensors: by their standard names.
      config: of the model.
      where: what to call the file in an error.
      task: what the model was fine-tuned for, if it was: then all that this needs must be there.

    Raises:
      UserError: a tensor is missing, of another shape or of integers, or the files tie nothing.
    """
    _check_layers(tensors, config, where)
    model = task_model(config, task.kind, task.labels) if task else BertForPreTraining(config)
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    flat: Any = traverse_util.flatten_dict(nn.unbox(shapes), sep="/")
    optional = () if task else OPTIONAL_MODULES
    absent = {part for part in optional if not any(_is_of(path, part, tensors) for path in flat)}
    params: dict[str, Any] = {}
    for path, wanted in flat.items():
        if path.startswith(tuple(f"{part}/" for part in absent)):
            continue
        transposed = path.endswith("/kernel")
        shape = wanted.shape[::-1] if transposed else wanted.shape
        value = _read(tensors, foreign_name(path), shape, where)
        # At once, so that only one tensor is held twice.
        params[path] = jnp.asarray(value.T if transposed else value)
    used = {foreign_name(path) for path in params}
    if _DECODER in tensors and "mlm_head/bias" in params:
        words = params["bert/embeddings/word_embeddings"]
        if not np.array_equal(_read(tensors, _DECODER, words.shape, where), words):
            raise UserError(
                f"{where}: {_DECODER} is not {_WORDS}; a model whose output embeddings are not "
                "those of its input is not supported"
            )
        used.add(_DECODER)
    unused = sorted(set(tensors) - used - {_DECODER})
    return Converted(traverse_util.unflatten_dict(params, sep="/"), unused, task)


def _is_of(path: str, part: str, tensors: Mapping[str, Tensor]) -> bool:
    return path.startswith(f"{part}/") and foreign_name(path) in tensors


def _check_layers(tensors: Mapping[str, Tensor], config: ModelConfig, where: str) -> None:
    """Refuses another number of layers, before so many are made."""
    found = {m[1] for n in tensors if (m := re.match(r"bert\.encoder\.layer\.(\d+)\.", n))}
    if len(found) != config.num_hidden_layers:
        raise UserError(
            f"{where} has {len(found)} layers of BERT and its config {config.num_hidden_layers}; "
            "fetch both from the same place"
        )


def _read(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], where: str
) -> np.ndarray:
    if name not in tensors:
        raise UserError(f"{where} has no {name}; fetch it again, or the config that goes with it")
    tensor = tensors[name]
    if tuple(tensor.shape) != shape:
        raise UserError(
            f"{where}: {name} is of shape {tuple(tensor.shape)} and the config asks for {shape}; "
            "fetch both from the same place"
        )
    value = tensor.read()
    if value.dtype not in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        raise UserError(f"{where}: {name} is of type {value.dtype}; only floating point is read")
    return np.asarray(value, np.float32)
