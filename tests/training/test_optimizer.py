"""Optimizers against NumPy, and schedules against the published ones."""

import dataclasses
import math

import jax
import numpy as np
import optax
import optax.contrib
import pytest
from flax import linen as nn
from flax import traverse_util
from helpers import model_config, refused

from bert_jax.config import OptimizerConfig, Phase, TrainConfig
from bert_jax.config.schedule import make_rate_schedule, make_schedule
from bert_jax.config.validation import validate
from bert_jax.models.heads import SequenceScores
from bert_jax.training.optimizer import (
    clip_by_global_norm,
    decayed,
    layer_rates,
    make_optimizer,
    rate_by_step,
    scale_by_muon,
)

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
    optimizer = optimizer_of(config)
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


def rates(steps: int, *at: int, **fields) -> list[float]:
    rate = rate_by_step(make_rate_schedule(OptimizerConfig(learning_rate=2.0, **fields), steps))
    return [float(rate(step)) for step in at]


def test_schedule_is_the_published_one():
    """Linear from 0 to the peak, then on the line from the peak at step 0 to 0 at the end."""
    at = (0, 5_000, 9_999, 10_000, 500_000, 1_000_000)
    found = rates(1_000_000, *at, warmup_fraction=0.01)
    assert found == pytest.approx([0.0, 1.0, 1.9998, 1.98, 1.0, 0.0], rel=1e-5, abs=1e-9)
    assert rates(10, 0, warmup_fraction=0.0) == [2.0]  # without a warm-up


@pytest.mark.parametrize("warmup", [0.1, 100.0])
def test_schedules_by_their_formulas(warmup):
    """Of 1,000 steps: a warm-up of 100, said as a share or in steps, then the decay of each."""
    warm = {"warmup_fraction": warmup}
    for name in ("cosine", "constant", "wsd"):
        assert rates(1000, 0, 50, 99, schedule=name, **warm) == pytest.approx([0, 1, 1.98])
    wanted = [1 + math.cos(math.pi * (step - 100) / 900) for step in (100, 300, 550, 1000)]
    found = rates(1000, 100, 300, 550, 1000, schedule="cosine", **warm)
    assert found == pytest.approx(wanted, abs=1e-6)
    assert rates(1000, 100, 500, 999, schedule="constant", **warm) == [2, 2, 2]
    for decay in (0.2, 200.0):
        found = rates(
            1000, 100, 800, 850, 900, 999, 1000, schedule="wsd", **warm, decay_fraction=decay
        )
        wanted = [2, 2, 1, 2 - math.sqrt(2), 2 - 2 * math.sqrt(199 / 200), 0]
        assert found == pytest.approx(wanted, abs=1e-6)


def test_phases_with_learning_rates_of_their_own():
    """Warm-up and decay are those of the run; 0 is the rate of the optimizer."""
    config = TrainConfig(steps=100, optimizer=OptimizerConfig(learning_rate=2.0, schedule="wsd"))
    own = Phase(60, 128, 8, learning_rate=0.5)
    config.data.phases = (Phase(40, 128, 8), own, Phase(95, 128, 8))
    schedule = make_schedule(config)
    assert schedule.rate.peaks == ((0, 2.0), (60, 0.5), (95, 2.0))
    rate = rate_by_step(schedule.rate)
    found = [float(rate(step)) for step in (1, 40, 59, 60, 90, 94, 95)]
    wanted = [2, 2, 2, 0.5, 0.5, 0.5 * (1 - math.sqrt(0.4)), 2 * (1 - math.sqrt(0.5))]
    assert found == pytest.approx(wanted)
    config.data.phases = config.data.phases[:1]
    assert make_schedule(config).rate.peaks == ((0, 2.0),)


def test_shares_that_fill_a_run_exactly():
    """Rounded, half of 3 steps is 2: the decay has what the warm-up leaves."""
    halves = {"schedule": "wsd", "warmup_fraction": 0.5, "decay_fraction": 0.5}
    assert rates(3, 0, 1, 2, 3, **halves) == [0, 1, 2, 0]
    assert rates(4, 0, 4, schedule="cosine", warmup_fraction=4.0) == [0, 2]


