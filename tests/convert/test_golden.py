"""The same numbers as PyTorch and TensorFlow, from files that `make_golden.py` wrote with them."""

import dataclasses
import re

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import traverse_util
from helpers import check_gradients
from make_golden import GOLDEN, google_variables
from outputs import check_encoder, close, loss_of, masked_batch

import bert_jax
from bert_jax.convert import names


@dataclasses.dataclass
class Golden:
    bert: bert_jax.Bert
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]

    def rows(self):
        return tuple(self.inputs[n] for n in ("input_ids", "token_type_ids", "attention_mask"))

    def parts(self, kind: str) -> list[np.ndarray]:
        """The layers' outputs of one kind, in order."""
        layers = (self.expected.get(f"{kind}/{index}") for index in range(10))
        return [value for value in layers if value is not None]


@pytest.fixture(params=["bert", "roberta", "relative_key", "relative_key_query"], scope="module")
def golden(request):
    folder = GOLDEN / request.param
    tensors = safetensors.numpy.load_file(folder / "expected.safetensors")
    inputs = {k.removeprefix("input/"): v for k, v in tensors.items() if k.startswith("input/")}
    return Golden(bert_jax.load(folder), inputs, tensors)


def test_every_number_of_the_forward_pass(golden):
    bert, expected, rows = golden.bert, golden.expected, golden.rows()
    assert rows[1].max() == bert.config.type_vocab_size - 1
    assert rows[0].shape[1] < bert.config.max_position_embeddings
    layers = golden.parts("hidden"), golden.parts("attention")
    check_encoder(bert.config, bert.params["bert"], rows, *layers, expected.get("pooled"))
    apply = jax.jit(bert.model.apply)
    heads = apply({"params": bert.params}, *rows, golden.inputs["positions"])
    close(heads.mlm_logits, expected["mlm"], least=0.5)
    if "nsp" in expected:
        close(heads.nsp_logits, expected["nsp"], least=0.3)


def test_loss_and_every_gradient(golden):
    bert, inputs = golden.bert, golden.inputs
    predicted = (inputs[n] for n in ("positions", "labels", "next_sentence_label"))
    run = jax.value_and_grad(loss_of(bert, masked_batch(*golden.rows(), *predicted)))
    loss, gradients = jax.jit(run)(bert.params)
    assert float(loss) == pytest.approx(golden.expected["loss"].item(), rel=1e-5)
    actual = dict(names.to_foreign(gradients, model_type=bert.config.model_type))
    exchange = names.exchange_of(bert.config.model_type)
    gradients_by_name = {
        exchange.standard_name(name.removeprefix("gradient/")): value
        for name, value in golden.expected.items()
        if name.startswith("gradient/")
    }
    assert set(actual) == set(gradients_by_name)
    sees_bias = bert.config.position_embedding_type == "relative_key_query"
    check_gradients(actual, gradients_by_name, zero="" if sees_bias else "self.key.bias")


def google_name(path: str) -> str:
    """Return the name of a parameter in google-research/bert; matrices have the same layout."""
    path = re.sub(r"layer_(\d+)/", r"encoder/layer_\1/", path)
    for ours, google in {
        "attention_layer_norm": "attention/output/LayerNorm",
        "feed_forward_layer_norm": "output/LayerNorm",
        "mlm_head/layer_norm": "cls/predictions/transform/LayerNorm",
        "mlm_head/transform": "cls/predictions/transform/dense",
        "layer_norm": "LayerNorm",
        "attention/output/k": "attention/output/dense/k",
        "attention/output/b": "attention/output/dense/b",
        "attention/query": "attention/self/query",
        "attention/key": "attention/self/key",
        "attention/value": "attention/self/value",
        "/up": "/intermediate/dense",
        "/down": "/output/dense",
        "pooler": "pooler/dense",
        "mlm_head/bias": "cls/predictions/output_bias",
        "nsp_head/kernel": "cls/seq_relationship/output_weights",
        "nsp_head/bias": "cls/seq_relationship/output_bias",
        "LayerNorm/scale": "LayerNorm/gamma",
        "LayerNorm/bias": "LayerNorm/beta",
    }.items():
        path = path.replace(ours, google)
    return path


@pytest.mark.parametrize("folder", ["google", "google_sharded"])
def test_every_value_that_tensorflow_wrote(folder):
    bert = bert_jax.load(GOLDEN / folder)
    values = google_variables()
    values["cls/seq_relationship/output_weights"] = values["cls/seq_relationship/output_weights"].T
    actual = traverse_util.flatten_dict(bert.params, sep="/")
    for path, value in actual.items():
        np.testing.assert_array_equal(value, values.pop(google_name(path)), strict=True)
    assert set(values) == {
        "global_step",
        "bert/pooler/dense/kernel/adam_m",
        "bert/pooler/dense/kernel/adam_v",
    }
    assert not bert.unused
    assert bert.config.hidden_act == "gelu_new"  # the name is "gelu" in Google's code
    assert bert.tokenizer.vocab_size == bert.config.vocab_size
