"""Every recipe: loaded as `train.py` does, validated, its state's shapes computed."""

import dataclasses
import importlib
import json
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from flax import linen as nn
from helpers import refused

from bert_jax.config import (
    DataConfig,
    DataFiles,
    FinetuneConfig,
    ModelConfig,
    Phase,
    TaskConfig,
    TrainConfig,
    recipes,
)
from bert_jax.config.recipes import recipe, source_files
from bert_jax.config.schedule import (
    config_of_step,
    default_predictions,
    make_rate_schedule,
    make_schedule,
)
from bert_jax.config.settings import as_text, fields, flatten, from_dict, override, to_json
from bert_jax.config.validation import validate, validate_finetuning
from bert_jax.distributed.devices import resolve_dtype
from bert_jax.models.modernbert import ModernBertConfig
from bert_jax.objectives import make_objective
from bert_jax.objectives.masking import make_masking
from bert_jax.runs.workdir import check_same_run
from bert_jax.tasks import glue, make_task
from bert_jax.tasks.question_answering import QuestionAnsweringConfig
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.optimizer import make_optimizer, rate_by_step
from bert_jax.training.step import init_state

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES, FINETUNING = (
    sorted(p.stem for p in f.glob("*.py")) for f in (CONFIGS, CONFIGS / "finetune")
)
# RoBERTa's own count has two rows more in the table of positions, of no use to any text.
PARAMETERS = {
    "base": 110_106_428,
    "large": 336_226_108,
    "roberta_base": 124_697_433 - 2 * 768,
    "modernbert_base": 149_655_232,
    "modernbert_large": 395_881_664,
}
# Both parts, of which the embeddings are shared; tests/convert/test_parity_electra.py counts them.
PARAMETERS |= {"electra_small": 14_196_219, "electra_base": 119_386_427}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name):
    module = importlib.import_module(f"configs.{name}")
    command = "python train.py" if name == "tiny" else f"bert-jax pretrain --config={name}"
    assert command in module.__doc__
    config = module.get_config()
    validate(config)
    config.model = resolve_dtype(config.model, jax.devices()[0])
    assert from_dict(TrainConfig, json.loads(to_json(config)), "here") == config
    config.model.vocab_size = config.model.vocab_size or 30  # 0 is as many as the text has letters
    model = make_objective(config).model
    optimizer = make_optimizer(config.optimizer, make_rate_schedule(config.optimizer, config.steps))
    state = jax.eval_shape(
        lambda key: nn.unbox(init_state(model.init_params(key), optimizer, key)), jax.random.key(0)
    )
    size = sum(x.size for x in jax.tree.leaves(state.params))
    assert size == PARAMETERS.get(name, size)
    moments = sum(x.size for x in jax.tree.leaves(state.opt_state))
    least = size if config.optimizer.name == "muon" else 2 * size  # one moment of matrices
    assert least <= moments <= 2 * size + 10


# Recipes of examples that no paper has scores of.
UNPUBLISHED = ("docstrings", "embedding", "late_interaction", "reranker", "sparse", "squad2")


@pytest.mark.parametrize("name", FINETUNING)
def test_finetuning_recipe(name):
    module = importlib.import_module(f"configs.finetune.{name}")
    for config in map(module.get_config, glue.LAYOUTS) if name == "glue" else [module.get_config()]:
        validate_finetuning(dataclasses.replace(config, model=ModelConfig()))
        assert from_dict(FinetuneConfig, json.loads(to_json(config)), "here") == config
        make_task(config.task)
    command = "bert-jax finetune"
    assert command + f" --config=finetune/{name}" * (name != "docstrings") in module.__doc__
    assert name in UNPUBLISHED or "Published" in module.__doc__


def test_defaults_are_bert_base():
    validate(TrainConfig())
    assert (default_predictions(128, 0.15), default_predictions(512, 0.15)) == (20, 77)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (128, [(0, 16, 64, 3), (15, 64, 16, 9), (30, 128, 8, 9), (90, 512, 4, 77)]),
        (50, [(0, 16, 24, 3), (30, 50, 8, 9), (90, 512, 4, 77)]),
        (16, [(0, 16, 8, 9), (90, 512, 4, 77)]),  # too short for a warm-up
    ],
)
def test_a_length_warmup_is_a_phase_before_the_others(length, expected):
    data = DataConfig(max_length=length, batch_size=8, max_predictions=9)
    data.phases, data.length_warmup_fraction = (Phase(90, 512, 4),), 0.3
    config = TrainConfig(steps=100, data=data)
    schedule = make_schedule(config)
    found = [(x.first_step, x.max_length, x.batch_size, x.max_predictions) for x in schedule.stages]
    assert found == expected
    assert len(schedule.main_stages) == 2
    assert schedule.largest == schedule.main_stages[1]
    assert schedule.length_warmup == (30 if length > 16 else 0)


