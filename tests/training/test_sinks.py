"""Metrics in TensorBoard and Weights & Biases: kept, resumed, and never the end of a run."""

import functools
import sys
import types

import pytest

from bert_jax import TrainConfig, UserError, console
from bert_jax.training import sinks
from bert_jax.training.metrics import Writer


class FakeRun:
    """What `wandb.init` returns, with what is done to it."""

    offline, url = False, "https://server/run"

    def __init__(self, options, fails_at):
        self.options, self.fails_at, self.rows = options, fails_at, []
        self.id, self.exit_code = options["id"] or "made-here", None

    def log(self, values, step):
        if step == self.fails_at:
            raise ConnectionError("the server\nis away")
        self.rows.append((step, values))

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    """A module `wandb`, whose runs are in `runs`."""
    module: types.Any = types.ModuleType("wandb")
    module.runs, module.fails_at, module.Settings = [], None, dict

    def init(**options):
        module.runs.append(FakeRun(options, module.fails_at))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_run_without_records_leaves_no_file_of_tensorboard(tmp_path):
    sink = sinks.TensorBoard(tmp_path, 0, CONFIG)
    sink.close(succeeded=True)
    assert not any(tmp_path.iterdir())


SHOWN = functools.partial(console.output, console.Level.PROGRESS)
CONFIG = TrainConfig(log_to=("wandb",))


def test_a_service_of_ones_own_may_need_no_package(monkeypatch):
    class Lines(sinks.Sink):
        def __init__(self, *run): ...

    monkeypatch.setitem(sinks.SERVICES, "lines", Lines)
    sinks.check(["lines"])
    Lines.package = "no_such_package"
    with pytest.raises(UserError, match=r"lines, which is not installed; .*\[no_such_package\]"):
        sinks.check(["lines"])


def test_a_resumed_run_continues_the_run_of_the_service(wandb, tmp_path, capsys):
    for first in (0, 10, 0):  # the last one begins anew
        with SHOWN(), Writer(tmp_path, first, CONFIG, lambda step: {"tokens": step * 8}) as writer:
            writer.write(first + 10, "train", {"loss": 1.0})
            writer.write(first + 10, "eval", {"loss": 2.0})
    begun, resumed, anew = wandb.runs
    assert [run.options["id"] for run in wandb.runs] == [None, "made-here", None]
    assert begun.options["config"]["optimizer"]["learning_rate"] == 1e-4
    (step, trained), (_, held_out) = resumed.rows
    assert (step, trained["train/loss"], trained["train/tokens"]) == (20, 1.0, 160)
    assert trained["train/seconds"] > 0
    assert held_out == {"eval/loss": 2.0}
    assert anew.exit_code == 0
    assert capsys.readouterr().out == "wandb      https://server/run\n" * 3


def test_a_service_that_fails_does_not_end_the_run(wandb, tmp_path, capsys):
    wandb.fails_at = 10
    with Writer(tmp_path, 0, CONFIG) as writer:
        writer.write(10, "train", {"loss": 1.0})
        writer.write(20, "train", {"loss": 1.0})
        writer.write(30, "train", {"loss": 1.0})
    printed = capsys.readouterr().out
    assert printed.count("is no longer written (the server is away); the run continues") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_run_that_ends_by_an_error_is_kept_as_failed(wandb, tmp_path):
    with pytest.raises(KeyboardInterrupt), Writer(tmp_path, 0, CONFIG):
        raise KeyboardInterrupt
    assert wandb.runs[0].exit_code == 1


def test_a_missing_package_is_refused_also_beside_a_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb").mkdir()  # as W&B makes it
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match=r"pip install 'bert-jax\[wandb\]'"):
        sinks.check(["wandb"])


@pytest.mark.parity
def test_wandb_offline(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for first in (0, 10):
        with SHOWN(), Writer(tmp_path, first, CONFIG) as writer:
            writer.write(10 + first, "train", {"loss": 1.0})
    id = (tmp_path / "wandb.id").read_text().strip()
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{id}*/run-{id}.wandb"))) == 2
    printed = capfd.readouterr()
    assert printed.out.count("wandb      ") == 2
    assert "no longer" not in printed.out
    assert not printed.err
