"""benchmarks/device.py: its parts, their time, what ends them, and what it concludes."""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import device
import device_cell
import device_check
import jax
import jax.numpy as jnp
import pytest
from device import Commands, Part, cause, run, run_part, run_parts, schedule
from device_cell import TINY, Cell, next_batch
from device_report import Found, Measured, decide, write_report
from helpers import refused

from bert_jax.config import ModelConfig
from bert_jax.models.attention import AttentionMask
from bert_jax.models.target import Target, traced_for

ROOT = Path(__file__).parents[1]
H100 = {"kind": "NVIDIA H100 80GB HBM3", "count": 1, "platform": "gpu", "version": "cuda 13000"}


@pytest.fixture
def found(tmp_path):
    return Found(tmp_path, H100)


def row(batch, speed):
    """What was measured of a batch."""
    times = {"mean": batch / speed}
    step = {"sequences_per_second": speed, "tokens_per_second": 128 * speed, "step_seconds": times}
    step |= {"mfu": 0.5, "mfu_of_matmul": 0.6, "model_flops_per_second": 1e12 * speed}
    memory = {"peak_memory_bytes": 1 << 30, "compiler_memory_bytes_per_device": 1 << 31}
    return {"batch_size": batch, "random": step, "compile_seconds": 40.0, **memory}


def measure(found, cell, *rows):
    found.figures(cell.name).write_text("".join(json.dumps(each) + "\n" for each in rows))


@pytest.mark.parametrize(
    ("fits", "speeds", "first", "batches", "end"),
    [
        (512, {}, 64, [64, 128, 256, 512, 1024], "memory is full"),
        (40, {}, 64, [64, 32], "memory is full"),
        (1, {}, 4, [4, 2], "no batch fits in memory"),
        (9999, {64: 10.0, 128: 15.0, 256: 15.1}, 64, [64, 128, 256], "no faster"),
        (9999, {}, 511, [510, 1020], "the largest batch asked for"),
    ],
)
def test_batches_grow_until_memory_or_speed_ends(fits, speeds, first, batches, end):
    rows = []
    while not isinstance(batch := next_batch(rows, first, 1024, devices=2), str):
        rows.append(row(batch, speeds.get(batch, batch)))
        if batch > fits:
            rows[-1] = {"batch_size": batch, "does_not_fit": "GiB"}
    assert [each["batch_size"] for each in rows] == batches
    assert batch == end


TRACEBACK = "Traceback (most recent call last):\n  File\n"


@pytest.mark.parametrize(
    ("log", "code", "line"),
    [
        ("..F\nE  assert 1\nFAILED tests/test_device.py::test_a - assert\n1 failed", 1, "FAILED"),
        ("E   KeyError: 1\nERROR tests/x.py\n", 2, "ERROR tests/x.py: KeyError"),
        (f"W0000\n{TRACEBACK}ValueError: a\nb", 1, "ValueError: a"),
        (f"{TRACEBACK}KeyError: 1\ntrain.py: data is none", 2, "train.py: data"),
        (f"{TRACEBACK}ImportError: x\npeers.py: torch has ended, for the reason above", 2, "Imp"),
        ("", -11, "ended by SIGSEGV: no output"),
    ],
)
def test_the_cause_is_one_line_of_the_log(log, code, line):
    assert cause(log, code).startswith(line)


def test_a_process_ends_with_all_that_it_started(tmp_path):
    child = ["bash", "-c", "sleep 60 & echo $!; wait"]
    assert run(child, tmp_path / "log", 0.5, {}) is None
    process = Path("/proc", (tmp_path / "log").read_text().strip(), "stat")
    deadline = time.monotonic() + 5  # whoever reaps it may take a moment
    while process.exists() and process.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert run(["bash", "-c", "exit 7"], tmp_path / "log", 5, {}) == 7


