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
from bert_jax.models.bert import BertModel
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
