"""`pretrain --minutes`: as many steps as the time has, of a smaller model where it is short."""

import copy
import json
import shutil
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers import model_config, refused

import bert_jax
from bert_jax import DataConfig, TrainConfig, UserError, console
from bert_jax.config import OptimizerConfig, Phase, settings
from bert_jax.config.schedule import Stage, make_schedule
from bert_jax.config.validation import validate
from bert_jax.distributed import devices
from bert_jax.distributed.mesh import make_mesh
from bert_jax.planning import time_budget


@pytest.fixture
def config():
    return TrainConfig(
        model=model_config(hidden_size=512, intermediate_size=2048, num_attention_heads=8),
        data=DataConfig(max_length=32, batch_size=64),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )


def use_speed(monkeypatch, speed: float) -> None:
    """Let a step take as long as its sequences and the width of its model say, in any memory."""

    def measure(config):
        return config.data.batch_size * config.model.hidden_size / speed, 6.0

    monkeypatch.setattr(time_budget, "_measure", measure)
    monkeypatch.setattr(devices, "available", lambda _: None)
    monkeypatch.setattr(time_budget, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.mark.parametrize(
    ("speed", "batch_size", "hidden_size"),
    [
        (1e6, 64, 512),  # 54 s of 33 ms
        (2.6e5, 16, 512),
        (2e5, 16, 256),
        (1e2, 16, 128),  # no smaller
    ],
)
def test_the_run_takes_the_minutes(config, speed, batch_size, hidden_size, monkeypatch):
    use_speed(monkeypatch, speed)
    minutes = 2 * 64 * 512 * 1000 / 60 / 1e6 + 0.1  # for 2,000 steps at the highest speed
    fitted = time_budget.fit(config, minutes, keeps_size=False)
    assert (fitted.data.batch_size, fitted.model.hidden_size) == (batch_size, hidden_size)
    assert fitted.model.hidden_size // fitted.model.num_attention_heads == 64
    seconds = 6.0 + fitted.steps * batch_size * hidden_size / speed
    assert seconds == pytest.approx(60 * minutes, rel=0.01) or fitted.steps < 100
    assert 0 < fitted.eval_every <= fitted.steps
    assert fitted.checkpoint.every == fitted.eval_every


def test_what_the_user_has_set_is_kept_and_time_may_be_too_short(config, monkeypatch):
    use_speed(monkeypatch, 1e4)
    fitted = time_budget.fit(config, 1.0, keeps_size=True, kept=["data.batch_size"])
    assert (fitted.model, fitted.data) == (config.model, config.data)
    config.checkpoint.every, config.log_every = 5, 7
    names = ["checkpoint.every", "log_every", "data.batch_size"]
    fitted = time_budget.fit(config, 1.0, keeps_size=True, kept=names)
    assert (fitted.checkpoint.every, fitted.log_every) == (5, 7)
    assert fitted.eval_every != 5
    with refused("--minutes=0.1 is too short", "compiling takes 6.0 s"):
        time_budget.fit(config, 0.1, keeps_size=False)


def test_phases_that_the_user_has_set_are_not_dropped(config, monkeypatch):
    use_speed(monkeypatch, 1e6)
    late = Phase(start=40_000, max_length=32, batch_size=64)
    config.data.phases = (Phase(start=0.5, max_length=32, batch_size=64), late)
    fit = partial(time_budget.fit, config, 1.0, keeps_size=True)
    assert fit(kept=["data.batch_size"]).data.phases == config.data.phases[:1]  # those of a recipe
    with refused("--minutes=1 leaves no steps for each of data.phases; give their starts as"):
        fit(kept=["data.phases", "data.batch_size"])


def test_what_the_minutes_change_is_what_a_resumed_run_keeps(monkeypatch):
    use_speed(monkeypatch, 1e2)
    config = bert_jax.recipe("base")
    config.optimizer.warmup_fraction, config.optimizer.decay_fraction = 10_000.0, 20_000.0
    config.data.length_warmup_fraction, config.optimizer.schedule = 30_000.0, "wsd"
    before = settings.flatten(config)
    after = settings.flatten(time_budget.fit(config, 60.0, keeps_size=False))
    assert {name for name in before if before[name] != after[name]} == {*time_budget.FITTED}


def test_batches_of_phases_that_the_user_has_set_are_kept(config, monkeypatch):
    use_speed(monkeypatch, 1e2)
    config.data.phases = (Phase(start=0.9, max_length=32, batch_size=40),)
    fitted = time_budget.fit(config, 60.0, keeps_size=True, kept=["data.phases"])
    assert (fitted.data.batch_size, fitted.data.phases) == (16, config.data.phases)


def test_a_batch_that_cannot_fit_is_halved(config, monkeypatch):
    """Its phases too, of which the longest decides."""
    use_speed(monkeypatch, 1e9)
    config.data.batch_size, config.data.phases = 1024, (Phase(0.9, 512, 512),)
    needed = devices.least_memory(
        config.model, Stage(512, 100), config.optimizer, make_mesh(config.parallel)
    )
    monkeypatch.setattr(devices, "available", lambda _: needed)
    fitted = time_budget.fit(config, 60.0, keeps_size=True).data
    assert (fitted.batch_size, fitted.phases[0].batch_size) == (128, 64)


def test_a_batch_that_does_not_fit_is_refused_before_steps_are_timed(config, monkeypatch):
    monkeypatch.setattr(devices, "available", lambda _: 1 << 20)
    monkeypatch.delattr(time_budget, "take_steps")
    with refused("a batch of 16 × 32 does not fit in the memory"):  # no smaller one is tried
        time_budget.fit(config, 1.0, keeps_size=True)
    with refused("a batch of 64 × 32 does not fit in the memory"):
        time_budget.fit(config, 1.0, keeps_size=True, kept=["data.batch_size"])


def test_memory_that_is_exhausted_by_a_timed_step_is_refused(config, monkeypatch):
    def take_steps(*_):
        raise MemoryError

    monkeypatch.setattr(time_budget, "take_steps", take_steps)
    with refused("a batch of 64 × 32 does not fit in the memory"):
        time_budget.fit(config, 1.0, keeps_size=True)


def test_the_time_in_which_steps_are_timed_counts(config, monkeypatch):
    use_speed(monkeypatch, 1e6)
    clock = SimpleNamespace(monotonic=iter((0.0, 24.0)).__next__)
    whole = time_budget.fit(config, 1.0, keeps_size=True, kept=["data.batch_size"])
    monkeypatch.setattr(time_budget, "time", clock)
    rest = time_budget.fit(config, 1.0, keeps_size=True, kept=["data.batch_size"])
    assert (whole.steps, rest.steps) == (int(54 / 0.032768), int(30 / 0.032768))


def test_steps_are_timed():
    small = TrainConfig(
        model=model_config(num_hidden_layers=1), data=DataConfig(max_length=32, batch_size=16)
    )
    fitted = time_budget.fit(small, 1.0, keeps_size=False)
    assert fitted.steps > 100


@pytest.mark.parametrize(
    ("words", "key_words"),
    [
        (["--minutes=nan"], ["--minutes=nan is no time"]),
        (["--minutes=1", "--config.steps=3"], ["both say how long to train"]),
        (
            ["--minutes=1", "--config.data.length_warmup_fraction=500"],
            ["--config.data.length_warmup_fraction is in steps", "give a share of the steps"],
        ),
        (
            ["--minutes=1", '--config.data.phases=[{"start": 1000}]'],
            ["--config.data.phases is in steps"],
        ),
        (["--minutes=1", "--fork=run"], ["--minutes begins a schedule of its own"]),
        (["--minutes=1", "--config.data.source=no.txt"], ["no.txt does not exist"]),
        (["--minutes=1", "--config.tokenizer.add=5"], ["tokenizer.add is 5, and adds tokens to"]),
    ],
)
def test_what_is_refused_before_a_step_is_timed(
    words, key_words, bert_jax_main, tmp_path, monkeypatch
):
    monkeypatch.delattr(time_budget, "fit")
    monkeypatch.chdir(tmp_path)
    with refused(*key_words):
        bert_jax_main("pretrain", "--config=tiny", "--num_processes=1", "--workdir=new", *words)


def test_minutes_resume_the_run_that_they_began_and_no_other(bert_jax_main, tiny_run, tmp_path):
    """A run of half the width and batch of its recipe; other settings are those of another run."""
    workdir = shutil.copytree(tiny_run.checkpoint.parents[1], tmp_path / "run")
    own = json.loads((workdir / "config.json").read_text())
    model, data = own["model"], own["data"]
    data |= {"batch_size": 2 * data["batch_size"], "phases": ()}
    for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
        model[name] *= 2
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from bert_jax.config import TrainConfig, settings\n\n\ndef get_config():\n"
        f"    return settings.from_dict(TrainConfig, {own | {'steps': 7000}!r}, 'mine')\n"
    )
    words = ["pretrain", f"--config={recipe}", "--num_processes=1", "--minutes=5"]
    words.append(f"--workdir={workdir}")
    with console.output(console.Level.PROGRESS):
        assert "has done its 2 steps" in bert_jax_main(*words)
    with refused("belongs to another config: seed is 0 there and 3 here"):
        bert_jax_main(*words, "--config.seed=3")
    with refused("belongs to another config: --config.data.batch_size is 8 there and 4 here"):
        bert_jax_main(*words, "--config.data.batch_size=4")


