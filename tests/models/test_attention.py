"""Fused attention beside the plain form, values and gradients, and where it may be chosen."""

import dataclasses
import importlib
import re
from functools import partial
from unittest.mock import Mock, patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import model_config, refused

from bert_jax.config import ModelConfig, ParallelConfig
from bert_jax.distributed import fsdp
from bert_jax.distributed.mesh import check_model, make_mesh
from bert_jax.models import attention, dropout_attention, fused_attention
from bert_jax.models.architecture import describe_attention
from bert_jax.models.attention import AttentionMask
from bert_jax.models.bert import BertModel
from bert_jax.models.fused_attention import check_attention, unsupported
from bert_jax.models.layers import DropoutKey, random_bits
from bert_jax.models.modernbert import ModernBertConfig, ModernBertModel
from bert_jax.models.target import Target, traced_for

SEQUENCES = 3
KEY = DropoutKey(jax.random.key(0), jnp.array([7, 0, 300]))


@pytest.fixture
def on_tpu(monkeypatch):
    """Chooses as on a TPU; the kernels run in Pallas's interpreter."""
    monkeypatch.setattr(fused_attention, "_is_interpreted", lambda: True)
    with traced_for(Target("tpu")):
        yield


def layer(heads, head_size, length, rate=0.1, **changes) -> ModelConfig:
    """A config of one attention layer; dropout counts more positions than there are."""
    return ModelConfig(
        hidden_size=heads * head_size,
        num_attention_heads=heads,
        max_position_embeddings=length + 5,
        attention_probs_dropout_prob=rate,
        **changes,
    )


def segments(length, packed, generator) -> np.ndarray:
    """Segment ids: the first sequence is half padding, the second is padding alone."""
    ids = np.ones((SEQUENCES, length), np.int32)
    if packed:
        ids = np.sort(generator.integers(1, 4, ids.shape), axis=1).astype(np.int32)
    ids[0, length // 2 :], ids[1] = 0, 0
    return ids


def fused(config, projected, mask, key=None):
    ids = None if mask.is_full else mask.segment_ids
    return fused_attention.fused_attention(
        config, projected, ids, window=mask.window, packed=mask.packed, dropout_key=key
    )


def value_and_gradients(function, projected, cotangent):
    """The output and the gradients by query, key and value, in float32."""

    @jax.jit
    def run(projected, cotangent):
        output, pull = jax.vjp(function, *projected)
        return output, *pull(cotangent.astype(output.dtype))

    return [np.array(x, np.float32) for x in run(projected, cotangent)]


def check_form(form, config, length, *, window=0, packed=False, full=False, key=None):
    """Compare a form of attention with the plain one, to 1e-5, of queries that are tokens.

    Padding has no meaning, and another context in each form.
    """
    generator, width = np.random.default_rng(0), config.hidden_size
    *projected, cotangent = jnp.asarray(generator.normal(size=(4, SEQUENCES, length, width)))
    ids = np.ones((SEQUENCES, length), np.int32) if full else segments(length, packed, generator)
    is_token = jnp.asarray(ids > 0)
    mask = AttentionMask(jnp.asarray(ids), packed, is_full=full, window=window)

    def plain(config, x, mask):
        return attention.plain_attention(config, x, mask, key)[0]

    found, expected = (
        value_and_gradients(
            lambda *x, f=f: f(config, x, mask) * is_token[:, :, None], projected, cotangent
        )
        for f in (form, plain)
    )
    check(found, expected, 1e-5)


def check(fused, plain, tolerance):
    for actual, expected in zip(fused, plain, strict=True):
        largest = np.abs(expected).max()
        assert largest > 0.1
        np.testing.assert_allclose(actual, expected, atol=tolerance * min(1, largest))


@pytest.mark.parametrize(
    ("packed", "full", "mask_type"),
    [(False, False, "PADDING"), (True, False, "NO_MASK"), (False, True, "NO_MASK")],
)
def test_lowers_to_cudnn_for_a_gpu(packed, full, mask_type, monkeypatch):
    """JAX asks for the version of cuDNN, which is not here."""
    cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)
    config = layer(2, 64, 128, 0.0, dtype="bfloat16")
    x = jax.ShapeDtypeStruct((2, 128, 128), jnp.bfloat16)
    mask = AttentionMask(jnp.ones((2, 128), jnp.int32), packed, is_full=full)

    @jax.jit
    def gradients(*x):
        return jax.vjp(lambda *x: fused(config, x, mask), *x)[1](x[0])

    with traced_for(Target("gpu")):
        text = gradients.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    name = "fmhaScaleBiasSoftmax" if packed else "fmhaSoftmax"
    assert text.count(f"@__cudnn${name}(") == text.count(f"@__cudnn${name}Backward(") == 1
    assert len(re.findall(rf"mask_type.{{1,12}}?{mask_type}", text)) == 2


