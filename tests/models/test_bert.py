"""The encoder against a plain NumPy form of the paper, and what it must and must not depend on."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import LENGTH, VOCAB, batch, model_config, random_arrays
from scipy.special import erf, softmax

from bert_jax.config import ModelConfig
from bert_jax.distributed.fsdp import RULES
from bert_jax.models.bert import BertModel
from bert_jax.objectives.sentence_pairs import BertForPreTraining


def random_params(model: BertForPreTraining):
    return jax.device_get(random_arrays(model.init_params))


def inputs_of(rows) -> list[np.ndarray]:
    return [rows[name] for name in ("input_ids", "token_type_ids", "attention_mask")]


def numpy_bert(p, config: ModelConfig, ids, types, mask):
    """Returns (all hidden states, attention maps, pooled), in float64, one head at a time."""

    def dense(name, x, at):
        return x @ at[name]["kernel"].astype(np.float64) + at[name]["bias"]

    def norm(name, x, at):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-12) * at[name]["scale"] + at[name]["bias"]

    def gelu(x):
        if config.hidden_act == "gelu":
            return x * 0.5 * (1 + erf(x / np.sqrt(2)))
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    e = p["embeddings"]
    x = e["word_embeddings"][ids].astype(np.float64) + e["token_type_embeddings"][types]
    place, kind = np.arange(ids.shape[1]), config.position_embedding_type
    if kind == "absolute":
        x += e["position_embeddings"][place]
    if kind == "sinusoidal":
        for i in range(config.hidden_size // 2):
            x[:, :, 2 * i] += np.sin(place / 10000 ** (2 * i / config.hidden_size))
            x[:, :, 2 * i + 1] += np.cos(place / 10000 ** (2 * i / config.hidden_size))
    x = norm("layer_norm", x, e)
    hidden, maps, size = [x], [], config.hidden_size // config.num_attention_heads
    for index in range(config.num_hidden_layers):
        layer = p[f"layer_{index}"]
        query, key, value = (dense(n, x, layer["attention"]) for n in ("query", "key", "value"))
        parts, probabilities = [], []
        for head in range(config.num_attention_heads):
            here = np.s_[..., head * size : (head + 1) * size]
            scores = query[here] @ key[here].swapaxes(1, 2)
            if kind.startswith("relative"):
                distance = place[:, None] - place + config.max_position_embeddings - 1
                embedded = layer["attention"]["distance"]["embeddings"][distance]
                scores += np.einsum("blk,lmk->blm", query[here], embedded)
                if kind == "relative_key_query":
                    scores += np.einsum("bmk,lmk->blm", key[here], embedded)
            scores /= np.sqrt(size)
            scores = np.where(mask[:, None, :] > 0, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            probabilities.append(weights)
            parts.append(weights @ value[here])
        maps.append(np.stack(probabilities, 1))
        x = norm(
            "attention_layer_norm",
            x + dense("output", np.concatenate(parts, -1), layer["attention"]),
            layer,
        )
        x = norm(
            "feed_forward_layer_norm", x + dense("down", gelu(dense("up", x, layer)), layer), layer
        )
        hidden.append(x)
    return hidden, maps, np.tanh(dense("pooler", x[:, 0], p))


@pytest.mark.parametrize(
    ("activation", "positions", "length"),
    [
        ("gelu", "absolute", LENGTH),
        ("gelu_new", "absolute", 21),
        ("gelu", "sinusoidal", 21),
        ("gelu", "relative_key", LENGTH),
        ("gelu", "relative_key_query", 21),
    ],
)
def test_agrees_with_numpy(activation, positions, length):
    config = model_config(
        hidden_act=activation, num_hidden_layers=3, position_embedding_type=positions
    )
    params = random_params(BertForPreTraining(config))["bert"]
    inputs = inputs_of(batch(6, length=length))
    run = partial(BertModel(config).apply, output_hidden_states=True, output_attentions=True)
    found = jax.jit(run)({"params": params}, *inputs)
    hidden, maps, pooled = numpy_bert(params, config, *inputs)
    assert len(found.hidden_states) == 4
    assert len(found.attentions) == 3
    for actual, expected in zip(found.hidden_states, hidden, strict=True):
        assert 0.3 < np.abs(expected).mean() < 3
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    for actual, expected in zip(found.attentions, maps, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.pooled, pooled, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found.last_hidden_state, found.hidden_states[-1])


@pytest.mark.parametrize("changes", [{}, {"scan_layers": True}, {"remat": True}])
@pytest.mark.parametrize("kind", ["absolute", "relative_key", "relative_key_query"])
def test_queries_and_keys_are_those_of_the_maps(kind, changes):
    config = model_config(num_hidden_layers=3, position_embedding_type=kind, **changes)
    params, rows = random_params(BertForPreTraining(config))["bert"], batch(4)
    inputs = inputs_of(rows)
    run = partial(BertModel(config).apply, output_hidden_states=True, output_attentions=True)
    found = jax.jit(partial(run, output_queries_keys=True))({"params": params}, *inputs)
    hidden, maps, _ = numpy_bert(params, config, *inputs)
    assert len(found.queries_keys) == 3
    for index, (layer, expected) in enumerate(zip(found.queries_keys, maps, strict=True)):
        for name, actual in (("query", layer.query), ("key", layer.key)):
            weights = params[f"layer_{index}"]["attention"][name]
            wanted = hidden[index] @ weights["kernel"].astype(float) + weights["bias"]
            wanted = wanted.reshape(4, LENGTH, 2, 8).swapaxes(1, 2)
            assert 0.3 < np.abs(wanted).mean() < 3
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5)
        assert layer.probabilities is None
        assert (layer.position_scores is None) == (kind == "absolute")
        scores = np.asarray(layer.query, float) @ np.asarray(layer.key, float).swapaxes(2, 3)
        if layer.position_scores is not None:
            scores += layer.position_scores
        scores = np.where(rows["attention_mask"][:, None, None] > 0, scores / np.sqrt(8), -np.inf)
        np.testing.assert_allclose(softmax(scores, -1), found.attentions[index], rtol=0, atol=1e-6)
        np.testing.assert_allclose(found.attentions[index], expected, rtol=0, atol=1e-5)
    without = jax.jit(run)({"params": params}, *inputs)
    assert without.queries_keys is None
    for ours, others in zip(without.attentions, found.attentions, strict=True):
        np.testing.assert_allclose(ours, others, rtol=0, atol=1e-6)


def test_heads_agree_with_numpy():
    config = model_config(hidden_act="gelu")
    model = BertForPreTraining(config)
    params, inputs = random_params(model), inputs_of(batch(5))
    positions = np.random.default_rng(0).integers(0, 5, (5, 3))
    found = jax.jit(model.apply)({"params": params}, *inputs, positions)
    hidden, _, pooled = numpy_bert(params["bert"], config, *inputs)
    head = params["mlm_head"]
    x = np.take_along_axis(hidden[-1], positions[:, :, None], 1)
    x = x @ head["transform"]["kernel"] + head["transform"]["bias"]
    x = x * 0.5 * (1 + erf(x / np.sqrt(2)))
    x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    x = x * head["layer_norm"]["scale"] + head["layer_norm"]["bias"]
    logits = x @ params["bert"]["embeddings"]["word_embeddings"].T + head["bias"]
    assert np.abs(logits).mean() > 1
    np.testing.assert_allclose(found.mlm_logits, logits, rtol=1e-5, atol=2e-5)
    nsp = pooled @ params["nsp_head"]["kernel"] + params["nsp_head"]["bias"]
    np.testing.assert_allclose(found.nsp_logits, nsp, rtol=0, atol=1e-5)


def test_padding_changes_nothing():
    config = model_config()
    params, rows = random_params(BertForPreTraining(config))["bert"], batch(4)
    shorter = 16
    ids, types = rows["input_ids"][:, :shorter], rows["token_type_ids"][:, :shorter]
    run = jax.jit(BertModel(config).apply)
    plain = run({"params": params}, ids, types, np.ones_like(ids))
    wide = np.random.default_rng(0).integers(0, VOCAB, (4, LENGTH)).astype(np.int32)
    wide[:, :shorter] = ids
    mask = (np.arange(LENGTH) < shorter).astype(np.int32) * np.ones((4, 1), np.int32)
    padded = run({"params": params}, wide, np.pad(types, ((0, 0), (0, LENGTH - shorter))), mask)
    np.testing.assert_allclose(
        padded.last_hidden_state[:, :shorter], plain.last_hidden_state, rtol=0, atol=1e-5
    )


def test_bfloat16_is_near_float32_and_keeps_what_must_be_float32():
    outputs, masked = {}, np.ones((4, 2), np.int32)
    for dtype in ("float32", "bfloat16"):
        model = BertForPreTraining(model_config(dtype=dtype))
        params = random_params(model)
        assert all(x.dtype == np.float32 for x in jax.tree.leaves(params))
        outputs[dtype] = jax.jit(model.apply)({"params": params}, *inputs_of(batch(4)), masked)
    assert outputs["bfloat16"].mlm_logits.dtype == jnp.float32
    a, b = (outputs[d].mlm_logits.ravel() for d in ("float32", "bfloat16"))
    assert 0 < np.abs(a - b).mean() < 0.05 * np.abs(a).mean()


@pytest.mark.parametrize(
    ("shape", "total", "encoder"),
    [
        ((28996, 768, 12, 12, 3072), 108_932_934, 108_310_272),
        ((28996, 1024, 24, 16, 4096), 334_661_958, 333_579_264),
    ],
)
def test_published_parameter_counts(shape, total, encoder):
    """Of the cased models; tests/config has those of the recipes."""
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    config = ModelConfig(**dict(zip((*sizes, "intermediate_size"), shape, strict=True)))
    model = BertForPreTraining(config)
    params = nn.unbox(jax.eval_shape(model.init_params, jax.random.key(0)))
    assert sum(x.size for x in jax.tree.leaves(params)) == total
    assert sum(x.size for x in jax.tree.leaves(params["bert"])) == encoder


def test_every_axis_has_a_rule_and_every_rule_an_axis():
    model = BertForPreTraining(model_config())
    specs = nn.get_partition_spec(jax.eval_shape(model.init_params, jax.random.key(0)))
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
    shapes = jax.tree.leaves(nn.unbox(jax.eval_shape(model.init_params, jax.random.key(0))))
    assert all(len(spec) == len(shape.shape) for spec, shape in zip(leaves, shapes, strict=True))
    assert {axis for spec in leaves for axis in spec} == set(RULES)
