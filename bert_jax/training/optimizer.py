"""Optimizers, BERT's AdamW among them, and learning rate schedules, in Optax."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from bert_jax.config import OptimizerConfig
from bert_jax.config.schedule import RateSchedule
from bert_jax.errors import UserError


def rate_by_step(schedule: RateSchedule) -> optax.Schedule:
    """Return the learning rate by step: linear warm-up, then what `schedule.kind` says.

    - "linear", to 0 at `steps`, as in google-research/bert `optimization.py`: the decay counts from
      step 0, so that the rate drops where warm-up ends. The first step of a warm-up, at rate 0,
      changes nothing.
    - "cosine", to 0 at `steps`. Source: Loshchilov and Hutter 2017, without restarts.
    - "constant".
    - "wsd": constant, and in the last steps 1 - sqrt of the share of them that is done. Source:
      Hägele et al. 2024, section 4, and Warner et al. 2024.

    Each of `schedule.peaks` is the rate, of which this leaves a share, from its step on.
    """
    steps, warmup, decay = schedule.steps, schedule.warmup, schedule.decay

    def rate(count: ArrayLike) -> jax.Array:
        step = jnp.asarray(count)
        if schedule.kind == "linear":
            decayed = jnp.maximum(1.0 - step / steps, 0.0)
        elif schedule.kind == "cosine":
            decayed = optax.cosine_decay_schedule(1.0, max(1, steps - warmup))(step - warmup)
        else:
            decayed = 1.0 - jnp.sqrt(jnp.clip((step - steps + decay) / max(decay, 1), 0.0, 1.0))
        (_, peak), *later = schedule.peaks
        for first, value in later:
            peak = jnp.where(step < first, peak, value)
        return peak * jnp.where(step < warmup, step / max(warmup, 1), decayed)

    return rate


def learning_rate(schedule: RateSchedule) -> Callable[[int], float]:
    """Return a function of the learning rate of a step, of which 1 is the first."""
    # One program; by operation, the first step would wait for six.
    rate = jax.jit(rate_by_step(schedule))
    return lambda step: float(rate(step - 1))


def clip_by_global_norm(largest: float) -> optax.GradientTransformation:
    """Scale gradients whose global norm is above `largest` down to it.

    Optax's function divides each gradient, which a compiler does before the optimizer, in a pass of
    its own; the product with one factor it computes wherever the gradient is used.
    """

    def clip(updates: optax.Updates, _: Any) -> optax.Updates:
        factor = largest / jnp.maximum(optax.tree.norm(updates), largest)
        return jax.tree.map(lambda g: g * factor, updates)

    return optax.stateless(clip)


class _Moments(NamedTuple):
    mu: optax.Updates
    nu: optax.Updates


def scale_by_bert_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam as BERT was trained: no bias correction, and epsilon outside the square root.

    `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g²`, update `m / (sqrt(v) + eps)`. Source:
    `AdamWeightDecayOptimizer` in google-research/bert `optimization.py`.
    """

    def init(params: optax.Params) -> _Moments:
        # Two trees of zeros, since a buffer that is in the state twice cannot be donated.
        return _Moments(jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: optax.Updates, state: _Moments, params: optax.Params | None = None
    ) -> tuple[optax.Updates, _Moments]:
        del params
        mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, updates, state.mu)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * g * g, updates, state.nu)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu), _Moments(mu, nu)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def clip_updates(
    adam: optax.GradientTransformation, b2: float, eps: float
) -> optax.GradientTransformation:
    """Divide the update of each tensor by max(1, RMS(g / sqrt(v))), weight decay included.

    `adam` is a chain that begins with Optax's, and `v` its second moment with bias correction.
    Source: StableAdamW, algorithm 2 of Wortsman et al. 2023, after Shazeer and Stern 2018.
    """

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        steps, state = adam.update(updates, state, params)
        second = optax.tree.bias_correction(state[0].nu, b2, state[0].count)

        def clip(step: jax.Array, g: jax.Array, v: jax.Array) -> jax.Array:
            return step / jnp.maximum(1.0, jnp.sqrt((g * g / jnp.maximum(v, eps**2)).mean()))

        return jax.tree.map(clip, steps, updates, second), state

    return optax.GradientTransformation(adam.init, update)


