"""A run that learns nothing is told so, once, with what to lower."""

import dataclasses

import pytest

import bert_jax
from bert_jax.config import OptimizerConfig, TrainConfig
from bert_jax.objectives import make_objective

BASELINES = {"mlm_loss": 7.0}


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
    text = objective.warning(step, {"mlm_loss": loss}, BASELINES, warmup)
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