@pytest.mark.parametrize(("length", "window"), [(384, 0), (2048, 0), (8192, 64)])
def test_lowers_for_a_tpu_and_saves_no_scores(length, window):
    """Lowering needs no TPU; what is saved for the gradients is as large as the operands."""
    config = layer(4, 64, length, 0.0)
    x = jax.ShapeDtypeStruct((2, length, 256), jnp.bfloat16)
    mask = AttentionMask(jnp.ones((2, length), jnp.int32), packed=True, window=window)

    def pullback(*x):
        return jax.vjp(lambda *x: fused(config, x, mask), *x)[1]

    with traced_for(Target("tpu")):
        gradients = jax.jit(lambda *x: pullback(*x)(jnp.ones_like(x[0])))
        gradients.trace(x, x, x).lower(lowering_platforms=("tpu",))
        saved = jax.tree.leaves(jax.eval_shape(pullback, x, x, x))
    assert max(each.size for each in saved) == x.size


@pytest.mark.devices(8)
@pytest.mark.parametrize(
    ("length", "window", "devices", "full"),
    [(256, 40, 2, False), (384, 0, 1, False), (256, 40, 2, True), (128, 0, 1, True)],
)
@pytest.mark.usefixtures("on_tpu")
def test_splash_attention_is_the_plain_form(length, window, devices, full):
    """Of local layers, on devices that have a head each, and of global ones."""
    config = layer(2, 16, length, 0.0)
    assert not unsupported(config, "tpu", length, window=window, packed=True, training=True)
    mesh = make_mesh(ParallelConfig(data=1, tensor=devices), jax.devices()[:devices])
    with jax.set_mesh(mesh), traced_for(Target("tpu", fsdp._map_over_heads)):
        check_form(fused, config, length, window=window, packed=not full, full=full)


@pytest.mark.devices(8)
@pytest.mark.parametrize(
    ("length", "packed", "full", "devices"),
    [(128, False, False, 1), (256, True, False, 2), (40, False, True, 2), (200, False, False, 1)],
)
def test_the_kernel_with_dropout_is_the_plain_form(length, packed, full, devices, monkeypatch):
    """The same elements are dropped, also by devices that have a head each."""
    monkeypatch.setattr(dropout_attention, "_is_interpreted", lambda: True)
    config = layer(2, 16, length)
    mesh = make_mesh(ParallelConfig(data=1, tensor=devices), jax.devices()[:devices])
    with jax.set_mesh(mesh), traced_for(Target("gpu", fsdp._map_over_heads)):
        check_form(partial(fused, key=KEY), config, length, packed=packed, full=full, key=KEY)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("length", [64, 384])
