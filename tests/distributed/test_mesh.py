"""One device, eight devices in every layout, and microbatches: the same parameters."""

import re
from functools import partial

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batch, objective, params, refused
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax import console
from bert_jax.config import OptimizerConfig, ParallelConfig
from bert_jax.config.schedule import make_rate_schedule
from bert_jax.distributed.mesh import compile_step, make_mesh, replicated_layout
from bert_jax.planning.topology import PlannedDevice, read_topologies
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.setup import make_setup
from bert_jax.training.step import make_eval_step

pytestmark = pytest.mark.devices(8)

STEPS, SEQUENCES = 3, 16
MODEL = {"num_attention_heads": 8, "vocab_size": 104}


ELECTRA = {"model_type": "electra", "hidden_size": 32, "embedding_size": 16}


def initial_params(layers: int, **model):
    return params(objective(num_hidden_layers=layers, **{**MODEL, **model}))


def train(
    config: ParallelConfig,
    devices: int,
    microbatches: int = 1,
    layers: int = 1,
    *,
    evaluates: bool = False,
    **model,
):
    """Train with plain SGD, which unlike Adam shows a gradient that is off by a factor."""
    task = objective(num_hidden_layers=layers, **{**MODEL, **model})
    # The weight of an electra's discriminator is 50.
    optimizer = optax.sgd(0.1 if "model_type" not in model else 0.025)
    state, metrics, layout = helpers.train(
        task,
        optimizer,
        [batch(SEQUENCES, seed=index) for index in range(STEPS)],
        config,
        jax.devices()[:devices],
        microbatches,
        initial_params(layers, **model),
    )
    losses = [float(each["mlm_loss"].total / each["mlm_loss"].weight) for each in metrics]
    evaluation = None
    if evaluates:
        evaluate = compile_step(make_eval_step(task), config.mode, layout, "metrics")
        placed = jax.device_put(state.params, layout.params)
        evaluation = jax.device_get(evaluate(placed, batch(SEQUENCES)))
    return state.params, losses, evaluation


def check_same(actual, expected, layers=1, **model):
    before = initial_params(layers, **model)

    def check(path, value, wanted, initial):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-5, err_msg=name)
        if "key" not in name or "bias" not in name:  # softmax does not see a key's bias
            assert np.abs(wanted - initial).max() > 1e-3, f"{name} has hardly moved"

    jax.tree.map_with_path(check, actual[0], expected[0], before)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5)
    for name, metric in (actual[2] or {}).items():
        np.testing.assert_allclose(metric.total, expected[2][name].total, rtol=1e-6)
        assert metric.weight == expected[2][name].weight


@pytest.fixture(scope="module")
def one_device():
    return train(ParallelConfig(), 1, evaluates=True)


# Mesh and pmap, (data, fsdp, tensor), ZeRO stage, microbatches.
LAYOUTS = {
    "data": (ParallelConfig(), 8, 1),
    "tensor": (ParallelConfig(data=1, tensor=8), 8, 1),
    "all three": (ParallelConfig(data=2, fsdp=2, tensor=2), 8, 1),
    "ZeRO-1": (ParallelConfig(data=2, fsdp=2, tensor=2, zero=1), 8, 1),
    "pmap": (ParallelConfig(mode="pmap"), 8, 1),
    "fsdp, 2 microbatches": (ParallelConfig(data=1, fsdp=-1), 8, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_agrees_with_one_device(one_device, name):
    """Dropout and masks included: both are keyed to the sequence, not to the device."""
    check_same(train(*LAYOUTS[name], evaluates=name in ("all three", "pmap")), one_device)


def test_random_numbers_do_not_depend_on_a_setting_of_the_host_program():
    """Those of initialization, masks and dropout."""
    task, batches = objective(num_hidden_layers=1, **MODEL), [batch(4)]
    expected = helpers.train(task, optax.sgd(0.1), batches)
    with jax.threefry_partitionable(False):
        actual = helpers.train(task, optax.sgd(0.1), batches)
    jax.tree.map(np.testing.assert_array_equal, actual[:2], expected[:2])


@pytest.mark.parametrize("name", ["stable_adamw", "muon"])
def test_an_update_of_whole_tensors_is_the_same_on_a_mesh(name):
    """Though each device has a shard of the tensor whose mean square, or product, is taken."""
    config = OptimizerConfig(name=name, learning_rate=0.1, warmup_fraction=0.0, clip_norm=0.0)
    optimizer = make_optimizer(config, make_rate_schedule(config, 9))
    random = np.random.default_rng(0)
    matrices = random.normal(size=(4, 16, 8)).astype(np.float32)

    def update(params, opt_state, gradients):
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    results = []
    for sharding in (P(), P("fsdp", "tensor")):
        mesh = make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))
        put = partial(jax.device_put, device=NamedSharding(mesh, sharding))
        params, *gradients = ({"layer_0": {"up": {"kernel": put(m)}}} for m in matrices)
        opt_state = optimizer.init(params)
        for gradient in gradients:
            params, opt_state = jax.jit(update)(params, opt_state, gradient)
        results.append(params["layer_0"]["up"]["kernel"])
    assert results[1].sharding.spec == P("fsdp", "tensor")
    np.testing.assert_allclose(*results, atol=1e-6)
    assert np.abs(results[0] - matrices[0]).max() > 0.05


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (LAYOUTS["all three"], {"remat": True, "scan_layers": True}),
        pytest.param(LAYOUTS["fsdp, 2 microbatches"], {"remat": True}, marks=pytest.mark.slow),
        pytest.param(LAYOUTS["pmap"], {"scan_layers": True}, marks=pytest.mark.slow),
    ],
)
def test_an_electra_agrees_with_one_device(layout, options):
    """The samples of its generator, too, are keyed to the sequence."""
    sharded = train(*layout, **ELECTRA, **options)
    check_same(sharded, train(ParallelConfig(), 1, **ELECTRA), **ELECTRA)


