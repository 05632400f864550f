"""The fused form beside the plain one: values and gradients, run by Pallas's interpreter."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import model_config
from jax.sharding import AbstractDevice

from bert_jax.config import ParallelConfig
from bert_jax.distributed.mesh import check_model, make_mesh
from bert_jax.errors import UserError
from bert_jax.models import attention, attention_gpu, attention_tpu, fused_attention
from bert_jax.models.attention import AttentionMask
from bert_jax.models.bert import BertModel
from bert_jax.models.layers import DropoutKey

ROWS = 3


def both(length, heads, size, *, on, dtype="float32", packed=False, rate=0.1, seed=0):
    """Returns (output, gradients by query, key and value) of the fused form and of the plain one.

    The first row has padding, the second is padding alone. Where nothing is attended to, scores are
    as coarse as -10000 is: a TPU's kernel adds them up as the plain form does, a GPU's in tiles,
    and what it makes of them is left out.
    """
    generator = np.random.default_rng(seed)
    *projected, cotangent = jnp.asarray(
        generator.normal(size=(4, ROWS, length, heads * size)), dtype
    )
    texts = (
        np.sort(generator.integers(1, 4, (ROWS, length)), axis=1)
        if packed
        else np.ones((ROWS, length), int)
    )
    texts[0, length // 2 :], texts[1] = 0, 0
    texts = jnp.asarray(texts, jnp.int32)
    real = (texts > 0)[..., None] if on == "gpu" else True
    key = DropoutKey(jax.random.key(seed), jnp.array([7, 0, 300]))
    how = {"rate": rate, "bounds": (heads, length + 5, length + 9)}

    def fused(*projected):
        return fused_attention.fused_attention(projected, texts, key, packed=packed, **how)

    def plain(*projected):
        mask = AttentionMask(texts, packed)
        return attention.plain_attention(projected, mask, key, **how)[0]

    def run(form):
        def with_gradients(*projected):
            mixed, pull = jax.vjp(form, *projected)
            return mixed, *pull(jnp.where(real, cotangent, 0))

        mixed, *gradients = jax.jit(with_gradients)(*projected)
        assert np.isfinite(mixed).all()
        return [np.asarray(x, np.float32) for x in (jnp.where(real, mixed, 0), *gradients)]

    with fused_attention.interpreted(on):
        found = run(fused)
    return found, run(plain)


def check(found, wanted, tolerance):
    for actual, expected in zip(found, wanted, strict=True):
        assert np.abs(expected).max() > 0.5
        np.testing.assert_allclose(actual, expected, atol=tolerance)


@pytest.mark.parametrize("on", ["tpu", "gpu"])
def test_is_the_plain_form(on):
    check(*both(48, 2, 16, on=on), 1e-5)


def test_in_tiles_of_queries_and_groups_of_heads(monkeypatch):
    monkeypatch.setattr(attention_tpu, "_SCORES", 128 * 256)
    assert attention_tpu._tile(256) == 128
    assert attention_tpu._together(4, 64, 128 * 256) == 2
    check(*both(256, 4, 64, on="tpu", packed=True), 1e-5)


def test_in_tiles_of_queries_and_of_keys():
    assert attention_gpu._tile(96, jnp.dtype("float32")) == 32
    check(*both(96, 2, 64, on="gpu", packed=True), 1e-5)


def test_on_devices_that_have_some_heads_each():
    mesh = make_mesh(ParallelConfig(data=1, tensor=4), jax.devices()[:4])
    with jax.set_mesh(mesh):
        check(*both(32, 4, 16, on="gpu", packed=True), 1e-5)


@pytest.mark.parametrize("on", ["tpu", "gpu"])
def test_in_bfloat16(on):
    """The plain form rounds more often: the gradients differ by some of the type's steps."""
    found, wanted = both(32, 2, 16, on=on, dtype="bfloat16", packed=True)
    check(found, wanted, 2**-6)
    np.testing.assert_allclose(found[0], wanted[0], atol=2**-8 * np.abs(wanted[0]).max())


