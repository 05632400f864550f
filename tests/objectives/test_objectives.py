"""What is true of several objectives: their figures, their warnings, and what they refuse."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import batch, objective, params, refused

import bert_jax
from bert_jax.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from bert_jax.models.electra import ElectraConfig
from bert_jax.models.modernbert import ModernBertConfig
from bert_jax.objectives import make_objective
from bert_jax.objectives.base import hidden_similarity
from bert_jax.objectives.labels import LabelsObjective
from bert_jax.training.objective import TOKENS


def accuracy(logits, labels) -> float:
    metric = LabelsObjective(nn.Dense(1)).metrics(jnp.asarray(logits), jnp.asarray(labels))
    return float(metric["accuracy"].total / metric["accuracy"].weight)


def test_accuracy_is_that_of_argmax():
    """Of equal logits the first class is predicted, and of NaN none."""
    generator = np.random.default_rng(0)
    logits = generator.integers(0, 4, (500, 7)).astype(np.float32)
    labels = generator.integers(-1, 7, 500)
    expected = (logits.argmax(-1) == labels)[labels >= 0].mean()
    np.testing.assert_allclose(accuracy(logits, labels), expected, rtol=1e-6)
    assert accuracy(np.full((2, 3), np.nan, np.float32), np.array([0, 2])) == 0


@pytest.mark.parametrize("model_type", ["bert", "electra"])
def test_the_share_of_tokens_leaves_out_what_completes_a_batch(model_type):
    """Not the padding of sequences that have tokens."""
    task, rows = objective(model_type=model_type, num_hidden_layers=1), batch(6)
    is_token = rows["attention_mask"][:4] > 0
    rows["attention_mask"][4:] = 0
    prepared = jax.jit(task.prepare)(jax.random.key(0), rows)
    _, metrics = jax.jit(task.loss)(params(task), prepared, task.weights(prepared), None)
    assert metrics[TOKENS].total == is_token.sum()
    assert metrics[TOKENS].weight == is_token.size


def test_hidden_similarity_is_the_mean_cosine_of_the_pairs_of_a_sequence():
    generator = np.random.default_rng(1)
    hidden, counts = generator.normal(size=(3, 6, 5)).astype(np.float32), (6, 3, 1)
    weights = (np.arange(6) < np.array(counts)[:, None]).astype(np.float32)
    pairs = [
        (s[i], s[j])
        for s, n in zip(hidden, counts, strict=True)
        for i in range(n)
        for j in range(n)
        if i != j
    ]
    expected = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]
    metric = hidden_similarity(jnp.asarray(hidden), jnp.asarray(weights))
    assert metric.weight == len(pairs)
    np.testing.assert_allclose(metric.total / metric.weight, np.mean(expected), rtol=1e-5)


@pytest.mark.parametrize(
    ("step", "loss", "warmup", "warns"),
    [
        (1400, 6.98, 1500, False),  # it is warming up
        (1600, 6.98, 1500, True),
        (2000, 5.0, 1500, False),
        (900, 6.98, 50, False),  # a short warm-up leaves time to learn
        (1000, 6.98, 50, True),
    ],
)
def test_a_loss_at_the_unigram_entropy_is_warned_of(step, loss, warmup, warns):
    """With what to lower."""
    objective = make_objective(TrainConfig(optimizer=OptimizerConfig(learning_rate=1e-3)))
    text = objective.warning(step, {"mlm_loss": loss}, {"mlm_loss": 7.0}, warmup)
    assert bool(text) == warns
    if warns:
        assert f"at step {step:,} the MLM loss of 6.98" in text
        assert "the unigram entropy (7.00)" in text
        assert "optimizer.learning_rate below 0.001 or optimizer.name adamw" in text


def test_a_collapsed_run_warns_once_at_its_first_evaluation(
    tiny_run, tiny_config, tmp_path, capsys
):
    """At a rate far too high, post-normalization makes all hidden states alike."""
    assert tiny_run.scores["hidden_similarity"] < 0.9
    config = dataclasses.replace(tiny_config, steps=30, eval_every=15)
    config.optimizer = OptimizerConfig(learning_rate=0.5, warmup_fraction=0.1)
    result = bert_jax.pretrain(config, tmp_path)
    assert result.scores["hidden_similarity"] > 0.9999
    assert capsys.readouterr().out.count("the hidden states of all tokens are alike") == 1


TWO_SEPARATORS = ModelConfig(pair_separators=2, pair_token_types=2)


@pytest.mark.parametrize(
    ("objective", "model", "pairs", "key_words"),
    [
        ("auto", ModelConfig(type_vocab_size=1), "nsp", "model.type_vocab_size of 2"),
        ("auto", ModelConfig(pair_separators=2), "nsp", "needs a model.pair_separators of 1"),
        ("auto", ModelConfig(pair_token_types=1), "nsp", "needs a model.pair_token_types of 2"),
        ("auto", ModelConfig(model_type="roberta"), "sop", "model_type roberta does not have"),
        ("auto", ElectraConfig(generator_hidden_size=0.3), "none", "multiple of 1/12, such as"),
        ("sentence_pairs", ModelConfig(), "none", "set it to nsp or sop"),
        ("replaced_tokens", ModelConfig(), "none", "model_type of electra"),
        ("masked_lm", ElectraConfig(), "none", "no checkpoint of model.model_type electra has"),
        ("masked_lm", ModelConfig(type_vocab_size=1), "nsp", "one token type for both texts"),
        ("masked_lm", ModelConfig(pair_token_types=1), "sop", "pair_token_types to 2 where it"),
        ("masked_lm", ModernBertConfig(type_vocab_size=2), "nsp", "one token type for both texts"),
        ("auto", TWO_SEPARATORS, "nsp", "puts one [SEP] between two texts, and the model has 2"),
        ("masked_lm", TWO_SEPARATORS, "sop", "or model.pair_separators to 1"),
        ("masked_ml", ModelConfig(), "none", "choose auto or one of masked_lm"),
    ],
)
def test_what_is_refused(objective, model, pairs, key_words):
    config = TrainConfig(objective=objective, model=model, data=DataConfig(pairs=pairs))
    with refused(key_words):
        make_objective(config)


def test_a_pair_of_padding_has_no_weight():
    task, rows = objective(num_hidden_layers=1), batch(6)
    rows["attention_mask"][4:] = 0
    prepared = jax.jit(task.prepare)(jax.random.key(0), rows)
    assert prepared["nsp_weight"].tolist() == [1, 1, 1, 1, 0, 0]
