"""The devices that a name of a topology stands for."""

import jax
import pytest
from helpers import refused

from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.planning.topology import parse, read_topologies

jax.devices()  # before a topology asks JAX for fewer


@pytest.mark.parametrize(
    ("name", "key_words"),
    [
        ("v5e:8", "write it as v5e:4x4"),
        ("v6e:4x4x4", "write it as v6e:4x4"),
        ("h100:2x2", "write it as h100:8"),
        ("cpu:0", "write it as cpu:8"),
        ("cpu:2,", "not a known chip"),
        ("v5e:2x2", "pip install libtpu"),
        ("v9-8", "not a known chip"),
        ("cpu:100000000", "100,000,000 devices; a plan is for 65,536 at most"),
        ("8xh99", "not a known chip"),
        (f"h100:{'1' * 5000}", "write it as h100:8"),
        ("v5e-12", "no slice of a usual shape has this number; write it as v5e:4x4"),
        ("v4-1", "no slice of a usual shape has this number; write it as v4:4x4x4"),
    ],
)
def test_names_that_are_refused(name, key_words, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # without its compiler
    with refused(key_words):
        read_topologies(name, compiles=True)


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [
        ("v5e-1", "v5e", "1x1"),
        ("v5e-8", "v5e", "2x4"),
        ("v5litepod-16", "v5e", "4x4"),
        ("v6e-256", "v6e", "16x16"),
        ("v4-8", "v4", "2x2x1"),
        ("v4-32", "v4", "2x2x4"),
        ("V5P-128", "v5p", "4x4x4"),
        ("8xh100", "h100", "8"),
        ("8xH200", "h200", "8"),
        ("h100:8", "h100", "8"),
    ],
)
def test_names_of_the_clouds(name, kind, shape):
    """Shapes of the default slices. Source: Cloud TPU documentation, 'TPU configurations'."""
    assert parse(name) == (kind, shape)


@pytest.mark.devices(8)
def test_a_compiler_of_cpus_is_here_and_none_of_gpus():
    (cpus,) = read_topologies("cpu:4", compiles=True)
    assert (len(cpus.devices), cpus.chip) == (4, None)
    with refused("--compile for h100:8 needs a GPU and its compiler; leave it out"):
        read_topologies("cpu:4,h100:8", compiles=True)


@pytest.mark.parametrize("name", ["v5e-8", "v4-32", "v5p:2x4x4"])
def test_planned_tpus_are_those_of_the_compiler(name):
    pytest.importorskip("libtpu")
    (planned,), (compiled,) = read_topologies(name), read_topologies(name, compiles=True)
    assert {x.coords for x in planned.devices} == {tuple(x.coords) for x in compiled.devices}
    assert {x.device_kind for x in compiled.devices} <= set(planned.chip.device_kinds)


def test_what_is_resolved():
    config = TrainConfig(model=ModelConfig(vocab_size=0, dtype="auto"))
    model = read_topologies("h100:1")[0].resolve(config).model
    assert (model.dtype, model.vocab_size) == ("bfloat16", 32000)


def test_tpus():
    pytest.importorskip("libtpu")
    (v4,) = read_topologies("v4:2x2x2", compiles=True)
    assert len(v4.devices) == 8  # not its 16 cores
    with refused("does not exist"):
        read_topologies("v5e:3x5", compiles=True)
