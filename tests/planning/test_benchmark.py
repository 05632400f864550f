"""The benchmark: its figures against each other, and what it refuses."""

import dataclasses
import json
import time

import pytest
from helpers import model_config, refused
from visible_devices import visible_devices

from bert_jax.commands import benchmark as command
from bert_jax.commands.flags import Recipe
from bert_jax.config import DataConfig, ParallelConfig, TrainConfig
from bert_jax.config.schedule import make_schedule
from bert_jax.errors import TrainingError, UserError
from bert_jax.planning import benchmark

STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def small_matmuls():
    """Large ones take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "_MATMUL_SIZES", {"cpu": (64,)})
        patch.setattr(benchmark, "_ROUND_SECONDS", 0.01)
        patch.setattr(benchmark, "_COPIED", {"cpu": 1 << 20})
        yield


def measure(trace, **limits):
    """Measure a small step, and write a trace."""
    config = TrainConfig(
        model=model_config(num_hidden_layers=1), data=DataConfig(max_length=32, batch_size=16)
    )
    stage = make_schedule(config).stages[0]
    return benchmark.measure(config, stage, steps=STEPS, trace_folder=str(trace), **limits)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A measurement on eight devices, and the folder of the trace."""
    trace = tmp_path_factory.mktemp("trace")
    with visible_devices(8):
        return measure(trace), trace


def test_rates_follow_from_the_time_of_a_step(measured):
    result = json.loads(json.dumps(measured[0]))
    each = result["random"]
    step = each["step_seconds"]
    assert each["steps"] == STEPS
    assert min(step.values()) > 0
    assert each["sequences_per_second"] == pytest.approx(16 / step["mean"])
    assert each["tokens_per_second"] == pytest.approx(32 * each["sequences_per_second"])
    # Of a layer 24 D² + 12 D F + 12 D S a token, and the heads: D 16, F 32, S 32, P 5, V 100.
    flops = 32 * (24 * 256 + 12 * 16 * 32 + 12 * 16 * 32) + 6 * 5 * (256 + 1600) + 6 * 256
    flops *= each["sequences_per_second"]
    assert each["model_flops_per_second"] == pytest.approx(flops)
    assert each["mfu_of_matmul"] == pytest.approx(flops / result["matmul_flops_per_second"])
    assert each["mfu"] is None  # the peak of a CPU is unknown
    assert (result["devices"], result["platform"]) == (8, "cpu")
    assert result["compile_seconds"] > 0
    assert result["peak_memory_bytes"] > result["compiler_memory_bytes_per_device"] > 0
    assert result["config"]["model"]["hidden_size"] == 16
    assert list(measured[1].rglob("*.xplane.pb"))


def test_text_of_a_result(measured):
    shown = benchmark.as_text(measured[0], "mine")
    assert shown.startswith("mine: 16 sequences of 32 per step, 5 predictions each\n")
    assert "MFU of the datasheet    unknown\n" in shown
    assert "\nmatmuls " in shown
    assert "\noptimizer " in shown


@pytest.mark.devices(8)
def test_bytes_are_those_of_one_step_where_the_time_is_short(measured, tmp_path):
    moved = measure(tmp_path, seconds=1e-9)["kinds"]["optimizer"]["bytes"]
    assert moved == pytest.approx(measured[0]["kinds"]["optimizer"]["bytes"], rel=0.05)


def test_kinds_of_operations_are_the_whole_step(measured):
    kinds = measured[0]["kinds"]
    assert sum(each["share"] for each in kinds.values()) == pytest.approx(1)
    assert {"matmuls", "optimizer", "normalization", "dropout", "communication"} <= kinds.keys()
    # It reads and writes each parameter and its two moments.
    assert kinds["optimizer"]["bytes"] > 6 * 4 * measured[0]["parameters"]


@pytest.fixture
def run(monkeypatch, bert_jax_main):
    """Run the command with a config, and return what it prints."""

    def run_with(config: TrainConfig, *words: str) -> str:
        monkeypatch.setattr(command, "read_config", lambda *_: Recipe(config, "small"))
        monkeypatch.setattr(command, "keep_host_memory", lambda: None)
        return bert_jax_main("benchmark", *words)

    return run_with


def test_no_text_is_needed(run):
    """The built-in text has fewer than the 30,522 tokens of the vocabulary."""
    config = TrainConfig(
        model=dataclasses.replace(model_config(num_hidden_layers=1), vocab_size=30522),
        data=DataConfig(max_length=32, batch_size=8),
    )
    result = json.loads(run(config, "--steps=2", "--json"))
    assert result["random"]["steps"] == 2


@pytest.mark.parametrize(
    ("config", "words", "key_words"),
    [
        (TrainConfig(), ["--phase=2"], "the config has phases 1 to 1"),
        (TrainConfig(), ["--steps=0"], "must be positive"),
        (TrainConfig(), ["--profile=/proc/none"], "cannot be written"),
        (TrainConfig(), ["--profile=gs://bucket/a"], "is not on a disk"),
        (TrainConfig(parallel=ParallelConfig(mode="pmap")), [], "is not measured"),
        pytest.param(
            TrainConfig(data=DataConfig(batch_size=3)),
            [],
            "not a multiple of the 8 devices",
            marks=pytest.mark.devices(8),
        ),
    ],
)
def test_what_is_refused(config, words, key_words, run):
    with refused(key_words):
        run(config, *words)


def test_a_trace_is_written_to_the_home_folder(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folders = []

    def measure(*_, trace_folder, **options):
        folders.append(trace_folder)
        raise UserError("measured")

    monkeypatch.setattr("bert_jax.planning.benchmark.measure", measure)
    with refused("measured"):
        run(TrainConfig(), "--profile=~/trace")
    assert folders == [str(tmp_path / "trace")]
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


class Result:
    """A step's metric, ready so many seconds after that of the step before."""

    def __init__(self, previous, seconds: float, total: float):
        started = max(previous._at if previous else 0.0, time.perf_counter())
        self._at, self.total = started + seconds, total

    def is_ready(self) -> bool:
        return time.perf_counter() >= self._at

    def block_until_ready(self):
        time.sleep(max(0.0, self._at - time.perf_counter()))
        return self


def step_of(seconds: float, total: float = 1.0, *, waits: bool = False):
    """Return a step of so many seconds, which begins when the one before has ended."""

    def step(state, batch):
        done = Result(state, seconds, total)
        return done.block_until_ready() if waits else done, {"loss": done}

    return step


@pytest.mark.parametrize(
    ("steps", "limit", "least", "most"), [(10, 60.0, 10, 10), (10_000, 0.2, 1, 24), (9, 1e-9, 1, 1)]
)
def test_times_of_steps_and_their_limit(steps, limit, least, most):
    _, seconds = benchmark.take_steps(step_of(0.02), None, {}, steps, limit)
    assert least <= len(seconds) <= most
    assert seconds.sum() >= least * 0.02


def test_a_step_whose_call_waits_for_it_has_its_own_time():
    """As in commands on a CPU, which run steps one after the other."""
    _, seconds = benchmark.take_steps(step_of(0.02, waits=True), None, {}, 5, 60.0)
    assert len(seconds) == 5
    assert seconds.min() >= 0.015


def test_a_loss_that_is_not_finite():
    with pytest.raises(TrainingError, match="loss is nan at step 1"):
        benchmark.take_steps(step_of(0.0, float("nan")), None, {}, 3, 60.0)