def test_the_kernel_with_dropout_lowers_for_a_gpu(length, monkeypatch):
    """JAX asks for the kind of GPU, which is not here. The scores are nowhere in memory."""
    info = pytest.importorskip("jax._src.pallas.triton.gpu_info")  # as of JAX 0.11
    monkeypatch.setattr(info, "get_device_kind", lambda: "NVIDIA H200")
    config = layer(2, 64, length, dtype="bfloat16")
    x = jax.ShapeDtypeStruct((3, length, 128), jnp.bfloat16)
    mask = AttentionMask(jnp.ones((3, length), jnp.int32))

    @jax.jit
    def gradients(*x):
        return jax.vjp(lambda *x: fused(config, x, mask, KEY), *x)[1](x[0])

    with traced_for(Target("gpu")):
        text = gradients.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 2
    assert f"{length}x{length}" not in text


@pytest.mark.parametrize(("length", "packed"), [(20, False), (200, True)])
def test_the_kernel_is_compared_with_its_interpreter_also_in_a_trace(length, packed, monkeypatch):
    """Both are interpreted here, the one that is to be compiled with an error or without."""
    forms = []

    def call(kernel, *, interpret, **options):
        run = pallas_call(kernel, interpret=True, **options)
        forms.append(interpret)
        return lambda *x: [each * (1 if interpret else 1 + wrong) for each in run(*x)]

    pallas_call = dropout_attention.pl.pallas_call
    monkeypatch.setattr(dropout_attention.pl, "pallas_call", call)
    for wrong in (0, 0.25):
        dropout_attention._largest_error.cache_clear()
        errors = []

        @jax.jit
        def traced(x, errors=errors):
            errors.append(dropout_attention.largest_error(length, 16, packed=packed))
            return x

        traced(jnp.ones(2))
        assert errors[0] >= wrong
        assert (errors[0] == 0) == (wrong == 0)
    assert forms.count(True) == forms.count(False) == 2 * 2 * 2


def test_a_kernel_that_is_wrong_here_is_not_taken(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dropout_attention, "largest_error", lambda *_, **__: 0.25)
    fused_attention._dropout_error.cache_clear()
    line = describe_attention(
        model_config(dtype="bfloat16", attention="auto", **HEADS), "gpu", [32], packed=False
    )
    assert line == (
        "plain: fused with dropout fails on this machine (its results are off by 0.25 of the "
        "largest); set model.attention_probs_dropout_prob to 0"
    )


def test_padding_attends_to_the_text_on_a_tpu():
    """Late interaction scores [MASK]s that no other token attends to."""
    config = layer(2, 16, 128, 0.0)
    draw = np.random.default_rng(0)
    projected = [jnp.asarray(draw.normal(size=(2, 128, 32)), jnp.float32) for _ in range(3)]
    text = jnp.asarray(np.arange(128) < np.array([[40], [0]]), jnp.int32)
    context = fused_attention.splash_attention(*projected, text, head_size=16, window=0)
    expected, _ = attention.plain_attention(config, projected, AttentionMask(text), None)
    np.testing.assert_allclose(context[0], expected[0], atol=1e-5)
    assert jnp.isfinite(context).all()  # of a sequence of padding alone too


@pytest.mark.parametrize(
    ("length", "window", "packed", "rate"),
    [(24, 4, False, 0.0), (50, 6, True, 0.3), (13, 1, True, 0.5), (30, 29, False, 0.1)],
)
@pytest.mark.parametrize("positions", [64, 1 << 17])
def test_blocks_of_a_window_are_the_plain_form(length, window, packed, rate, positions):
    """At lengths that are no multiple of a block; the same elements are dropped."""
    config = dataclasses.replace(layer(2, 8, length, rate), max_position_embeddings=positions)
    form = partial(attention.local_attention, dropout_key=KEY)
    check_form(form, config, length, window=window, packed=packed, key=KEY)


def test_blocks_of_a_window_save_no_square_of_the_length():
    config, x = layer(2, 8, 1024), jax.ShapeDtypeStruct((1, 1024, 16), jnp.float32)
    mask = AttentionMask(jnp.ones((1, 1024), jnp.int32), window=8)

    def pullback(*x):
        return jax.vjp(lambda *x: attention.local_attention(config, x, mask, None), *x)[1]

    saved = jax.tree.leaves(jax.eval_shape(pullback, x, x, x))
    assert max(each.size for each in saved) == 2 * 1024 * 24


