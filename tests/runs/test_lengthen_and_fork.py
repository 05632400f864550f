"""A run that is lengthened, with more steps or phases, or forked into another workdir."""

import copy
import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import refused
from training_runs import assert_same_state, read_state, stop_after, without_speeds

from bert_jax import FinetuneConfig, OptimizerConfig, Phase, TrainConfig, UserError, load, pretrain
from bert_jax.batches.loader import ReadBefore
from bert_jax.config.schedule import make_schedule
from bert_jax.config.settings import as_variant, override
from bert_jax.distributed import hosts
from bert_jax.runs import forks, origin, report
from bert_jax.runs import pretrain as pretraining
from bert_jax.runs import workdir as workdirs

STOPPED = 4


def changed(config: TrainConfig, **fields) -> TrainConfig:
    config = copy.deepcopy(config)
    config.log_every, config.checkpoint.every, config.model.num_hidden_layers = 2, 4, 1
    config.optimizer.warmup_fraction = 0.5  # 4 steps of 8, and of 9
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def with_phase(config: TrainConfig, start: float, max_length: int = 16, **fields) -> TrainConfig:
    config = changed(config, **fields)
    config.data.phases = (Phase(start=start, max_length=max_length, batch_size=8),)
    return config


@pytest.fixture(scope="module")
def stopped(tiny_config, tmp_path_factory) -> Path:
    """The workdir of a run of 8 steps that was stopped where its warm-up ended."""
    workdir = tmp_path_factory.mktemp("stopped") / "run"
    stop_after(STOPPED, changed(tiny_config, steps=8), workdir)
    return workdir


@pytest.fixture
def printed(monkeypatch) -> list[str]:
    """What a quiet run would print at its start."""
    lines = []
    for module in (report, hosts):
        monkeypatch.setattr(
            module, "print_on_main", lambda text, *_: lines.extend(text.split("\n"))
        )
    monkeypatch.setattr(report, "warn_on_main", lambda text: lines.append(f"warning    {text}"))
    return lines