@pytest.mark.parametrize("length", [17, 40, 100, 120, 127, 250, 384, 500, 1000])
def test_batches_of_a_length_warmup_have_about_as_many_tokens(length):
    data = DataConfig(max_length=length, batch_size=8, length_warmup_fraction=0.3)
    schedule = make_schedule(TrainConfig(steps=100, data=data))
    shares = [x.max_length * x.batch_size / (8 * length) for x in schedule.warmup_stages]
    assert shares
    assert 2 <= 3 * min(shares) <= 3 * max(shares) <= 4
    sizes = [stage.max_length * stage.batch_size for stage in schedule.stages]
    assert schedule.largest == schedule.stages[int(np.argmax(sizes))]


def test_a_phase_has_its_own_share_of_masks_or_that_of_the_data():
    config = TrainConfig(steps=1000)
    config.data.mask_fraction = 0.3
    config.data.phases = (Phase(500, 512, 64), Phase(900, 512, 64, mask_fraction=0.15))
    validate(config)
    stages = make_schedule(config).stages
    found = [(x.mask_fraction, x.max_predictions) for x in stages]
    assert found == [(0.3, 39), (0.3, 154), (0.15, 77)]
    tokenizer = Mock(spec=Tokenizer, vocab_size=9, special_ids=(), mask_id=4)
    counts = [make_masking(tokenizer, stage, config.data).counts[100] for stage in stages]
    assert counts == [30, 30, 15]


def modern(*later: Phase) -> TrainConfig:
    model = ModernBertConfig(global_rope_theta=1e4)
    return TrainConfig(steps=100, model=model, data=DataConfig(pairs="none", phases=later))


def test_a_checkpoint_has_the_rotary_base_of_its_own_step():
    """A step is of the phase that ends with it; what is to come is as it was."""
    plain = modern(Phase(50, 512, 64))
    assert config_of_step(plain, make_schedule(plain), 70) is plain
    later = (Phase(40, 128, 64, global_rope_theta=160e3), Phase(60, 512, 64), Phase(80, 256, 64))
    config = modern(*later)
    validate(config)
    schedule = make_schedule(config)
    for step, theta in ((0, 1e4), (40, 1e4), (41, 160e3), (60, 160e3), (61, 1e4), (100, 1e4)):
        then = config_of_step(config, schedule, step)
        assert then.model == dataclasses.replace(config.model, global_rope_theta=theta)
        assert make_schedule(then).stages[1:] == schedule.stages[1:]
        again = config_of_step(then, make_schedule(then), max(step, 80)).model
        assert again.global_rope_theta == schedule.stage_of(max(step, 80)).global_rope_theta


@pytest.mark.parametrize(("name", "tokens"), [("base", 2019), ("large", 2000)])
def test_modernbert_sees_the_published_tokens(name, tokens):
    """In billions; table 3 of Warner et al. 2024. The rate falls in the last 50, to 0."""
    config = recipe(f"modernbert_{name}")
    schedule = make_schedule(config)
    seen = np.array(
        [(x.end - x.first_step) * x.batch_size * x.max_length / 1e9 for x in schedule.stages]
    )
    assert seen.sum() == pytest.approx(tokens, abs=0.01)
    assert seen[-1] == pytest.approx(300, abs=0.01)
    last_stage, decay = schedule.stages[-1], schedule.rate.decay
    assert decay * last_stage.batch_size * 8192 / 1e9 == pytest.approx(50, abs=0.01)
    steps = (schedule.rate.warmup, last_stage.first_step, config.steps - decay, config.steps)
    rate = rate_by_step(schedule.rate)
    found = [float(rate(step)) for step in steps]
    peak, last = (8e-4, 3e-4) if name == "base" else (5e-4, 5e-5)
    assert found == pytest.approx([peak, last, last, 0.0])


def set_field(config: TrainConfig, name: str, value) -> None:
    *parts, last = name.split(".")
    for part in parts:
        config = getattr(config, part)
    setattr(config, last, value)


