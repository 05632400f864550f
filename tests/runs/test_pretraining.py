"""Pretraining: to the end, killed, stopped, resumed, continued from a model, and refused."""

import contextlib
import copy
import io
import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import refused
from training_runs import (
    NUMBERS,
    ROOT,
    assert_same_state,
    contents,
    pretraining_flags,
    records,
    run_script,
    start_script,
    wait_for_logs,
    without_speeds,
)
from visible_devices import visible_devices

import bert_jax
from bert_jax import PretrainingResult, TrainingError, UserError, console
from bert_jax.batches import loader
from bert_jax.batches.packing import PairStatistics
from bert_jax.commands.flags import Recipe, read_config
from bert_jax.config import DataConfig, TokenizerConfig, TrainConfig
from bert_jax.objectives import make_objective
from bert_jax.objectives.sentence_pairs import SentencePairs
from bert_jax.runs import pretrain as pretraining
from bert_jax.text import prepare
from bert_jax.text.store import Corpus
from bert_jax.training import loop

STEPS = 24


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> Path:
    """Sentences in which each word tells the next."""
    folder = tmp_path_factory.mktemp("text")
    generator = np.random.default_rng(0)
    with (folder / "text.txt").open("w") as file:
        for _ in range(200):
            for _ in range(8):
                first, size = generator.integers(0, 10), generator.integers(4, 10)
                file.write(" ".join(NUMBERS[(first + i) % 10] for i in range(size)) + "\n")
            file.write("\n")
    data = DataConfig(source=str(folder / "text.txt"))
    prepare.prepare(data, TokenizerConfig(kind="wordpiece"), 66, folder / "store")
    return folder / "store"


def recipe(store: Path, *changes: str, name: str = "tiny") -> Recipe:
    return read_config(name, pretraining_flags(store, *changes), TrainConfig)


def pretrain(store: Path, workdir: Path, *changes: str, **options) -> PretrainingResult:
    return bert_jax.pretrain(recipe(store, *changes).config, workdir, **options)


@pytest.fixture(scope="session")
def finished(store, tmp_path_factory) -> tuple[Path, str]:
    """An undisturbed run on eight devices: its workdir and what it printed."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    with visible_devices(8), contextlib.redirect_stdout(io.StringIO()) as output:
        pretrain(store, workdir)
    return workdir, output.getvalue()


@pytest.fixture(scope="module")
def script(store, tmp_path_factory) -> tuple[Path, Path]:
    """An undisturbed run of `train.py` on one device: its workdir, and the user's cache."""
    folder = tmp_path_factory.mktemp("script")
    code, output, errors = run_script(
        "train.py", folder, f"--workdir={folder / 'run'}", *pretraining_flags(store)
    )
    assert (code, errors) == (0, "")
    assert "devices    1 ×" in output
    assert "unigram entropy" in output
    return folder / "run", folder


def test_what_a_run_leaves_and_prints(finished):
    workdir, printed = finished
    for name in ("config.json", "tokenizer/tokenizer.json", "curves.png", "metrics.jsonl"):
        assert (workdir / name).stat().st_size > 0
    assert list((workdir / "tensorboard").glob("events*"))
    steps = {int(p.name) for p in (workdir / "checkpoints").iterdir()}
    assert {18, 24} <= steps <= {12, 18, 24}
    logged = records(workdir)
    fields = {"loss", "mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"}
    fields.add("sequences_per_second")
    for record in logged:
        assert fields <= record.keys()
        assert record["loss"] == pytest.approx(record["mlm_loss"] + record["nsp_loss"])
    train = [r for r in logged if r["split"] == "train"]
    assert [r["step"] for r in train] == [4, 8, 12, 16, 20, 24]
    assert [r["step"] for r in logged if r["split"] == "eval"] == [12, 24]
    assert all(r["sequences_per_second"] > 0 for r in logged)
    for record in logged:
        step = record["step"]
        assert (record["sequences"], record["tokens"]) == (step * 16, step * 16 * 32)
        assert record["epoch"] == pytest.approx(logged[-1]["epoch"] * step / STEPS)
        decayed = 3e-3 * (1 - (step - 1) / STEPS)  # after two steps of warm-up
        assert record["learning_rate"] == pytest.approx(decayed)
    assert f"which is {console.epochs(logged[-1]['epoch'])}" in printed
    assert [r["seconds"] for r in logged] == sorted(r["seconds"] for r in logged)
    for record in train:  # only tokens of the text count: of 32, those that are not padding
        tokens = record["tokens_per_second"] / record["sequences_per_second"]
        assert 16 < tokens < 32
        assert tokens == pytest.approx(32 * record["token_share"], rel=0.1)
    for text in (
        "devices    8 ×",
        "parameters",
        "with data.packing",
        "tokens/s",
        "epochs",
        "unigram entropy",
        "majority class",
        "fill-mask",
        "[MASK]",
    ):
        assert text in printed


