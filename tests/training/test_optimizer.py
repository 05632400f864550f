"""BERT's optimizer against NumPy, and its schedule against the published one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.config import OptimizerConfig
from bert_jax.errors import UserError
from bert_jax.training.optimizer import decayed, make_optimizer, schedule

STEPS = 100


def test_agrees_with_numpy_for_a_hundred_steps():
    """No bias correction, epsilon outside the root, decoupled decay of kernels alone, clipping."""
    config = OptimizerConfig(learning_rate=0.05, warmup_fraction=0.1, weight_decay=0.1)
    generator = np.random.default_rng(0)
    params = {
        "dense": {"kernel": generator.normal(size=(4, 3)), "bias": generator.normal(size=3)},
        "layer_norm": {"scale": np.ones(3), "bias": np.zeros(3)},
    }
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    expected = jax.tree.map(lambda x: x.astype(np.float64), params)
    m, v = (jax.tree.map(np.zeros_like, expected) for _ in range(2))
    optimizer = make_optimizer(config, STEPS)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for step in range(STEPS):
        grads = jax.tree.map(lambda x: generator.normal(size=x.shape).astype(np.float32), params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)

        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in jax.tree.leaves(grads)))
        rate = 0.05 * (step / 10 if step < 10 else 1 - step / STEPS)
        for layer, parts in expected.items():
            for name in parts:
                g = grads[layer][name] * min(1.0, 1.0 / norm)
                m[layer][name] = 0.9 * m[layer][name] + 0.1 * g
                v[layer][name] = 0.999 * v[layer][name] + 0.001 * g**2
                change = m[layer][name] / (np.sqrt(v[layer][name]) + 1e-6)
                if name == "kernel":
                    change = change + 0.1 * parts[name]
                parts[name] = parts[name] - rate * change
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), params, expected
    )


def test_schedule_is_the_published_one():
    """Linear from 0 to the peak, then on the line from the peak at step 0 to 0 at the end."""
    rate = schedule(OptimizerConfig(learning_rate=1e-4, warmup_fraction=0.01), 1_000_000)
    for step, expected in [
        (0, 0.0),
        (5_000, 0.5e-4),
        (9_999, 0.9999e-4),
        (10_000, 0.99e-4),
        (500_000, 0.5e-4),
        (1_000_000, 0.0),
    ]:
        assert float(rate(step)) == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_without_warmup_the_first_step_has_the_peak():
    rate = schedule(OptimizerConfig(learning_rate=1.0, warmup_fraction=0.0), 10)
    assert float(rate(0)) == 1.0


def test_adamw_is_optax_own():
    config = OptimizerConfig(name="adamw", warmup_fraction=0.0, clip_norm=1e9)
    params = {"dense": {"kernel": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}}
    plain = optax.adamw(
        schedule(config, STEPS), b2=0.999, eps=1e-6, weight_decay=0.01, mask=decayed
    )
    results = []
    for optimizer in (make_optimizer(config, STEPS), plain):
        state, moved = optimizer.init(params), params
        for step in range(5):
            grads = jax.tree.map(lambda x, s=step: x * (s + 1), params)
            updates, state = optimizer.update(grads, state, moved)
            moved = optax.apply_updates(moved, updates)
        results.append(moved)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *results)


def test_no_buffer_is_in_the_state_twice():
    """A state that had one could not be donated."""
    config = dataclasses.replace(OptimizerConfig(), name="bert_adamw")
    state = make_optimizer(config, STEPS).init({"kernel": jax.numpy.ones(4)})
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


def test_each_layer_has_a_lower_rate_than_the_one_above():
    params = {
        "bert": {
            "embeddings": {"word_embeddings": jnp.ones(2)},
            "layer_0": {"up": {"kernel": jnp.ones(2)}},
            "layer_1": {"up": {"kernel": jnp.ones(2)}},
            "pooler": {"kernel": jnp.ones(2)},
        },
        "classifier": {"kernel": jnp.ones(2)},
    }
    config = OptimizerConfig(weight_decay=0.0, warmup_fraction=0.0, learning_rate=1.0)
    gradients = jax.tree.map(lambda x: 1e-3 * x, params)

    def first_update(**options):
        optimizer = make_optimizer(config, 100, **options)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return updates

    whole, lower = first_update(), first_update(layer_decay=0.5)
    shares = jax.tree.map(lambda a, b: float(a[0] / b[0]), lower, whole)
    assert shares["classifier"]["kernel"] == shares["bert"]["pooler"]["kernel"] == 1
    assert shares["bert"]["layer_1"]["up"]["kernel"] == pytest.approx(0.5)
    assert shares["bert"]["layer_0"]["up"]["kernel"] == pytest.approx(0.25)
    assert shares["bert"]["embeddings"]["word_embeddings"] == pytest.approx(0.125)

    frozen = first_update(freezes_encoder=True)
    assert all(not update.any() for update in jax.tree.leaves(frozen["bert"]))
    assert np.abs(frozen["classifier"]["kernel"]).min() > 0


def test_more_steps_than_the_state_counts_are_refused():
    """Such as those of `--config.epochs=4e9`."""
    with pytest.raises(UserError, match="8,000,000,000 steps"):
        make_optimizer(OptimizerConfig(), 8_000_000_000)
