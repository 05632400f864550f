"""A run that learns nothing is told so, once, with what to lower."""

import dataclasses

import pytest

import bert_jax
from bert_jax.config import OptimizerConfig, TrainConfig
from bert_jax.training import collapse

BASELINES = {"mlm_loss": 7.0}


@pytest.fixture
def watch():
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_fraction=0.3)
    return collapse.watch(TrainConfig(steps=5000, optimizer=optimizer), 1500, BASELINES)


def test_a_run_at_the_unigram_entropy_is_warned_of_once(watch):
    assert watch(1400, {"mlm_loss": 6.98}) == ""  # it is warming up
    warning = watch(1600, {"mlm_loss": 6.98})
    assert "the MLM loss of 6.98 is no better than guessing tokens by their frequency" in warning
    assert "optimizer.learning_rate below 0.001 or optimizer.name adamw" in warning
    assert watch(1700, {"mlm_loss": 6.98}) == ""


def test_a_loss_that_returns_to_the_entropy_is_warned_of(watch):
    assert watch(2000, {"mlm_loss": 5.0}) == ""
    assert "step 3,000" in watch(3000, {"mlm_loss": 7.02})


def test_a_short_warm_up_leaves_time_to_learn():
    config = TrainConfig(steps=5000, optimizer=OptimizerConfig(warmup_fraction=0.01))
    watch = collapse.watch(config, 50, BASELINES)
    assert watch(900, {"mlm_loss": 7.0}) == "" != watch(1000, {"mlm_loss": 7.0})


def test_a_collapsed_run_warns_at_its_first_evaluation(tiny_config, tmp_path, capsys):
    """At a rate far too high, post-normalization makes all hidden states alike."""
    config = dataclasses.replace(tiny_config, steps=30, eval_every=30)
    config.optimizer = OptimizerConfig(learning_rate=0.5, warmup_fraction=0.1)
    result = bert_jax.pretrain(config, tmp_path)
    assert result.scores["hidden_similarity"] > 0.9999
    assert "the hidden states of all tokens are alike" in capsys.readouterr().out


def test_a_sound_run_has_hidden_states_that_differ(tiny_run):
    assert tiny_run.scores["hidden_similarity"] < 0.9
