"""Shardings on a mesh, what a mesh refuses, and checkpoints read on another one."""

import dataclasses
from contextlib import closing
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from flax import traverse_util
from helpers import model_config, refused

from bert_jax.bert import load
from bert_jax.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from bert_jax.config.schedule import make_rate_schedule
from bert_jax.config.validation import validate
from bert_jax.distributed import hosts
from bert_jax.distributed.fsdp import num_batch_shards
from bert_jax.distributed.mesh import check_divides, check_model, make_mesh
from bert_jax.objectives.sentence_pairs import BertForPreTraining
from bert_jax.runs.weights import copy_params
from bert_jax.training import checkpoint
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.setup import Setup, make_setup

pytestmark = pytest.mark.devices(8)

# The mesh axes over which each parameter's dimensions are split. Under ZeRO-1 "fsdp" splits the
# moments alone.
GOLDEN = """
bert/embeddings/layer_norm/bias                 fsdp
bert/embeddings/layer_norm/scale                fsdp
bert/embeddings/position_embeddings             -       fsdp
bert/embeddings/token_type_embeddings           -       fsdp
bert/embeddings/word_embeddings                 tensor  fsdp
bert/layer_0/attention/distance/embeddings      -       -
bert/layer_0/attention/key/bias                 tensor
bert/layer_0/attention/key/kernel               fsdp    tensor
bert/layer_0/attention/output/bias              fsdp
bert/layer_0/attention/output/kernel            tensor  fsdp
bert/layer_0/attention/query/bias               tensor
bert/layer_0/attention/query/kernel             fsdp    tensor
bert/layer_0/attention/value/bias               tensor
bert/layer_0/attention/value/kernel             fsdp    tensor
bert/layer_0/attention_layer_norm/bias          fsdp
bert/layer_0/attention_layer_norm/scale         fsdp
bert/layer_0/down/bias                          fsdp
bert/layer_0/down/kernel                        tensor  fsdp
bert/layer_0/feed_forward_layer_norm/bias       fsdp
bert/layer_0/feed_forward_layer_norm/scale      fsdp
bert/layer_0/up/bias                            tensor
bert/layer_0/up/kernel                          fsdp    tensor
bert/pooler/bias                                -
bert/pooler/kernel                              fsdp    -
mlm_head/bias                                   tensor
mlm_head/layer_norm/bias                        fsdp
mlm_head/layer_norm/scale                       fsdp
mlm_head/transform/bias                         -
mlm_head/transform/kernel                       fsdp    -
nsp_head/bias                                   -
nsp_head/kernel                                 fsdp    -
"""
MESHES = {"data": (8, 1, 1), "fsdp": (1, 8, 1), "tensor": (1, 1, 8), "all": (2, 2, 2)}
SIZES = ModelConfig(
    vocab_size=104,
    hidden_size=48,
    num_hidden_layers=1,
    num_attention_heads=8,
    intermediate_size=64,
    max_position_embeddings=16,
)


def make_sharded(shape, zero=3, count=8, sizes=SIZES) -> Setup:
    """Return a model on a mesh, with the optimizer of BERT."""
    config = ParallelConfig(*shape, zero=zero)
    mesh = make_mesh(config, jax.devices()[:count])
    optimizer = make_optimizer(OptimizerConfig(), make_rate_schedule(OptimizerConfig(), 10))
    return make_setup(BertForPreTraining(sizes), optimizer, 0, mesh, config)


def axes_by_name(shardings) -> dict[str, list[str]]:
    flat = traverse_util.flatten_dict(shardings, sep="/")
    return {name: [axis or "-" for axis in sharding.spec] for name, sharding in flat.items()}


def golden(*unsplit: str) -> dict[str, list[str]]:
    rows = (line.split() for line in GOLDEN.strip().splitlines())
    return {name: ["-" if axis in unsplit else axis for axis in axes] for name, *axes in rows}


@pytest.mark.parametrize("kind", ["absolute", "relative_key"])
def test_every_parameter_is_sharded_as_the_table_says(kind):
    sizes = dataclasses.replace(SIZES, position_embedding_type=kind)
    absent = "position_embeddings" if kind == "relative_key" else "distance"
    setup = make_sharded((2, 2, 2), sizes=sizes)
    layout = setup.layout
    wanted = {name: axes for name, axes in golden().items() if absent not in name}
    assert axes_by_name(layout.params) == axes_by_name(layout.gradients) == wanted
    for moments in (layout.state.opt_state[1].mu, layout.state.opt_state[1].nu):
        assert axes_by_name(moments) == wanted
    assert all(x.sharding for x in jax.tree.leaves(setup.abstract_state))
    layout = make_sharded((2, 2, 2), zero=1, sizes=sizes).layout
    unsplit = {name: axes for name, axes in golden("fsdp").items() if absent not in name}
    assert axes_by_name(layout.params) == axes_by_name(layout.state.params) == unsplit
    assert axes_by_name(layout.gradients) == axes_by_name(layout.state.opt_state[1].nu) == wanted


