"""The command, its figures against each other, and what it refuses."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from helpers import model_config

from bert_jax import settings
from bert_jax.batches import loader
from bert_jax.commands import benchmark as command
from bert_jax.config import DataConfig, Phase, TokenizerConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.planning import benchmark_table as table
from bert_jax.planning import chips, compiling, measure, memory
from bert_jax.planning.ceiling import Ceiling
from bert_jax.planning.compiling import Compiled
from bert_jax.planning.timing import Timing
from bert_jax.text import prepare as prepare_lib
from bert_jax.text.store import open_store

flags.FLAGS.mark_as_parsed()  # Grain reads a flag

ROOT = Path(__file__).parents[2]
STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Over a store, so that its rows are known."""
    folder = tmp_path_factory.mktemp("text")
    lines = (f"word {n} and {n * n} of them.\n" + "\n" * (n % 5 == 0) for n in range(2000))
    (folder / "text.txt").write_text("".join(lines))
    data = DataConfig(source=str(folder / "text.txt"), max_length=32, batch_size=16)
    prepare_lib.prepare(data, TokenizerConfig(kind="wordpiece"), 100, folder / "store")
    data.source = str(folder / "store")
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return TrainConfig(model=model_config(num_hidden_layers=1, **without), data=data)


@pytest.fixture(scope="module")
def found(config):
    """What the command prints, on one device."""
    default = settings.flatten(importlib.import_module("configs.tiny").get_config())
    wanted = settings.flatten(config).items()
    fields = [f"--config.{n}={x}" for n, x in wanted if x != default[n] and n != "data.phases"]
    words = [
        sys.executable,
        "-m",
        "bert_jax",
        "benchmark",
        "--config=configs/tiny.py",
    ]
    words += ["--json", f"--steps={STEPS}", "--seconds=30", "--profile", *fields]
    xla = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    done = run(words, env={**os.environ, "XLA_FLAGS": xla})
    assert "steps with real rows" in done.stderr
    return json.loads(done.stdout)


def test_rates_follow_from_the_time_of_a_step(found):
    for each in (found["synthetic"], found["real"]):
        step = each["step_seconds"]
        assert each["steps"] == STEPS
        assert 0 < step["lower_quartile"] <= step["median"] <= step["upper_quartile"]
        assert each["rows_per_second"] == pytest.approx(16 / step["mean"])
        assert each["tokens_per_second"] == pytest.approx(32 * each["rows_per_second"])
        real = each["tokens_per_second"] * (1 - each["padding_share"])
        assert each["real_tokens_per_second"] == pytest.approx(real)
        # Of a layer 24 D² + 12 D F + 12 D S a token, and the heads: D 16, F 32, S 32, P 5, V 100.
        row = 32 * (24 * 256 + 12 * 16 * 32 + 12 * 16 * 32) + 6 * 5 * (256 + 1600) + 6 * 256
        flops = row * each["rows_per_second"]
        assert each["model_flops_per_second"] == pytest.approx(flops)
        share = flops / found["matrix_products_flops_per_second"]
        assert each["mfu_of_matrix_products"] == pytest.approx(share)
        assert each["mfu_of_datasheet"] is None
        assert 0 <= each["waiting_for_rows_share"] < 1
    times = [found[name]["step_seconds"]["mean"] for name in ("real", "synthetic")]
    assert found["real_step_over_synthetic_step"] == pytest.approx(times[0] / times[1])


def test_what_is_beside_the_steps(found):
    assert (found["devices"], found["platform"]) == (1, "cpu")
    assert 0 < found["compile_seconds"]["warm"] < found["compile_seconds"]["cold"]
    assert found["peak_memory_bytes"] > found["compiler_memory_bytes_per_device"] > 0
    assert found["input_rows_per_second"] > 0
    assert sum(found["share_of_time_by_kind"].values()) == pytest.approx(1)
    assert found["share_of_time_by_kind"]["matrix products"] > 0
    assert found["config"]["model"]["hidden_size"] == 16


def test_padding_is_that_of_the_rows(found, config):
    """Counted in the batches that were timed, which are those after the ones that warm up."""
    corpus = open_store(Path(config.data.source))
    steps = loader.TrainBatches(corpus, config)
    masks = [steps[6 + number]["attention_mask"] for number in range(STEPS)]
    expected = np.mean([row.mean() for mask in masks for row in mask])
    assert 1 - found["real"]["padding_share"] == pytest.approx(expected)
    assert 0.01 < found["real"]["padding_share"] < 0.5
    assert found["synthetic"]["padding_share"] == 0


