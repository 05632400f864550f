"""The wheel: its contents, and the commands of it in an empty folder."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from training_runs import pretraining_flags

from bert_jax import __version__
from bert_jax.commands.main import COMMANDS as NAMES

ROOT = Path(__file__).parents[1]
# Several commands in one process, with one list of words after another.
COMMANDS = """
import json, sys
from bert_jax.commands.main import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["bert-jax", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    names = "bert_jax", "configs", "tests/compatibility"
    for name in names:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    options = ["--no-deps", "--no-build-isolation", "--quiet", f"--wheel-dir={folder}"]
    pip("wheel", *options, str(folder / "source"))
    (path,) = folder.glob("bert_jax-*.whl")
    return path


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", *words, "--disable-pip-version-check", "--no-index"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {path.relative_to(ROOT) for path in (ROOT / "bert_jax").rglob("*.py")}
    sources |= {Path("bert_jax") / p.relative_to(ROOT) for p in (ROOT / "configs").rglob("*.py")}
    assert {path.as_posix() for path in sources} <= names
    assert "bert_jax/py.typed" in names
    viewer = (ROOT / "bert_jax/viewer").glob("page.*")
    assert {f"bert_jax/viewer/{path.name}" for path in viewer} <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"bert_jax"}


def test_every_command_works_in_an_empty_folder(wheel, tmp_path, tiny_text):
    packages, folder = tmp_path / "packages", tmp_path / "empty"
    folder.mkdir()
    pip("install", "--no-deps", "--quiet", f"--target={packages}", str(wheel))

    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            env={
                **os.environ,
                "PYTHONPATH": str(packages),
                "PYTHONSAFEPATH": "1",
                "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1"),
            },
            capture_output=True,
            text=True,
            cwd=folder,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    small = pretraining_flags(tiny_text, "--config.steps=2", "--config.tokenizer.kind=wordpiece")
    examples = "The river bank.\tfirst\nA model reads.\tsecond\n" * 14
    (folder / "train.tsv").write_text("sentence\tlabel\n" + examples)
    fields = {"data.train": "train.tsv", "data.max_length": 32, "data.batch_size": 8, "epochs": 1}
    task = [f"--config.{name}={value}" for name, value in fields.items()]
    recipe = "--config=finetune/classification"
    words = [
        *([name, "--help"] for name in NAMES),
        ["pretrain", "--config=tiny", "--workdir=run", *small],
        ["finetune", recipe, "--init=run", "--workdir=task", "--num_processes=1", *task],
        ["fill-mask", "run", "The [MASK] bank."],
        ["predict", "task", "train.tsv"],
        ["embed", "run", "train.tsv", "--column=sentence", "--output=vectors.npz"],
        ["export", "run", "exported"],
        ["import", "exported", "imported"],
    ]
    assert run(str(packages / "bin/bert-jax"), "--version") == f"bert-jax {__version__}\n"
    printed = run(sys.executable, "-c", COMMANDS, json.dumps(words))
    assert "unigram entropy" in printed
    assert "best constant prediction" in printed
    for name in NAMES:
        assert f"usage: bert-jax {name}" in printed
    assert "BertForPreTraining" in printed
    assert "28 examples: predictions.jsonl" in printed
    created = {"run", "task", "train.tsv", "predictions.jsonl", "vectors.npz", "exported"}
    assert {path.name for path in folder.iterdir()} == created | {"imported"}