REFUSED = {
    "steps": [0, 2**31, 100.5],
    "seed": [-1, 2**32],
    "model.hidden_size": [0, "768"],
    "model.num_attention_heads": [5],
    "model.hidden_act": ["swish"],
    "model.hidden_dropout_prob": [1.0],
    "model.pair_token_types": [3],
    "data.pairs": ["all"],
    "data.packing": [True],  # of full blocks
    "data.max_length": [4, 513],
    "data.max_predictions": [129],
    "data.eval_fraction": [0.0, 1.5],
    "data.mask_fraction": [0.0],
    "data.phases": [
        (Phase(start=0.9, max_length=128, batch_size=-1),),
        (Phase(start=0.5, mask_fraction=1.1),),
        (Phase(start=0.5, global_rope_theta=160e3),),  # of learned positions
        (Phase(start=1.5, max_length=128, batch_size=8),),
        (Phase(start=0.5, max_length=1024, batch_size=8),),
        (Phase(start=1 - 1e-9, max_length=128, batch_size=8),),  # it would have no step
    ],
    "optimizer.learning_rate": [
        *(0.0, float("inf"), (), (1e-3, 1e-4), (1e-3, 0.0)),
        *(np.float64("nan"), np.float64(-1), np.float32(-1)),
    ],
    "optimizer.microbatches": [3],
    "optimizer.name": ["lion"],
    "checkpoint.every": [0],
    "parallel.mode": ["shard"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    for value in REFUSED[name]:
        config = TrainConfig(data=DataConfig(pairs="none" if name == "data.packing" else "nsp"))
        set_field(config, name, value)
        with refused(name.split(".")[-1]):
            validate(config)


def test_two_token_types_of_pairs_are_two_embeddings():
    modern = ModernBertConfig(type_vocab_size=2, pair_token_types=2)
    with refused("a modernbert has no token types; set it to 0"):
        validate(TrainConfig(model=modern))
    config = TrainConfig(model=ModelConfig(type_vocab_size=1, pair_token_types=2))
    with refused("model.pair_token_types is 2, and model.type_vocab_size is 1"):
        validate(config)


def test_every_number_has_a_range():
    """Not a number is refused everywhere, so that no field is left unchecked."""
    for name, value in flatten(TrainConfig()).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            config = TrainConfig()
            set_field(config, name, float("nan"))
            with refused(name.split(".")[-1]):
                validate(config)


@pytest.mark.parametrize(
    ("fields", "key_words"),
    [
        ({"probe": "13"}, "probe is '13'"),
        ({"task": QuestionAnsweringConfig(n_best=-1)}, "task.n_best is -1"),
        ({"probe": "mix", "layer_decay": 0.9}, "layer_decay does nothing with probe"),
        ({"layer_decay": 1.5}, "layer_decay is 1.5"),
        ({"seeds": 0}, "seeds is 0"),
        ({"seed": 2**32 - 1, "seeds": 2}, "and the last seed is below 2**32"),
        (
            {
                "data": DataFiles(max_length=1024),
                "task": TaskConfig("multiple_choice"),
            },
            "exceeds model.max_position_embeddings 512",
        ),
        ({"task": TaskConfig(kind="tagging")}, "task.kind is 'tagging'"),
        ({"task": TaskConfig(labels=("a", "b", "a"))}, "task.labels has a label twice"),
        ({"task": QuestionAnsweringConfig(max_question=100)}, "max_question 100"),
    ],
)
def test_a_field_of_finetuning_that_cannot_be(fields, key_words):
    with refused(key_words):
        validate_finetuning(FinetuneConfig(**fields))


def test_what_may_be_another_on_resume(tmp_path):
    config = TrainConfig()
    config.model.attention, config.model.remat = "plain", True
    check_same_run(config, TrainConfig(), tmp_path)
    config.model.attention_probs_dropout_prob = 0.5
    with refused("model.attention_probs_dropout_prob is 0.1 there"):
        check_same_run(config, TrainConfig(), tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("steps", "100", 100),
        ("optimizer.learning_rate", "1e-3", 1e-3),
        ("optimizer.learning_rate", "1e-3,1e-4", (1e-3, 1e-4)),
        ("data.eval_fraction", "0", 0.0),
        ("data.source", "a.txt,b.txt", "a.txt,b.txt"),
        ("tokenizer.lowercase", "false", False),
        ("model.remat", "0", False),
        ("model.remat", None, True),
        ("parallel.zero", "1", 1),
    ],
)
def test_a_field_is_set_to_a_value_of_its_type(name, text, value):
    config = TrainConfig()
    override(config, name, text)
    result = flatten(config)[name]
    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize("name", [*RECIPES, *(f"finetune/{name}" for name in FINETUNING)])
def test_a_value_that_help_shows_can_be_typed(name):
    config, expected = recipe(name), recipe(name)
    for field in fields(expected):
        if field.name != "data.phases":  # set by a recipe alone
            override(config, field.name, as_text(field.value))
    assert config == expected


@pytest.mark.parametrize("text", ["no,yes", "['no','yes']"])
def test_a_tuple_is_set_by_commas_or_as_python(text):
    config = FinetuneConfig()
    override(config, "task.labels", text)
    assert config.task.labels == ("no", "yes")
    override(config, "task.labels", "none")
    assert config.task.labels == ()


@pytest.mark.parametrize(
    ("name", "text", "key_words"),
    [
        ("model.hiden_size", "3", "did you mean --config.model.hidden_size?"),
        ("model", "3", "--config.model: no such field"),
        ("steps", None, "--config.steps needs a value"),
        ("steps", "1.5", "a value of type int"),
        ("model.remat", "maybe", "a value of type bool"),
        ("data.pairs", "all", "choose one of nsp, sop, none"),
        ("parallel.zero", "2", "choose one of 1, 3"),
        ("data.phases", "[{'mask_fracton': 0.3}]", "did you mean mask_fraction?"),
        ("data.phases", "(1", "--config.data.phases=(1: a value of type"),
        ("data.phases", "3", "phases[0] is '3'"),
    ],
)
def test_a_value_or_a_field_that_is_refused(name, text, key_words):
    with refused(key_words):
        override(TrainConfig(), name, text)


def test_a_recipe_may_name_an_architecture_of_a_file_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "MODEL_TYPES", types := dict(recipes.MODEL_TYPES))
    (tmp_path / "an_encoder.py").write_text("ARCHITECTURE = 'one'\n")
    path, module = tmp_path / "mine.py", "import bert_jax.config.recipes as r\n"
    for entry in ("an_encoder:ARCHITECTURE", "another:ARCHITECTURE", "an_encoder:ARCHITECTURE"):
        path.write_text(f"{module}r.MODEL_TYPES['x'] = {entry!r}\nget_config = lambda: 'config'\n")
        if entry.startswith("an_"):
            assert recipe(path) == "config"
            assert types["x"] == "one"
        else:
            with refused(f"recipe {path} cannot be read: No module named 'another'"):
                recipe(path)