def test_table(config):
    """Of eight H100, and a step of half a second."""
    made = dataclasses.replace(config.data, phases=(Phase(0.5, 64, 8),))
    kind = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    assert chips.of_device(kind) is chips.CHIPS["h100"]
    timed = Timing(np.array([0.4, 0.5, 0.6]), np.array([0.0, 0.15, 0.0]), 1152, 1536)
    shares = {"matrix products": 0.75, "elementwise": 0.25}
    report = measure.Report(
        config=dataclasses.replace(config, data=made),
        number=1,
        phase=Phase(0.0, 32, 16, 5),
        device=kind,
        num_devices=8,
        compiled=Compiled(None, 20.0, None),
        needed=2 << 20,
        steps=measure.Steps(timed, timed, 0.004, 1234, (3 << 20, "of one device"), shares),
        ceiling=Ceiling(6e15, (8, 8, 8)),
        datasheet=8 * 989e12,
        load=0.25,
    )
    shown = table.text(report, "mine.py")
    assert shown.startswith("mine.py, phase 1 of 2: 16 rows of 32 a step, 5 predictions each\n")
    columns = [line for line in shown.splitlines() if line[44:] and line[44:] == line[30:44]]
    values = {line[:29].rstrip(): line.split()[-1] for line in columns}
    assert values["a step, mean              ms"] == "500.00"
    assert values["        lower quartile    ms"] == "450.00"
    assert values["rows                      /s"] == "32.0"
    assert values["real tokens               /s"] == "768"
    assert values["padding                    %"] == "25.0"
    assert values["waiting for rows, of it    %"] == "10.0"
    rates = report.rates(timed)
    assert rates.mfu_of_datasheet == pytest.approx(rates.flops / 7.912e15)
    assert rates.mfu_of_products == pytest.approx(rates.flops / 6e15)
    for line in (
        "8 × NVIDIA H100 80GB HBM3, JAX",
        "its rows alone                4,000 rows/s",
        "the datasheet                 7,912,000 GFLOP/s",
        "could not be cached",
        "memory at its peak            3 MiB, of one device",
        "  matrix products                 75.0%",
    ):
        assert line in shown
    assert json.loads(json.dumps(table.as_json(report)))["peak_memory_bytes"] == 3 << 20


def test_a_chip_that_is_like_another_is_not_it():
    kind = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 PCIe")
    assert chips.of_device(kind) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--phase=2"], "the config has phases 1 to 1"),
        (["--steps=0"], "must be positive"),
        (["--config.parallel.mode=pmap"], "is not measured"),
        (["--profile=/proc/none"], "cannot be made"),
    ],
)
def test_mistakes(words, message, monkeypatch):
    made = TrainConfig()
    made.parallel.mode = "pmap" if "pmap" in words[0] else "mesh"
    monkeypatch.setattr(command.cli, "read_config", lambda *_: (made, "tiny"))
    monkeypatch.setattr(sys, "argv", ["bert-jax"])
    with pytest.raises(UserError, match=message):
        command.run(["--config=configs/tiny.py", *words])


def test_no_text_is_an_error(config, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    data = dataclasses.replace(config.data, source=str(tmp_path / "empty.txt"))
    with pytest.raises(UserError, match="has no text"):
        measure.measure(dataclasses.replace(config, data=data), 1, measure.Limits(), lambda _: None)


def test_a_batch_that_does_not_fit(config, monkeypatch):
    """Found from the compiled program, which is compiled once: nothing of it is made."""
    sizes = dict.fromkeys(("argument", "output", "alias", "generated_code"), 0)
    stats = {f"{name}_size_in_bytes": x for name, x in {**sizes, "temp": 1 << 50}.items()}
    compiled = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**stats))
    lowered = SimpleNamespace(compile=lambda: compiled)
    step = SimpleNamespace(lower=lambda state, batch: lowered)
    monkeypatch.setattr(measure.parallel, "jit_step", lambda *_: step)
    data = dataclasses.replace(config.data, batch_size=1 << 30)
    changed = dataclasses.replace(config, data=data)
    with pytest.raises(UserError, match=r"a batch of 1,073,741,824 × 32 does not fit .* GiB of"):
        measure.measure(changed, 1, measure.Limits(), lambda _: None)


def test_an_allocation_that_fails():
    """By the device or by the host; other failures are as they were."""
    phase, device = Phase(0.0, 512, 256), jax.devices()[0]

    def step_of_a_cpu():
        raise jax.errors.JaxRuntimeError("INTERNAL: Error: Out of memory allocating 9 bytes.")

    for fail in (lambda: jnp.zeros(1 << 46), lambda: np.ones(1 << 55), step_of_a_cpu):
        with (
            pytest.raises(UserError, match=r"a batch of 256 × 512 does not fit in .* lower"),
            memory.fits(phase, device),
        ):
            fail()
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError), memory.fits(phase, device):
        raise error


def test_peak_is_that_of_what_ran():
    found = []
    for size in (100 << 20, 1 << 20):
        peak = memory.Peak(jax.devices())
        np.ones(size, np.uint8)
        found.append(peak.read())
    (large, what), (small, _) = found
    assert large is not None
    assert small is not None
    if "during" in what:  # where the system lets the peak be set back
        assert large - small > 50 << 20


def test_settings_of_the_cache_are_as_before():
    before = [getattr(jax.config, name) for name in compiling._SETTINGS]
    found = compiling.compile_twice(jax.jit(lambda x: x + 1).lower(1.0).compile)
    assert found.program(1.0) == 2.0
    assert [getattr(jax.config, name) for name in compiling._SETTINGS] == before
