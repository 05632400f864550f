"""`finetune.py` and `bert-jax predict` as a user runs them, on a task whose answer is one word."""

import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import linen as nn
from helpers import model_config
from test_train import ROOT, environment, records, state_files

import bert_jax
from bert_jax import bert as pretrained
from bert_jax.bert import Bert
from bert_jax.config import TokenizerConfig
from bert_jax.models.heads import BertForPreTraining
from bert_jax.text import tokenizer_training

STEPS = 114  # six epochs of 19
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    """Sentences with one of three words, by which they are labelled."""
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        words = [WORDS[i] for i in generator.integers(3, 10, generator.integers(2, 24))]
        answer = int(generator.integers(3))
        words[generator.integers(len(words))] = WORDS[answer]
        made.append((" ".join(words), f"has {WORDS[answer]}"))
    return made


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Path:
    """A folder with a checkpoint of random weights and a task's files."""
    folder = tmp_path_factory.mktemp("task")
    tokenizer = tokenizer_training.train(
        [" ".join(WORDS)] * 9, TokenizerConfig(kind="wordpiece"), 66
    )
    config = model_config(vocab_size=66, num_hidden_layers=1, hidden_size=32, initializer_range=0.2)
    model = BertForPreTraining(config)
    params = nn.unbox(model.init_params(jax.random.key(1)))
    pretrained.save(Bert(config, params, tokenizer, model), folder / "init")
    for name, count, seed in (("train", 300, 0), ("dev", 61, 1), ("test", 30, 2)):
        rows = sentences(count, seed)
        lines = [f"{text}\t{label}" for text, label in rows]
        if name == "test":
            lines = [text for text, _ in rows]
        header = "sentence" if name == "test" else "sentence\tlabel"
        (folder / f"{name}.tsv").write_text("\n".join([header, *lines]) + "\n")
    return folder


def command(task: Path, workdir: Path, *flags: str) -> list[str]:
    config = {
        "data.train": task / "train.tsv",
        "data.eval": task / "dev.tsv",
        "data.max_length": 32,
        "data.batch_size": 16,
        "compare": False,
        "epochs": 6.0,
        "log_every": 10,
        "optimizer.learning_rate": 0.01,
    }
    set_here = {flag.split("=")[0].removeprefix("--config.") for flag in flags}
    given = [f"--config.{k}={v}" for k, v in config.items() if k not in set_here]
    init = [] if any(flag.startswith("--init") for flag in flags) else [f"--init={task / 'init'}"]
    return [
        sys.executable,
        str(ROOT / "finetune.py"),
        f"--workdir={workdir}",
        *init,
        *given,
        *flags,
    ]


def run(task, workdir, *flags, devices: int = 1) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(task, workdir, *flags),
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=workdir.parent,
    )


