"""Configs that an objective cannot train."""

import pytest
from helpers import refused

from bert_jax.config import DataConfig, ModelConfig, TrainConfig
from bert_jax.models.electra import ElectraConfig
from bert_jax.objectives import make_objective


@pytest.mark.parametrize(
    ("objective", "model", "pairs", "key_words"),
    [
        ("auto", ModelConfig(type_vocab_size=1), "nsp", "model.type_vocab_size of 2"),
        ("auto", ModelConfig(model_type="roberta"), "sop", "model_type roberta does not have"),
        ("auto", ElectraConfig(generator_hidden_size=0.3), "none", "multiple of 1/12, such as"),
        ("sentence_pairs", ModelConfig(), "none", "set it to nsp or sop"),
        ("replaced_tokens", ModelConfig(), "none", "model_type of electra"),
        ("masked_lm", ElectraConfig(embedding_size=32), "none", "embedding_size of 32"),
        ("masked_ml", ModelConfig(), "none", "choose auto or one of replaced_tokens"),
    ],
)
def test_what_is_refused(objective, model, pairs, key_words):
    config = TrainConfig(objective=objective, model=model, data=DataConfig(pairs=pairs))
    with refused(key_words):
        make_objective(config)
