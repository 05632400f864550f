"""One device, eight of them in both modes, and microbatches: the same parameters."""

import jax
import numpy as np
import optax
import pytest
from helpers import batch, objective, params

from bert_jax.training import parallel
from bert_jax.training.step import init_state, make_eval_step, make_train_step

STEPS = 4


def train(mode: str, devices: int, microbatches: int):
    """Trains with plain SGD, which unlike Adam shows a gradient that is off by a factor."""
    task = objective(num_hidden_layers=1)
    optimizer = optax.sgd(0.1)
    state = init_state(params(task), optimizer, seed=3)
    mesh = parallel.make_mesh(devices=jax.devices()[:devices])
    whole = jax.NamedSharding(mesh, jax.P())
    step = parallel.compile_step(
        make_train_step(task, optimizer, microbatches), mode, mesh, whole, ("state", "sums")
    )
    losses = []
    for index in range(STEPS):
        state, sums = step(state, batch(16, seed=index))
        losses.append(float(sums["mlm_loss"].value / sums["mlm_loss"].weight))
    evaluate = parallel.compile_step(make_eval_step(task), mode, mesh, whole, ("sums",))
    return jax.device_get(state.params), losses, jax.device_get(evaluate(state, batch(16)))


@pytest.fixture(scope="module")
def one_device():
    return train("mesh", 1, 1)


@pytest.mark.parametrize(
    ("mode", "devices", "microbatches"),
    [("mesh", 8, 1), ("pmap", 8, 1), ("mesh", 1, 4), ("mesh", 8, 2), ("pmap", 4, 2)],
)
def test_agrees_with_one_device(one_device, mode, devices, microbatches):
    """Dropout and masks included: both are keyed to the row, not to the device."""
    trained, losses, evaluation = train(mode, devices, microbatches)
    start = params(objective(num_hidden_layers=1))
    for path, expected in jax.tree.leaves_with_path(one_device[0]):
        name = jax.tree_util.keystr(path)
        actual, before = (_at(tree, path) for tree in (trained, start))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5, err_msg=name)
        if "key" not in name or "bias" not in name:  # softmax does not see a key's bias
            assert np.abs(expected - before).max() > 1e-3, f"{name} has hardly moved"
    np.testing.assert_allclose(losses, one_device[1], rtol=1e-5)
    for name, expected in one_device[2].items():
        np.testing.assert_allclose(evaluation[name].value, expected.value, rtol=1e-5)
        assert evaluation[name].weight == expected.weight


def _at(tree, path):
    for key in path:
        tree = tree[key.key]
    return tree
