"""Map tensor names to our parameters, both ways.

The names are those of `models.exchange.Exchange`, which each architecture has.

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

from bert_jax.config import DataFiles, ModelConfig, TaskConfig
from bert_jax.config.fields import MODEL_TYPES
from bert_jax.config.settings import resolve
from bert_jax.errors import UserError
from bert_jax.models.architecture import make_encoder
from bert_jax.models.exchange import Exchange
from bert_jax.models.heads import TaskModel
from bert_jax.objectives import pretraining_model
from bert_jax.tasks import make_task

# Modules of an encoder that a checkpoint may lack, as it may lack any head of pretraining.
OPTIONAL_MODULES = ("bert/pooler", "bert/head")

_FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")

# Tensors by name; each is read from its file when it is called, so that one is in memory at a time.
Tensors = Mapping[str, Callable[[], np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Converted:
    """The contents of a foreign checkpoint."""

    params: dict[str, Any]  # float32, without the optional modules that the file lacks
    unused: Sequence[str]  # names of tensors that the model does not have
    task: TaskConfig | None = None
    max_length: int | None = None  # tokens of a sequence, at most, where the checkpoint says it
    data: DataFiles | None = None  # the columns that the task was trained on, where it says them


def exchange_of(model_type: str) -> Exchange:
    """Return the names of an architecture in files of `transformers`; refuse one without."""
    exchange = resolve(MODEL_TYPES, model_type).exchange
    if exchange is None:
        raise UserError(
            f"a {model_type} cannot be exported or imported: its architecture has no exchange"
        )
    return exchange


def _unstacked(tensors: Tensors, stacked: Mapping[str, int]) -> Tensors:
    """Return tensors by name, with each stack of matrices as its matrices, by number."""
    result: dict[str, Callable[[], np.ndarray]] = {}
    for name, read in tensors.items():
        number = next((n for suffix, n in stacked.items() if f".{suffix}.weight" in name), 0)
        for index in range(number):
            part = name.replace(".weight", f".{index}.weight")
            # A stack of another size has a part of a wrong shape, which is refused by name.
            result[part] = lambda r=read, i=index, n=number: np.array_split(r(), n)[i]
        if not number:
            result[name] = read
    return result


def _stacked(
    tensors: Iterable[tuple[str, np.ndarray]], stacked: Mapping[str, int]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors, with matrices that `_unstacked` has split joined again."""

    def whole(item: tuple[str, np.ndarray]) -> str:
        name = item[0]
        for suffix in stacked:
            name = re.sub(rf"\.{re.escape(suffix)}\.\d+\.", f".{suffix}.", name)
        return name

    for name, group in itertools.groupby(tensors, whole):
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
    exchange, flat = exchange_of(model_type), _flatten(params)
    prefixes = tuple(f"{module}/" for module in dropped)
    paths = {exchange.name_of(p): p for p in flat if not f"{p}/".startswith(prefixes)}
    arrays = ((name, np.asarray(flat[path])) for name, path in sorted(paths.items()))
    kernels = (
        (name, value.T if paths[name].endswith("/kernel") else value) for name, value in arrays
    )
    yield from _stacked(kernels, exchange.stacked)


def from_foreign(
    tensors: Tensors,
    config: ModelConfig,
    where: str,
    task: TaskConfig | None = None,
    architecture: str = "",
) -> Converted:
    """Build the parameters of a model, and all modules of a task, from tensors by standard names.

    `architecture` is the class of `transformers` whose names the messages have.
    """
    exchange = exchange_of(config.model_type)
    prefix = re.escape(exchange.layers)
    layers = {m[1] for n in tensors if (m := re.match(rf"{prefix}(\d+)\.", n))}
    if len(layers) != config.num_hidden_layers:  # checked before that many layers are made
        raise UserError(
            f"{where} has {len(layers)} layers of BERT and its config {config.num_hidden_layers}; "
            "fetch both from the same source"
        )
    tensors = _unstacked(tensors, exchange.stacked)
    # A pooler is read, too, of an architecture that is pretrained without one.
    has_pooler = "bert/pooler" in exchange.modules
    model = make_task(task).model(config) if task else pretraining_model(config, pairs=has_pooler)
    # A generator is a checkpoint of its own.
    shapes = {name: x for name, x in param_shapes(model).items() if name != "generator"}
    optional = () if task else module_names(shapes)
    names = {path: exchange.name_of(path) for path in _flatten(shapes)}
    present = tuple(path for path, name in names.items() if name in tensors)
    absent = tuple(
        f"{module}/"
        for module in optional
        if not any(path.startswith(f"{module}/") for path in present)
    )
    in_file = partial(exchange.name_in_class, architecture=architecture)
    params: dict[str, Any] = {}
    for path, expected in _flatten(shapes).items():
        if path.startswith(absent):
            continue
        name, transposed = names[path], path.endswith("/kernel")
        shape = expected.shape[::-1] if transposed else expected.shape
        value = read_tensor(tensors, name, shape, where, in_file(name))
        # Copied at once, so that only one tensor is in memory twice.
        params[path] = jnp.asarray(value.T if transposed else value)
    decoder, words = exchange.decoder, "bert/embeddings/word_embeddings"
    if decoder in tensors and not task:
        value = read_tensor(tensors, decoder, params[words].shape, where, in_file(decoder))
        if not np.array_equal(value, params[words]):
            raise UserError(
                f"{where}: {in_file(decoder)} differs from {in_file(names[words])}; only models "
                "whose output embeddings are their input embeddings are read"
            )
    unused = sorted(set(tensors) - {names[path] for path in params} - {decoder})
    return Converted(traverse_util.unflatten_dict(params, sep="/"), unused, task)


def stored_shapes(model: nn.Module) -> tuple[Any, Sequence[str]]:
    """Return the shapes of a checkpoint's parameters, and the modules that it may lack."""
    shapes = param_shapes(model)
    if not isinstance(model, TaskModel):
        return shapes, sorted(module_names(shapes))
    if not model.keeps_pooler:
        return shapes, ()
    key, ids = jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
    encoder = make_encoder(model.config, add_pooling_layer=True)
    whole: Any = jax.eval_shape(encoder.init, key, ids, ids, ids)
    return {**shapes, "bert": nn.unbox(whole["params"])}, OPTIONAL_MODULES


def param_shapes(model: Any) -> Mapping[str, Any]:
    """Return the shapes of a module's parameters."""
    return nn.unbox(jax.eval_shape(model.init_params, jax.random.key(0)))


def _flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    return traverse_util.flatten_dict(params, sep="/")  # pyright: ignore


def read_tensor(
    tensors: Tensors, name: str, shape: tuple[int, ...], where: str, shown: str
) -> np.ndarray:
    """Return a tensor in float32; refuse one of another shape, or not of floating point.

    `shown` is the name that messages have of it.
    """
    if name not in tensors:
        raise UserError(f"{where} has no {shown}; fetch it again, or the config that goes with it")
    tensor = tensors[name]()
    if tensor.shape != shape:
        raise UserError(
            f"{where}: {shown} is of shape {tensor.shape} and the config asks for {shape}; fetch "
            "both again"
        )
    if tensor.dtype.name not in _FLOAT_DTYPES:
        raise UserError(f"{where}: {shown} is of type {tensor.dtype}; only floating point is read")
    return np.asarray(tensor, np.float32)
