"""What is trained: a model, its optimizer, and the layout of their state."""

import dataclasses
from functools import partial
from typing import Any

import jax
import optax
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

    @own_settings()  # which a thread of its own does not inherit
    def new_state(self) -> TrainState:
        """Return a randomly initialized state, on the devices."""
        make = partial(_new_state, self.model, self.optimizer, self.seed)
        return init_sharded(make, self.layout.state, jax.random.key(self.seed, impl=PRNG))


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
    make = partial(_new_state, model, optimizer, seed)
    abstract_state, layout = make_layout(make, mesh, parallel)
    return Setup(model, optimizer, seed, abstract_state, layout)


def _new_state(model: Any, optimizer: Any, seed: int, key: jax.Array) -> TrainState:
    return init_state(model.init_params(key), optimizer, seed)