def scale_by_muon(momentum: float = 0.95) -> optax.GradientTransformation:
    """Muon, for matrices only: make all singular values of Nesterov's momentum about equal.

    The updates are scaled to the size of Adam's, so that one rate and one weight decay serve both.
    Sources: Jordan et al. 2024, "Muon", and Liu et al. 2025, "Muon is Scalable for LLM Training",
    section 2.2. Optax's Muon takes 1.6 times as long on a CPU, since it adds a batch axis to each
    matrix (benchmarks/records/2026-11-25-default-run).
    """

    def init(params: optax.Params) -> optax.Updates:
        return jax.tree.map(jnp.zeros_like, params)

    def update(
        updates: optax.Updates, state: optax.Updates, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.Updates]:
        del params
        state = jax.tree.map(lambda m, g: momentum * m + g, state, updates)
        ahead = jax.tree.map(lambda m, g: momentum * m + g, state, updates)
        return jax.tree.map(lambda x: 0.2 * max(x.shape) ** 0.5 * orthogonalize(x), ahead), state

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def orthogonalize(x: Float[Array, "I O"]) -> Float[Array, "I O"]:
    """Return a matrix with the singular vectors of `x`, whose singular values are about 1.

    They become 0.7 to 1.2; those far below the largest stay smaller. Five steps of Newton and
    Schulz, with the coefficients of Jordan et al. 2024.
    """
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x /= jnp.linalg.norm(x) + 1e-8
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x.T if is_tall else x


def scale_by_muon_or(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Scale the gradients of the layers' matrices by Muon, and all others by `adam`."""

    def labels(params: optax.Params) -> optax.Params:
        def label(path: Any, _: Any) -> str:
            names = [getattr(key, "key", "") for key in path]
            is_matrix = "kernel" in names and any(re.match(r"layer_\d", name) for name in names)
            return "muon" if is_matrix else "adam"

        return jax.tree.map_with_path(label, params)

    return optax.partition({"muon": scale_by_muon(), "adam": adam}, labels)


def decayed(params: optax.Params) -> optax.Params:
    """Return which parameters are decayed: all but biases and LayerNorm scales."""
    kept = ("bias", "scale")
    return jax.tree.map_with_path(
        lambda path, _: not any(getattr(key, "key", None) in kept for key in path), params
    )


def layer_rates(params: optax.Params, decay: float) -> optax.Params:
    """Return each parameter's multiplier of the rate (Howard and Ruder 2018, section 3.2)."""
    flat: Any = traverse_util.flatten_dict(params, sep="/")
    layers = [re.match(r"bert/layer_(\d+)/", name) for name in flat]
    depth = len({match[1] for match in layers if match})
    powers = {}
    for name, match in zip(flat, layers, strict=True):
        is_embedding = name.startswith("bert/embeddings")  # and "bert/embeddings_project"
        # 0 for heads and pooler, 1 for the last layer, and so on down to the embeddings.
        powers[name] = depth - int(match[1]) if match else (depth + 1) * is_embedding
    return traverse_util.unflatten_dict({name: decay**n for name, n in powers.items()}, sep="/")


def make_optimizer(
    config: OptimizerConfig,
    rate: RateSchedule,
    *,
    layer_decay: float = 1.0,
    freezes_encoder: bool = False,
) -> optax.GradientTransformation:
    """Return clipping by the global norm, an optimizer, decoupled weight decay and the schedule."""
    if rate.steps >= 1 << 31:  # what the state counts in int32
        raise UserError(
            f"the run has {rate.steps:,} steps, of at most 2**31 - 1; lower epochs or steps"
        )
    scale = scale_by_bert_adam if config.name == "bert_adamw" else optax.scale_by_adam
    adam = scale(config.b1, config.b2, config.eps)
    if config.name == "muon":
        adam = scale_by_muon_or(adam)
    transforms = [adam, optax.add_decayed_weights(config.weight_decay, mask=decayed)]
    if config.name == "stable_adamw":
        transforms = [clip_updates(optax.chain(*transforms), config.b2, config.eps)]
    by_layer = optax.stateless(
        lambda updates, _: jax.tree.map(jnp.multiply, updates, layer_rates(updates, layer_decay))
    )
    optimizer = optax.chain(
        clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        *transforms,
        by_layer if layer_decay < 1 else optax.identity(),
        optax.scale_by_learning_rate(rate_by_step(rate)),
    )
    if not freezes_encoder:
        return optimizer
    return optax.multi_transform(
        {"trained": optimizer, "frozen": optax.set_to_zero()},
        lambda params: {name: "frozen" if name == "bert" else "trained" for name in params},
    )
