"""`--config=RECIPE --config.FIELD=VALUE`, as the words of a command."""

import pytest
from helpers import refused

from bert_jax import FinetuneConfig, TrainConfig
from bert_jax.commands.flags import read_config


def test_fields_are_set_in_each_of_three_forms():
    words = ["--config.model.remat", "--config.steps", "7", "--config.data.pairs=sop"]
    recipe = read_config("tiny", words, TrainConfig)
    assert (recipe.config.model.remat, recipe.config.steps) == (True, 7)
    assert recipe.config.data.pairs == "sop"
    assert recipe.fields == ["model.remat", "steps", "data.pairs"]


def test_a_run_is_named_after_its_recipe_and_none_stands_for_no_value():
    assert read_config("finetune/glue:mrpc", [], FinetuneConfig).name == "glue-mrpc"
    squad = read_config("finetune/squad", ["--config.data.eval=none"], FinetuneConfig)
    assert (squad.name, squad.config.data.eval) == ("squad", "")


@pytest.mark.parametrize(
    ("recipe", "words", "key_words"),
    [
        ("finetune/squad", [], "returns no TrainConfig"),
        ("tiny", ["now"], "'now' is not a flag; fields are set by --config.FIELD=VALUE"),
        ("tiny", ["--config.steps", "--config.seed=1"], "--config.steps needs a value"),
        ("tiny", ["--config.tokenizer.path", ""], "--config.tokenizer.path is empty; give"),
    ],
)
def test_mistakes(recipe, words, key_words):
    with refused(key_words):
        read_config(recipe, words, TrainConfig)
