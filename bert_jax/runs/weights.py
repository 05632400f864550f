"""The parameters and the state that a run begins with."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from bert_jax import console
from bert_jax.config import ModelConfig, settings
from bert_jax.convert import names
from bert_jax.errors import refuse
from bert_jax.objectives import pretraining_model
from bert_jax.storage.paths import AnyPath
from bert_jax.training import checkpoint
from bert_jax.training.step import TrainState

# Fields of a model that may differ from the ones its weights were trained with.
COMPUTATION = ("dtype", *settings.resumable(ModelConfig))
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_POSITIONS = "position_embeddings"  # the name of the parameter of learned positions


def initial_state(
    source: AnyPath | None,
    new_state: Callable[[], TrainState],
    abstract_state: TrainState,
    *,
    params: Any = None,
    positions: int | None = None,
) -> tuple[int, TrainState]:
    """Return the step and the state that a run begins with.

    Args:
      source: the checkpoint to read; None for a new state.
      new_state: returns a randomly initialized state.
      abstract_state: shapes and shardings of the state.
      params: the parameters that replace those of a new state.
      positions: the number of positions of `source`, if they are to be interpolated.
    """
    if source:
        with console.working("restoring the checkpoint", says_end=False):
            return int(source.name), _read_state(source, abstract_state, positions)
    with console.working("initializing", says_end=False):
        state = new_state()
        if params:
            state = dataclasses.replace(state, params=copy_params(state.params, params))
        return 0, state


def _read_state(source: AnyPath, like: TrainState, positions: int | None) -> TrainState:
    """Read a state; with `positions`, interpolate its learned positions and their moments."""
    if positions is None:
        return checkpoint.read_state(source, like)

    def stored(path: Any, leaf: Any) -> Any:
        is_position = any(getattr(key, "key", None) == _POSITIONS for key in path)
        return leaf.update(shape=(positions, *leaf.shape[1:])) if is_position else leaf

    def resize(value: jax.Array, leaf: Any) -> jax.Array:
        if value.shape == leaf.shape:
            return value
        resized = partial(interpolate, count=leaf.shape[0])
        return jax.jit(resized, out_shardings=leaf.sharding)(value)

    state = checkpoint.read_state(source, jax.tree.map_with_path(stored, like))
    return jax.tree.map(resize, state, like)


def interpolate(positions: Any, count: int) -> jax.Array:
    """Return a table of learned positions for longer sequences, linearly interpolated."""
    return jax.image.resize(positions, (count, positions.shape[1]), "linear")


def copy_params(params: Any, source: Any) -> Any:
    """Return `params` with each one that `source` also has replaced by a copy, placed alike."""
    sources: Any = traverse_util.flatten_dict(source, sep="/")
    copied: Any = traverse_util.flatten_dict(params, sep="/")
    for name in sources.keys() & copied.keys():
        value, count = np.asarray(sources[name]), len(copied[name])
        if name.endswith(_POSITIONS) and len(value) != count:
            value = np.asarray(interpolate(value, count))
        # Copies, since a step reuses the memory of the state that it is given.
        copied[name] = jax.make_array_from_callback(
            value.shape, copied[name].sharding, lambda index, value=value: np.array(value[index])
        )
    return traverse_util.unflatten_dict(copied, sep="/")


def check_shapes(params: Any, model: ModelConfig) -> None:
    """Refuse initial parameters whose shapes are not those of a model; it may have others too."""
    as_float32 = dataclasses.replace(model, dtype="float32")  # "auto" is not resolved yet
    shapes: Any = names.param_shapes(pretraining_model(as_float32, pairs=True))
    wanted: Any = traverse_util.flatten_dict(shapes, sep="/")
    found: Any = traverse_util.flatten_dict(params, sep="/")
    heads = tuple(f"{module}/" for module in names.OPTIONAL_MODULES)
    for name, param in found.items():
        shape = wanted[name].shape if name in wanted else None
        if name.endswith(_POSITIONS) and shape and shape[0] > len(param):
            shape = param.shape  # they are interpolated
        # A head that the model does not have is dropped: of a task, or of another objective.
        is_of_encoder = name.startswith("bert/") and not f"{name}/".startswith(heads)
        is_used = name in wanted or is_of_encoder
        refuse(
            is_used and shape != param.shape,
            f"--init has {name} of shape {param.shape}, which the config does not ask for",
            fix="leave model_type and the sizes of the model out of the command",
        )