def bert_jax_command(*args, devices: int = 1) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "bert_jax", *map(str, args)],
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="session")
def finished(task, tmp_path_factory) -> tuple[Path, str]:
    """An undisturbed run: its workdir and what it printed."""
    workdir = tmp_path_factory.mktemp("finetuned") / "run"
    done = run(task, workdir, f"--config.data.test={task / 'test.tsv'}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return workdir, done.stdout


def test_what_a_run_leaves_and_prints(finished, task):
    workdir, printed = finished
    results = json.loads((workdir / "results.json").read_text())
    assert results["scores"]["eval"]["accuracy"] > 0.9
    assert "accuracy" not in results["scores"]["test"]
    assert "3 labels: has one, has two, has zero" in printed
    assert "best constant prediction" in printed
    assert "anew: classifier" in printed
    assert results["padding"]["after"] < results["padding"]["before"]
    assert (workdir / "confusion.png").read_bytes().startswith(b"\x89PNG")
    lines = list(map(json.loads, (workdir / "predictions.jsonl").read_text().splitlines()))
    right = [line["prediction"] == line["label"] for line in lines]
    assert np.mean(right) == pytest.approx(results["scores"]["eval"]["accuracy"])
    assert len(lines) == 61
    assert len((workdir / "predictions.test.jsonl").read_text().splitlines()) == 30
    logged = records(workdir / "seed-0")
    assert {record["split"] for record in logged} == {"train", "eval"}
    best = max(record["accuracy"] for record in logged if record["split"] == "eval")
    assert best == results["scores"]["eval"]["accuracy"]


def test_the_result_is_a_checkpoint_that_predicts_the_same(finished, task, tmp_path):
    workdir, _ = finished
    bert = bert_jax.load(workdir)
    assert bert.task.labels == ("has one", "has two", "has zero")
    assert bert.config.hidden_dropout_prob == 0.1
    done = bert_jax_command("predict", workdir, task / "dev.tsv", f"--output={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.jsonl").read_text() == (workdir / "predictions.jsonl").read_text()
    assert "accuracy" in done.stdout


def test_the_same_command_again_trains_nothing(finished, task):
    workdir, _ = finished
    before = (workdir / "results.json").read_text()
    done = run(task, workdir, f"--config.data.test={task / 'test.tsv'}")
    assert done.returncode == 0, done.stderr
    assert "\nstep " not in done.stdout
    assert (workdir / "results.json").read_text() == before


def test_a_killed_run_goes_on_bit_equal(finished, task, tmp_path):
    workdir = tmp_path / "run"
    process = subprocess.Popen(
        command(task, workdir, f"--config.data.test={task / 'test.tsv'}"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    # An evaluation, and the checkpoint that goes with it, come every 19 steps.
    deadline = time.monotonic() + 120
    while not (workdir / "seed-0" / "checkpoints" / "38").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode in (-9, 0)  # the rest of so short a run may be over
    done = run(task, workdir, f"--config.data.test={task / 'test.tsv'}")
    assert done.returncode == 0, done.stderr
    whole, _ = finished
    states = [state_files(folder / "seed-0", STEPS) for folder in (whole, workdir)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][name], err_msg=name)
    for name in ("predictions.jsonl", "predictions.test.jsonl"):
        assert (workdir / name).read_text() == (whole / name).read_text()


def test_eight_devices_predict_the_same(finished, task, tmp_path):
    workdir, _ = finished
    args = ("predict", workdir, task / "dev.tsv", f"--output={tmp_path / 'out'}")
    done = bert_jax_command(*args, devices=8)
    assert done.returncode == 0, done.stderr
    one, eight = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for folder, name in ((workdir, "predictions.jsonl"), (tmp_path, "out.jsonl"))
    )
    assert [line["prediction"] for line in one] == [line["prediction"] for line in eight]
    chances = [[line["probability"] for line in lines] for lines in (one, eight)]
    np.testing.assert_allclose(*chances, atol=2e-6)


def test_several_seeds_and_what_degenerates(task, tmp_path):
    done = run(
        task,
        tmp_path / "run",
        "--config.seeds=2",
        "--config.compare=True",
        "--config.epochs=1.0",
        "--config.optimizer.learning_rate=1e-9",
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert [run["seed"] for run in results["seeds"]] == [0, 1]
    for run_ in results["seeds"]:
        assert run_["degenerate"] == (
            run_["best"]["accuracy"]
            <= next(r for r in results["summary"] if "constant" in r["name"])["scores"]["accuracy"]
        )
    for name in ("mean", "random weights", "TF-IDF"):
        assert name in done.stdout
    tfidf = next(row for row in results["summary"] if "TF-IDF" in row["name"])
    assert tfidf["scores"]["accuracy"] > 0.9


def test_mnli_has_two_sets_of_each_kind(task, tmp_path):
    folder = tmp_path / "MNLI"
    folder.mkdir()
    names = ["entailment", "neutral", "contradiction"]
    sizes = {"train": 64, "dev_matched": 9, "dev_mismatched": 7, "test_matched": 12}
    for split, count in (sizes | {"test_mismatched": 5}).items():
        labelled = not split.startswith("test")
        lines = ["index\tsentence1\tsentence2" + "\tgold_label" * labelled]
        for i, (text, _) in enumerate(sentences(count, seed=3)):
            first, _, second = text.partition(" ")
            lines.append(f"{i}\t{first}\t{second}" + f"\t{names[i % 3]}" * labelled)
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    glue = f"--config={ROOT / 'configs/finetune/glue.py'}:mnli"
    flags = ["--config.epochs=1.0", f"--config.data.train={folder}", "--config.data.eval="]
    done = run(task, tmp_path / "run", glue, *flags)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["task"]["labels"] == ["entailment", "neutral", "contradiction"]
    assert list(results["scores"]) == ["matched", "mismatched", "test_matched", "test_mismatched"]
    assert "accuracy" in results["scores"]["mismatched"]
    for name, count in {"": 9, ".mismatched": 7, ".test_matched": 12}.items():
        lines = (tmp_path / f"run/predictions{name}.jsonl").read_text().splitlines()
        assert len(lines) == count


def test_early_stopping(task, tmp_path):
    done = run(
        task,
        tmp_path / "run",
        "--config.patience=1",
        "--config.log_every=1000",
        "--config.optimizer.learning_rate=1e-9",
        "--config.optimizer.warmup_fraction=0.0",
    )
    assert done.returncode == 0, done.stderr
    evaluated = [r["step"] for r in records(tmp_path / "run/seed-0") if r["split"] == "eval"]
    assert evaluated == [19, 38]


def test_a_probe_leaves_the_encoder_as_it_is(task, tmp_path):
    done = run(task, tmp_path / "run", "--config.probe=mix", "--config.epochs=1.0")
    assert done.returncode == 0, done.stderr
    before, after = bert_jax.load(task / "init"), bert_jax.load(tmp_path / "run")
    encoder = {k: v for k, v in before.params["bert"].items() if k != "pooler"}
    jax.tree.map(np.testing.assert_array_equal, encoder, after.params["bert"])
    assert np.abs(after.params["mix"]).max() > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.data.text=text"], "has no column 'text'; set data.text"),
        (["--config.data.batchsize=3"], "batchsize"),
    ],
)
def test_a_mistake_is_one_line(task, tmp_path, flags, message):
    done = run(task, tmp_path / "run", *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_the_head_of_another_task_is_refused(finished, task, tmp_path):
    workdir, _ = finished
    labels = "('has zero','has one','has two')"
    done = run(task, tmp_path / "run", f"--init={workdir}", f"--config.task.labels={labels}")
    assert done.returncode == 2
    assert "the order counts" in done.stderr
    done = run(task, tmp_path / "run", f"--init={workdir}", "--config.epochs=1.0")
    assert done.returncode == 0, done.stderr
    assert "anew: none" in done.stdout
    first = next(r for r in records(tmp_path / "run/seed-0") if r["split"] == "train")
    assert first["accuracy"] > 0.8
