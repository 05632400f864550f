"""ELECTRA directories of `transformers`: with their generator or without, or refused."""

import dataclasses
import shutil

import numpy as np
import pytest
from helpers import random_bert, refused
from model_folders import change_config, same, tensors_of, write

import bert_jax
from bert_jax.bert import Bert
from bert_jax.config import ModelConfig
from bert_jax.config.settings import as_variant
from bert_jax.convert import huggingface
from bert_jax.inference.masked_lm import guesses_by_layer
from bert_jax.models.electra import ElectraConfig
from bert_jax.runs import origin, weights


def electra_of(bert: Bert, **values) -> Bert:
    sizes = dict(embedding_size=8, generator_hidden_size=0.5)
    config = dataclasses.replace(as_variant(bert.config, "electra"), **{**sizes, **values})
    return random_bert(config, bert.tokenizer, pairs=False)


@pytest.fixture(scope="module")
def electra(golden):
    return electra_of(golden)


@pytest.fixture(scope="module")
def exported(electra, tmp_path_factory):
    folder = tmp_path_factory.mktemp("electra") / "exported"
    assert electra.export(folder).dropped == ()
    return folder


@pytest.mark.parametrize("share", [0.5, 0.0, 1.0])
def test_round_trip_keeps_both_parts(golden, share, tmp_path):
    ours = electra_of(golden, generator_hidden_size=share)
    ours.export(tmp_path / "exported")
    again = bert_jax.load(tmp_path / "exported")
    assert not again.unused
    expected = {"dtype": "float32", "attention": "auto"}
    assert dataclasses.replace(again.config, **expected) == dataclasses.replace(
        ours.config, **expected
    )
    same(again.params, ours.params)


def test_an_export_is_replaced_as_a_whole(electra, exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "model")
    assert huggingface.is_export(folder)
    (folder / "generator/notes").write_text("mine")
    assert not huggingface.is_export(folder)


def test_a_generator_alone_fills_masks(electra, exported):
    alone = bert_jax.load(exported / "generator")
    assert alone.config.generator_hidden_size == 0
    assert alone.config.hidden_size == electra.config.hidden_size // 2
    same(alone.params["bert"]["embeddings"], electra.params["bert"]["embeddings"])
    text = "the [MASK] bank"
    guesses, both = alone.fill_mask(text), electra.fill_mask(text)
    assert [g.token for g in guesses] == [g.token for g in both]
    assert guesses[0].probability == pytest.approx(both[0].probability, rel=1e-5)
    # It does not read the discriminator's hidden states, which a page shows.
    assert not guesses_by_layer(electra, np.zeros((3, 5, 12), np.float32), np.array([2]))


def test_a_discriminator_alone(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "model")
    shutil.rmtree(folder / "generator")
    alone = bert_jax.load(folder)
    assert set(alone.params) == {"bert", "discriminator_head"}
    with refused("no generator"):
        alone.fill_mask("the [MASK] bank")
    assert alone.export(tmp_path / "out").architecture == "ElectraForPreTraining"
    assert not (tmp_path / "out/generator").exists()


@pytest.mark.parametrize(
    ("where", "values", "said"),
    [
        (".", {"num_key_value_heads": 1}, "num_key_value_heads"),
        (".", {"summary_type": "mean"}, "summary_type mean"),
        (".", {"is_decoder": True}, "is_decoder"),
        ("generator", {"num_attention_heads": 6, "hidden_size": 24}, ""),
        ("generator", {"layer_norm_eps": 1e-3}, "layer_norm_eps 0.001"),
    ],
)
def test_what_is_not_read_is_named(exported, tmp_path, where, values, said):
    folder = shutil.copytree(exported, tmp_path / "model")
    change_config(folder / where, **values)
    with refused(said):
        bert_jax.load(folder)


def test_a_generator_with_other_embeddings_or_larger_than_its_model(golden, exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "untied")
    tensors = tensors_of(folder / "generator")
    tensors["electra.embeddings.position_embeddings.weight"][0, 0] += 1
    write(folder / "generator", tensors)
    with refused("other embeddings than its model"):
        bert_jax.load(folder)
    folder = shutil.copytree(exported, tmp_path / "larger")
    shutil.rmtree(folder / "generator")
    heads = golden.config.num_attention_heads
    sizes = {"hidden_size": 2 * golden.config.hidden_size, "num_attention_heads": 2 * heads}
    electra_of(golden, **sizes, generator_hidden_size=0.0).export(folder / "generator", "masked-lm")
    with refused("beside this model only"):
        bert_jax.load(folder)


def test_the_encoder_of_a_bert_starts_a_discriminator(golden):
    fields = ["model.model_type", "model.generator_hidden_size"]
    wanted = ElectraConfig(generator_hidden_size=0.5)
    config = origin.model_config(golden, wanted, fields)
    assert config.model_type == "electra"
    new = random_bert(config, golden.tokenizer, pairs=False).params
    copied = weights.copy_params(new, golden.params)
    encoder = {k: v for k, v in golden.params["bert"].items() if k != "pooler"}
    same(copied["bert"], encoder)
    for module in ("generator", "generator_head", "discriminator_head"):
        same(copied[module], new[module])


def test_an_electra_starts_from_its_discriminator_or_from_its_fine_tuned_encoder(electra):
    for dropped in ("generator", "discriminator_head"):
        params = {k: v for k, v in electra.params.items() if not k.startswith(dropped)}
        params["classifier"] = {"kernel": np.zeros((12, 2), np.float32)}
        found = origin.model_config(dataclasses.replace(electra, params=params), ModelConfig(), [])
        assert found == electra.config
