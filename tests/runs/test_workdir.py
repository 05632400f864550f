"""The workdir of a run: whose it is, and what the run resumes with."""

import dataclasses
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers import refused

from bert_jax.bert import Bert
from bert_jax.config import DataConfig, FinetuneConfig, ModelConfig, TrainConfig, settings
from bert_jax.config.validation import validate
from bert_jax.errors import TrainingError, UserError
from bert_jax.runs import origin, workdir
from bert_jax.storage import locks
from bert_jax.training import checkpoint


@pytest.mark.parametrize("saved", ["float32", "bfloat16"])
def test_auto_resumes_with_the_dtype_that_the_run_began_with(tmp_path, saved):
    """Whatever the processor on which it resumes prefers."""
    auto, fixed = (TrainConfig(model=ModelConfig(dtype=d)) for d in ("auto", "float32"))
    workdir.resume_settings(auto, workdir.read(tmp_path, TrainConfig))
    assert auto.model.dtype == "auto"
    began = TrainConfig(model=ModelConfig(dtype=saved))
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    (tmp_path / "config.json").write_text(settings.to_json(began))
    for config, expected in ((auto, saved), (fixed, "float32")):
        workdir.resume_settings(config, workdir.read(tmp_path, TrainConfig))
        assert config.model.dtype == expected


def claim(folder: Path, config: TrainConfig) -> None:
    (folder / "config.json").write_text(settings.to_json(config))
    (folder / "text.sha256").write_bytes(b"\xff of other text")


def test_a_run_without_a_checkpoint_owns_nothing(tmp_path):
    claim(tmp_path, TrainConfig(seed=1))
    workdir.check(workdir.read(tmp_path, TrainConfig), TrainConfig(seed=2))
    workdir.check_text(workdir.read(tmp_path, TrainConfig), "0" * 64)


def test_a_run_in_a_subfolder_is_another(tmp_path):
    """The folder around it is no run, and one that was begun there may be replaced."""
    around, began = tmp_path / "around", tmp_path / "began"
    for folder in (around, began):
        (folder / "other/checkpoints/6").mkdir(parents=True)
    claim(began, TrainConfig(seed=1))
    for folder in (around, began):
        workdir.check(workdir.read(folder, TrainConfig), TrainConfig(seed=2))


@pytest.mark.parametrize(
    ("kind", "file"), [(TrainConfig, "checkpoints/4/x"), (FinetuneConfig, "seed-0/result.json")]
)
def test_a_run_without_its_config_is_refused(tmp_path, kind, file):
    """Of which nobody could tell whether it is the run that the command means."""
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    with refused("has a run, and no config.json that says which; restore it, or choose another"):
        workdir.read(tmp_path, kind)


@pytest.mark.parametrize("name", ["config.json", "results.json"])
def test_a_file_of_a_copy_is_named_as_that_of_the_bucket(tmp_path, monkeypatch, name):
    """The copy is fetched again whenever a command starts."""
    copy, there = tmp_path / "copy", tmp_path / "bucket"
    (there / "checkpoints/4/state").mkdir(parents=True)
    copy.mkdir()
    claim(copy, TrainConfig())
    (copy / name).write_text("{")
    monkeypatch.setattr(workdir.mirror, "address", lambda _: there)
    with refused(f"{there / name} cannot be read"):
        workdir.read(copy, TrainConfig)


def test_a_folder_of_numbered_folders_has_no_checkpoints(tmp_path):
    (tmp_path / "1").mkdir()
    assert workdir.read(tmp_path, TrainConfig).config is None
    (tmp_path / "1/state").mkdir()
    with refused("is the folder of a run's checkpoints; give the folder of the run"):
        workdir.read(tmp_path, TrainConfig)


@pytest.mark.parametrize("config", [TrainConfig(), FinetuneConfig()])
def test_the_folder_of_another_model_is_refused(tmp_path, config):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "vocab_size": 30522}')
    with pytest.raises(UserError, match=r"config.json that no run wrote"):
        workdir.read(tmp_path, type(config))
    (tmp_path / "notes.txt").write_text("of mine")
    (tmp_path / "config.json").write_text(settings.to_json(config))
    workdir.check(workdir.read(tmp_path, type(config)), config)