@pytest.mark.parametrize(
    ("field", "keeps_size"), [("dtype=float32", False), ("num_hidden_layers=1", True)]
)
def test_a_model_keeps_its_size_where_the_user_has_set_it(
    field, keeps_size, bert_jax_main, tmp_path, monkeypatch
):
    fit = Mock(side_effect=UserError("fitted"))
    monkeypatch.setattr(time_budget, "fit", fit)
    words = ["--config=tiny", "--num_processes=1", f"--config.model.{field}", "--minutes=1"]
    with refused("fitted"):
        bert_jax_main("pretrain", f"--workdir={tmp_path / 'new'}", *words)
    assert fit.call_args.kwargs["keeps_size"] == keeps_size


def test_a_batch_that_cannot_be_halved_is_not_tried_for_ever(config, monkeypatch):
    """In whole batches of the 8 devices, 320 is halved to 160, 80 and 40, and 40 no more."""
    use_speed(monkeypatch, 1e2)
    config.data.batch_size = 320
    fitted = time_budget.fit(config, 60.0, keeps_size=False)
    assert (fitted.data.batch_size, fitted.model.hidden_size) == (40, 128)


@pytest.mark.parametrize("name", ["electra_small", "modernbert_base", "modernbert_large", "base"])
@pytest.mark.parametrize("speed", [1e3, 1e4, 3e5])
def test_the_recipes_of_full_size_fit_few_minutes(name, speed, monkeypatch):
    """Their numbers of steps become shares, and their phases have smaller batches too."""
    use_speed(monkeypatch, speed)
    config = bert_jax.recipe(name)
    fitted = time_budget.fit(config, 20.0, keeps_size=False)
    validate(fitted)
    times = config.data.batch_size // fitted.data.batch_size
    before = {phase.max_length: phase.batch_size for phase in config.data.phases}
    for phase in fitted.data.phases:
        assert phase.batch_size <= max(8, before[phase.max_length] / times)
    rate = make_schedule(config).rate
    assert make_schedule(fitted).rate.warmup == pytest.approx(
        fitted.steps * rate.warmup / rate.steps, abs=0.5
    )


def test_a_warmup_in_steps_that_the_user_has_set_is_kept(config, monkeypatch):
    use_speed(monkeypatch, 1e6)
    config.optimizer.warmup_fraction = 100.0

    def fit(config=config, minutes=1.0, kept=()):
        kept = ["data.batch_size", *kept]
        return time_budget.fit(config, minutes, keeps_size=True, kept=kept)

    assert fit(kept=["optimizer.warmup_fraction"]).optimizer.warmup_fraction == 100
    longer = copy.deepcopy(config)
    longer.steps, longer.optimizer.warmup_fraction = 2000, 4000.0
    fitted = fit(longer, 60.0, kept=["optimizer.warmup_fraction"])
    assert fitted.optimizer.warmup_fraction == 4000 < fitted.steps
    validate(fitted)
    assert fit().optimizer.warmup_fraction == pytest.approx(100 / config.steps)
