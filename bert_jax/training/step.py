"""The train, evaluation and prediction steps, the same for every device layout.

Each takes the `Collectives` of its devices; `distributed.mesh.compile_step` gives it those.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array

from bert_jax.distributed.fsdp import SINGLE_DEVICE, Collectives
from bert_jax.training.objective import (
    Batch,
    Metrics,
    Objective,
    PredictionObjective,
    WeightedSum,
)

# The outputs of a predict step, as `distributed.mesh.compile_step` names them: both are replicated.
PREDICT_OUTPUTS = ("metrics", "metrics")
# Named here, so that neither a flag nor a newer default of JAX changes what a seed means.
PRNG = "threefry2x32"


@struct.dataclass
class TrainState:
    """All that a run carries from step to step: arrays only."""

    step: Any  # how many steps have been taken
    params: Any  # of the model, float32
    opt_state: Any  # of the optimizer
    rng: Any  # the run's key as raw words; it never changes, step t folds t into it


def init_state(params: Any, optimizer: optax.GradientTransformation, key: Array) -> TrainState:
    """Return the state before the first step of a run that has this key, one of `PRNG`."""
    return TrainState(jnp.int32(0), params, optimizer.init(params), jax.random.key_data(key))


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    microbatches: int = 1,
    steps: int | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Return `train_step(state, batch, collectives) -> (next state, metrics)`.

    `steps` are those of the run, for an objective that changes on its way.
    """

    def train_step(
        state: TrainState, batch: Batch, collectives: Collectives = SINGLE_DEVICE
    ) -> tuple[TrainState, Metrics]:
        def run_shard(params: Any, rng: tuple[Array, Array], batch: Batch) -> tuple[Any, Metrics]:
            key = jax.random.fold_in(jax.random.wrap_key_data(rng[0], impl=PRNG), rng[1])
            mask_key, dropout_key = jax.random.split(key)
            examples = objective.prepare(mask_key, _with_mask(batch))
            present = objective.at_progress(rng[1] / steps) if steps else objective
            gradients, metrics = present.gradient(
                params, examples, dropout_key, collectives, microbatches
            )
            return collectives.reduce_gradients(gradients), collectives.psum(metrics)

        gradients, metrics = collectives.run(run_shard, ("gradients", "metrics"))(
            state.params, (state.rng, state.step), batch
        )
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
            params = collectives.gather_params(optax.apply_updates(state.params, updates))
            norm = WeightedSum(optax.tree.norm(gradients), jnp.float32(1))
        new_state = TrainState(state.step + 1, params, opt_state, state.rng)
        return new_state, {**metrics, "gradient_norm": norm}

    return train_step


def _with_mask(batch: Batch) -> Batch:
    """Return a batch with an `attention_mask`, as objectives take it.

    The loader's batches without padding have none. Theirs is a NumPy array, of which a model knows
    that it is of ones alone; a microbatch's is not.
    """
    ones = np.broadcast_to(np.int32(1), batch["input_ids"].shape)
    return {"attention_mask": ones, **batch}


def make_eval_step(objective: Objective) -> Callable[..., Metrics]:
    """Return `eval_step(params, batch, collectives) -> metrics`, without dropout."""

    def eval_step(params: Any, batch: Batch, collectives: Collectives = SINGLE_DEVICE) -> Metrics:
        def run_shard(params: Any, _: Any, batch: Batch) -> Metrics:
            # Masks depend on a sequence's index alone: they are the same in each evaluation.
            key = jax.random.key(0, impl=PRNG)
            examples = objective.prepare(key, _with_mask(batch))
            _, metrics = objective.loss(params, examples, objective.weights(examples), None)
            return collectives.psum(metrics)

        return collectives.run(run_shard, "metrics")(params, (), batch)

    return eval_step


def make_predict_step(
    objective: PredictionObjective,
    microbatches: int = 1,
) -> Callable[..., tuple[Array, Metrics]]:
    """Return `predict(params, batch, collectives) -> (logits, metrics)`, without dropout.

    Microbatches save memory. The metrics are those of the whole batch.
    """

    def predict(
        params: Any, batch: Batch, collectives: Collectives = SINGLE_DEVICE
    ) -> tuple[Array, Metrics]:
        def run_shard(params: Any, _: Any, batch: Batch) -> tuple[Array, Metrics]:
            logits = objective.apply_in_microbatches(params, batch, None, microbatches)
            metrics = objective.metrics(logits, batch["labels"], collectives)
            # Of the whole batch, so that every process can read them.
            return collectives.all_gather(logits), collectives.psum(metrics)

        return collectives.run(run_shard, PREDICT_OUTPUTS)(params, (), batch)

    return predict