@pytest.mark.parametrize(
    "file",
    [
        *("results.json", "tensorboard/events", "tokenizer/vocab.txt", "curves.png"),
        *("best/params", "predictions.conll", "store.json"),
    ],
)
def test_files_that_no_run_wrote_are_not_replaced(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("mine")
    with refused(f"has a {file.split('/')[0]}, and no config.json of a run; choose"):
        workdir.read(tmp_path, TrainConfig)
    (tmp_path / "config.json").write_text(settings.to_json(TrainConfig()))
    assert workdir.read(tmp_path, TrainConfig).config is None  # of a run without a checkpoint


def test_the_checkpoints_of_a_run_are_no_workdir(tmp_path):
    (tmp_path / "run/checkpoints/4/state").mkdir(parents=True)
    with refused("is the folder of a run's checkpoints; give the folder of the run"):
        workdir.read(tmp_path / "run/checkpoints", TrainConfig)


def test_files_are_utf8_in_any_locale(tmp_path):
    code = "from pathlib import Path; from bert_jax.distributed import hosts; "
    code += f"hosts.write_on_main(Path({str(tmp_path)!r}) / 'x', '\\u0928\\u0924')"
    plain = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **plain}, check=True)
    assert (tmp_path / "x").read_bytes() == "नत".encode()


@pytest.mark.parametrize("checkpoint", ["checkpoints/6", "seed-0/checkpoints/6"])
def test_a_run_with_a_checkpoint_owns_its_workdir(tmp_path, checkpoint):
    claim(tmp_path, TrainConfig(seed=1))
    (tmp_path / checkpoint).mkdir(parents=True)
    (tmp_path / "checkpoints/²").mkdir(parents=True)  # a digit, and no number to Python
    with pytest.raises(UserError, match="belongs to another config: seed is 1 there and 2 here"):
        workdir.check(workdir.read(tmp_path, TrainConfig), TrainConfig(seed=2))
    with pytest.raises(UserError, match="was trained on other text"):
        workdir.check_text(workdir.read(tmp_path, TrainConfig), "0" * 64)


def test_what_cannot_be_a_workdir_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for name in ("state", "tokenizer", "config"):
        (tmp_path / "checkpoint" / name).mkdir(parents=True)
    for path, key_words in (
        (tmp_path / "file/run", "is no writable folder; choose another"),
        (tmp_path / "checkpoint", "is a checkpoint; choose another folder"),
    ):
        with refused(key_words):
            workdir.check(workdir.read(path, TrainConfig), TrainConfig())


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with locks.locked(tmp_path):
        pass
    assert "cannot be locked (No locks available); run one command on it" in capsys.readouterr().out


@pytest.mark.parametrize("gone", [[True], [False, True]])
def test_every_host_reads_the_run_where_one_lacks_init(tmp_path, monkeypatch, gone):
    """With the config of the run: its checkpoint is of a phase with another rotary base."""
    began = dataclasses.replace(ModelConfig(), hidden_size=64)
    read = Mock(return_value=Bert(dataclasses.replace(began, hidden_size=32), {}, None, None))
    monkeypatch.setattr(origin, "load", read)
    monkeypatch.setattr(origin.hosts, "gather", lambda own: [*gone[:-1], own or gone[-1]])
    run = workdir.Workdir(
        tmp_path, tmp_path, TrainConfig(model=began), (4, 8), None, {"init": "of others"}
    )
    found = origin._initial_model(tmp_path / ("none" if gone == [True] else ""), run)
    read.assert_called_once_with(tmp_path / "checkpoints" / "8")
    assert found.config == began


@pytest.mark.parametrize(("init", "is_loaded"), [("hf:a/b", False), ("hf:a/c", True)])
def test_a_run_that_began_with_a_model_of_the_hub_resumes_without_it(
    tmp_path, monkeypatch, init, is_loaded
):
    read = Mock(return_value=Bert(ModelConfig(), {}, None, None))
    monkeypatch.setattr(origin, "load", read)
    run = workdir.Workdir(tmp_path, tmp_path, TrainConfig(), (4,), None, {"init": "hf:a/b"})
    origin._initial_model(init, run)
    read.assert_called_once_with(init if is_loaded else tmp_path / "checkpoints" / "4")