@pytest.mark.parametrize(
    ("length", "packed", "full"),
    [(24, False, False), (33, False, False), (24, True, False), (33, False, True)],
)
def test_the_layout_of_cudnn_is_the_plain_form(length, packed, full):
    """The same call in XLA's own implementation."""

    def form(config, projected, mask):
        kernel = partial(fused_attention.cudnn_attention, head_size=16, implementation="xla")
        return kernel(*projected, None if full else mask.segment_ids, packed=packed)

    check_form(form, layer(2, 16, length, rate=0.0), length, packed=packed, full=full)


@pytest.mark.parametrize(
    ("length", "window", "packed", "full"),
    [(24, 4, False, False), (50, 6, True, False), (13, 1, True, False), (30, 29, False, True)],
)
def test_windows_of_cudnn_are_the_plain_form(length, window, packed, full):
    """The same calls in XLA's own implementation."""

    def form(config, projected, mask):
        kernel = partial(fused_attention.cudnn_windows, head_size=16, implementation="xla")
        ids = None if full else mask.segment_ids
        return kernel(*projected, ids, window=window, packed=packed)

    config = layer(2, 16, length, rate=0.0)
    check_form(form, config, length, window=window, packed=packed, full=full)


@pytest.mark.device
@pytest.mark.parametrize("length", [128, 200, 512])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("window", "rate"), [(0, 0.0), (64, 0.0), (0, 0.1)])
def test_on_the_device(length, packed, window, rate):
    """In bfloat16, beside the plain form in float32 of the same values."""
    platform = jax.default_backend()
    config = layer(2, 64, length, rate, dtype="bfloat16")
    options = {"window": window, "packed": packed, "training": True}
    reason = unsupported(config, platform, length, **options)
    if reason:
        pytest.skip(f"fused attention {reason}")
    generator = np.random.default_rng(0)
    ids = segments(length, packed, generator)
    *projected, cotangent = jnp.asarray(
        generator.normal(size=(4, SEQUENCES, length, 128)), jnp.bfloat16
    )
    mask = AttentionMask(jnp.asarray(ids), packed, window)
    is_token = jnp.asarray(ids > 0)[:, :, None]
    cotangent *= is_token  # padding has another context in each form
    found = value_and_gradients(lambda *x: fused(config, x, mask, KEY), projected, cotangent)
    with jax.default_matmul_precision("highest"):
        plain = value_and_gradients(
            lambda *x: attention.plain_attention(config, x, mask, KEY)[0],
            [x.astype(jnp.float32) for x in projected],
            cotangent,
        )
    assert all(np.isfinite(x).all() for x in found)
    found[0], plain[0] = (x[0] * is_token for x in (found, plain))
    check(found, plain, 2**-5)


FUSED = model_config(attention="fused")
FLOAT32 = model_config(attention="fused", attention_probs_dropout_prob=0.0)
BFLOAT16 = dataclasses.replace(FLOAT32, dtype="bfloat16")
RELATIVE = dataclasses.replace(FUSED, position_embedding_type="relative_key")
HEADS = {"hidden_size": 32, "num_attention_heads": 2}
NARROW = model_config(attention="fused", dtype="bfloat16", **HEADS)
WIDE_HEADS = dataclasses.replace(NARROW, hidden_size=512)
ODD_HEADS = dataclasses.replace(BFLOAT16, hidden_size=24)


