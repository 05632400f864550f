"""The `bert-jax` command: help, results, and mistakes in one line."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bert_jax(*words) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "bert_jax", *map(str, words)],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "words", [(), ("prepare",), ("fill-mask",), ("import",), ("export",), ("embed",)]
)
def test_help(words):
    shown = bert_jax(*words, "--help")
    assert shown.returncode == 0
    assert "usage: bert-jax" in shown.stdout


def test_prepare_and_its_mistakes(tmp_path):
    lines = "One sentence.\nAnother sentence.\nA third one.\n\n" * 40
    (tmp_path / "text.txt").write_text(lines)
    options = ["--tokenizer=wordpiece", "--vocab-size=40"]
    made = bert_jax("prepare", tmp_path / "text.txt", tmp_path / "store", *options)
    assert made.returncode == 0, made.stderr
    assert "training: " in made.stdout
    # The printed command trains on the store, whatever the size of its vocabulary.
    command = shlex.split(made.stdout.partition("train on it with: ")[2])
    options = {"steps": 2, "data.batch_size": 8, "model.hidden_size": 16}
    flags = [f"--config.{name}={value}" for name, value in options.items()]
    trained = subprocess.run(
        [sys.executable, "-m", "bert_jax", *command[1:], f"--workdir={tmp_path / 'run'}", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert trained.returncode == 0, trained.stderr
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["model"]["vocab_size"] == 40
    for words, message in (
        (("prepare", tmp_path / "none.txt", tmp_path / "other"), "does not exist"),
        (("prepare", tmp_path / "text.txt", tmp_path / "store"), "another tokenizer"),
        (("prepare", tmp_path / "text.txt", tmp_path / "other", "--vocab-size=9999"), "suit"),
        (("prepare", tmp_path / "text.txt", tmp_path / "other", "--tokenizer=x.model"), "x.model"),
        (("prepare", tmp_path / "text.txt", tmp_path / "o", "--eval-fraction=2"), "eval_fraction"),
        (("fill-mask", tmp_path / "none", "a [MASK]"), "does not exist"),
        (("fill-mask", tmp_path, "a [MASK]"), "holds no checkpoint"),
        (("no-such-command",), "invalid choice"),
    ):
        failed = bert_jax(*words)
        assert failed.returncode == 2, words
        assert message in failed.stderr
        assert "Traceback" not in failed.stderr