def test_a_checkpoint_is_self_contained(finished, tmp_path):
    workdir, _ = finished
    moved = shutil.copytree(workdir / "checkpoints" / "24", tmp_path / "elsewhere")
    for path in (workdir, workdir / "checkpoints", moved):
        bert = bert_jax.load(path)
        assert bert.config.hidden_size == 16
        names = [bert.tokenizer.id_to_token(i) for i in range(66)]
        guesses = bert.fill_mask("one two [MASK] four", top_k=3)
        assert len(guesses) == 3
        assert guesses[0].probability >= guesses[1].probability > 0
        ids = bert.tokenizer.encode_with_masks("one two [MASK] four")
        ids[ids.index(bert.tokenizer.mask_id)] = names.index(guesses[0].token)
        assert guesses[0].text == bert.tokenizer.decode(ids)


def test_the_same_run_again_changes_nothing(finished, store, capsys):
    workdir, printed = finished
    before = contents(workdir)
    pretrain(store, workdir)
    again = capsys.readouterr().out
    ends = (text.split("held-out text")[1].split("time       ")[0] for text in (again, printed))
    # A slow machine also says how long a part of it took.
    first, second = ([line for line in end.splitlines() if " took " not in line] for end in ends)
    assert first == second
    assert again.startswith(
        f"finished   {workdir} has done its {STEPS} steps, so nothing is trained"
    )
    assert "\nstep " not in again
    assert "resuming" not in again
    assert contents(workdir) == before