@pytest.mark.parametrize("name", MESHES)
def test_a_device_holds_its_shard(name):
    """A dimension that is split is divided by the number of shards."""
    data, fsdp, tensor = MESHES[name]
    params = make_sharded(MESHES[name]).abstract_state.params
    parts, axes = {"-": 1, "fsdp": fsdp, "tensor": tensor}, golden()
    for path, like in traverse_util.flatten_dict(params, sep="/").items():
        wanted = [n // parts[axis] for n, axis in zip(like.shape, axes[path], strict=True)]
        assert list(like.sharding.shard_shape(like.shape)) == wanted, path
    assert num_batch_shards(make_mesh(ParallelConfig(*MESHES[name]))) == data * fsdp


@pytest.mark.parametrize(
    ("parallel_config", "model", "key_words"),
    [
        ({"data": 3}, {}, ["data 3 × fsdp 1 × tensor 1", "8 devices"]),
        ({"data": -1, "fsdp": -1}, {}, ["several axes of parallel are -1"]),
        ({"zero": 2}, {}, ["parallel.zero is 2"]),
        ({"mode": "pmap", "fsdp": 2}, {}, ["parallel.mode pmap keeps all parameters"]),
        ({"tensor": 8}, {"num_attention_heads": 4}, ["num_attention_heads 4 is not a multiple"]),
        ({"tensor": 8}, {"vocab_size": 100}, ["vocab_size 100", "tensor to 4", "to 104"]),
        ({"tensor": 8}, {"intermediate_size": 20}, ["intermediate_size 20", "tensor to 4"]),
        ({"fsdp": 8}, {"hidden_size": 12, "num_attention_heads": 2}, ["parallel.fsdp to 4"]),
    ],
)
def test_sizes_that_the_mesh_does_not_divide_are_refused(parallel_config, model, key_words):
    config = TrainConfig(
        model=dataclasses.replace(SIZES, **model),
        data=DataConfig(max_length=16),
        parallel=ParallelConfig(**parallel_config),
    )
    with refused(*key_words):
        validate(config)
        check_model(config.model, make_mesh(config.parallel), [16])


def test_hosts_of_which_one_has_no_kernel_are_refused(monkeypatch):
    def gather(value):
        name, texts = value
        others = {name: text.replace("plain", "fused") for name, text in texts.items()}
        return [[name, texts], ["other", others]]

    monkeypatch.setattr(hosts, "gather", gather)
    check_model(SIZES, make_mesh(), [16])  # of a single host
    monkeypatch.setattr(hosts, "count", lambda: 2)
    with refused('the attention of 16 tokens is ["plain", "plain"] on host 0', "on host 1 (other)"):
        check_model(SIZES, make_mesh(), [16])


def test_a_batch_that_the_mesh_does_not_divide_is_refused():
    mesh = make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))
    check_divides(12, 1, mesh)
    with refused("batch_size 12", "4 devices", "2 microbatches; use 16"):
        check_divides(12, 2, mesh)
    check_divides(24, 1, mesh, per_sequence=3)
    with refused("times 3 examples a sequence; use 24"):
        check_divides(20, 1, mesh, per_sequence=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """A checkpoint of random numbers, moments included, saved from 2 × 2 × 2 devices."""
    folder = tmp_path_factory.mktemp("saved")
    like = make_sharded((2, 2, 2)).abstract_state
    generator = np.random.default_rng(0)
    numbers = jax.tree.map(
        lambda x: (
            generator.normal(size=x.shape).astype(x.dtype)
            if x.dtype == np.float32
            else generator.integers(0, 99, x.shape).astype(x.dtype)
        ),
        like,
    )
    state = jax.tree.map(lambda value, x: jax.device_put(value, x.sharding), numbers, like)
    settings = folder, CheckpointConfig(), tokenizer, lambda _: 0.0
    with closing(Checkpoints(*settings)) as checkpoints:
        checkpoints.save(7, state, TrainConfig(model=SIZES), None)
    return folder, numbers


@pytest.mark.parametrize(
    ("shape", "zero", "count"),
    [((1, 1, 1), 3, 1), ((1, 8, 1), 3, 8), ((1, 8, 1), 1, 8), ((1, 1, 2), 3, 2), ((3, 1, 1), 3, 3)],
)
def test_restored_onto_another_mesh(saved, shape, zero, count):
    folder, numbers = saved
    setup = make_sharded(shape, zero, count)
    state = checkpoint.read_state(folder / "7", setup.abstract_state)
    jax.tree.map(np.testing.assert_array_equal, state, numbers)
    assert jax.tree.map(lambda x: x.sharding, state) == setup.layout.state


def test_loaded_exported_and_used_to_initialize_elsewhere(saved, tmp_path):
    folder, numbers = saved
    bert = load(folder)
    jax.tree.map(np.testing.assert_array_equal, bert.params, numbers.params)
    bert.export(tmp_path / "exported")
    exported = load(tmp_path / "exported")
    jax.tree.map(np.testing.assert_array_equal, exported.params, numbers.params)
    setup = make_sharded((1, 3, 1), count=3)
    copied = copy_params(setup.new_state().params, bert.params)
    jax.tree.map(np.testing.assert_array_equal, copied, numbers.params)
    assert jax.tree.map(lambda x: x.sharding, copied) == setup.layout.params


def test_a_new_state_does_not_depend_on_the_mesh():
    sizes = model_config(vocab_size=104)
    one, eight = (
        make_sharded(s, count=c, sizes=sizes) for s, c in (((1, 1, 1), 1), ((2, 2, 2), 8))
    )
    jax.tree.map(np.testing.assert_array_equal, one.new_state(), eight.new_state())


def test_shapes_and_the_states_of_all_seeds_come_from_one_trace(monkeypatch):
    traced = Mock(side_effect=BertForPreTraining.init_params)
    monkeypatch.setattr(BertForPreTraining, "init_params", lambda model, key: traced(model, key))
    setup = make_sharded((1, 1, 1), count=1)
    first, second = (dataclasses.replace(setup, seed=seed).new_state() for seed in (0, 1))
    assert traced.call_count == 1
    assert first.rng.tolist() == [0, 0]
    assert second.rng.tolist() == [0, 1]
    kernels = [
        traverse_util.flatten_dict(state.params, sep="/")["mlm_head/transform/kernel"]
        for state in (first, second)
    ]
    assert not np.array_equal(*kernels)