@pytest.mark.parametrize(
    ("fields", "key_words"),
    [
        (
            {"schedule": "wsd", "warmup_fraction": 0.3, "decay_fraction": 0.8},
            ["warmup_fraction is 30", "decay_fraction 80 of a run of 100 steps"],
        ),
        ({"warmup_fraction": 200.0}, ["warmup_fraction is 200 of a run of 100 steps"]),
        ({"warmup_fraction": 1.5}, ["a share below 1 or a whole number of steps"]),
        ({"decay_fraction": 0.2}, ["decay_fraction does nothing", "schedule linear"]),
        ({"schedule": "trapezoid"}, ["optimizer.schedule is 'trapezoid'"]),
    ],
)
def test_impossible_schedules_are_refused(fields, key_words):
    with refused(*key_words):
        validate(TrainConfig(steps=100, optimizer=OptimizerConfig(**fields)))


SHAPES = {
    "bert": {
        "embeddings": {"word_embeddings": (9, 4)},
        "layer_0": {"up": {"kernel": (4, 6), "bias": (6,)}, "down": {"kernel": (6, 4)}},
    },
    "mlm_head": {"transform": {"kernel": (4, 4)}},
}


def random_tree(seed: int, size: float = 1.0):
    generator = np.random.default_rng(seed)

    def draw(shape):
        return (size * generator.normal(size=shape)).astype(np.float32)

    return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def optimizer_of(config: OptimizerConfig, steps: int = STEPS, **options):
    return make_optimizer(config, make_rate_schedule(config, steps), **options)


def run_optimizer(optimizer: optax.GradientTransformation, gradients):
    """Return the parameters after one step for each tree of gradients."""
    params = random_tree(0)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def run(config: OptimizerConfig, gradients, **options):
    return run_optimizer(optimizer_of(config, **options), gradients)


def flatten(tree) -> dict[str, np.ndarray]:
    return {
        k: np.asarray(v, np.float64) for k, v in traverse_util.flatten_dict(tree, sep="/").items()
    }


PLAIN = {"schedule": "constant", "warmup_fraction": 0.0, "clip_norm": 0.0, "weight_decay": 0.1}


def test_adamw_is_optax_own():
    config = OptimizerConfig(name="adamw", learning_rate=0.05, **PLAIN)
    own = optax.adamw(0.05, b2=0.999, eps=1e-6, weight_decay=0.1, mask=decayed)
    gradients = [random_tree(seed) for seed in range(1, 6)]
    found, wanted = (run_optimizer(o, gradients) for o in (optimizer_of(config), own))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted)


def test_muon_makes_the_singular_values_of_a_layer_equal():
    """Of the update, whose singular vectors are the gradient's; its root mean square is Adam's."""
    config = OptimizerConfig(name="muon", learning_rate=1.0, **{**PLAIN, "weight_decay": 0.0})
    random = np.random.default_rng(0)
    shapes = {"bert/layer_0/up/kernel": (16, 64), "bert/layer_11/down/kernel": (64, 16)}
    shapes |= {"bert/layer_0/up/bias": (64,), "bert/embeddings/word_embeddings": (32, 16)}
    shapes |= {"mlm_head/dense/kernel": (16, 16)}
    gradients = {name: random.normal(size=shape) for name, shape in shapes.items()}
    params = traverse_util.unflatten_dict({n: np.zeros(s) for n, s in shapes.items()}, sep="/")
    tree = traverse_util.unflatten_dict(gradients, sep="/")
    found, adam = (
        flatten(o.update(tree, o.init(params), params)[0])
        for o in (optimizer_of(config), optimizer_of(dataclasses.replace(config, name="adamw")))
    )
    for name, gradient in gradients.items():
        if "layer_" not in name or "kernel" not in name:
            np.testing.assert_array_equal(found[name], adam[name])
            continue
        left, _, right = np.linalg.svd(gradient, full_matrices=False)
        diagonal = left.T @ -found[name] @ right.T
        values = np.diag(diagonal) / (0.2 * 64**0.5)
        assert 0.6 < values.min() < values.max() < 1.3
        np.testing.assert_allclose(diagonal, np.diag(np.diag(diagonal)), atol=1e-2)
        assert np.sqrt(np.mean(found[name] ** 2)) == pytest.approx(0.2, rel=0.25)


