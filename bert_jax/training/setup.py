"""What is trained: a model, its optimizer, and the layout of their state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import linen as nn
from jax.sharding import Mesh

from bert_jax.config import ParallelConfig, TrainConfig
from bert_jax.config.schedule import RateSchedule
from bert_jax.distributed.mesh import Layout, init_sharded, make_layout, own_settings
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.step import PRNG, TrainState, init_state


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model and its optimizer, with their abstract state (shapes and shardings)."""

    model: Any  # with `init_params(key)`
    optimizer: optax.GradientTransformation
    seed: int
    abstract_state: TrainState
    layout: Layout
    init: Callable[[jax.Array], TrainState]  # returns the boxed state of a key

    @own_settings()  # which a thread of its own does not inherit
    def new_state(self) -> TrainState:
        """Return a randomly initialized state, on the devices."""
        return init_sharded(self.init, self.layout.state, jax.random.key(self.seed, impl=PRNG))


def set_up(model: Any, config: TrainConfig, rate: RateSchedule, mesh: Mesh) -> Setup:
    """Return a model, its optimizer and their layout for a resolved pretraining config."""
    optimizer = make_optimizer(config.optimizer, rate)
    return make_setup(model, optimizer, config.seed, mesh, config.parallel)


def make_setup(
    model: Any,
    optimizer: optax.GradientTransformation,
    seed: int,
    mesh: Mesh,
    parallel: ParallelConfig,
) -> Setup:
    """Return a model that has `init_params(key)`, its optimizer and their layout."""

    def init(key: jax.Array) -> TrainState:
        return _without_empty_boxes(init_state(model.init_params(key), optimizer, key))

    key = jax.random.key(seed, impl=PRNG)
    abstract_state, layout = make_layout(init, key, mesh, parallel)
    return Setup(model, optimizer, seed, abstract_state, layout, init)


def _without_empty_boxes(state: Any) -> Any:
    """Return a state without the names of the axes of what is not there.

    An optimizer of some parameters has nothing in the place of the others.
    """

    def is_box(x: Any) -> bool:
        return isinstance(x, nn.meta.AxisMetadata)

    return jax.tree.map(
        lambda x: x.unbox() if is_box(x) and not jax.tree.leaves(x) else x, state, is_leaf=is_box
    )
