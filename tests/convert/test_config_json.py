"""What `config.json` of other programs may say, and what a model then is."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import model_config, random_bert, refused

import bert_jax
from bert_jax.convert import config_json
from bert_jax.models.layers import ACTIVATIONS
from bert_jax.models.modernbert import ModernBertConfig

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("field", "name", "expected"),
    [
        ("hidden_act", "gelu_python", "gelu"),
        ("hidden_act", "gelu_fast", "gelu_new"),
        ("hidden_activation", "gelu_pytorch_tanh", "gelu_new"),
    ],
)
def test_names_of_activations(field, name, expected):
    kind = "bert" if field == "hidden_act" else "modernbert"
    values = {**SIZES, "model_type": kind, field: name}
    if kind == "modernbert":
        values["classifier_activation"] = name
    assert config_json.read_config(values, "config.json").hidden_act == expected


@pytest.mark.parametrize(
    ("tokens", "embeddings", "size", "says"),
    [
        (60, 64, 60, ""),  # as exported
        (61, 64, 60, ""),  # with a token more, in an embedding that had none
        (61, 128, 60, ""),  # with more embeddings, a multiple of 64
        (50, 50, 60, ""),  # with fewer tokens
        (60, 64, None, ""),
        (59, 64, 60, "59 tokens for 64 embeddings, and the model has 60 or more; fetch"),
        (65, 64, 60, "has a vocabulary of 65 tokens for 64 embeddings; fetch"),
        (65, 64, None, "has a vocabulary of 65 tokens for 64 embeddings; fetch"),
    ],
)
def test_a_vocabulary_fits_the_embeddings(tokens, embeddings, size, says):
    tokenizer, config = SimpleNamespace(vocab_size=tokens), model_config(vocab_size=embeddings)
    values = {"tokenizer_pieces": size} if size else {}
    with refused(says) if says else contextlib.nullcontext():
        config_json.check_tokenizer(Path("model"), tokenizer, config, values)


def test_what_a_modernbert_has_where_its_config_says_nothing():
    values = {"model_type": "modernbert", "vocab_size": 100, "hidden_size": 768}
    config = config_json.read_config(values, "config.json")
    found = config.num_hidden_layers, config.intermediate_size, config.max_position_embeddings
    assert found == (22, 1152, 8192)


def test_two_names_of_one_activation_are_one_activation():
    values = {**SIZES, "model_type": "modernbert"}
    values |= {"hidden_activation": "gelu_python", "classifier_activation": "gelu"}
    assert config_json.read_config(values, "config.json").hidden_act == "gelu"


@pytest.mark.parity
@pytest.mark.parametrize("name", [*config_json.ACTIVATIONS, "gelu", "gelu_new", "relu"])
def test_activations_are_those_of_transformers(name: str):
    torch = pytest.importorskip("torch")
    from transformers.activations import ACT2FN

    x = np.linspace(-5, 5, 201, dtype=np.float32)
    ours = ACTIVATIONS[config_json.ACTIVATIONS.get(name, name)](jax.numpy.asarray(x))
    np.testing.assert_allclose(ours, ACT2FN[name](torch.from_numpy(x)), atol=1e-6)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "modernbert"])
def test_unknown_fields_are_named(kind):
    values = {**SIZES, "model_type": kind}
    config_json.read_config({**values, "rescale_embeddings": False, "pruned_heads": {}}, "it")
    for field, value in {"rescale_embeddings": True, "pruned_heads": {"0": [1]}}.items():
        with refused(field, "remove it"):
            config_json.read_config({**values, field: value}, "it")


def test_a_modernbert_of_one_layer_keeps_the_distance_of_global_layers():
    values = {**SIZES, "model_type": "modernbert", "num_hidden_layers": 1}
    for distance in (1, 3, 5):
        layers = {"layer_types": ["full_attention"], "global_attn_every_n_layers": distance}
        config = config_json.read_config({**values, **layers}, "config.json")
        assert isinstance(config, ModernBertConfig)
        assert config.global_attn_every_n_layers == distance


@pytest.mark.parametrize("window", [1, 0, -3])
def test_a_window_of_a_modernbert_without_neighbours_is_refused(window):
    values = {**SIZES, "model_type": "modernbert", "local_attention": window}
    with refused(f"config.json has local_attention {window}, and windows of 2 tokens or more"):
        config_json.read_config(values, "config.json")
    assert config_json.read_config({**values, "local_attention": 3}, "it").local_attention == 2


def test_pairs_have_one_token_type_where_transformers_has(tiny_bert, tmp_path):
    """By the settings, by the class, or by the template; not by that of the class of a model."""
    tiny_bert.export(tmp_path / "exported")
    file = tmp_path / "exported/tokenizer_config.json"
    values = json.loads(file.read_text())
    rule = tmp_path / "exported/tokenizer.json"
    template = rule.read_text()
    without_types = template.replace('"type_id": 1', '"type_id": 0')
    assert without_types != template
    for changed, content, count in (
        ({}, template, 0),
        ({"model_input_names": None}, template, 0),  # which transformers 4 gives the types of
        ({"model_input_names": ["input_ids", "attention_mask"]}, template, 1),
        ({"model_input_names": None, "tokenizer_class": "TokenizersBackend"}, template, 1),
        ({}, without_types, 1),
        ({"tokenizer_class": "BertTokenizer"}, without_types, 0),
    ):
        file.write_text(json.dumps({**values, **changed}))
        rule.write_text(content)
        bert = bert_jax.load(tmp_path / "exported")
        assert bert.config.pair_token_types == count
        arrays = bert.tokenize(["a river"], ["a bank"])
        assert arrays["token_type_ids"].max() == (count == 0)
        bert.save(tmp_path / f"saved {count}", force=True)
        assert bert_jax.load(tmp_path / f"saved {count}").config.pair_token_types == count


def test_both_texts_of_a_pair_have_type_0_in_a_roberta(tiny_bert, tmp_path):
    config = model_config("roberta", vocab_size=tiny_bert.config.vocab_size)
    assert config.type_vocab_size == 2  # as in the default config of `transformers`
    roberta = random_bert(config, tiny_bert.tokenizer, pairs=False)
    inputs = roberta.tokenize(["a river"], ["a bank"])
    assert np.asarray(inputs["token_type_ids"]).max() == 0
    roberta.export(tmp_path / "exported")
    written = json.loads((tmp_path / "exported/tokenizer_config.json").read_text())
    assert "token_type_ids" not in written["model_input_names"]
    again = bert_jax.load(tmp_path / "exported")
    assert again.config.type_vocab_size == 2
    expected = roberta(["a river"], ["a bank"]).last_hidden_state
    np.testing.assert_array_equal(again(["a river"], ["a bank"]).last_hidden_state, expected)
