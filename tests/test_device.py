"""An accelerator beside a CPU in float32: training, random bits, attention, checkpoints.

`pytest -m device` runs all of it on JAX's first device. The main suite runs the most of it with a
CPU in the place of that device, so that no test here is new on the day there is one.
"""

import functools
from contextlib import closing

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batch, model_config, objective, params

from bert_jax.config import CheckpointConfig, ParallelConfig, TrainConfig
from bert_jax.distributed.mesh import jit_step, make_mesh
from bert_jax.models.attention import unsupported
from bert_jax.models.layers import random_bits
from bert_jax.training import checkpoint
from bert_jax.training.setup import Setup, make_setup
from bert_jax.training.step import PRNG, init_state, make_train_step

BFLOAT16 = ("bfloat16", 1e-2, 0.05)  # of which a step is 0.004
WINDOWS = {  # a layer without a window, and one with
    "model_type": "modernbert",
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "hidden_size": 64,  # as the heads of real models
    "max_position_embeddings": 128,
    "local_attention": 16,
}
DROPOUT = {"num_hidden_layers": 1, "hidden_size": 32, "max_position_embeddings": 128}


@pytest.fixture(params=["cpu", pytest.param("first", marks=pytest.mark.device)])
def device(request):
    return jax.devices("cpu" if request.param == "cpu" else None)[0]


@pytest.fixture
def cpu():
    return jax.devices("cpu")[-1]


def task_and_optimizer(length=32, **model):
    """Plain SGD, unlike Adam, shows a gradient that is off by a factor."""
    return objective(length, **model), optax.sgd(0.1)


def initial(task):
    """Parameters a third of the size that others test with: in bfloat16, errors grow less."""
    return jax.tree.map_with_path(
        lambda path, x: x if path[-1].key == "scale" else 0.3 * x, params(task)
    )


def setup_on(device, task, optimizer) -> Setup:
    return make_setup(task.model, optimizer, 3, make_mesh(devices=[device]), ParallelConfig())


@functools.cache
def train(device, length=32, **model):
    """Return the losses of some steps, and the parameters after them."""
    task, optimizer = task_and_optimizer(length, **model)
    batches = [batch(8, index, length) for index in range(3)]
    with jax.default_matmul_precision("highest"):  # an accelerator would round the operands
        state, metrics, _ = helpers.train(
            task, optimizer, batches, devices=[device], params=initial(task)
        )
    losses = [float(each["mlm_loss"].total / each["mlm_loss"].weight) for each in metrics]
    return losses, state.params


def error(found, wanted, **model) -> float:
    """The error of what steps have changed, as a share of it."""
    before = initial(objective(**model))

    def norm(one, other):
        return float(optax.tree.norm(jax.tree.map(np.subtract, one, other)))

    return norm(found, wanted) / norm(wanted, before)


@pytest.mark.parametrize(("dtype", "loss", "change"), [("float32", 1e-5, 1e-4), BFLOAT16])
def test_training_is_that_of_a_cpu_in_float32(dtype, loss, change, device):
    """Masks and dropout are drawn on the device."""
    model = {"num_hidden_layers": 1}
    losses, trained = train(device, **model, dtype=dtype)
    wanted_losses, wanted = train(jax.devices("cpu")[0], **model, dtype="float32")
    np.testing.assert_allclose(losses, wanted_losses, rtol=loss)
    assert error(trained, wanted, **model) < change


@pytest.mark.device
@pytest.mark.parametrize("device", ["first"], indirect=True)
@pytest.mark.parametrize(
    ("model", "attention"), [(WINDOWS, "plain"), (WINDOWS, "fused"), (DROPOUT, "fused")]
)
def test_layers_with_a_window_without_and_with_dropout(model, attention, device):
    """In bfloat16, as the kernels of a GPU need. The same is dropped as on a CPU."""
    changes = {**model, "attention": attention, "dtype": "bfloat16"}
    options = {"window": 0, "packed": False, "training": True}
    reason = unsupported(model_config(**changes), device.platform, 128, **options)
    if attention == "fused" and reason:
        pytest.skip(f"fused attention {reason}")
    losses, trained = train(device, 128, **changes)
    wanted_losses, wanted = train(jax.devices("cpu")[0], 128, **model)
    _, loss, change = BFLOAT16
    np.testing.assert_allclose(losses, wanted_losses, rtol=loss)
    assert error(trained, wanted, **model) < change


@pytest.mark.device
def test_a_gpu_adds_biases_in_its_matmuls():
    """By cuBLAS, as `distributed.mesh` asks; otherwise each is a pass over memory of its own."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        pytest.skip("of a GPU")
    assert '"epilogue":"BIAS' in compiled_step(device)


def compiled_step(device) -> str:
    task, optimizer = task_and_optimizer(dtype="bfloat16")
    setup = setup_on(device, task, optimizer)
    step = jit_step(make_train_step(task, optimizer, 1), setup.layout, ("state", "metrics"))
    return step.lower(setup.abstract_state, batch(8)).compile().as_text()


def test_the_same_bits_are_drawn(device, cpu):
    """Of dropout, and of the masks and random tokens of a batch; exactly."""
    task, _ = task_and_optimizer()

    def draw(key, batch):
        bits = random_bits(key, jnp.array([0, 7, 300]), (5, 33), (6, 40))
        return bits, task.prepare(key, batch)

    def on(place):
        key = jax.random.key(11, impl="threefry2x32")
        return jax.device_get(jax.jit(draw)(*jax.device_put((key, batch(8)), place)))

    found, wanted = on(device), on(cpu)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert len(np.unique(found[0])) == 3 * 5 * 33


@pytest.mark.parametrize("to_cpu", [True, False])
def test_a_checkpoint_moves_between_a_device_and_a_cpu(to_cpu, device, cpu, tmp_path, tokenizer):
    source, target = (device, cpu) if to_cpu else (cpu, device)
    task, optimizer = task_and_optimizer()
    state = init_state(params(task), optimizer, jax.random.key(3, impl=PRNG))
    placed = jax.device_put(state, setup_on(source, task, optimizer).layout.state)
    settings = tmp_path, CheckpointConfig(), tokenizer, len
    with closing(checkpoint.Checkpoints(*settings)) as checkpoints:
        checkpoints.save(4, placed, TrainConfig(), None)
    read = checkpoint.read_state(tmp_path / "4", setup_on(target, task, optimizer).abstract_state)
    assert {x.device for x in jax.tree.leaves(read)} == {target}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(read), jax.device_get(state))
    found = checkpoint.read_params(tmp_path / "4", state.params)  # onto the first device
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), state.params)