def test_in_bfloat16_a_parameter_has_the_same_digits_on_every_mesh():
    """It is rounded where it is read; its gradient, and the sum of it, are not."""
    task = objective(num_hidden_layers=1, dtype="bfloat16", hidden_size=64, **MODEL)
    weights = params(task)
    results = []
    for config in (ParallelConfig(), ParallelConfig(data=1, fsdp=8)):
        mesh = make_mesh(config)
        layout = make_setup(task.model, optax.sgd(1.0), 0, mesh, config).layout

        def embed(weights, batch, collectives):
            def run_shard(weights, _, batch):
                embeddings = task.model.bind({"params": weights}).bert.embeddings
                embedded = embeddings(batch["input_ids"], batch["token_type_ids"], None)
                return embedded.astype(jnp.float32)

            return collectives.run(run_shard, "per_example")(weights, (), batch)

        step = compile_step(embed, "mesh", layout, "per_example")
        results.append(np.asarray(step(jax.device_put(weights, layout.params), batch(SEQUENCES))))
    np.testing.assert_array_equal(*results)


def test_a_part_of_a_batch_that_spans_hosts_unevenly_is_refused():
    """Also in a plan, of nodes of eight GPUs."""
    six = [PlannedDevice(i, "gpu", "H100", process_index=i // 3) for i in range(6)]
    (planned,) = read_topologies("h100:24")
    with refused("parallel.tensor 6 and the 8 devices of a host do not divide one another"):
        make_mesh(ParallelConfig(tensor=6), planned.devices)
    with refused("parallel.tensor 2 and the 3 devices of a host do not divide one another"):
        make_mesh(ParallelConfig(tensor=2), six)
    assert make_mesh(ParallelConfig(tensor=3), six).shape["data"] == 2
    assert make_mesh(ParallelConfig(tensor=6), six).shape["data"] == 1


def test_a_training_step_prints_the_memory_that_it_takes(monkeypatch):
    printed = []
    monkeypatch.setattr("bert_jax.distributed.hosts.print_on_main", printed.append)
    train(ParallelConfig(), 1, evaluates=False)
    (line,) = printed  # of the first of several steps
    assert re.fullmatch(r"memory     \d+\.\d\d GiB( of [\d,]+\.\d GiB)?", line)
    # Arrays beside the step, such as the weights of a checkpoint that is fine-tuned, take memory.
    beside = jnp.zeros(1 << 28, jnp.uint8)
    train(ParallelConfig(), 1, evaluates=False)
    more = float(printed[1].split()[1]) - float(line.split()[1])
    assert more == pytest.approx(1.15 * beside.nbytes / 2**30, abs=0.02)


def test_a_step_compiles_when_those_before_it_are_done(monkeypatch):
    """So that their time is known without that of compilation."""
    layout = replicated_layout(make_mesh(devices=jax.devices()[:1]))
    step = compile_step(lambda params, batch, collectives: batch, "mesh", layout, "per_example")
    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, 400, lambda _, y: x @ y, x))
    params, was_done, working = multiply(jnp.eye(256)), [], console.working

    def show(doing: str):
        was_done.append(params.is_ready())
        return working(doing)

    monkeypatch.setattr(console, "working", show)
    step(params, {"input_ids": np.ones((1, 1))})
    assert was_done == [True]
