"""Checkpoints: which are kept, what each holds, and errors of those that cannot be read."""

import errno
import gc
import logging
import shutil
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from helpers import flip_bit, refused

from bert_jax.commands.process import quiet_libraries
from bert_jax.config import CheckpointConfig, TrainConfig
from bert_jax.errors import TrainingError
from bert_jax.runs import forks
from bert_jax.text import tokenizer_loading
from bert_jax.training import checkpoint
from bert_jax.training.step import PRNG, init_state


def state_at(step: int):
    params = {
        "dense": {"kernel": np.full((3, 2), step, np.float32), "bias": np.zeros(2, np.float32)}
    }
    return init_state(params, optax.adam(1e-3), jax.random.key(step, impl=PRNG))


def rank(held_out: Mapping[str, float]) -> float:
    return -held_out["loss"]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (MemoryError(), "end what else takes memory, or use a machine with more"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB"), "end what else takes memory"),
        (ValueError("no such array"), "use another one, or move it away"),
    ],
)
def test_a_lack_of_memory_is_no_fault_of_a_checkpoint(tmp_path, error, remedy):
    with refused("5 cannot be read (", f"); {remedy}"), checkpoint._reading(tmp_path / "5"):
        raise error


def test_a_host_whose_save_failed_waits_for_no_other(monkeypatch):
    waited: list[str] = []

    def barrier(*, key: str, timeout_ms: int) -> None:
        waited.append(key)

    def fail() -> None:
        try:
            raise OSError("the disk is full")
        finally:  # as Orbax does
            checkpoint._wait_at_barrier(key="b", timeout_ms=1)

    monkeypatch.setattr(checkpoint.ocp.multihost, "get_barrier_sync_fn", lambda: barrier)
    checkpoint._wait_at_barrier(key="a", timeout_ms=1)
    with pytest.raises(OSError, match="full"):
        fail()
    assert waited == ["a"]


def opened(folder, tokenizer):
    return checkpoint.Checkpoints(folder, CheckpointConfig(keep=2), tokenizer, rank)


def write(folder, tokenizer, losses: dict[int, float | None]) -> None:
    with closing(opened(folder, tokenizer)) as checkpoints:
        for step, loss in losses.items():
            scores = None if loss is None else {"loss": loss}
            checkpoints.save(step, state_at(step), TrainConfig(seed=step), scores)


