"""`train.py` as a user runs it: to the end, killed, stopped, resumed, and given mistakes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import numpy as np
import pytest

import bert_jax
from bert_jax import bert as pretrained
from bert_jax.config import DataConfig, TokenizerConfig
from bert_jax.errors import UserError
from bert_jax.text import prepare as prepare_lib

ROOT = Path(__file__).parents[1]
STEPS = 24


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> Path:
    """Sentences in which each word tells the next."""
    folder = tmp_path_factory.mktemp("text")
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    generator = np.random.default_rng(0)
    with (folder / "text.txt").open("w") as file:
        for _ in range(200):
            for _ in range(8):
                first, size = generator.integers(0, 10), generator.integers(4, 10)
                file.write(" ".join(words[(first + i) % 10] for i in range(size)) + "\n")
            file.write("\n")
    data = DataConfig(source=str(folder / "text.txt"))
    prepare_lib.prepare(data, TokenizerConfig(kind="wordpiece"), 66, folder / "store")
    return folder / "store"


def command(store: Path | str, workdir: Path, *flags: str) -> list[str]:
    config = {
        "steps": STEPS,
        "log_every": 4,
        "eval_every": 12,
        "model.vocab_size": 66,
        "model.hidden_size": 16,
        "model.num_hidden_layers": 1,
        "model.intermediate_size": 32,
        "model.max_position_embeddings": 32,
        "data.source": store,
        "data.max_length": 32,
        "data.batch_size": 16,
        "checkpoint.every": 6,
    }
    set_here = {flag.split("=")[0].removeprefix("--config.") for flag in flags}
    given = [f"--config.{k}={v}" for k, v in config.items() if k not in set_here]
    return [sys.executable, str(ROOT / "train.py"), f"--workdir={workdir}", *given, *flags]


def environment(devices: int = 1) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def run(store, workdir, *flags, devices: int = 1) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(store, workdir, *flags),
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=workdir.parent,
    )


def state_files(workdir: Path, step: int = STEPS) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, read by Orbax alone."""
    import jax
    import orbax.checkpoint as ocp

    path = workdir / "checkpoints" / str(step) / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        names = reader.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        state = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_state(one: Path, other: Path) -> None:
    first, second = state_files(one), state_files(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


def records(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def finished(store, tmp_path_factory) -> tuple[Path, str]:
    """An undisturbed run: its workdir and what it printed."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    done = run(store, workdir)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return workdir, done.stdout


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
    for record in train:  # no tokens but those of the text: of 32 a row, those that are not padding
        tokens = record["tokens_per_second"] / record["sequences_per_second"]
        assert 16 < tokens < 32
        assert tokens == pytest.approx(32 * record["token_share"], rel=0.1)
    for text in (
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


def test_a_checkpoint_is_complete_by_itself(finished, tmp_path):
    workdir, _ = finished
    moved = tmp_path / "elsewhere"
    subprocess.run(["cp", "-r", workdir / "checkpoints" / "24", moved], check=True)
    for place in (workdir, workdir / "checkpoints", moved):
        bert = bert_jax.load(place)
        assert bert.config.hidden_size == 16
        names = [bert.tokenizer.id_to_token(i) for i in range(66)]
        (guesses,) = bert.fill_mask("one two [MASK] four", top_k=3)
        assert len(guesses) == 3
        assert guesses[0].probability >= guesses[1].probability > 0
        ids = bert.tokenizer.encode_with_masks("one two [MASK] four")
        ids[ids.index(bert.tokenizer.mask_id)] = names.index(guesses[0].token)
        assert guesses[0].text == bert.tokenizer.decode(ids)
    assert len(bert.fill_mask("[MASK] one [MASK]")) == 2
    for text, top_k, message in (
        ("no mask", 5, "has no"),
        ("[MASK] " * 40, 5, "has 42 pieces and the model only 32 positions"),
        ("a [MASK]", 0, "top_k is 0"),
    ):
        with pytest.raises(UserError, match=message):
            bert.fill_mask(text, top_k)


def test_the_same_command_again_changes_nothing(finished, store, tmp_path, monkeypatch):
    """But what it compiles is kept in the user's cache."""
    workdir, printed = finished
    before = (workdir / "metrics.jsonl").read_text()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    monkeypatch.setenv("MPLCONFIGDIR", matplotlib.get_cachedir())  # whose fonts are there as well
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    again = run(store, workdir)
    assert again.returncode == 0, again.stderr
    assert list((tmp_path / "bert-jax").glob("jit_apply-*"))
    assert again.stdout.split("held-out text")[1] == printed.split("held-out text")[1]
    assert (workdir / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_resumed_is_bit_equal(finished, store, tmp_path, seed):
    """SIGKILL, three times, at moments spread over the training; then to the end."""
    workdir, draw = tmp_path / "run", random.Random(seed)
    for kill in range(3):
        process = subprocess.Popen(
            command(store, workdir), env=environment(), stdout=-1, stderr=-1, cwd=tmp_path
        )
        metrics, lines = workdir / "metrics.jsonl", kill + draw.randrange(3)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") > lines:
                break
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    done = run(store, workdir)
    assert done.returncode == 0, done.stderr
    assert_same_state(workdir, finished[0])
    for found, expected in zip(records(workdir), records(finished[0]), strict=True):
        # A log after a resume covers fewer steps than one that was not interrupted.
        names = set(found) if found["split"] == "eval" else {"step", "split"}
        names.discard("sequences_per_second")
        assert {n: found[n] for n in names} == {n: expected[n] for n in names}


def test_sigterm_saves_and_exits_with_its_own_code(finished, store, tmp_path):
    workdir = tmp_path / "run"
    process = subprocess.Popen(
        command(store, workdir, "--config.checkpoint.every=1000"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 4/"):
            break
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 75
    assert error.startswith("train.py: SIGTERM after step")
    assert error.count("\n") == 1
    (step,) = [int(p.name) for p in (workdir / "checkpoints").iterdir()]
    assert 4 <= step < STEPS
    done = run(store, workdir, "--config.checkpoint.every=1000")
    assert f"resuming from step {step}" in done.stdout
    assert_same_state(workdir, finished[0])


@pytest.mark.parametrize("mode", ["mesh", pytest.param("pmap", marks=pytest.mark.slow)])
def test_eight_devices_give_the_same_losses(finished, store, tmp_path, mode):
    done = run(store, tmp_path / "run", f"--config.parallel.mode={mode}", devices=8)
    assert done.returncode == 0, done.stderr
    assert "devices    8 ×" in done.stdout
    for found, expected in zip(records(tmp_path / "run"), records(finished[0]), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert bert_jax.load(tmp_path / "run").fill_mask("one [MASK]")


def test_phases_in_one_run(store, tmp_path):
    """A second length for the last quarter, resumed on either side of the change; packed rows."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from configs import tiny\n"
        "from bert_jax.config import Phase\n"
        "def get_config():\n"
        "    config = tiny.get_config()\n"
        "    config.data.phases = (Phase(start=0.75, max_length=32, batch_size=8),)\n"
        "    return config\n"
    )
    flags = [f"--config={recipe}", "--config.data.max_length=16", "--config.checkpoint.keep=9"]
    flags.append("--config.data.packing=True")
    env = {**environment(), "PYTHONPATH": str(ROOT)}

    def go(workdir: Path) -> str:
        words = command(store, workdir, *flags)
        done = subprocess.run(words, env=env, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = go(tmp_path / "whole")
    assert "24/24" in printed
    for step in (12, 18):
        workdir = tmp_path / f"resumed{step}"
        subprocess.run(["cp", "-r", tmp_path / "whole", workdir], check=True)
        for checkpoint in (workdir / "checkpoints").iterdir():
            if int(checkpoint.name) != step:
                subprocess.run(["rm", "-r", checkpoint], check=True)
        go(workdir)
        assert_same_state(workdir, tmp_path / "whole")


def test_a_run_begins_with_an_exported_model(finished, store, tmp_path):
    """At a rate of next to nothing it evaluates as the run that the weights are from."""
    bert = bert_jax.load(finished[0])
    pretrained.export(bert, tmp_path / "whole")
    pretrained.export(bert, tmp_path / "encoder", head="none")
    rate = "--config.optimizer.learning_rate=1e-12"
    done = run(store, tmp_path / "run", f"--init={tmp_path / 'whole'}", rate, "--config.steps=4")
    assert done.returncode == 0, done.stderr
    assert f"weights    {tmp_path / 'whole'}; anew: none" in done.stdout
    wanted, found = (records(path)[-1] for path in (finished[0], tmp_path / "run"))
    for name in ("mlm_loss", "nsp_loss", "mlm_accuracy"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-5)
    done = run(store, tmp_path / "anew", f"--init={tmp_path / 'encoder'}", "--config.steps=4")
    assert "anew: mlm_head, nsp_head; left out: none" in done.stdout, done.stderr
    again = run(store, tmp_path / "anew", f"--init={tmp_path / 'encoder'}", "--config.steps=4")
    assert "from step 4; --init is not used again" in again.stdout
    # The shape is the checkpoint's, whatever the recipe's; what is set by hand is kept.
    words = [word for word in command(store, tmp_path / "free") if ".model." not in word]
    words += [f"--init={tmp_path / 'whole'}", "--config.model.hidden_dropout_prob=0.25"]
    words += ["--config.steps=2", "--config.data.max_length=16"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model = json.loads((tmp_path / "free/config.json").read_text())["model"]
    assert (model["hidden_size"], model["hidden_dropout_prob"]) == (16, 0.25)
    flags = [f"--init={tmp_path / 'whole'}", "--config.model.intermediate_size=64"]
    check_mistake(run(store, tmp_path / "other", *flags), "of shape (32, 16), which")
    assert not (tmp_path / "other").exists()


def test_the_roberta_recipe_at_a_tiny_size(tmp_path):
    """On the built-in text, with a byte-level vocabulary trained on it; and out, and in again."""
    small = {
        "model.vocab_size": 2000,
        "model.hidden_size": 32,
        "model.num_hidden_layers": 2,
        "model.num_attention_heads": 2,
        "model.intermediate_size": 64,
        "model.dtype": "float32",
        "data.max_length": 64,
        "data.batch_size": 16,
        "optimizer.learning_rate": 1e-2,
        "steps": 40,
        "log_every": 20,
        "eval_every": 40,
        "eval_rows": 32,
    }
    flags = [f"--config.{name}={value}" for name, value in small.items()]
    recipe = f"--config={ROOT / 'configs/roberta_base.py'}"
    words = [sys.executable, str(ROOT / "train.py"), recipe, f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(
        [*words, *flags], env=environment(), capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    logged = records(tmp_path / "run")
    assert not any("nsp_loss" in record for record in logged)
    assert logged[0]["mlm_loss"] < np.log(2000)
    bert = bert_jax.load(tmp_path / "run")
    assert bert.tokenizer.kind == "byte_bpe"
    assert pretrained.export(bert, tmp_path / "out").architecture == "RobertaForMaskedLM"
    again = bert_jax.load(tmp_path / "out")
    text = "Return the [MASK] of the file."
    assert again.fill_mask(text) == bert.fill_mask(text)


MISTAKES = {
    "misspelt field": (["--config.model.hiden_size=3"], "hiden_size"),
    "wrong type": (["--config.steps=many"], "config.steps=many"),
    "unknown flag": (["--wrokdir=x"], "wrokdir"),
    "stray word": (["now"], "'now' is not a flag"),
    "no such config": (["--config=configs/huge.py"], "configs/huge.py does not exist"),
    "a phase": (["--config.data.phases=3"], "phases is 3"),
    # The others of a config are in test_configs.py.
    "length over positions": (["--config.data.max_length=64"], "data.max_length 64 exceeds"),
    "vocabulary too small": (["--config.model.vocab_size=65"], "model.vocab_size 65 is smaller"),
    "microbatches": (["--config.optimizer.microbatches=3"], "not a multiple of"),
    "a RoBERTa's pairs": (["--config.model.model_type=roberta"], "data.pairs nsp needs"),
    "no such checkpoint": (["--init=nowhere"], "checkpoint nowhere does not exist"),
    "no such text": (["--config.data.source=nowhere.txt"], "nowhere.txt does not exist"),
    "unwritable workdir": (
        ["--workdir=/dev/null/run"],
        "/dev/null/run cannot be made in /dev/null",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line_before_any_training(store, tmp_path, name):
    flags, message = MISTAKES[name]
    done = run(store, tmp_path / "run", *flags)
    check_mistake(done, message)
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_field():
    words = [sys.executable, str(ROOT / "train.py"), "--help"]
    shown = subprocess.run(words, capture_output=True, text=True)
    assert shown.returncode == 0
    for text in ("Pretrains BERT", "--workdir", "--config.data.source", "--config.seed=0"):
        assert text in shown.stdout


def check_mistake(done: subprocess.CompletedProcess, message: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("train.py: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "step " not in done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    files = [p for p in folder.rglob("*") if p.is_file() and "tensorboard" not in p.parts]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_a_batch_that_the_devices_do_not_divide(store, tmp_path):
    done = run(store, tmp_path / "run", "--config.data.batch_size=12", devices=8)
    check_mistake(
        done,
        "data.batch_size 12 is not a multiple of the 8 devices of parallel's data × fsdp; use 16",
    )


def test_a_workdir_of_another_config(finished, store):
    before = contents(finished[0])
    done = run(store, finished[0], "--config.seed=1")
    check_mistake(done, "belongs to another config: seed is 0 there and 1 here")
    assert contents(finished[0]) == before


def test_a_workdir_of_other_text(finished, store, tmp_path):
    """The same paths, but what lies there has changed since."""
    workdir, copy = tmp_path / "run", tmp_path / "store"
    subprocess.run(["cp", "-r", finished[0], workdir], check=True)
    (workdir / "text.sha256").write_text("0" * 64)
    before = contents(tmp_path)
    check_mistake(run(store, workdir), "was trained on other text")
    assert contents(tmp_path) == before
    assert not copy.exists()


@pytest.mark.parametrize("what", ["checkpoint", "config", "store"])
def test_damage_on_disk(finished, store, tmp_path, what):
    workdir, copy = tmp_path / "run", tmp_path / "store"
    subprocess.run(["cp", "-r", finished[0], workdir], check=True)
    subprocess.run(["cp", "-r", store, copy], check=True)
    config = json.loads((workdir / "config.json").read_text())
    config["data"]["source"] = str(copy)
    (workdir / "config.json").write_text(json.dumps(config))
    # Of a checkpoint all data files: some of them hold nothing that is still of use.
    paths, message = {
        "checkpoint": (
            list((workdir / "checkpoints/24/state").glob("**/d/*")),
            "checkpoints/24 cannot be read",
        ),
        "config": ([workdir / "config.json"], "is not JSON"),
        "store": ([copy / "train/tokens.bin"], "remove the folder to prepare it again"),
    }[what]
    for path in paths:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = contents(tmp_path)
    check_mistake(run(copy, workdir), message)
    assert contents(tmp_path) == before


def test_a_loss_that_is_no_number_stops_the_run(store, tmp_path):
    done = run(
        store,
        tmp_path / "run",
        "--config.optimizer.learning_rate=1e30",
        "--config.optimizer.warmup_fraction=0.5",
        "--config.checkpoint.every=1",
    )
    assert done.returncode == 1
    assert "at step" in done.stderr
    assert "the last good checkpoint is" in done.stderr
    assert done.stderr.count("\n") == 1


def test_it_learns(store, tmp_path):
    """Of words that tell the next, most of what is masked can be told."""
    done = run(
        store,
        tmp_path / "run",
        "--config.steps=1000",
        "--config.optimizer.name=adamw",
        "--config.optimizer.b2=0.98",
        "--config.model.initializer_range=0.1",
        "--config.log_every=100",
        "--config.eval_every=1000",
        "--config.checkpoint.every=1000",
        "--config.optimizer.learning_rate=5e-3",
        "--config.model.hidden_size=32",
    )
    assert done.returncode == 0, done.stderr
    last = records(tmp_path / "run")[-1]
    assert last["mlm_loss"] < 1.2  # of 2.3, the entropy of ten words
    best = bert_jax.load(tmp_path / "run").fill_mask("two three four [MASK] six seven")[0][0]
    assert best.token == "five"