@pytest.mark.parametrize("on", ["tpu", "gpu"])
def test_of_random_shapes(on):
    generator = np.random.default_rng(1)
    for seed in range(2):
        length, heads, size = (int(n) for n in generator.integers((2, 1, 2), (40, 4, 20)))
        if on == "gpu":
            length, size = 16 * (1 + length // 8), 16 * (1 + size // 10)
        packed, rate = bool(generator.integers(2)), float(generator.choice([0.0, 0.5]))
        check(*both(length, heads, size, on=on, packed=packed, rate=rate, seed=seed), 1e-5)


def lowered(length, device):
    """Returns the program of the value and the gradients, for a device that need not be here."""
    shape = jax.ShapeDtypeStruct((2, length, 256), jnp.bfloat16)
    texts, key = jnp.ones((2, length), jnp.int32), DropoutKey(jax.random.key(0), jnp.arange(2))

    def total(*projected):
        how = {"packed": True, "rate": 0.1, "bounds": (4, length, length)}
        return fused_attention.fused_attention(projected, texts, key, **how).sum()

    mesh = jax.sharding.AbstractMesh(
        (1,), ("tensor",), (jax.sharding.AxisType.Auto,), abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.value_and_grad(total, (0, 1, 2))).trace(shape, shape, shape)
        name = {"gpu": "cuda"}.get(device.platform, device.platform)
        return traced.lower(lowering_platforms=(name,)).as_text()


@pytest.mark.parametrize("length", [20, 384, 2048])
def test_lowers_for_a_tpu_and_keeps_no_scores(length):
    """Which needs no TPU, nor its compiler."""
    text = lowered(length, AbstractDevice("TPU v5 lite", 1, "tpu"))
    assert text.count("@tpu_custom_call") == 2
    assert f"{length}x{length}x" not in text


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("length", [48, 512])
def test_lowers_for_a_gpu_and_keeps_no_scores(length):
    text = lowered(length, AbstractDevice("NVIDIA H100", None, "gpu"))
    assert text.count("@__gpu$xla.gpu.triton") == 2
    assert f"{length}x{length}x" not in text


def test_is_taken_where_it_serves():
    config = model_config()
    fused = dataclasses.replace(config, attention="fused")
    assert not attention.is_fused(fused, 512)  # on a CPU
    with fused_attention.interpreted():
        assert attention.is_fused(config, 512)
        assert not attention.is_fused(config, 64)
        assert attention.is_fused(fused, 64)
        assert not attention.is_fused(fused, 1000)
        assert not attention.is_fused(dataclasses.replace(config, attention="plain"), 512)
        relative = {"position_embedding_type": "relative_key"}
        assert not attention.is_fused(dataclasses.replace(fused, **relative), 512)
    with fused_attention.interpreted("gpu"):
        assert not attention.is_fused(fused, 512)  # heads of 8
        wide = dataclasses.replace(fused, hidden_size=32)
        assert attention.is_fused(wide, 512)
        assert not attention.is_fused(wide, 500)
        assert not attention.is_fused(dataclasses.replace(wide, attention="auto"), 512)


def test_an_attention_map_is_of_the_plain_form():
    ids = jnp.ones((2, 16), jnp.int32)
    model = BertModel(model_config(attention="fused", num_hidden_layers=1))
    params = jax.eval_shape(model.init, jax.random.key(0), ids, ids, ids)

    def maps(params, *, wanted):
        return model.apply(params, ids, ids, ids, output_attentions=wanted).attentions

    with fused_attention.interpreted():
        assert jax.eval_shape(partial(maps, wanted=False), params) is None
        (found,) = jax.eval_shape(partial(maps, wanted=True), params)
    assert found.shape == (2, 2, 16, 16)


def test_on_a_cpu_it_is_refused():
    with pytest.raises(UserError, match="fused is for a TPU or a GPU"):
        check_model(model_config(attention="fused"), make_mesh())