@pytest.mark.parametrize(
    ("config", "platform", "length", "packed", "key_words"),
    [
        (FLOAT32, "tpu", 512, True, []),
        (BFLOAT16, "tpu", 8192, True, []),
        (BFLOAT16, "gpu", 1000, False, []),
        (model_config(attention="auto"), "cpu", 512, True, []),
        (FUSED, "cpu", 32, False, ["is for a TPU or a GPU, not for a cpu", "to plain"]),
        (FUSED, "tpu", 512, False, ["no dropout on a TPU; set model.attention_probs_dropout_prob"]),
        (NARROW, "gpu", 200, True, []),
        (
            WIDE_HEADS,
            "gpu",
            32,
            False,
            ["takes heads of 16, 32, 64 or 128", "not of 256", "heads, or"],
        ),
        (BFLOAT16, "tpu", 200, False, ["a multiple of 128 tokens on a TPU, not 200"]),
        (RELATIVE, "tpu", 32, False, ["no relative_key"]),
        (FLOAT32, "gpu", 32, False, ["needs bfloat16 on a GPU; set model.dtype"]),
        (BFLOAT16, "gpu", 32, True, []),
        (BFLOAT16, "gpu", 33, True, ["an even number of packed tokens on a GPU, not 33"]),
        (ODD_HEADS, "gpu", 32, False, ["a multiple of 8", "a GPU, not of 12"]),
    ],
)
def test_where_fused_attention_serves_or_is_refused(config, platform, length, packed, key_words):
    check = partial(check_attention, config, platform, length, window=0, packed=packed)
    if not key_words:
        return check()
    with refused("model.attention fused", *key_words):
        check()


def test_on_a_gpu_cudnn_serves_layers_with_and_without_a_window(monkeypatch):
    """Each by its own function; together they are the plain form's."""
    config = model_config(
        model_type="modernbert", dtype="bfloat16", num_hidden_layers=4, local_attention=8
    )
    ids = jnp.asarray(np.random.default_rng(0).integers(5, 60, (2, 40)), jnp.int32)
    mask = jnp.ones((2, 40), jnp.int32).at[1, 30:].set(0)
    params = ModernBertModel(config).init(jax.random.key(0), ids, ids, mask)
    plain = ModernBertModel(config).apply(params, ids, ids, mask).last_hidden_state

    kernels = {}
    for name in ("cudnn_attention", "cudnn_windows"):
        kernel = partial(getattr(fused_attention, name), implementation="xla")
        kernels[name] = Mock(side_effect=kernel)
        monkeypatch.setattr(fused_attention, name, kernels[name])
    config = dataclasses.replace(config, attention="fused")
    with traced_for(Target("gpu")):
        hidden = ModernBertModel(config).apply(params, ids, ids, mask).last_hidden_state
    assert [kernel.call_count for kernel in kernels.values()] == [2, 2]  # layers 0 and 3, 1 and 2
    np.testing.assert_allclose(
        *(x.astype(np.float32)[mask > 0] for x in (hidden, plain)), atol=0.03
    )


@pytest.mark.parametrize(
    ("platform", "changes", "packed", "line"),
    [
        ("cpu", {}, False, "plain: a CPU has no kernel"),
        (
            "gpu",
            {"attention_probs_dropout_prob": 0.1},
            False,
            "fused",
        ),
        ("gpu", {}, False, "fused"),
        ("gpu", {}, True, "fused"),
        ("tpu", {}, True, "fused"),
        ("gpu", {"attention": "plain"}, False, "plain: model.attention is plain"),
        (
            "tpu",
            {"attention": "auto"},
            False,
            "plain: auto, until a kernel is measured on a TPU; ask for it by model.attention fused",
        ),
        ("gpu", {"attention": "auto"}, False, "fused"),
        (
            "gpu",
            {"attention": "auto", "attention_probs_dropout_prob": 0.1},
            False,
            "fused",
        ),
    ],
)
def test_what_is_said_of_the_attention(platform, changes, packed, line):
    settings = {"attention": "fused", "dtype": "bfloat16", "attention_probs_dropout_prob": 0.0}
    config = model_config(**{**settings, **HEADS, **changes})
    assert describe_attention(config, platform, [128, 512], packed=packed) == line


