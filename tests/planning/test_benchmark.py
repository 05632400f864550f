"""The benchmark: its figures against each other, and what it refuses."""

import argparse
import dataclasses
import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import model_config, train_batches

from bert_jax.batches import loader
from bert_jax.commands import benchmark as command
from bert_jax.commands.flags import Recipe
from bert_jax.config import DataConfig, ParallelConfig, TokenizerConfig, TrainConfig
from bert_jax.config.schedule import make_schedule
from bert_jax.distributed.mesh import make_mesh
from bert_jax.errors import TrainingError, UserError
from bert_jax.planning import benchmark, machine
from bert_jax.text import prepare

STEPS = 4


def no_log(_: str) -> None:
    """Print nothing."""


@pytest.fixture(scope="module", autouse=True)
def small_matmuls():
    """Large ones take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_MATMUL_SIZES", {"cpu": (64,)})
        patch.setattr(machine, "_ROUND_SECONDS", 0.01)
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A config, its corpus, its measurement with text, and the folder of the trace."""
    folder = tmp_path_factory.mktemp("text")
    lines = (f"word {n} and {n * n} of them.\n" + "\n" * (n % 5 == 0) for n in range(2000))
    (folder / "text.txt").write_text("".join(lines))
    data = DataConfig(source=str(folder / "text.txt"), max_length=32, batch_size=16)
    corpus = prepare.prepare(data, TokenizerConfig(kind="wordpiece"), 100, folder / "store")
    config = TrainConfig(model=model_config(num_hidden_layers=1), data=data)
    phase = make_schedule(config).stages[0]
    trace = folder / "trace"
    result = benchmark.measure(config, phase, corpus, no_log, steps=STEPS, trace_folder=str(trace))
    return config, corpus, result, trace


def test_rates_follow_from_the_time_of_a_step(measured):
    result = json.loads(json.dumps(measured[2]))
    for kind in ("random", "text"):
        each = result[kind]
        step = each["step_seconds"]
        assert each["steps"] == STEPS
        assert 0 < step["lower_quartile"] <= step["median"] <= step["upper_quartile"]
        assert each["sequences_per_second"] == pytest.approx(16 / step["mean"])
        tokens = 32 * each["sequences_per_second"] * (1 - each["padding"])
        assert each["tokens_per_second"] == pytest.approx(tokens)
        # Of a layer 24 D² + 12 D F + 12 D S a token, and the heads: D 16, F 32, S 32, P 5, V 100.
        flops = 32 * (24 * 256 + 12 * 16 * 32 + 12 * 16 * 32) + 6 * 5 * (256 + 1600) + 6 * 256
        flops *= each["sequences_per_second"]
        assert each["model_flops_per_second"] == pytest.approx(flops)
        assert each["mfu_of_matmul"] == pytest.approx(flops / result["matmul_flops_per_second"])
        assert each["mfu"] is None  # the peak of a CPU is unknown
    assert (result["devices"], result["platform"]) == (8, "cpu")
    assert 0 < result["compile_seconds"]["cached"] < result["compile_seconds"]["cold"]
    assert result["peak_memory_bytes"] > result["compiler_memory_bytes_per_device"] > 0
    assert result["config"]["model"]["hidden_size"] == 16


def test_padding_is_that_of_the_batches(measured):
    """Those that were timed come after the first six."""
    config, corpus, result, _ = measured
    batches = train_batches(corpus, config)
    masks = [batches[6 + number]["attention_mask"] for number in range(STEPS)]
    assert 1 - result["text"]["padding"] == pytest.approx(np.mean(masks))
    assert 0.01 < result["text"]["padding"] < 0.5
    assert result["random"]["padding"] == 0


def test_padding_of_packed_sequences(measured, monkeypatch):
    """Their mask numbers the segments."""
    batch = {"attention_mask": np.array([[1, 1, 1, 0], [2, 1, 1, 1]])}
    monkeypatch.setattr(loader, "TrainBatches", lambda *_: None)
    monkeypatch.setattr(loader, "prefetch", lambda *_: [batch])
    config, mesh = TrainConfig(), make_mesh(devices=jax.devices()[:1])
    phase = make_schedule(config).stages[0]
    ((_, padding),) = benchmark.text_batches(measured[1], config, phase, mesh)
    assert padding == 1 / 8


