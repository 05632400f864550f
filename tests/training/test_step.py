"""A train step and the objective that it trains."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from bert_jax.objectives.labels import LabelsObjective
from bert_jax.training.step import PRNG, init_state, make_train_step


class Growing(LabelsObjective):
    """An objective whose gradient is its progress."""

    progress: Any = 1.0

    def at_progress(self, done):
        objective = Growing(self.model)
        object.__setattr__(objective, "progress", done)
        return objective

    def gradient(self, params, *_):
        return {"w": self.progress * jnp.ones_like(params["w"])}, {}


def test_an_objective_knows_how_far_its_run_is():
    optimizer = optax.sgd(1.0)
    state = init_state({"w": jnp.zeros(())}, optimizer, jax.random.key(0, impl=PRNG))
    batch = {"input_ids": jnp.ones((1, 1), jnp.int32)}
    found = SimpleNamespace(with_steps=[], without=[])
    for steps, norms in ((4, found.with_steps), (None, found.without)):
        step, following = make_train_step(Growing(nn.Dense(1)), optimizer, steps=steps), state
        for _ in range(3):
            following, metrics = step(following, batch)
            norms.append(float(metrics["gradient_norm"].total))
    assert found.with_steps == [0.0, 0.25, 0.5]
    assert found.without == [1.0, 1.0, 1.0]