def test_what_is_said_of_layers_and_lengths_that_differ():
    config = ModernBertConfig(
        num_hidden_layers=4, attention="fused", dtype="bfloat16", attention_probs_dropout_prob=0.0
    )
    words = partial(describe_attention, config, packed=False)
    assert words("gpu", [128, 512]) == "fused"
    assert words("tpu", [100, 512]) == (
        "at length 100 plain: fused takes a multiple of 128 tokens on a TPU, not 100; "
        "give all sequences such a length, those of phases and of a length warm-up too; "
        "at length 512 fused"
    )


def test_without_cudnn_a_gpu_says_why_and_takes_the_plain_form(monkeypatch):
    """As on a machine that has no such library, which this one is."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    fused_attention._cudnn_error.cache_clear()
    config = dataclasses.replace(BFLOAT16, attention="auto")
    line = describe_attention(config, "gpu", [32], packed=False)
    assert line.startswith("plain: fused by cuDNN fails on this machine (")
    assert line.endswith("; install jax[cuda13]")
    with refused("model.attention fused by cuDNN fails", "or set model.attention to plain"):
        check_attention(BFLOAT16, "gpu", 32, window=0, packed=False)


def test_dropout_is_no_obstacle_outside_training():
    config = model_config(attention="fused", dtype="bfloat16")
    assert not unsupported(config, "tpu", 128, window=0, packed=False, training=False)


@pytest.mark.devices(8)
def test_the_model_on_a_mesh_is_checked():
    with refused("fused is for a TPU or a GPU, not for a cpu"):
        check_model(model_config(attention="fused"), make_mesh(), [32])


@pytest.mark.parametrize(
    ("changes", "wanted", "kernels"),
    [
        ({}, False, 1),
        ({}, True, 0),
        ({"attention": "plain"}, False, 0),
        ({"attention": "auto"}, False, 0),
    ],
)
@pytest.mark.usefixtures("on_tpu")
def test_attention_is_fused_where_it_may_be(changes, wanted, kernels):
    """Not where its map is wanted."""
    ids = jnp.ones((2, 128), jnp.int32)
    config = model_config(
        **{
            "attention": "fused",
            "num_hidden_layers": 1,
            "max_position_embeddings": 128,
            "attention_probs_dropout_prob": 0.0,
            **changes,
        }
    )
    params = jax.eval_shape(BertModel(config).init, jax.random.key(0), ids, ids, ids)
    hidden = jax.ShapeDtypeStruct((2, 128, 16), jnp.float32)
    module = attention.SelfAttention(config)
    variables = {"params": params["params"]["layer_0"]["attention"]}
    run = partial(module.apply, output_maps=wanted, dropout_key=None)
    _, found = jax.eval_shape(run, variables, hidden, AttentionMask(ids))
    traced = str(jax.make_jaxpr(run)(variables, hidden, AttentionMask(ids)))
    assert traced.count("pallas_call") == kernels
    assert (found is not None) == wanted
    if wanted:
        assert found.probabilities.shape == (2, 2, 128, 128)
        assert found.query.shape == found.key.shape == (2, 2, 128, 8)


@pytest.mark.parametrize(("length", "counted"), [(9, 16), (24, 24)])
def test_dropout_repeats_no_bits_in_a_packed_row_longer_than_the_positions(length, counted):
    config = dataclasses.replace(layer(2, 4, 16), max_position_embeddings=16)
    with patch.object(attention, "apply_dropout", wraps=attention.apply_dropout) as applied:
        x = jnp.ones((SEQUENCES, length, 8))
        attention._attend(config, (x, x, x), jnp.zeros((SEQUENCES, 1, 1, length)), KEY, length)
    assert applied.call_args.args[3] == (2, counted, counted)
    bits = random_bits(KEY.key, KEY.indices[:1], (2, length, length), (2, counted, counted))
    assert len(np.unique(bits)) == bits.size