def test_a_finished_run_is_evaluated_from_its_checkpoint(finished, store, tmp_path):
    """Whatever its records are, and anew on another number of sequences."""
    copied = shutil.copytree(finished[0], tmp_path / "run")
    content = (copied / "metrics.jsonl").read_bytes()
    (copied / "metrics.jsonl").write_bytes(content[: len(content) // 2])
    same, other, again = (
        pretrain(store, copied, *changes, quiet=True).scores["mlm_loss"]
        for changes in ([], ["eval_rows=8"], ["eval_rows=8"])
    )
    assert same == pytest.approx(records(finished[0])[-1]["mlm_loss"], rel=1e-6)
    assert same != other == again


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_resumed_is_bit_equal(script, store, tmp_path, seed):
    """SIGKILL, twice, at moments spread over the training; then to the end."""
    expected, cache = script
    workdir, draw = tmp_path / "run", random.Random(seed)
    command = "train.py", cache, f"--workdir={workdir}", *pretraining_flags(store)
    for _ in range(2):
        process = start_script(*command)
        wait_for_logs(process, 1 + draw.randrange(3))
        time.sleep(draw.random() * 0.05)
        process.kill()
        process.communicate()
    code, _, errors = run_script(*command)
    assert code == 0, errors
    assert_same_state(workdir, expected, STEPS)
    assert without_speeds(workdir) == without_speeds(expected)


def test_sigterm_saves_and_exits_with_its_own_code(script, store, tmp_path):
    expected, cache = script
    workdir = tmp_path / "run"
    command = pretraining_flags(store, "checkpoint.every=1000")
    process = start_script("train.py", cache, f"--workdir={workdir}", *command)
    wait_for_logs(process, 1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75
    assert errors.startswith("train.py: SIGTERM after step")
    assert errors.count("\n") == 1
    (step,) = [int(p.name) for p in (workdir / "checkpoints").iterdir()]
    assert 4 <= step < STEPS
    code, output, errors = run_script("train.py", cache, f"--workdir={workdir}", *command)
    assert code == 0, errors
    assert f"resuming from step {step}" in output
    assert_same_state(workdir, expected, STEPS)
    assert without_speeds(workdir) == without_speeds(expected)  # whatever step it stopped after


def test_eight_devices_give_the_losses_of_one(finished, script):
    for record, other in zip(records(finished[0]), records(script[0]), strict=True):
        assert record["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_phases_in_one_run(store, tmp_path):
    """Another length, batch, share of masks and rate, resumed on either side of them; packed."""
    (tmp_path / "recipe.py").write_text(
        "from bert_jax import Phase, recipe\n"
        "def get_config():\n"
        "    config = recipe('tiny')\n"
        "    config.data.phases = (Phase(0.75, 32, 8, mask_fraction=0.5, learning_rate=1e-3),)\n"
        "    return config\n"
    )
    changes = "data.max_length=16", "checkpoint.keep=9", "data.packing=True", "eval_every=24"
    config = recipe(store, *changes, name=str(tmp_path / "recipe.py")).config
    bert_jax.pretrain(config, tmp_path / "whole", quiet=True)
    last = records(tmp_path / "whole")[-1]
    assert last["sequences"] == 18 * 16 + 6 * 8
    assert last["tokens"] == 18 * 16 * 16 + 6 * 8 * 32
    for record in records(tmp_path / "whole"):
        if record["split"] == "train":
            share = record["learning_rate"] / (3e-3 if record["step"] <= 18 else 1e-3)
            assert share == pytest.approx(1 - (record["step"] - 1) / STEPS)
    for step in (12, 18):
        workdir = shutil.copytree(tmp_path / "whole", tmp_path / f"resumed{step}")
        for checkpoint in (workdir / "checkpoints").iterdir():
            if int(checkpoint.name) != step:
                shutil.rmtree(checkpoint)
        bert_jax.pretrain(config, workdir, quiet=True)
        assert_same_state(workdir, tmp_path / "whole", STEPS)
        assert without_speeds(workdir) == without_speeds(tmp_path / "whole")


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory) -> Path:
    """Two directories for `transformers`: "whole", and "encoder" without heads."""
    folder = tmp_path_factory.mktemp("exported")
    bert = bert_jax.load(finished[0])
    bert.export(folder / "whole")
    bert.export(folder / "encoder", head="none")
    return folder


@pytest.mark.devices(8)
def test_a_run_continues_from_an_exported_model(finished, exported, store, tmp_path, capsys):
    """At a learning rate of next to nothing it evaluates as the run of the weights."""
    changes = "optimizer.learning_rate=1e-12", "steps=4"
    pretrain(store, tmp_path / "run", *changes, init=exported / "whole")
    printed = capsys.readouterr().out
    assert f"weights    {exported / 'whole'}; randomly initialized: none; dropped: none" in printed
    wanted, record = (records(path)[-1] for path in (finished[0], tmp_path / "run"))
    for name in ("mlm_loss", "nsp_loss", "mlm_accuracy"):
        assert record[name] == pytest.approx(wanted[name], rel=1e-5)


def test_modules_that_the_model_lacks_are_randomly_initialized(exported, store, tmp_path, capsys):
    changes = "optimizer.learning_rate=1e-12", "steps=4"
    for _ in range(2):
        pretrain(store, tmp_path / "run", *changes, init=exported / "encoder")
    printed = capsys.readouterr().out
    assert "randomly initialized: mlm_head, nsp_head; dropped: none" in printed
    assert "from step 4; --init is not used again" in printed
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["init"] == str(exported / "encoder")
    assert results["step"] == 4
    assert results["scores"].keys() > results["baselines"].keys()


def test_the_shape_is_that_of_the_model_whatever_the_recipes(exported, store, tmp_path):
    free = [word for word in pretraining_flags(store) if ".model." not in word]
    free.append("--config.model.hidden_dropout_prob=0.25")  # what is set by hand is kept
    config = read_config("tiny", free, TrainConfig)
    run = pretraining.start(config.config, tmp_path / "run", exported / "whole", config.fields)
    assert (run.config.model.hidden_size, run.config.model.hidden_dropout_prob) == (16, 0.25)
    assert run.config.model.vocab_size == 66
    config = read_config("tiny", [*free, "--config.model.intermediate_size=64"], TrainConfig)
    with pytest.raises(UserError, match=r"of shape \(32, 16\), which"):
        pretraining.start(config.config, tmp_path / "other", exported / "whole", config.fields)
    assert not list(tmp_path.iterdir())


def test_a_mixture_of_texts(store, tmp_path, capsys):
    """Of a store and of plain text: what is printed and recorded, and which text resumes."""
    text, workdir = tmp_path / "more.txt", tmp_path / "run"
    text.write_text("\n\n".join(" ".join(NUMBERS[::-1][i % 7 :]) + "\nnine." for i in range(60)))
    changes = [f"data.source={store}@3,{text}@1", "steps=8"]
    scores = pretrain(store, workdir, *changes).scores
    printed = capsys.readouterr().out
    source = r"\nsource     {}: {}% of the sequences, {}, which is {} epochs? of [\d,]+ tokens\n"
    train, held_out = records(workdir)[-2:]
    for name, share, count in (("store", 75, 96), ("more.txt", 25, 32)):
        epochs = console.epochs(train[f"epoch/{name}"]).split()[0]
        assert re.search(source.format(name, share, count, re.escape(epochs)), printed)
        row = (
            rf"\n{name} +{share}% +{count} +{re.escape(epochs)} +{scores[f'mlm_loss/{name}']:.3f}\n"
        )
        assert re.search(row, printed)
    losses = [held_out[f"mlm_loss/{name}"] for name in ("store", "more.txt")]
    assert held_out["mlm_loss"] == pytest.approx(0.75 * losses[0] + 0.25 * losses[1])
    assert losses[0] != losses[1]

    corpus = pretraining.start(recipe(store, *changes, "steps=9").config, workdir).corpus
    assert corpus.fingerprint == (workdir / "text.sha256").read_text().strip()
    with pytest.raises(UserError, match=r"belongs to another config: data.source is"):
        pretrain(store, workdir, *changes, f"data.source={store}@2,{text}@1")
    text.write_text(text.read_text() + "One.\n")
    with refused("store/1 was prepared from other text; restore the text, or", "by --fork="):
        pretrain(store, workdir, *changes, "steps=9")
    shutil.rmtree(workdir / "store")
    with pytest.raises(UserError, match="was trained on other text"):
        pretrain(store, workdir, *changes, "steps=9")
    assert not (workdir / "store").exists()  # in the way of the run's own text


def test_the_roberta_recipe_at_a_tiny_size(tmp_path):
    """With a byte-level vocabulary trained on the text; exported, and loaded again."""
    small = ["model.vocab_size=400", "model.num_attention_heads=2", "model.dtype=float32"]
    small += ["optimizer.learning_rate=1e-2", "log_every=24", "eval_every=24"]
    config = recipe(ROOT / "LICENSE", *small, name="roberta_base").config
    bert = bert_jax.pretrain(config, tmp_path / "run", quiet=True).bert
    logged = records(tmp_path / "run")
    assert not any("nsp_loss" in record for record in logged)
    assert logged[0]["mlm_loss"] < np.log(400)
    assert bert.tokenizer.kind == "byte_bpe"
    assert bert.export(tmp_path / "out").architecture == "RobertaForMaskedLM"
    again = bert_jax.load(tmp_path / "out")
    text = "Subject to the [MASK] of this License."
    assert again.fill_mask(text) == bert_jax.load(tmp_path / "run").fill_mask(text)


@pytest.mark.parametrize(
    ("change", "key_words"),  # the others of a config are in test_configs.py
    [
        ("model.vocab_size=65", "model.vocab_size 65 is smaller"),
        pytest.param(
            "data.batch_size=12",
            "not a multiple of the 8 devices of parallel's data × fsdp; use 16",
            marks=pytest.mark.devices(8),
        ),
        ("model.model_type=electra", "data.pairs nsp needs"),
        ("data.source=nowhere.txt", "nowhere.txt does not exist"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(store, tmp_path, change, key_words):
    with refused(key_words):
        pretraining.start(recipe(store, change).config, tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "check",
    [
        "distributed.devices.check_fits",
        "objectives.sentence_pairs.SentencePairs.check_text",
        "text.mixture.check_settings",
        "training.sinks.check",
    ],
)
def test_what_is_checked_before_anything_is_written(store, tmp_path, monkeypatch, check):
    def refuse(*_, **__):
        raise UserError("of this check")

    monkeypatch.setattr(f"bert_jax.{check}", refuse)
    with refused("of this check"):
        pretraining.start(recipe(store).config, tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_run_with_random_weights_does_not_resume_with_init(finished, exported, store):
    with refused("has a run that began with random weights, not with --init", "leave --init out"):
        pretrain(store, finished[0], "steps=30", init=exported / "whole")


# Orbax's threads are still reading the damaged files when their error has been reported.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("ends_reads")
@pytest.mark.parametrize("damaged", ["checkpoint", "config", "store"])
def test_damage_on_disk(finished, store, tmp_path, damaged):
    workdir = shutil.copytree(finished[0], tmp_path / "run")
    copy = shutil.copytree(store, tmp_path / "store")
    config = json.loads((workdir / "config.json").read_text())
    config["data"]["source"] = str(copy)
    (workdir / "config.json").write_text(json.dumps(config))
    # Of a checkpoint all data files: some of them hold nothing that is still of use.
    paths, message = {
        "checkpoint": (
            list((workdir / "checkpoints/24/state").glob("**/d/*")),
            "checkpoints/24 cannot be read",
        ),
        "config": ([workdir / "config.json"], "cannot be read"),
        "store": ([copy / "train/tokens.bin"], "remove the folder"),
    }[damaged]
    for path in paths:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = contents(tmp_path)
    with pytest.raises(UserError, match=message):
        pretrain(copy, workdir)
    assert contents(tmp_path) == before


def test_a_loss_that_is_not_finite_stops_the_run(store, tmp_path):
    """Before it is saved, and before held-out text would show it."""
    changes = "optimizer.learning_rate=1e9", "optimizer.warmup_fraction=0.5", "checkpoint.every=1"
    with pytest.raises(TrainingError, match=r"is nan at step .*the last good checkpoint is") as end:
        pretrain(store, tmp_path / "run", *changes, "eval_every=1000")
    assert "held-out" not in str(end.value)
    params = bert_jax.load(tmp_path / "run").params
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_the_best_is_saved_between_checkpoints_and_only_of_a_text_that_is_whole(
    store, tmp_path, monkeypatch
):
    losses, found = {4: 1.0, 8: 3.0, 12: 2.0}, []
    evaluate, verify, save = loop.evaluate, Corpus.verify, loop.Training.save

    def scored(*arguments):
        return evaluate(*arguments) | {"loss": losses[int(arguments[-1].step)]}

    def verified(corpus, most):
        found.append(("verify", most))
        verify(corpus, most)

    def saved(training, step, config):
        assert found[-1] == ("verify", None)
        found.append(("save", step.number))
        save(training, step, config)

    monkeypatch.setattr(loop, "evaluate", scored)
    monkeypatch.setattr(Corpus, "verify", verified)
    monkeypatch.setattr(loop.Training, "save", saved)
    changes = "steps=12", "eval_every=4", "checkpoint.every=1000", "checkpoint.keep=1"
    pretrain(store, tmp_path / "run", *changes, quiet=True)
    assert [step for what, step in found if what == "save"] == [4, 12]
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == {"4", "12"}


def test_it_learns(store, tmp_path):
    """Where each word tells the next, most masked words can be told."""
    changes = ["steps=200", "log_every=100", "eval_every=200", "checkpoint.every=200"]
    changes += ["data.max_length=16", "data.pairs=none"]
    changes += ["optimizer.name=adamw", "optimizer.b2=0.98", "optimizer.learning_rate=1e-2"]
    changes += ["model.initializer_range=0.1", "model.hidden_size=32"]
    changes += ["model.position_embedding_type=relative_key"]
    result = pretrain(store, tmp_path / "run", *changes, quiet=True)
    assert result.scores["mlm_loss"] < 1.2  # of 2.3, the entropy of ten words
    assert result.bert.fill_mask("two three four [MASK] six seven")[0].token == "five"


@pytest.mark.slow
def test_an_electra_is_evaluated_and_resumes(store, tmp_path):
    """What its generator samples depends on the step alone."""
    run, again = tmp_path / "run", tmp_path / "again"
    electra = ["model.model_type=electra", "model.hidden_size=32", "model.embedding_size=16"]
    electra += ["data.pairs=none", "steps=12"]
    result = pretrain(store, run, *electra, quiet=True)
    scores, baselines = result.scores, result.baselines
    assert baselines["rtd_accuracy"] == scores["rtd_accuracy_baseline"] > 0.8
    assert baselines["rtd_recall"] == 0
    assert records(run)[-1]["rtd_loss"] == scores["rtd_loss"]
    for values in (scores, next(r for r in records(run) if r["split"] == "train")):
        assert values["loss"] == pytest.approx(values["mlm_loss"] + 50 * values["rtd_loss"])
    assert result.bert.fill_mask("two three four [MASK] six seven")
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints/12")
    pretrain(store, again, *electra, quiet=True)
    assert_same_state(run, again, 12)
    assert without_speeds(run)[-1] == without_speeds(again)[-1]


def test_letters_are_learned(tmp_path):
    """The recipe for proteins and DNA: a token is a letter, and a line a sequence."""
    random = np.random.default_rng(0)
    lines = ["".join(random.choice(list("ACGT"), 80, p=[0.7, 0.1, 0.1, 0.1])) for _ in range(100)]
    (tmp_path / "dna.txt").write_text("\n".join(lines))
    changes = "model.vocab_size=0", "model.dtype=float32"
    config = recipe(tmp_path / "dna.txt", *changes, name="letters").config
    fitted = []  # for some minutes, which depend on the vocabulary
    fit = lambda config: fitted.append(config.model.vocab_size) or config  # noqa: E731
    assert pretraining.start(config, tmp_path / "fitted", fit=fit).has_open_vocabulary
    assert fitted == [10]
    for steps in (2, 4):  # where it resumes on another machine, whose workdir has no store
        shutil.rmtree(tmp_path / "run/store", ignore_errors=True)
        config.steps = steps
        result = bert_jax.pretrain(config, tmp_path / "run", quiet=True)
        tokenizer = result.bert.tokenizer
        assert tokenizer.vocab_size == result.bert.config.vocab_size == 10
        assert len(tokenizer.encode([lines[0]])[0]) == 81  # with the start of the sequence
        assert set(result.baselines) == {"mlm_loss", "mlm_accuracy"}
        assert "sequences_per_second" not in result.scores  # so that equal runs are equal


def test_a_text_of_which_little_can_be_learned_warns(tiny_config, tmp_path, capfd):
    """As of a language without full stops: a document is a line, of which a pair has the least."""
    text, config = tmp_path / "text.txt", copy.deepcopy(tiny_config)
    text.write_text("\n\n".join(["the river bank of the model " * 20] * 40))
    config.data.source, config.data.batch_size, config.steps = str(text), 512, 8
    bert_jax.pretrain(config, tmp_path / "run")
    printed = "".join(capfd.readouterr())
    assert "by rote; give more text, or --config.steps=" in printed
    assert "% of the text is cut off, as its sentences are beyond data.max_length" in printed


def test_text_that_is_cut_off_in_most_steps_is_warned_of(monkeypatch):
    """`base` has sequences of 128 tokens in nine tenths of its steps, and then of 512."""
    monkeypatch.setattr(SentencePairs, "_unlearnable", lambda *_: "")
    rare, often = (PairStatistics(0.0, 0.0, majority=0.5, cut=cut) for cut in (0.02, 0.55))
    objective = make_objective(bert_jax.recipe("base"))
    (warning,) = objective.text_warnings(None, {128: often, 512: rare})
    assert warning.startswith("55% of the text is cut off")


def test_held_out_sequences_are_evaluated_in_microbatches(tiny_config, tmp_path, monkeypatch):
    """As a batch may only fit in parts; the scores are those of whole batches."""
    sizes, found = [], []

    class Counting(loader.EvalBatches):
        def __iter__(self):
            for batch in super().__iter__():
                sizes.append(len(batch["index"]))
                yield batch

    monkeypatch.setattr(loader, "EvalBatches", Counting)
    for count in (1, 2):
        config = copy.deepcopy(tiny_config)
        config.data.batch_size, config.optimizer.microbatches = 16, count
        run = pretraining.start(config, tmp_path / str(count))
        (stage,) = pretraining._make_stages(run, np.arange)
        sizes.clear()
        found.append(stage.evaluate(run.new_state()))
        assert set(sizes) == {16 // count}
        found[-1].pop("sequences_per_second")
    assert found[0] == pytest.approx(found[1], rel=1e-5)
