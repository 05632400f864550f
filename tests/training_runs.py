"""Small runs: as the two scripts are given them, in this process or in one of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
import orbax.checkpoint as ocp
import pytest

from bert_jax import Interrupted, TrainConfig, console
from bert_jax.runs import pretrain as pretraining

ROOT = Path(__file__).parents[1]
CACHE_VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def words(defaults: Mapping[str, Any], flags: Sequence[str]) -> list[str]:
    """Return flags that set each field once; `flags`, NAME=VALUE, win over the defaults."""
    fields = {name: f"{value}" for name, value in defaults.items()}
    for flag in flags:
        name, _, value = flag.removeprefix("--config.").partition("=")
        fields[name] = value
    return [f"--config.{name}={value}" for name, value in fields.items()]


def pretraining_flags(source: Path | str, *changes: str) -> list[str]:
    """Return the flags of a small run of the recipe `tiny`."""
    config = {
        "steps": 24,
        "log_every": 4,
        "eval_every": 12,
        "model.vocab_size": 66,
        "model.hidden_size": 16,
        "model.num_hidden_layers": 1,
        "model.intermediate_size": 32,
        "model.max_position_embeddings": 32,
        "data.source": source,
        "data.max_length": 32,
        "data.batch_size": 16,
        "data.length_warmup_fraction": 0,
        "optimizer.learning_rate": 3e-3,
        "checkpoint.every": 6,
    }
    return words(config, changes)


def start_script(name: str, cache: Path, *flags: str) -> subprocess.Popen:
    """Start `train.py` or `finetune.py` on one device, as a user whose cache is `cache`."""
    environment = {k: v for k, v in os.environ.items() if k not in CACHE_VARIABLES}
    xla_flags = os.environ["XLA_FLAGS"].split()
    environment |= {
        "XLA_FLAGS": " ".join(flag for flag in xla_flags if "device_count" not in flag),
        "XDG_CACHE_HOME": str(cache),
        "MPLCONFIGDIR": matplotlib.get_cachedir(),  # whose list of fonts takes seconds to make
    }
    return subprocess.Popen(
        [sys.executable, str(ROOT / name), *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cache,
    )


def run_script(name: str, cache: Path, *flags: str) -> tuple[int, str, str]:
    """Run a script to its end, and return its exit code, its output and its errors."""
    process = start_script(name, cache, *flags)
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors


def stop_after(steps: int, config: TrainConfig, workdir: Path) -> None:
    """Begin a run that is asked to stop once it has done some steps."""
    run = pretraining.start(config, workdir)
    reasons = iter([""] * (steps - 1) + ["a test"])
    with console.quiet(), pytest.raises(Interrupted):
        pretraining.train_run(run, lambda: next(reasons))


def wait_for_logs(process: subprocess.Popen, count: int) -> None:
    """Wait until a script has logged some steps, or has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        count -= line.startswith("step ") and "held-out" not in line
        if count <= 0:
            return


def records(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def without_speeds(workdir: Path) -> list[dict]:
    speeds = ("sequences_per_second", "tokens_per_second", "seconds")
    return [{k: v for k, v in r.items() if k not in speeds} for r in records(workdir)]


def read_state(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, read by Orbax alone."""
    path = workdir / "checkpoints" / str(step) / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        names = reader.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        state = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_state(one: Path, other: Path, step: int) -> None:
    first, second = read_state(one, step), read_state(other, step)
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


def contents(folder: Path) -> dict[str, bytes]:
    files = [p for p in folder.rglob("*") if p.is_file() and "tensorboard" not in p.parts]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}