def on_one_device(tree):
    """Return the shapes of arrays, placed on the first device."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)


def test_the_latest_and_the_best_are_kept(tmp_path, tokenizer):
    """Whatever the process that saved them; each has the config of its own step."""
    for losses in ({10: 3.0, 20: 1.0, 30: None}, {40: 2.0}, {50: 2.5, 60: None}):
        write(tmp_path, tokenizer, losses)
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == [20, 50, 60]
    seeds = [checkpoint.read_json(tmp_path / step, "config")["seed"] for step in ("20", "50", "60")]
    assert seeds == [20, 50, 60]
    assert checkpoint.find(tmp_path).name == "60"
    assert checkpoint.find(tmp_path / "20").name == "20"


def test_the_latest_is_so_by_its_number(tmp_path, tokenizer):
    write(tmp_path / "checkpoints", tokenizer, {8: None, 10: None})
    assert checkpoint.find(tmp_path).name == forks.find(tmp_path).name == "10"


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_no_half(tmp_path, tokenizer, monkeypatch):
    """The deletion ends after its first file, as it does when the process is killed."""
    rmtree = shutil.rmtree

    def remove_a_file(path, *args, **options):
        if str(path).startswith(str(tmp_path)):
            min(p for p in Path(path).rglob("*") if p.is_file()).unlink(missing_ok=True)
        else:
            rmtree(path, *args, **options)

    checkpoints = opened(tmp_path, tokenizer)
    monkeypatch.setattr(shutil, "rmtree", remove_a_file)
    for step in (10, 20, 30, 40):
        checkpoints.save(step, state_at(step), TrainConfig(), None)
    checkpoints._manager.close()
    monkeypatch.undo()
    assert (tmp_path / "deleted").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"30", "40", "deleted"}
    write(tmp_path, tokenizer, {50: None})
    assert {p.name for p in tmp_path.iterdir()} == {"40", "50"}


def test_what_a_killed_process_was_writing_is_removed(tmp_path, tokenizer):
    write(tmp_path, tokenizer, {10: None})
    (tmp_path / "20.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    write(tmp_path, tokenizer, {30: None})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "30"]


def test_the_run_alone_asks_whether_to_stop(tmp_path, tokenizer, monkeypatch):
    """JAX counts the questions, and a signal that came between two of others is never heard."""
    asked = []
    monkeypatch.setattr("orbax.checkpoint.utils.reached_preemption", asked.append)
    write(tmp_path, tokenizer, {10: None, 20: 1.0})
    assert not asked


def test_a_write_that_fails(tmp_path, tokenizer, monkeypatch):
    def fill_disk(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with closing(opened(tmp_path, tokenizer)) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "save", fill_disk)
        with pytest.raises(TrainingError, match=r"cannot be written \(No space left on device\)"):
            checkpoints.save(10, state_at(10), TrainConfig(), None)


def test_a_folder_that_was_moved_is_not_made_again(tmp_path, tokenizer):
    folder = tmp_path / "run/checkpoints"
    with closing(opened(folder, tokenizer)) as checkpoints:
        folder.parent.rename(tmp_path / "moved")
        with pytest.raises(FileNotFoundError, match="moved or deleted"):
            checkpoints.save(10, state_at(10), TrainConfig(), None)
    assert not folder.parent.exists()


def test_restores_bit_for_bit(tmp_path, tokenizer):
    write(tmp_path, tokenizer, {5: None})
    like = on_one_device(state_at(5))
    with closing(opened(tmp_path, tokenizer)) as checkpoints:
        assert checkpoints.latest_path() == tmp_path / "5"
        found = checkpoint.read_state(tmp_path / "5", like)
    jax.tree.map(np.testing.assert_array_equal, found, state_at(5))
    params = checkpoint.read_params(tmp_path / "5", like.params)
    jax.tree.map(np.testing.assert_array_equal, params, state_at(5).params)
    (tmp_path / "5/checksums.json").unlink()  # as of an earlier version, or one that was killed
    params = checkpoint.read_params(tmp_path / "5", like.params)
    jax.tree.map(np.testing.assert_array_equal, params, state_at(5).params)
    saved = checkpoint.read_json(tmp_path / "5", "tokenizer")
    assert tokenizer_loading.from_json(saved, "here").fingerprint == tokenizer.fingerprint


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path, tokenizer):
    write(tmp_path, tokenizer, {5: None})
    wrong = {"dense": {"kernel": jax.ShapeDtypeStruct((4, 2), np.float32)}}
    with refused("5 cannot be read"):
        checkpoint.read_params(tmp_path / "5", wrong)
    shutil.rmtree(tmp_path / "5/state")
    with refused("holds no checkpoint"):
        checkpoint.find(tmp_path)
    with refused("does not exist"):
        checkpoint.find(tmp_path / "nowhere")


def test_a_damaged_checkpoint_prints_nothing_but_its_error(tmp_path, tokenizer, monkeypatch, capfd):
    """Its other arrays are still being read when the first fails."""
    params = {str(i): np.arange(1000.0, dtype=np.float32) for i in range(60)}
    checkpoint.write_params(tmp_path / "5", params, {}, tokenizer)
    (tmp_path / "5/checksums.json").unlink()  # as in one of an earlier version
    for path in (tmp_path / "5/state").glob("**/d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    levels = {name: logging.getLogger(name).level for name in ("absl", "asyncio")}
    quiet_libraries()
    like = on_one_device(params)
    for _ in range(10):
        with refused("5 cannot be read"):
            checkpoint.read_params(tmp_path / "5", like)
    gc.collect()
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    assert printed == []
    assert capfd.readouterr().err == ""


# A failed read closes Orbax's event loop before other reads end.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_flipped_bit_in_any_file_is_noticed(tmp_path, tokenizer):
    write(tmp_path, tokenizer, {5: 1.0})
    like = on_one_device(state_at(5))

    def read() -> None:
        with closing(opened(tmp_path, tokenizer)):
            checkpoint.read_state(tmp_path / "5", like)
        for item in ("config", "tokenizer", "log_window"):
            checkpoint.read_json(tmp_path / "5", item)
        assert checkpoint.read_scores(tmp_path / "5") == {"loss": 1.0}

    read()
    checkpoint.read_params(tmp_path / "5", like.params)
    files = [p for p in (tmp_path / "5").glob("*/**/*") if p.is_file()]
    folders = {p.relative_to(tmp_path / "5").parts[0] for p in files}
    assert folders == {"config", "log_window", "metrics", "state", "tokenizer"}
    for path in files:
        content = path.read_bytes()
        flip_bit(path)
        with refused("5 cannot be read", "has changed since"):
            read()
        if "metrics" in path.parts:
            with refused("has changed since"):
                checkpoint.read_scores(tmp_path / "5")
        if "state" in path.parts:
            with refused("has changed since"):
                checkpoint.read_params(tmp_path / "5", like.params)
        path.write_bytes(content)
    for content in ("[]", "[" * 10_000):
        (tmp_path / "5/_CHECKPOINT_METADATA").write_text(content)
        with refused("_CHECKPOINT_METADATA cannot be read"):
            read()
