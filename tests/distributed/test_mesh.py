"""One device, eight of them in every layout, and microbatches: the same parameters."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batch, objective, params

from bert_jax.config import ParallelConfig
from bert_jax.distributed.mesh import AXES, compile_step, init_sharded, make_layout, make_mesh
from bert_jax.models import attention
from bert_jax.training.step import init_state, make_eval_step, make_train_step

STEPS, ROWS = 5, 16
MODEL = {"num_attention_heads": 8, "vocab_size": 104}


def train(config: ParallelConfig, devices: int, microbatches: int = 1, layers: int = 1, **how):
    """Trains with plain SGD, which unlike Adam shows a gradient that is off by a factor."""
    task = objective(num_hidden_layers=layers, **MODEL, **how)
    optimizer = optax.sgd(0.1)
    mesh = make_mesh(config, jax.devices()[:devices])

    def new_state(key):
        return init_state(task.model.init_params(key), optimizer, seed=3)

    _, layout = make_layout(new_state, mesh, config)
    state = init_sharded(new_state, layout.state, jax.random.key(0))
    state = state.replace(params=jax.device_put(start(layers), layout.params))
    compiled = partial(compile_step, mode=config.mode, layout=layout)
    step = compiled(
        make_train_step(task, optimizer, microbatches),
        in_sharding=layout.state,
        outputs=("state", "metrics"),
    )
    losses = []
    for index in range(STEPS):
        state, sums = step(state, batch(ROWS, seed=index))
        losses.append(float(sums["mlm_loss"].total / sums["mlm_loss"].weight))
    evaluate = compiled(make_eval_step(task), in_sharding=layout.params, outputs="metrics")
    return jax.device_get(state.params), losses, jax.device_get(evaluate(state.params, batch(ROWS)))


@pytest.fixture(scope="module")
def one_device():
    return train(ParallelConfig(), 1)


# Mesh and pmap, (data, fsdp, tensor), ZeRO stage, microbatches.
LAYOUTS = {
    "data": (ParallelConfig(), 8, 1),
    "fsdp": (ParallelConfig(data=1, fsdp=8), 8, 1),
    "tensor": (ParallelConfig(data=1, tensor=8), 8, 1),
    "all three": (ParallelConfig(data=2, fsdp=2, tensor=2), 8, 1),
    "ZeRO-1": (ParallelConfig(data=2, fsdp=2, tensor=2, zero=1), 8, 1),
    "pmap": (ParallelConfig(mode="pmap"), 8, 1),
    "2 microbatches": (ParallelConfig(data=2, fsdp=-1), 8, 2),
}


# Of "data" alone test_train.py has a whole run.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "data" else n for n in LAYOUTS]
)
def test_agrees_with_one_device(one_device, name):
    """Dropout and masks included: both are keyed to the row, not to the device."""
    check_same(train(*LAYOUTS[name]), one_device)


def test_remat_and_scan_change_nothing():
    plain = train(ParallelConfig(), 1, layers=2)
    config = ParallelConfig(data=2, fsdp=2, tensor=2)
    check_same(train(config, 8, layers=2, remat=True, scan_layers=True), plain, layers=2)


@pytest.mark.parametrize("sizes", [(1, 1, 8), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
def test_fused_attention_agrees_with_one_device(one_device, sizes, monkeypatch):
    """Each device runs the kernel for its own rows and heads; dropout counts all of them."""
    config = ParallelConfig(**dict(zip(AXES, sizes, strict=True)))
    monkeypatch.setattr(attention, "target_platform", lambda: "tpu")
    found = train(config, 8, attention="fused", remat=True, scan_layers=True)
    check_same(found, one_device)


def test_in_bfloat16_a_parameter_has_the_same_digits_on_every_mesh():
    """It is rounded where it is read; its gradient, and the sum of it, are not."""
    task = objective(num_hidden_layers=1, dtype="bfloat16", hidden_size=64, **MODEL)
    found = {}
    for name, config in {"data": ParallelConfig(), "fsdp": ParallelConfig(data=1, fsdp=8)}.items():
        mesh = make_mesh(config)
        _, layout = make_layout(
            lambda key: init_state(task.model.init_params(key), optax.sgd(1.0), 0), mesh, config
        )

        def look_up(weights, batch, collectives):
            def of_rows(weights, _, batch):
                apply = task.model.bind({"params": weights}).bert.embeddings
                rows = apply(batch["input_ids"], batch["token_type_ids"], None)
                return rows.astype(jnp.float32)

            return collectives.run(of_rows, "per_example")(weights, (), batch)

        step = compile_step(look_up, "mesh", layout, layout.params, "per_example")
        found[name] = np.asarray(step(jax.device_put(params(task), layout.params), batch(ROWS)))
    np.testing.assert_array_equal(found["data"], found["fsdp"])


def start(layers: int):
    return params(objective(num_hidden_layers=layers, **MODEL))


def check_same(found, wanted, layers=1):
    trained, losses, evaluation = found
    begun = start(layers)
    for path, expected in jax.tree.leaves_with_path(wanted[0]):
        name = jax.tree_util.keystr(path)
        actual, before = (_at(tree, path) for tree in (trained, begun))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5, err_msg=name)
        if "key" not in name or "bias" not in name:  # softmax does not see a key's bias
            assert np.abs(expected - before).max() > 1e-3, f"{name} has hardly moved"
    np.testing.assert_allclose(losses, wanted[1], rtol=1e-5)
    for name, expected in wanted[2].items():
        np.testing.assert_allclose(evaluation[name].total, expected.total, rtol=1e-6)
        assert evaluation[name].weight == expected.weight


def _at(tree, path):
    for key in path:
        tree = tree[key.key]
    return tree