@pytest.fixture
def copied(stopped, tmp_path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run")


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory) -> Path:
    """The workdir of a run that had 9 steps from the start."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    pretrain(changed(tiny_config, steps=9), workdir, quiet=True)
    return workdir


def test_a_longer_run_is_the_one_that_had_its_steps_from_the_start(
    tiny_config, copied, whole, printed
):
    """Bit for bit: up to the step where it was stopped, both schedules have the same rates."""
    pretrain(changed(tiny_config, steps=9), copied, quiet=True)
    assert "schedule   the rate now falls to 0 at step 9; it was 8" in printed
    jump = "the learning rate jumps at step 4 from 0.0005 to 0.000556"
    assert f"warning    {jump}, as it had decayed for the earlier end" in printed
    assert_same_state(copied, whole, 9)
    assert without_speeds(copied) == without_speeds(whole)
    printed.clear()
    pretrain(changed(tiny_config, steps=9), copied, quiet=True)
    assert not any(line.startswith("schedule") for line in printed)


def test_a_fork_continues_from_the_whole_state(tiny_config, stopped, whole, tmp_path, capsys):
    """With the steps of another run, which it equals; then it needs its parent no more."""
    parent = shutil.copytree(stopped, tmp_path / "parent")
    forked, longer = tmp_path / "forked", changed(tiny_config, steps=9)
    longer.checkpoint.keep = 9
    (forked / "tensorboard").mkdir(parents=True)  # of a run that was killed before its checkpoint
    shutil.copy(parent / "config.json", forked)
    (forked / "metrics.jsonl").write_text('{"step": 2, "split": "eval", "loss": 0.01}\n')
    (forked / "tensorboard" / "events").touch()
    pretrain(longer, forked, fork=f"{parent}@4", quiet=True)
    assert not (forked / "tensorboard" / "events").exists()
    assert_same_state(forked, stopped, 4)
    assert_same_state(forked, whole, 9)
    assert without_speeds(forked) == without_speeds(whole)[-len(without_speeds(forked)) :]
    shutil.rmtree(parent)
    assert json.loads((forked / "results.json").read_text())["init"].endswith("checkpoints/4")
    for fork in (None, parent):
        again = pretraining.start(longer, forked, fork=fork)
        assert again.corpus.tokenizer.fingerprint == load(stopped).tokenizer.fingerprint
        assert ("--fork is not used again" in capsys.readouterr().out) == bool(fork)


def test_a_fork_decays_from_its_first_step(tiny_config, stopped, tmp_path, printed):
    """From the rate that the run had, to 0 at its end."""
    config = changed(tiny_config, steps=9, log_every=1)
    wsd = {"schedule": "wsd", "warmup_fraction": 4.0, "decay_fraction": 5.0}
    config.optimizer = dataclasses.replace(config.optimizer, **wsd)
    pretrain(config, tmp_path / "fork", fork=f"{stopped}@4", quiet=True)
    rates = [r["learning_rate"] for r in without_speeds(tmp_path / "fork") if r["split"] == "train"]
    assert rates == pytest.approx([1e-3 * (1 - math.sqrt(i / 5)) for i in range(5)])
    assert "schedule   the rate now falls from step 4 to 0 at step 9; it was 8" in printed


def interpolated(table: np.ndarray, count: int) -> np.ndarray:
    """Between the centers of equal parts of the sequence; the ends are those of the table."""
    centers = (np.arange(count) + 0.5) * len(table) / count - 0.5
    return np.stack([np.interp(centers, np.arange(len(table)), row) for row in table.T], axis=1)


def test_a_fork_with_more_positions_interpolates_those_of_the_run(
    tiny_config, stopped, tmp_path, printed
):
    """Their moments too; all else is kept, and the fork trains on longer sequences."""
    config = changed(tiny_config, steps=5)
    config.checkpoint.keep, config.data.max_length = 2, 48
    config.model.max_position_embeddings = 48
    pretrain(config, tmp_path / "fork", fork=stopped, quiet=True)
    assert "positions  32 learned positions, interpolated to 48" in printed
    before, after = read_state(stopped, 4), read_state(tmp_path / "fork", 4)
    for name, value in after.items():
        wanted = before[name]
        if "position_embeddings" in name:
            assert value.shape == (48, 16)
            wanted = interpolated(wanted, 48)
        np.testing.assert_allclose(value, wanted, atol=1e-5 * np.abs(wanted).max(), err_msg=name)
    assert sum("position_embeddings" in name for name in after) == 3
    assert load(tmp_path / "fork").config.max_position_embeddings == 48


def test_copies_of_a_forked_run_are_compared(tiny_config, copied, tmp_path, monkeypatch):
    """Several hosts may each have one: of another state, or without what the run has read."""
    config, compared = changed(tiny_config, steps=5), {}
    monkeypatch.setattr(hosts, "check_same", lambda values, fix: compared.update(values))

    def values() -> dict:
        compared.clear()
        pretraining.start(config, tmp_path / "fork", fork=copied)
        return {name: repr(value) for name, value in compared.items()}

    before = values()
    (copied / "results.json").write_text(json.dumps({"text_identity": "another"}))
    differ = {name for name, value in values().items() if value != before[name]}
    assert differ == {"what the run of --fork has read"}
    checksums = copied / "checkpoints/4/checksums.json"
    recorded = json.loads(checksums.read_text())
    name = next(name for name in recorded if name.startswith("state/"))
    checksums.write_text(json.dumps({**recorded, name: recorded[name] + 1}))
    assert values()["the content of --fork"] != before["the content of --fork"]
    monkeypatch.setattr(hosts, "run_on_main", lambda action: action())
    monkeypatch.setattr(hosts, "is_main", lambda: False)  # the first host finds it out later
    with refused(f"checkpoints/4 cannot be read ({name} has changed since it was written)"):
        values()


def test_weights_with_more_positions(tiny_config, stopped, tmp_path, printed):
    bert, config = load(stopped), changed(tiny_config, steps=5)
    config.model.max_position_embeddings = 48
    run = pretraining.start(config, tmp_path / "run", stopped, ["model.max_position_embeddings"])
    assert "positions  32 learned positions, interpolated to 48" in printed
    assert run.config.model.max_position_embeddings == 48
    config.model.max_position_embeddings = 600
    for fields in (None, (), ["model.dtype"]):  # from Python, and of a recipe on a command line
        assert origin.model_config(bert, config.model, fields).max_position_embeddings == 600
    config.model.max_position_embeddings = 16
    assert origin.model_config(bert, config.model).max_position_embeddings == 32
    init = {"init": stopped, "fields": ["model.max_position_embeddings"]}
    for start in (init, {"fork": stopped}):
        with pytest.raises(UserError, match="position_embeddings"):
            pretraining.start(config, tmp_path / "other", **start)


@pytest.mark.slow
def test_a_phase_with_another_rotary_base(tiny_config, tmp_path):
    """Each checkpoint is loaded, exported and forked with the base of its own step."""
    config = changed(tiny_config, steps=8)
    config.model = as_variant(config.model, "modernbert")
    config.model.global_rope_theta = 10.0
    config.data.pairs, config.eval_every = "none", 4
    config.data.phases = (Phase(4, 32, 8, global_rope_theta=1e5),)
    result = pretrain(config, tmp_path / "run", quiet=True)
    assert result.bert
    assert result.bert.config.global_rope_theta == 1e5
    checkpoints, losses = tmp_path / "run/checkpoints", {}
    for record in without_speeds(tmp_path / "run"):
        losses |= {record["step"]: record["mlm_loss"]} if record["split"] == "eval" else {}
    for step, theta in ((4, 10.0), (8, 1e5)):
        bert = load(checkpoints / str(step))
        assert bert.config.global_rope_theta == theta
        bert.export(tmp_path / f"exported{step}")
        values = json.loads((tmp_path / f"exported{step}/config.json").read_text())
        assert values["global_rope_theta"] == theta
        # Trained no further, its loss is that of its own base.
        still = changed(tiny_config, steps=1)
        still.data.pairs, still.optimizer.learning_rate = "none", 1e-12
        pretrain(still, tmp_path / f"still{step}", init=checkpoints / str(step), quiet=True)
        found = without_speeds(tmp_path / f"still{step}")[-1]["mlm_loss"]
        assert found == pytest.approx(losses[step], rel=1e-6)
    forked = origin.own_config(tmp_path / "fork", f"{tmp_path / 'run'}@4")
    assert forked
    pretrain(forked, tmp_path / "fork", fork=f"{tmp_path / 'run'}@4", quiet=True)
    assert_same_state(tmp_path / "fork", tmp_path / "run", 8)


def plan(steps: int, decay: float = 100.0, **fields) -> TrainConfig:
    fields = {"schedule": "wsd", "warmup_fraction": 10.0, **fields}
    decays = {"decay_fraction": decay} if fields["schedule"] == "wsd" else {}
    return TrainConfig(
        steps=steps, optimizer=OptimizerConfig(learning_rate=1.0, **fields, **decays)
    )


@pytest.mark.parametrize(
    ("before", "after", "step", "lines"),
    [
        (plan(1000), plan(2000), 900, ["falls from step 1,900 to 0 at step 2,000; it was 1,000"]),
        (
            plan(1000),
            plan(2000),
            925,
            ["to 0 at step 2,000", "jumps at step 925 from 0.5 to 1, as"],
        ),
        (
            plan(1000),
            plan(550),
            475,
            [
                "to 0 at step 550",
                "from 1 to 0.5, as its decay begins at step 450; with --config.steps=581",
            ],
        ),
        (
            plan(8, schedule="constant", warmup_fraction=0.0),
            plan(16, decay=16.0, warmup_fraction=0.0),
            8,
            ["to 0 at step 16", "at step 8 from 1 to 0.293, as its schedule is wsd now"],
        ),
        (
            plan(100, schedule="linear", warmup_fraction=0.5),
            plan(80, schedule="linear", warmup_fraction=0.5),
            20,
            ["falls to 0 at step 80; it was 100", "from 0.4 to 0.5, as its warm-up is shorter"],
        ),
        (
            plan(8, schedule="constant", warmup_fraction=0.5),
            plan(24, schedule="constant", warmup_fraction=0.5),
            8,
            [
                "constant to step 24; it was 8",
                "from 1 to 0.667, as its warm-up is longer",
            ],
        ),
        (
            plan(1000, 0.1),
            plan(500, 0.1),
            475,
            ["to 0 at step 500; it was 1,000", "with --config.steps=528 it begins later"],
        ),
        (plan(1000, 0.1), plan(528, 0.1), 475, ["to 0 at step 528"]),
        (
            plan(1000, schedule="constant"),
            plan(1000, 500.0),
            500,
            ["from step 500 to 0 at step 1,000; it was constant to step 1,000"],
        ),
        (
            plan(20, schedule="constant"),
            plan(26, 8.0),
            12,
            ["falls from step 18 to 0 at step 26; it was constant to step 20"],
        ),
        (
            plan(1000, schedule="linear"),
            plan(1000),
            500,
            ["0 at step 1,000", "to 1, as its schedule is wsd now"],
        ),
        (plan(1000, 500.0), plan(1000), 800, ["to 0", "to 1, as its warm-up and decay are others"]),
        (plan(19, 1.0), plan(20, schedule="constant"), 8, ["constant to step 20; it was 19"]),
        (plan(1000, schedule="cosine"), plan(1000, schedule="cosine"), 500, []),
        (plan(1000), plan(1000), 950, []),
    ],
)
def test_what_is_said_of_another_schedule(before, after, step, lines, printed):
    report.new_schedule(make_schedule(before), make_schedule(after), step)
    assert len(printed) == len(lines)
    for line, key_words in zip(printed, lines, strict=True):
        assert key_words in line


def test_a_fork_may_have_other_text_and_settings(tiny_config, stopped, tmp_path):
    config = changed(tiny_config, steps=5, seed=3)
    config.data.source, config.optimizer.learning_rate = str(tmp_path / "text.txt"), 1.0
    config.data.batch_size, config.model.hidden_dropout_prob = 16, 0.0
    (tmp_path / "text.txt").write_text("The bank.\nA river.\n\n" * 30)
    run = pretraining.start(config, tmp_path / "run", fork=stopped)
    assert run.origin.fork == stopped / "checkpoints/4"
    assert run.corpus.tokenizer.fingerprint == load(stopped).tokenizer.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.vocab_size=65", "model.vocab_size is 64 there and 65 here"),
        ("model.num_attention_heads=4", "model.num_attention_heads is 2 there and 4 here"),
        ("optimizer.name=bert_adamw", "optimizer.name is 'adamw' there and 'bert_adamw' here"),
        ("data.pairs=none", "objective is sentence_pairs, and that of this run masked_lm"),
        ("steps=3", "has done 4 steps, and steps is 3; raise it, or fork an earlier one"),
        ("tokenizer.path=vocab.txt", "tokenizer.path vocab.txt is not the tokenizer of "),
    ],
)
def test_a_fork_of_another_state_is_refused(
    tiny_config, stopped, tmp_path, monkeypatch, change, message
):
    monkeypatch.chdir(tmp_path)
    words = [*"abcdefgh", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    config = changed(tiny_config, steps=8)
    override(config, *change.split("="))
    with pytest.raises(UserError, match=message):
        pretraining.start(config, tmp_path / "run", fork=stopped)
    assert not (tmp_path / "run").exists()


def test_a_fork_by_a_relative_path_knows_its_run(tiny_config, stopped, tmp_path, monkeypatch):
    monkeypatch.chdir(stopped / "checkpoints")
    for name in ("4", "../checkpoints/4"):
        run = pretraining.start(changed(tiny_config, steps=8), tmp_path / "run", fork=name)
        assert run.origin.fork == stopped / "checkpoints/4"
    whole = pretraining.start(changed(tiny_config, steps=8), tmp_path / "run", fork=stopped)
    assert run.origin.read_before == whole.origin.read_before


def test_what_cannot_be_forked(tiny_config, stopped, tmp_path, bert_jax_main):
    config = changed(tiny_config, steps=8)
    for fork, message in (
        (f"{stopped}@5", "has no such checkpoint; choose one of 4"),
        (tmp_path, "is no workdir with checkpoints; give RUN or RUN@STEP"),
        ("x" * 5000, "is no workdir"),
    ):
        with pytest.raises(UserError, match=message):
            pretraining.start(config, tmp_path / "run", fork=fork)
    tuned = shutil.copytree(stopped, tmp_path / "tuned")
    values = json.loads((tuned / "checkpoints/4/config/metadata").read_text())
    (tuned / "checkpoints/4/config/metadata").write_text(json.dumps({**values, "task": {}}))
    (tuned / "checkpoints/4/checksums.json").unlink()
    with refused("unknown field"):
        pretraining.start(config, tmp_path / "run", fork=tuned)
    task = json.dumps(dataclasses.asdict(FinetuneConfig()))
    (tuned / "checkpoints/4/config/metadata").write_text(task)
    with refused("is of a fine-tuning run, and only pretraining can be forked"):
        pretraining.start(config, tmp_path / "run", fork=tuned)
    unknown = TrainConfig()
    unknown.model.position_embedding_type = "mine"
    with refused("model.position_embedding_type is 'mine'", "import the file of your own"):
        forks._check_state(unknown, stopped / "checkpoints/4", unknown, ())
    with refused("has a run that began with random weights, not with --fork"):
        pretraining.start(config, shutil.copytree(stopped, tmp_path / "own"), fork=stopped)
    fork = shutil.copytree(stopped, tmp_path / "runs/some/run")
    with pytest.raises(UserError, match="--fork begins a new run; choose another --workdir than"):
        pretraining.start(config, tmp_path / "runs", fork=fork)
    with pytest.raises(UserError, match="--init and --fork are both set"):
        pretrain(config, tmp_path / "run", init=stopped, fork=stopped)
    with pytest.raises(UserError, match="name its folder with --workdir"):
        bert_jax_main("pretrain", f"--fork={stopped}")


def test_a_finished_run_with_a_phase_after_its_end(tiny_config, copied, printed):
    """Here of the length that was, whose programs are compiled."""
    finished = changed(tiny_config, steps=STOPPED)
    (copied / "config.json").write_text(json.dumps(finished, default=dataclasses.asdict))
    pretrain(with_phase(tiny_config, 4.0, steps=9, max_length=32), copied, quiet=True)
    end = "falls to 0 at step 9; it was 4; length 32 from step 4"
    assert f"schedule   the rate now {end}" in printed
    assert any("jumps at step 4 from 0 to 0.000556" in line for line in printed)
    assert [record["step"] for record in without_speeds(copied)][-1] == 9


def test_what_is_done_is_not_changed(tiny_config, copied):
    """Fewer steps, or other phases for them."""
    with pytest.raises(UserError, match="has done 4 steps, and steps is 3; raise it or choose"):
        pretraining.start(changed(tiny_config, steps=3), copied)
    with pytest.raises(UserError, match="has done 4 steps with other phases; keep those"):
        pretraining.start(with_phase(tiny_config, 3.0, steps=8), copied)
    assert pretraining.start(with_phase(tiny_config, 4.0, steps=8), copied)


def test_a_phase_that_has_begun_keeps_its_first_step(tiny_config, copied):
    """A share of more steps would be a later one; that of a phase that is to come moves."""
    for start, expected in ((0.25, 2), (0.75, 0.75)):
        saved = with_phase(tiny_config, start, steps=8)
        (copied / "config.json").write_text(json.dumps(saved, default=dataclasses.asdict))
        for steps in (8, 16):
            run = pretraining.start(with_phase(tiny_config, start, steps=steps), copied)
            assert run.config.data.phases[0].start == (start if steps == 8 else expected)


def test_a_length_warmup_that_is_done_keeps_its_steps(tiny_config, tmp_path):
    """It has as many tokens a step as the rest, and a run that is lengthened does not repeat it."""
    config = changed(tiny_config, steps=4)
    config.data.length_warmup_fraction = 0.5
    pretrain(config, tmp_path, quiet=True)
    config.steps = 8
    pretrain(config, tmp_path, quiet=True)
    counts = [(r["sequences"], r["tokens"]) for r in without_speeds(tmp_path) if "tokens" in r]
    assert [pair for pair in dict.fromkeys(counts)] == [
        (32, 512),
        (48, 1024),
        (64, 1536),
        (80, 2048),
    ]
    assert origin.own_config(tmp_path).data.length_warmup_fraction == 2
    config.data.length_warmup_fraction = 3.0
    with pytest.raises(UserError, match=r"not of 3; set data\.length_warmup_fraction to 2"):
        pretrain(changed(config, steps=12), tmp_path, quiet=True)
    config.data.length_warmup_fraction = 0.5
    config.steps = 24
    forked = pretraining.start(config, tmp_path / "fork", fork=f"{tmp_path}@8")
    assert forked.config.data.length_warmup_fraction == 2


def test_no_length_warmup_is_not_that_of_the_run_before(tiny_config, tmp_path):
    saved, config = changed(tiny_config, steps=8), changed(tiny_config, steps=8)
    saved.data.length_warmup_fraction = 4.0
    workdir = workdirs.read(tmp_path / "fork", TrainConfig)
    fork = tmp_path / "run/checkpoints/6"
    assert forks.resolve(config, fork, saved, workdir).data.length_warmup_fraction == 0.0
    # Of more steps than there are, one that is kept is shortened, and one that was set stays.
    saved.steps, saved.data.length_warmup_fraction = 1000, 400.0
    for given, expected in ((400.0, 7.0), (500.0, 500.0)):
        config.data.length_warmup_fraction = given
        resolved = forks.resolve(config, fork, saved, workdir)
        assert resolved.data.length_warmup_fraction == expected


def test_a_run_cannot_end_in_its_length_warmup(tiny_config, tmp_path):
    config = changed(tiny_config, steps=12)
    config.data.length_warmup_fraction = 0.5
    stop_after(1, config, tmp_path)
    config.steps = 4
    with pytest.raises(UserError, match=r"length_warmup_fraction 6\.0 is 6 steps, and must end"):
        pretrain(config, tmp_path, quiet=True)


def test_a_workdir_alone_has_the_config_of_its_run(stopped, tmp_path, monkeypatch, bert_jax_main):
    """With fields it is changed by them; an explicit recipe is a recipe."""
    started = []
    monkeypatch.setattr(pretraining, "start", lambda config, **rest: started.append((config, rest)))
    monkeypatch.setattr(pretraining, "train_run", lambda run, stop: None)
    for words in ([], ["--config.steps=20"], ["--config=tiny"]):
        bert_jax_main("pretrain", f"--workdir={stopped}", "--num_processes=1", *words)
    fork = "--workdir=new", f"--fork={stopped}"
    bert_jax_main("pretrain", *fork, "--num_processes=1", "--config.steps=20")
    (own, options), (longer, _), (recipe, _), (forked, forking) = started
    saved = origin.own_config(stopped)
    assert own == saved
    without_checkpoint = tmp_path / "killed"
    without_checkpoint.mkdir()
    shutil.copy(stopped / "config.json", without_checkpoint)
    assert origin.own_config(without_checkpoint) is None
    assert options["workdir"] == stopped
    saved.steps = 20
    assert (longer, forked, recipe.model.hidden_size) == (saved, saved, 128)
    assert forking["fork"] == str(stopped)


def test_a_fork_keeps_the_phases_and_the_length_warmup_that_have_begun(tiny_config, tmp_path):
    """As a lengthened run does; a share that is set for the fork is its own."""
    config = with_phase(tiny_config, 0.5, steps=8, max_length=32)
    config.data.max_length, config.data.length_warmup_fraction = 64, 0.25
    config.model.max_position_embeddings = 64
    fork, workdir = tmp_path / "run/checkpoints/6", workdirs.read(tmp_path / "fork", TrainConfig)
    for phase, share, warmup, starts in (
        (0.5, 0.25, 2, [4]),
        (0.75, 0.25, 2, [24]),
        (0, 0.5, 16, []),
    ):
        longer = with_phase(config, phase, steps=32, max_length=32)
        longer.data.length_warmup_fraction = share
        longer.data.phases = longer.data.phases if phase else ()
        schedule = make_schedule(forks.resolve(longer, fork, config, workdir))
        assert schedule.length_warmup == warmup
        assert [stage.first_step for stage in schedule.main_stages[1:]] == starts
    # Of a run that was lengthened, shares have become numbers: what the command line sets is new.
    config = with_phase(config, 4.0, steps=8, max_length=32)
    config.data.length_warmup_fraction = 2.0
    longer = with_phase(longer, 0.75, steps=32, max_length=32)
    set_anew = "data.phases", "data.length_warmup_fraction"
    for fields, warmup, start in (((), 2, 4), (set_anew, 16, 24)):
        schedule = make_schedule(forks.resolve(longer, fork, config, workdir, fields))
        assert (schedule.length_warmup, schedule.main_stages[1].first_step) == (warmup, start)


def test_what_is_prepared_is_kept_where_reading_fails(tiny_config, copied, monkeypatch):
    """As by a network; a run that resumes on another machine has no store there at first."""
    store = copied / "store"
    shutil.rmtree(store, ignore_errors=True)

    def read(*_):
        store.mkdir()
        raise UserError("the text cannot be read")

    monkeypatch.setattr("bert_jax.text.mixture.read", read)
    with refused("the text cannot be read"):
        pretraining.start(changed(tiny_config, steps=8), copied)
    assert store.exists()


def test_a_run_that_resumes_has_a_learning_rate(tiny_config, copied):
    config = changed(tiny_config, steps=8)
    config.optimizer.learning_rate = ()
    with refused("optimizer.learning_rate is empty; give a number, or several"):
        pretraining.start(config, copied)


def test_a_fork_of_a_fork_counts_what_it_has_read(tiny_config, stopped, tmp_path):
    """Of another text from the first fork on; of more sequences a step from the second on."""
    (tmp_path / "text.txt").write_text("The bank.\nA river.\n\n" * 30)
    config = changed(tiny_config, steps=6)
    config.data.source = str(tmp_path / "text.txt")
    pretrain(config, tmp_path / "first", fork=stopped, quiet=True)
    config.steps, config.data.batch_size = 8, 16
    pretrain(config, tmp_path / "second", fork=tmp_path / "first", quiet=True)
    counts = {
        record["step"]: record["sequences"]
        for name in ("first", "second")
        for record in without_speeds(tmp_path / name)
        if record["split"] == "train"
    }
    assert counts == {6: 2 * 8, 8: 2 * 8 + 2 * 16}
    config.steps = 10
    pretrain(config, tmp_path / "second", quiet=True)  # resumed
    assert without_speeds(tmp_path / "second")[-1]["epoch"] > 0
    last = [r for r in without_speeds(tmp_path / "second") if r["split"] == "train"][-1]
    assert (last["step"], last["sequences"]) == (10, 2 * 8 + 4 * 16)


def test_a_fork_knows_its_text_by_the_content(tiny_config, copied, tmp_path):
    """A file of the same name may have other text by now."""
    config = changed(tiny_config, steps=6)
    same = pretraining.start(config, tmp_path / "same", fork=copied).origin.read_before
    assert same.earlier
    assert not same.shuffled_anew
    results = json.loads((copied / "results.json").read_text())
    (copied / "results.json").write_text(json.dumps(results | {"text_identity": "another"}))
    other = pretraining.start(config, tmp_path / "other", fork=copied).origin.read_before
    assert other == ReadBefore(counted_from=same.counted_from, shuffled_anew=same.counted_from)


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": True},
        {"short_fraction": 0.5},
        {"pairs": "sop"},
        {"length_warmup_fraction": 0.2},  # which divides the text in another order
        {"seed": 3},
    ],
)
def test_a_fork_to_other_sequences_does_not_count_those_of_the_run(
    tiny_config, copied, tmp_path, changes
):
    """An epoch has fewer of them, or more."""
    changes = dict(changes)
    config = changed(tiny_config, steps=6, seed=changes.pop("seed", tiny_config.seed))
    config.data = dataclasses.replace(config.data, **changes)
    read = pretraining.start(config, tmp_path / "forked", fork=copied).origin.read_before
    assert read == ReadBefore(counted_from=read.counted_from, shuffled_anew=read.counted_from)
    assert read.counted_from


def test_phases_that_are_done_need_not_fit_more_steps(tiny_config, copied):
    """A share of them would be behind a phase at a step, or the length warm-up in it."""
    saved = changed(tiny_config, steps=8)
    saved.data.phases = (Phase(0.25, 16, 8), Phase(3.0, 32, 8))
    (copied / "config.json").write_text(json.dumps(saved, default=dataclasses.asdict))
    longer = copy.deepcopy(saved)
    longer.steps = 32
    run = pretraining.start(longer, copied)
    assert [stage.first_step for stage in run.schedule.stages] == [0, 2, 3]


def test_an_error_before_the_first_step_waits_for_the_checkpoint_of_a_fork(
    stopped, tiny_config, tmp_path, monkeypatch
):
    def fail(*_):
        raise UserError("no header")

    monkeypatch.setattr(report, "pretraining_start", fail)
    with refused("no header"):
        pretrain(changed(tiny_config, steps=8), tmp_path / "fork", fork=stopped, quiet=True)
    assert [path.name for path in (tmp_path / "fork/checkpoints").iterdir()] == [str(STOPPED)]
