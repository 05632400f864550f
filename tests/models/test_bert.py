"""What the encoder must and must not depend on; tests/convert has its numbers beside others'."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import LENGTH, batch, model_config, random_arrays
from scipy.special import softmax

from bert_jax.distributed.fsdp import RULES
from bert_jax.models import layers
from bert_jax.models.bert import BertModel
from bert_jax.models.heads import TaskModel
from bert_jax.models.layers import DropoutKey
from bert_jax.objectives.sentence_pairs import BertForPreTraining


def random_params(model: BertForPreTraining):
    return jax.device_get(random_arrays(model.init_params))


def inputs_of(rows) -> list[np.ndarray]:
    return [rows[name] for name in ("input_ids", "token_type_ids", "attention_mask")]


@pytest.mark.parametrize("changes", [{}, {"scan_layers": True}, {"remat": True}])
@pytest.mark.parametrize("kind", ["absolute", "relative_key", "relative_key_query"])
def test_queries_and_keys_are_those_of_the_maps(kind, changes):
    """With layers in a scan or computed again, too, of which all numbers are the plain ones."""
    config = model_config(num_hidden_layers=3, position_embedding_type=kind)
    params, rows = random_params(BertForPreTraining(config))["bert"], batch(4)

    def run(**options):
        model = BertModel(options.pop("config", config))
        outputs = {"output_hidden_states": True, "output_attentions": True, **options}
        return jax.jit(partial(model.apply, **outputs))({"params": params}, *inputs_of(rows))

    changed = model_config(num_hidden_layers=3, position_embedding_type=kind, **changes)
    found, plain = run(config=changed, output_queries_keys=True), run()
    assert len(found.queries_keys) == 3
    for index, layer in enumerate(found.queries_keys):
        for name, actual in (("query", layer.query), ("key", layer.key)):
            weights = params[f"layer_{index}"]["attention"][name]
            hidden = np.asarray(plain.hidden_states[index], float)
            wanted = hidden @ weights["kernel"].astype(float) + weights["bias"]
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
        np.testing.assert_allclose(found.attentions[index], plain.attentions[index], 0, 1e-5)
    np.testing.assert_allclose(found.pooled, plain.pooled, rtol=0, atol=1e-5)
    assert plain.queries_keys is None


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


def test_every_axis_has_a_rule_and_every_rule_an_axis():
    model = BertForPreTraining(model_config())
    specs = nn.get_partition_spec(jax.eval_shape(model.init_params, jax.random.key(0)))
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
    shapes = jax.tree.leaves(nn.unbox(jax.eval_shape(model.init_params, jax.random.key(0))))
    assert all(len(spec) == len(shape.shape) for spec, shape in zip(leaves, shapes, strict=True))
    assert {axis for spec in leaves for axis in spec} == set(RULES)


def test_the_softmax_of_bfloat16_scores_is_float32():
    rows, model = batch(4), BertModel(model_config(dtype="bfloat16", num_hidden_layers=1))
    given = [jnp.asarray(each) for each in inputs_of(rows)]
    weights = random_arrays(model.init, *given)
    output = model.apply(weights, *given, output_attentions=True, output_queries_keys=True)
    (layer,), (found,) = output.queries_keys, output.attentions
    scores = np.asarray(layer.query, float) @ np.asarray(layer.key, float).swapaxes(2, 3)
    scores /= np.sqrt(layer.query.shape[-1])
    scores = np.where(rows["attention_mask"][:, None, None] > 0, scores, -np.inf)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, softmax(scores, -1), rtol=0, atol=1e-5)


def test_no_two_places_share_their_dropout(monkeypatch):
    keys, draw, model = [], layers.random_bits, BertModel(model_config())

    def recorded(key, *rest):
        keys.append(tuple(jax.random.key_data(key).tolist()))
        return draw(key, *rest)

    given = [jnp.asarray(each) for each in inputs_of(batch(2))]
    weights = random_arrays(model.init, *given)
    monkeypatch.setattr(layers, "random_bits", recorded)
    model.apply(weights, *given, DropoutKey(jax.random.key(0), jnp.arange(2)))
    assert len(keys) == len({*keys}) == 1 + 2 * 3  # embeddings, and three places in each layer


def test_a_probe_has_no_dropout_in_its_encoder():
    model = TaskModel(model_config(hidden_dropout_prob=0.5), 2, probe="1")
    weights = {"params": random_arrays(model.init_params)}
    given = [jnp.asarray(each) for each in inputs_of(batch(4))]

    def states(key):
        _, kept = model.apply(
            weights,
            *given,
            key,
            capture_intermediates=lambda module, _: module.name == "bert",
            mutable=["intermediates"],
        )
        (output,) = kept["intermediates"]["bert"]["__call__"]
        return output.hidden_states[1]

    key = DropoutKey(jax.random.key(0), jnp.arange(4))
    np.testing.assert_array_equal(states(None), states(key))