def test_trace(measured):
    assert list(Path(measured[3]).rglob("*.xplane.pb"))


def test_text_of_a_result(measured):
    shown = benchmark.as_text(measured[2], "mine")
    assert shown.startswith("mine: 16 sequences of 32 per step, 5 predictions each\n")
    assert "sequences                             random          text\n" in shown
    assert "MFU of the datasheet       %         unknown       unknown\n" in shown
    alone = {name: value for name, value in measured[2].items() if name != "text"}
    assert "text" not in benchmark.as_text(alone, "mine")


def run(monkeypatch, config: TrainConfig, *words: str) -> None:
    monkeypatch.setattr(command, "read_config", lambda *_: Recipe(config, "small", ()))
    monkeypatch.setattr(command, "keep_host_memory", lambda: None)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    command.run(parser.parse_args(words), [])


def test_no_text_is_needed(monkeypatch, capsys):
    """The built-in text has fewer than the 30,522 tokens of the vocabulary."""
    monkeypatch.setattr(machine, "compile_twice", lambda compile_step: (compile_step(), 1.0, None))
    config = TrainConfig(
        model=dataclasses.replace(model_config(num_hidden_layers=1), vocab_size=30522),
        data=DataConfig(max_length=32, batch_size=8),
    )
    run(monkeypatch, config, "--steps=2", "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["random"]["steps"] == 2
    assert "text" not in result


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--phase=2"], "the config has phases 1 to 1"),
        (["--steps=0"], "must be positive"),
        (["--profile=/proc/none"], "cannot be written"),
    ],
)
def test_refused_flags(words, message, monkeypatch):
    with pytest.raises(UserError, match=message):
        run(monkeypatch, TrainConfig(), *words)


def test_refused_configs(monkeypatch, tmp_path):
    with pytest.raises(UserError, match="is not measured"):
        run(monkeypatch, TrainConfig(parallel=ParallelConfig(mode="pmap")))
    (tmp_path / "empty.txt").write_text("")
    empty = TrainConfig(data=DataConfig(source=str(tmp_path / "empty.txt")))
    with pytest.raises(UserError, match="has no text"):
        run(monkeypatch, empty, "--text")
    with pytest.raises(UserError, match="not a multiple of the 8 devices"):
        run(monkeypatch, TrainConfig(data=DataConfig(batch_size=3)))


class Result:
    """Ready some time after it was asked for, as a device's is."""

    def __init__(self, before: "Result | None", seconds: float, total: float = 1.0):
        now = time.perf_counter()
        self._at = max(now, before._at if before else now) + seconds
        self.total = total

    def block_until_ready(self):
        time.sleep(max(0.0, self._at - time.perf_counter()))
        return self


def step_of(seconds: float, total: float = 1.0):
    """Return a step of so many seconds, which begins when the one before has ended."""

    def step(state, batch):
        done = Result(state, seconds)
        return done, {"loss": SimpleNamespace(total=total), "done": done}

    return step


def slow_batches(seconds: float):
    for _ in itertools.count():
        time.sleep(seconds)
        yield {}, 1 / 8


def test_times_of_steps():
    batches = iter([({}, 0.0), ({}, 0.25)] * 5)
    _, seconds, padding = benchmark.take_steps(step_of(0.02), None, batches, 10, 60.0)
    assert len(seconds) == 10
    assert seconds.sum() >= 10 * 0.02
    assert padding == pytest.approx(1 / 8)


def test_slow_batches_make_slow_steps():
    _, seconds, _ = benchmark.take_steps(step_of(0.01), None, slow_batches(0.03), 8, 60.0)
    assert seconds.mean() >= 0.03


def test_steps_end_in_time():
    _, seconds, _ = benchmark.take_steps(step_of(0.02), None, slow_batches(0.0), 10_000, 0.2)
    assert 1 <= len(seconds) < 25
    _, seconds, _ = benchmark.take_steps(step_of(0.02), None, slow_batches(0.0), 10_000, 1e-9)
    assert len(seconds) == 1


def test_a_loss_that_is_not_finite():
    with pytest.raises(TrainingError, match="loss is nan at step 1"):
        benchmark.take_steps(step_of(0.0, float("nan")), None, slow_batches(0.0), 3, 60.0)