@pytest.mark.parametrize("is_new", [True, False])
def test_two_runs_that_start_together_share_no_workdir(tmp_path, tokenizer, is_new):
    """Each reads the workdir before one of them locks it; the second must not claim it too."""
    if not is_new:
        claim(tmp_path, TrainConfig())
    first, second = (workdir.read(tmp_path, TrainConfig) for _ in range(2))
    workdir.claim(first, TrainConfig(seed=1), tokenizer, "0" * 64)
    before = (tmp_path / "config.json").read_bytes()
    with refused("another run has used --workdir", "give the command again"):
        workdir.claim(second, TrainConfig(seed=2), tokenizer, "1" * 64)
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_workdir_has_one_run_at_a_time(tmp_path):
    folder = tmp_path / "run"
    with workdir.hold(folder):
        other = workdir.hold(folder)
        held = rf"run is in use by process {os.getpid()} on {socket.gethostname()};"
        with pytest.raises(UserError, match=held):
            other.__enter__()
        (folder / "config.json").write_text("{")  # half-written
        for kind in (TrainConfig, FinetuneConfig):
            with pytest.raises(UserError, match=held):
                workdir.read(folder, kind)
    (folder / "config.json").unlink()
    assert workdir.read(folder, TrainConfig).config is None
    with workdir.hold(folder):
        pass


def test_what_cannot_be_written_ends_the_run(tmp_path):
    wrong = pytest.raises(TrainingError, match=r"missing/file: No such file")
    with wrong, workdir.hold(tmp_path):
        (tmp_path / "missing/file").write_text("")


def test_texts_of_a_user_may_have_the_name_of_those_from_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text('{"text": "a"}')
    names = ("./texts.jsonl", "*/texts.jsonl", "https://host/texts.jsonl", "/gone/texts.jsonl")
    own, *others = (TrainConfig(data=DataConfig(source=name)) for name in names)
    moved = workdir.with_own_texts(others[-1], tmp_path)
    assert moved.data.source == str(tmp_path / "texts.jsonl")
    for config in others:
        assert workdir.has_same_text(config, config)
        assert not workdir.has_same_text(config, own)
    assert workdir.has_same_text(own, moved)
    workdir.check_same_run(own, moved, tmp_path)
    with refused("belongs to another config: data.source is"):
        workdir.check_same_run(own, others[0], tmp_path)


def test_a_run_that_resumes_reads_its_workdir_once(tmp_path, monkeypatch):
    """In a bucket, each listing is a request."""
    claim(tmp_path, began := TrainConfig(seed=1))
    (tmp_path / "checkpoints/6").mkdir(parents=True)
    calls = []
    for module, name in ((workdir, "read_json"), (checkpoint, "list_steps")):
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, f=function: (calls.append(f.__name__), f(*args))[1]
        )
    found = workdir.read(tmp_path, TrainConfig)
    as_list = dataclasses.replace(began, log_to=[])  # as of a model in memory
    assert origin.resolve(as_list, found, validate).log_to == ()
    assert (found.config, found.steps) == (began, (6,))
    assert sorted(calls) == ["list_steps", "read_json"]


def test_a_run_of_the_other_kind_is_named(tmp_path):
    for kind, name in ((TrainConfig, "pretraining"), (FinetuneConfig, "fine-tuning")):
        (tmp_path / "config.json").write_text(settings.to_json(kind()))
        other = FinetuneConfig if kind is TrainConfig else TrainConfig
        with refused(f"{tmp_path} has a run of {name}; choose another folder for"):
            workdir.read(tmp_path, other)
        assert workdir.read(tmp_path, kind).config is None  # without a checkpoint


def test_a_folder_that_host_0_does_not_write_to_is_refused(tmp_path, monkeypatch):
    second = SimpleNamespace(
        count=lambda: 2,
        is_main=lambda: False,
        broadcast_from_main=lambda function: function(),
        run_on_all_hosts=lambda function: function(),
    )
    monkeypatch.setattr(workdir, "hosts", second)
    monkeypatch.setattr(workdir, "_SEEN_WITHIN", 0)
    with refused("is not the folder that host 0 writes to"):
        workdir.check_shared(tmp_path)
