"""A train step and the objective that it trains."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from helpers import batch, objective, params

from bert_jax.objectives.labels import LabelsObjective
from bert_jax.training.objective import WeightedSum
from bert_jax.training.step import PRNG, init_state, make_eval_step, make_train_step


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


class Drawing(LabelsObjective):
    """Measures what its masks and its dropout draw."""

    def prepare(self, key, batch):
        return {**batch, "masks": jax.random.uniform(key)}

    def gradient(self, params, batch, dropout_key, *_):
        drawn = {"masks": batch["masks"], "dropout": jax.random.uniform(dropout_key)}
        return {"w": jnp.zeros(())}, {n: WeightedSum(x, 1.0) for n, x in drawn.items()}


def test_each_step_draws_its_own_masks_and_dropout():
    optimizer, drawn = optax.sgd(1.0), []
    state = init_state({"w": jnp.zeros(())}, optimizer, jax.random.key(0, impl=PRNG))
    step = make_train_step(Drawing(nn.Dense(1)), optimizer)
    for _ in range(3):
        state, metrics = step(state, {"input_ids": jnp.ones((1, 1), jnp.int32)})
        drawn += [float(metrics[name].total) for name in ("masks", "dropout")]
    assert len({*drawn}) == 6


def test_an_evaluation_has_no_dropout():
    found = []
    for rate in (0.1, 0.0):
        rates = {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}
        task = objective(num_hidden_layers=1, **rates)
        found.append(jax.jit(make_eval_step(task))(params(task), batch(4))["mlm_loss"].total)
    assert found[0] == found[1]