def test_recipes_by_name_and_by_path(tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text("def get_config(name='b'):\n    return 'config ' + name\n")
    assert recipe(str(path)) == "config b"
    assert recipe(f"{path}:c") == "config c"
    assert recipe(path) == "config b"
    (tmp_path / "d:e").mkdir()
    assert recipe(str(shutil.copy(path, tmp_path / "d:e"))) == "config b"
    assert recipe("tiny") == recipe(str(CONFIGS / "tiny.py")) is not recipe("tiny")
    assert recipe("finetune/glue:cola").task.glue == "cola"
    # It may import a file that is beside it, and leaves the path as it was.
    before = list(sys.path)
    (tmp_path / "beside_a_recipe.py").write_text("WORDS = 'words'\n")
    path.write_text("from beside_a_recipe import WORDS\n\ndef get_config():\n    return WORDS\n")
    assert recipe(str(path)) == "words"
    assert sys.path == before
    # Its folder may be on the path already, before others.
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.path)
    recipe(str(path))
    assert sys.path == before
    # Both are code of a run, which several hosts compare.
    assert {path, tmp_path / "beside_a_recipe.py"} <= source_files()
    assert not [file for file in source_files() if "bert_jax" in file.parts[-3:-1]]


@pytest.mark.parametrize(
    ("name", "key_words"),
    [
        ("tny", "--config=tny: no such recipe or file; did you mean tiny?"),
        ("finetune/sqad", "did you mean finetune/squad?"),
        ("zzz", "there are base, "),
        ("syntax.py", "cannot be read"),
        ("nothing.py", "get_config"),
        ("fails.py", "No such file"),
        ("exits.py", "cannot be read: enough"),
        ("config.json", "config.json is no recipe, which is a Python file"),
    ],
)
def test_a_recipe_that_is_refused(name, key_words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("syntax.py").write_text("def get_config(:")
    Path("nothing.py").write_text("x = 1")
    Path("fails.py").write_text("def get_config():\n    return open('nowhere')")
    Path("exits.py").write_text("import sys\ndef get_config():\n    sys.exit('enough')")
    Path("config.json").write_text("{}")
    with refused(key_words):
        recipe(name)


def test_a_recipe_of_the_other_kind_is_refused():
    with refused("returns no TrainConfig; it is a recipe of fine-tuning; choose another"):
        recipe("finetune/ner", TrainConfig)
