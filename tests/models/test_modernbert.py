"""ModernBERT's encoder by its own properties; tests/convert/test_parity.py has its numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import model_config, random_arrays, refused

from bert_jax.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from bert_jax.config.schedule import Stage
from bert_jax.config.validation import validate_model
from bert_jax.distributed import devices
from bert_jax.distributed.mesh import make_mesh
from bert_jax.models.modernbert import ModernBertModel
from bert_jax.planning import costs

CONFIG = model_config(
    model_type="modernbert",
    num_hidden_layers=4,
    hidden_size=24,
    num_attention_heads=2,
    hidden_act="gelu_new",
    layer_norm_eps=1e-12,
    max_position_embeddings=64,
    local_attention=6,
)
IDS = np.random.default_rng(0).integers(5, CONFIG.vocab_size, (2, 24)).astype(np.int32)
ONES = np.ones_like(IDS)


@pytest.fixture(scope="module")
def params():
    model = ModernBertModel(CONFIG, add_pooling_layer=False)
    return random_arrays(model.init, IDS, IDS, IDS)["params"]


def run(params, ids, mask, config=CONFIG, **options):
    model = ModernBertModel(config, add_pooling_layer=False)
    ids, mask = jnp.asarray(ids), jnp.asarray(mask)
    output = jax.jit(lambda p: model.apply({"params": p}, ids, ids * 0, mask, **options))(params)
    return np.asarray(output.last_hidden_state)


@pytest.mark.parametrize("every", [2, 3])
def test_scan_and_remat_change_nothing(params, every):
    """Of 4 layers a step of the scan has two or three."""
    plain = dataclasses.replace(CONFIG, global_attn_every_n_layers=every)
    config = dataclasses.replace(plain, scan_layers=True, remat=True)
    np.testing.assert_allclose(
        run(params, IDS, ONES, config), run(params, IDS, ONES, plain), rtol=0, atol=1e-5
    )


def test_operations_by_hand():
    """Of 4 layers the first and the last are global: 8 keys a query, and 7 in the others."""
    layer = 8 * 24**2 + 6 * 24 * CONFIG.intermediate_size
    attention = 4 * 24 * (8 + 7 + 7 + 8)
    head = 2 * (24**2 + 24 * CONFIG.vocab_size)
    expected = 3 * (8 * (4 * layer + attention) + head)
    phase = Stage(max_length=8, batch_size=1, max_predictions=1)
    config = TrainConfig(model=CONFIG, data=DataConfig(pairs="none"))
    assert costs.model_flops(config, phase) == expected


def test_windows_save_memory_by_hand():
    """Of 4 layers two are local: blocks of 3 queries have 9 keys instead of 24, in two heads."""
    phase, mesh = Stage(max_length=24, batch_size=2), make_mesh(devices=jax.devices()[:1])
    whole = dataclasses.replace(CONFIG, global_attn_every_n_layers=1)
    needed = [
        devices.least_memory(model, phase, OptimizerConfig(), mesh) for model in (whole, CONFIG)
    ]
    assert needed[0] - needed[1] == 4 * (2 * 24) * 2 * 2 * (24 - 9)


@pytest.mark.parametrize(
    ("config", "key_words"),
    [
        ({"position_embedding_type": "absolute"}, ["has no absolute positions", "to rotary"]),
        ({"position_embedding_type": "rotry"}, ["is 'rotry'; did you mean rotary"]),
        ({"model_type": "bert"}, [".ModelConfig(...)"]),
        ({"num_attention_heads": 8}, ["need heads of an even size, not of 3"]),
        ({"model_type": "modernbrt"}, ["is 'modernbrt'; did you mean modernbert"]),
        ({"local_attention": 7}, ["model.local_attention 7 is odd"]),
        ({"local_attention": 0}, ["local_attention is 0"]),
        (ModelConfig(model_type="modernbert"), ["write bert_jax.", "ModernBertConfig(...)"]),
    ],
)
def test_what_does_not_fit(config, key_words):
    config = dataclasses.replace(CONFIG, **config) if isinstance(config, dict) else config
    with refused(*key_words):
        validate_model(config, "config")