def test_muon_is_that_of_optax():
    """Of matrices of all shapes. It is given the sum of Nesterov's momentum, as it has its own."""
    random = np.random.default_rng(0)
    shapes = {"up": (16, 64), "down": (64, 16), "query": (16, 16)}
    gradients = [
        {n: random.normal(size=s).astype(np.float32) for n, s in shapes.items()} for _ in "12"
    ]
    own, theirs = scale_by_muon(0.9), optax.contrib.muon(-1.0, consistent_rms=0.2)
    first, second = gradients
    momentum = {name: 0.9 * (0.9 * first[name] + second[name]) + second[name] for name in shapes}
    state = own.init(first)
    for gradient, summed in ((first, first), (second, momentum)):
        found, state = own.update(gradient, state)
        wanted, _ = theirs.update(summed, theirs.init(summed), summed)
        for name in shapes:
            np.testing.assert_allclose(found[name], wanted[name], atol=1e-4)


def test_stable_adamw_agrees_with_numpy():
    """Algorithm 2 of Wortsman et al. 2023; a gradient that is suddenly large is clipped."""
    gradients = [random_tree(seed, size=100.0 if seed == 4 else 1.0) for seed in range(1, 7)]
    config = OptimizerConfig(name="stable_adamw", learning_rate=0.05, b2=0.98, **PLAIN)
    found = flatten(run(config, gradients))
    b1, b2, clipped = 0.9, 0.98, []
    for name, value in flatten(random_tree(0)).items():
        m = v = np.zeros_like(value)
        for t, gradient in enumerate(gradients, 1):
            g = flatten(gradient)[name]
            # Moments that are corrected as they grow.
            share = b1 * (1 - b1 ** (t - 1)) / (1 - b1**t)
            m = share * m + (1 - share) * g
            share = b2 * (1 - b2 ** (t - 1)) / (1 - b2**t)
            v = share * v + (1 - share) * g * g
            rms = np.sqrt(np.mean(g * g / np.maximum(v, 1e-12)))
            rate = 0.05 / max(1.0, rms)
            clipped.append(rms > 1.5)
            decay = 0.0 if "bias" in name else 0.1
            value = value - rate * decay * value - rate * m / (np.sqrt(v) + 1e-6)
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5)
    assert 0 < sum(clipped) < len(clipped)


@pytest.mark.parametrize(
    ("kind", "highest"),
    [("bert", {"bert/pooler"}), ("modernbert", {"bert/final_layer_norm", "bert/head"})],
)
def test_each_layer_has_a_lower_rate_than_the_one_above(kind, highest):
    """Heads, and what is between them and the layers, are above all."""
    model = SequenceScores(model_config(model_type=kind), num_labels=2)
    shapes = nn.unbox(jax.eval_shape(model.init_params, jax.random.key(0)))
    rates = traverse_util.flatten_dict(layer_rates(shapes, 0.5), sep="/")
    found: dict[float, set[str]] = {}
    for name, rate in rates.items():
        found.setdefault(rate, set()).add("/".join(name.split("/")[:2]))
    assert found == {
        1.0: {*highest, "classifier/kernel", "classifier/bias"},
        0.5: {"bert/layer_1"},
        0.25: {"bert/layer_0"},
        0.125: {"bert/embeddings"},
    }


def test_layers_and_probes_of_stable_adamw():
    config = OptimizerConfig(name="stable_adamw", learning_rate=1.0, **PLAIN)
    gradients = [random_tree(1)]
    before, whole = flatten(random_tree(0)), flatten(run(config, gradients))
    lower = flatten(run(config, gradients, layer_decay=0.5))
    frozen = flatten(run(config, gradients, freezes_encoder=True))
    shares = {"mlm_head": 1.0, "bert/layer_0": 0.5, "bert/embeddings": 0.25}
    for path, value in before.items():
        share = next(share for prefix, share in shares.items() if path.startswith(prefix))
        np.testing.assert_allclose(lower[path] - value, share * (whole[path] - value), atol=1e-6)
        assert np.array_equal(frozen[path], value) == path.startswith("bert/")


def test_no_buffer_is_in_the_state_twice():
    """A state that had one could not be donated."""
    state = optimizer_of(OptimizerConfig(name="bert_adamw")).init({"kernel": jax.numpy.ones(4)})
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


def test_more_steps_than_the_state_counts_are_refused():
    """Such as those of `--config.epochs=4e9`."""
    with refused("8,000,000,000 steps"):
        optimizer_of(OptimizerConfig(), 8_000_000_000)


def test_a_gradient_below_the_largest_norm_stays():
    clip = clip_by_global_norm(1.0)
    for size, expected in ((0.5, 0.5), (4.0, 1.0)):
        found, _ = clip.update({"w": np.full(1, size, np.float32)}, clip.init(None))
        assert found["w"] == expected