def test_how_a_part_ends_is_kept(found):
    def nothing(_):
        raise LookupError("PyTorch sees no such device")

    def broken(_):
        raise ValueError("half a line")

    words = {"good": "print()", "bad": "1 / 0", "slow": "import time; time.sleep(9)"}
    words["partial"] = "import time; time.sleep(0.3); raise SystemExit(75)"
    commands = {k: lambda _, v=v: [sys.executable, "-S", "-c", v] for k, v in words.items()}
    for name, command in {**commands, "none": nothing, "broken": broken}.items():
        run_part(Part(name, "speed", command), found, 0.5 if name in ("slow", "partial") else 20)
    assert found.summary("good").startswith("complete, 0 s")
    assert found.read("bad")["cause"] == "ZeroDivisionError: division by zero"
    assert found.summary("slow").endswith("(its 0 s were over)")
    assert found.read("partial")["status"] == found.read("slow")["status"] == "out of time"
    skipped = found.read("none")
    assert (skipped["status"], skipped["cause"]) == ("skipped", "PyTorch sees no such device")
    assert found.read("broken")["cause"] == "ValueError('half a line')"


def test_a_group_has_its_share_and_what_failed_comes_last(found, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    names = ("tests", "a", "b", "c", "profile", "default")
    groups = ("tests", "speed", "speed", "peers", "profile", "default")
    parts = [Part(name, group, list) for name, group in zip(names, groups, strict=True)]
    found.write("tests", {"status": "failed"})
    found.write("profile", {"status": "complete"})
    given = {}
    for (part,), seconds in schedule(parts, found, 1810.0, 30.0):
        given[part.name] = seconds
        clock[0] += 870.0 if part.name == "a" else 100.0
    # 10 of 18 shares of speed are 1,005 s, of which a takes 870, and b what is left.
    assert list(given) == ["a", "b", "c", "default", "tests"]
    assert given["a"] == device.MOST
    assert given["b"] == pytest.approx(1810 * 10 / 18 - 870 - 10)
    assert given["tests"] == 1810 - 1170 - 10


def test_parts_that_take_turns_run_together_and_end_with_the_program(found, monkeypatch):
    """Each is started again as long as it has more to do."""
    monkeypatch.setattr(device, "AT_ONCE", 2)
    again = "import os, sys; done = os.path.exists(sys.argv[1]); open(sys.argv[1], 'w'); "
    words = {"a": f"{again}sys.exit(0 if done else 75)", "b": "import time; time.sleep(60)"}
    parts = [
        Part(name, "speed", lambda _, v=v: [sys.executable, "-c", v, str(found.output / "file")])
        for name, v in {**words, "c": ""}.items()
    ]
    parts = [dataclasses.replace(part, takes_turns=True) for part in parts]
    parts.append(Part("d", "profile", list))
    end = time.monotonic() + 1000
    groups = [[part.name for part in each] for each, _ in schedule(parts, found, end, 0.0)]
    assert groups == [["a", "b"], ["c"], ["d"]]
    started = time.monotonic()
    with closing(run_parts(parts[:2], found, 50)) as ended:
        assert next(ended).name == "a"
        assert found.read("a")["status"] == "complete"
    assert time.monotonic() - started < 30
    assert not found.read("b")


def test_a_step_is_timed_when_no_other_compiles_or_is_timed(tmp_path, monkeypatch):
    monkeypatch.setenv(device_cell.TURNS, str(tmp_path / "turns"))
    events, all_compile = [], threading.Barrier(3)

    def step(number):
        with device_cell._turns() as wait:
            all_compile.wait(10)
            time.sleep(0.05 * number)
            events.append("compiled")
            wait()
            events.append(f"begin {number}")
            time.sleep(0.02)
            events.append(f"end {number}")

    threads = [threading.Thread(target=step, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events[:3] == ["compiled"] * 3
    assert [event.partition(" ")[0] for event in events[3:]] == ["begin", "end"] * 3
    assert events[3::2] == [event.replace("end", "begin") for event in events[4::2]]


def test_in_nine_minutes_each_of_the_first_groups_has_a_turn(found, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    parts = [Part(name, name, list) for name in device.SHARES]
    given = {}
    for (part,), seconds in schedule(parts, found, 540.0, device.LEAST):
        given[part.name] = seconds
        clock[0] += seconds
    assert list(given)[:4] == ["check", "tests", "speed", "peers"]
    assert given["check"] == given["tests"] == device.GROUP - 2 * device.ENDING
    assert clock[0] <= 540


def test_the_forms_of_attention_that_a_platform_has(tmp_path):
    def forms(platform):
        commands = Commands(Found(tmp_path, {**H100, "platform": platform}), tiny=False)
        return [(cell.recipe, cell.length, cell.form) for cell in commands.cells]

    plain = [(*pair, "bfloat16, plain") for pair in device.PAIRS]
    assert set(forms("cpu")) == {*plain, ("base", 128, "float32, plain")}
    for platform in ("gpu", "tpu"):
        assert ("large", 512, "bfloat16, fused, no attention dropout") in forms(platform)
    assert ("large", 512, "bfloat16, plain, no attention dropout") in forms("gpu")
    assert forms("gpu")[:2] == [("modernbert_base", 1024, "bfloat16, fused"), plain[0]]
    assert forms("gpu")[-1] == ("base", 128, "bfloat16, fused, no attention dropout")


def test_other_forms_and_peers_begin_at_the_fastest_batch(found, monkeypatch):
    commands = Commands(found, tiny=False)
    part = {part.name: part for part in commands.parts()}
    with pytest.raises(LookupError, match="not measured"):
        part["peers-large-512"].command(60)
    plain = Cell("large", 512)
    fused = dataclasses.replace(plain, attention="fused", attention_dropout=False)
    assert json.loads(part[plain.name].command(60)[-1])[1:3] == [64, 256]
    longest = json.loads(part[Cell("modernbert_base", 8192).name].command(60)[-1])
    assert longest[1:3] == [1, 16]
    measure(found, plain, row(64, 300.0), row(128, 310.0), {"end": "memory is full"})
    assert json.loads(part[fused.name].command(60)[-1])[1] == 128
    answers = {"stdout": "False\n", "stderr": "", "returncode": 0}
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **options: subprocess.CompletedProcess(args, **answers)
    )
    with pytest.raises(LookupError, match="PyTorch sees no such device"):
        part["peers-large-512"].command(60)
    answers["stdout"] = "True\n"
    part = {part.name: part for part in Commands(found, tiny=False).parts()}
    words = part["peers-large-512"].command(60)
    assert "--config.data.batch_size=128" in words
    assert "--config.model.attention_probs_dropout_prob=0" not in words
    measure(found, fused, row(64, 320.0))
    words = part["peers-large-512"].command(60)
    assert {"--config.data.batch_size=64", "--config.model.attention=fused"} <= {*words}
    assert "--config.model.attention_probs_dropout_prob=0" in words
    measure(found, fused)
    profiled = json.loads(part["profile"].command(60)[-1])
    assert profiled[0]["recipe"] == "large"
    assert profiled[1:3] == [128, 128]


def test_fused_becomes_the_default_where_it_was_faster_at_all_longer_lengths(found):
    commands = Commands(found, tiny=False)
    speeds = {128: 90.0, 512: 140.0, 1024: 150.0, 8192: 160.0}
    for cell in commands.cells:
        fast = speeds[cell.length] if cell.attention == "fused" else 100.0
        measure(found, cell, row(8, 25.0 if cell.dtype == "float32" else fast))
    entry, words = decide(found, commands.cells)
    assert entry == Measured()  # what has not passed its tests is no default
    assert words == ["Nothing becomes a default: the tests on the device have not passed."]
    found.write("tests", {"status": "complete", "seconds": 60.0})
    entry, words = decide(found, commands.cells)
    assert entry == Measured("bfloat16", 512)
    assert "4.00 times" in words[0]
    assert "fused from 512 tokens on" in words[1]
    speeds[8192] = 101.0
    for cell in commands.cells:
        if cell.attention == "fused":
            measure(found, cell, row(8, speeds[cell.length]))
    assert decide(found, commands.cells)[0].fused_from is None


def test_a_file_that_cannot_be_read_ends_no_report(found):
    commands = Commands(found, tiny=False)
    measure(found, Cell("base", 128), row(256, 7000.0))
    found.figures("tests").write_text("<testsuite><testcase name='a'><failure/></testcase>")
    write_report(found, [part.name for part in commands.parts()], commands.cells, ["grain"])
    text = (found.output / "README.md").read_text()
    assert "Cannot be shown: ParseError" in text
    assert "| base | 128 | bfloat16, plain | 256 | 36.6 | 7,000.0 |" in text
    assert "Not installed: grain." in text
    assert "| default | no turn yet |" in text


@pytest.mark.parametrize(
    ("flag", "key_words"),
    [
        ("--parts=tests,sped", "--parts sped: there are check, tests, speed, peers"),
        ("--minutes=nan", "--minutes must be positive"),
        ("--output=/proc/x", "--output=/proc/x cannot be written"),
    ],
)
def test_flags_that_are_refused(flag, key_words, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["device.py", f"--output={tmp_path}", flag])
    with refused(key_words):
        device.parse()


@pytest.mark.parametrize(
    "form",
    ["fused", "fused, without padding", "packed, fused", "window, fused"],
)
def test_a_kernel_of_the_check_lowers_for_a_gpu(form, monkeypatch):
    """JAX asks for the version of cuDNN, which is not here."""
    cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)
    attend, kind = device_check.FORMS[form]
    sizes = {"hidden_size": 768, "max_position_embeddings": 128}
    config = ModelConfig(dtype="bfloat16", attention_probs_dropout_prob=0.0, **sizes)
    mask = AttentionMask(jnp.ones((2, 128), jnp.int32), kind == "packed", 64 * (kind == "window"))
    x = jax.ShapeDtypeStruct((2, 128, 768), jnp.bfloat16)

    @jax.jit
    def gradients(*x):
        return jax.grad(lambda *x: attend(config, x, mask).astype(jnp.float32).sum())(*x)

    with traced_for(Target("gpu")):
        text = gradients.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "SoftmaxBackward(" in text


@pytest.mark.slow
def test_all_of_it_on_a_cpu_ended_and_started_again(tmp_path):
    output = tmp_path / "day"
    command = [sys.executable, str(ROOT / "benchmarks/device.py"), "--tiny", "--minutes=30"]
    command.append(f"--output={output}")
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    pipe = {"stdout": subprocess.PIPE, "text": True, "env": {**env, "JAX_PLATFORMS": "cpu"}}
    with subprocess.Popen(command, **pipe) as ended:
        for line in ended.stdout:
            if line.startswith("speed-modernbert_base-32-bfloat16-plain: at most"):
                time.sleep(5)
                ended.send_signal(signal.SIGTERM)
    assert ended.returncode == 128 + signal.SIGTERM
    found = Found(output, {})
    before = {path.name: path.read_text() for path in output.glob("*.json")}
    speed = "speed-base-16-bfloat16-plain.json"
    assert sorted(before) == ["check.json", "device.json", speed, "tests.json"]
    assert "| default | no turn yet |" in (output / "README.md").read_text()

    done = subprocess.run(command, check=True, **pipe)
    assert "tests: " not in done.stdout
    assert {name: (output / name).read_text() for name in before} == before
    ends = {path.stem: found.read(path.stem).get("status") for path in output.glob("*.json")}
    assert ends.pop("device") is None
    assert ends.pop("peers-base-16") in ("complete", "skipped")  # without PyTorch
    assert set(ends.values()) == {"complete"}
    assert len(ends) == 9 + len(device.SETTINGS)
    text = (output / "README.md").read_text()
    for line in (
        "A matmul alone: ",
        "| 2 × 128 | fused |",
        "| matmuls | ",
        "| optimization-O1 | ",
        "6 passed, 0 failed",
        "| modernbert_base | 32 |",
        "loss ",
        "| training embeddings | 32 | ",
        "| encode, bert-jax | 16 | ",
        "`model.dtype=auto` is",
    ):
        assert line in text
    assert "Cannot be shown" not in text
    assert not (output / "workdir").exists()


@pytest.mark.parity
def test_peers_take_turns(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    words = [f"--config.model.{name}={value}" for name, value in TINY.items()]
    words += ["--config=base", "--config.data.batch_size=2", "--config.data.max_length=16"]
    words += ["--peers=bert-jax,torch-masked", "--rounds=2", "--seconds=0.1"]
    command = [sys.executable, ROOT / "benchmarks/peers.py", *words, f"--output={tmp_path / 'x'}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert "| torch-masked | float32 | " in done.stdout
    peers = json.loads((tmp_path / "x").read_text())["peers"]
    assert [len(each["seconds_of_a_step"]) for each in peers] == [2, 2]
