"""The train step and the evaluation step, the same for every device layout."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array

from bert_jax.distributed.fsdp import SINGLE_DEVICE, Collectives
from bert_jax.training.objectives import Batch, Metrics, Objective, TaskObjective, WeightedSum

# Named, so that neither a newer default nor a flag of JAX's changes what a seed means.
_PRNG = "threefry2x32"


@struct.dataclass
class TrainState:
    """Everything that a run carries from step to step: arrays only.

    Attributes:
      step: how many steps have been taken.
      params: of the model, float32.
      opt_state: of the optimizer.
      rng: the run's key as raw words; step t uses it folded with t, so it never changes.
    """

    step: Any
    params: Any
    opt_state: Any
    rng: Any


def init_state(params: Any, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """Returns the state before the first step."""
    rng = jax.random.key_data(jax.random.key(seed, impl=_PRNG))
    return TrainState(jnp.int32(0), params, optimizer.init(params), rng)


def make_train_step(
    objective: Objective, optimizer: optax.GradientTransformation, microbatches: int = 1
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Return `train_step(state, batch, collectives) -> (next state, metrics)`.

    The weights of the whole global batch are summed before any loss is divided by them, so that
    one device, many, and any number of microbatches give the same gradient.

    Args:
      objective: what is trained.
      optimizer: how.
      microbatches: parts in which the rows are run, one after the other.
    """
    gradient = jax.grad(objective.loss, has_aux=True)

    def train_step(
        state: TrainState, batch: Batch, collectives: Collectives = SINGLE_DEVICE
    ) -> tuple[TrainState, Metrics]:
        def of_rows(params: Any, draws: tuple[Array, Array], batch: Batch) -> tuple[Any, Metrics]:
            mask_key, dropout_key = _keys(draws)
            examples = objective.prepare(mask_key, batch)
            weights = collectives.psum(objective.weights(examples))

            def accumulate(total: Any, part: Any) -> tuple[Any, None]:
                found = gradient(params, part, weights, dropout_key)
                return jax.tree.map(jnp.add, total, found), None

            if microbatches == 1:
                total = gradient(params, examples, weights, dropout_key)
            else:
                parts = jax.tree.map(lambda x: _split(x, microbatches), examples)
                first = jax.tree.map(lambda x: x[0], parts)
                shapes = jax.eval_shape(gradient, params, first, weights, dropout_key)
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
                total, _ = jax.lax.scan(accumulate, zeros, parts)
            gradients, sums = total
            return collectives.reduce_gradients(gradients), collectives.psum(sums)

        run = collectives.run(of_rows, ("gradients", "metrics"))
        gradients, sums = run(state.params, (state.rng, state.step), batch)
        return _updated(state, gradients, sums, optimizer, collectives)

    return train_step


def _keys(draws: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns the keys of a step, for what `prepare` draws and for dropout.

    Args:
      draws: the run's key as raw words, and the step.
    """
    words, step = draws
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl=_PRNG), step)
    mask_key, dropout_key = jax.random.split(key)
    return mask_key, dropout_key


def _updated(
    state: TrainState,
    gradients: Any,
    sums: Metrics,
    optimizer: optax.GradientTransformation,
    collectives: Collectives = SINGLE_DEVICE,
) -> tuple[TrainState, Metrics]:
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = collectives.gather_params(optax.apply_updates(state.params, updates))
    norm = WeightedSum(optax.tree.norm(gradients), jnp.float32(1))
    return (
        TrainState(state.step + 1, params, opt_state, state.rng),
        {**sums, "gradient_norm": norm},
    )


def make_eval_step(objective: Objective) -> Callable[..., Metrics]:
    """Return `eval_step(params, batch, collectives) -> metrics`, without dropout.

    A row's masks depend on its `row` alone: they do not change from one evaluation to the next.
    """

    def eval_step(params: Any, batch: Batch, collectives: Collectives = SINGLE_DEVICE) -> Metrics:
        def of_rows(params: Any, _: Any, batch: Batch) -> Metrics:
            examples = objective.prepare(jax.random.key(0, impl=_PRNG), batch)
            _, sums = objective.loss(params, examples, objective.weights(examples), None)
            return collectives.psum(sums)

        return collectives.run(of_rows, "metrics")(params, (), batch)

    return eval_step


def make_predict_step(objective: TaskObjective) -> Callable[..., tuple[Array, Metrics]]:
    """Returns `predict(params, batch, collectives)`, which gives each row's logits and the sums."""

    def predict(
        params: Any, batch: Batch, collectives: Collectives = SINGLE_DEVICE
    ) -> tuple[Array, Metrics]:
        def of_rows(params: Any, _: Any, batch: Batch) -> tuple[Array, Metrics]:
            logits = objective.logits(params, batch)
            return logits, collectives.psum(objective.metrics(logits, batch["labels"]))

        return collectives.run(of_rows, ("per_example", "metrics"))(params, (), batch)

    return predict


def _split(x: Array, parts: int) -> Array:
    """Splits the rows, [B, ...] to [parts, B / parts, ...].

    Neighbours go to different parts, so that rows that lie evenly over devices still do.
    """
    return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)
