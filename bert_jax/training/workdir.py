"""The workdir of a run: check that a run may start or resume there, claim it, write to it."""

import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import jax
import numpy as np

from bert_jax.config import FinetuneConfig, TrainConfig, settings
from bert_jax.config.schedule import make_schedule
from bert_jax.distributed import hosts
from bert_jax.errors import TrainingError, UserError
from bert_jax.storage import mirror, paths, remote
from bert_jax.storage.json_files import read_json, write_text
from bert_jax.storage.locks import locked
from bert_jax.storage.paths import AnyPath
from bert_jax.text.tokenizer import Tokenizer

RESUME = "fix that, then repeat the command to resume"
_TEXT = "text.sha256"
_REMEDY = "remove it, or choose another --workdir"
_SEEN_WITHIN = 30  # seconds in which a network file system shows one host's file to the others


def check_path(workdir: AnyPath) -> None:
    """Refuse a workdir whose path, or that of a file in it, no file system accepts."""
    if paths.is_remote(workdir):
        wrong = f"--workdir {workdir} is not on a disk, which fine-tuning needs"
        raise UserError(f"{wrong}; give a folder, and copy it when the run has ended")
    try:
        str(workdir).encode()  # Orbax writes to UTF-8 names only
        os.lstat(workdir / ("x" * 200))
    except (FileNotFoundError, NotADirectoryError):  # `check` says in which folder
        return
    except (OSError, ValueError) as error:  # ValueError for a NUL byte, or no UTF-8
        reason = getattr(error, "strerror", error)
        raise UserError(f"--workdir {workdir} cannot be used ({reason}); choose another") from error


def check(workdir: Path, config: TrainConfig | FinetuneConfig) -> None:
    """Refuse a workdir that cannot be written, or belongs to another run; create nothing yet."""
    nearest = next(path for path in (workdir, *workdir.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        reason = f"{nearest} is no writable folder"
        raise UserError(f"--workdir {workdir} cannot be made: {reason}; choose another")
    if (workdir / "state").exists():
        raise UserError(f"--workdir {workdir} is a checkpoint; choose another folder")
    path = workdir / "config.json"
    if path.exists() and "optimizer" not in read_json(path, _REMEDY):
        raise UserError(f"--workdir {workdir} has the config.json of no run; choose another folder")
    if has_checkpoint(workdir):
        check_same_run(config, path)
        if isinstance(config, TrainConfig):
            _check_steps_done(config, workdir)


def check_same_run(config: TrainConfig | FinetuneConfig, path: Path) -> None:
    """Refuse to resume a run if its `config.json` differs in a field that is not resumable."""
    saved = settings.flatten(_saved_config(type(config), path))
    for name, value, _, metadata in settings.fields(config):
        if saved[name] != value and not metadata["resumable"]:
            wrong = f"{name} is {saved[name]!r} there and {value!r} here"
            advice = "choose another --workdir or set the field back"
            raise UserError(f"{path.parent} belongs to another config: {wrong}; {advice}")


def _check_steps_done(config: TrainConfig, workdir: Path) -> None:
    """Refuse fewer steps than a run has done, and other phases than it did them with."""
    done, saved = _steps_done(workdir), own_config(workdir)
    if config.steps < done:
        wrong = f"{mirror.address(workdir)} has done {done:,} steps, and steps is {config.steps:,}"
        raise UserError(f"{wrong}; raise it or choose another --workdir")
    if saved and make_schedule(config).until(done) != make_schedule(saved).until(done):
        where = mirror.address(workdir)
        wrong = f"{where} has done {done:,} steps with other phases or another length warm-up"
        raise UserError(f"{wrong}; let new ones start at that step or later")


def _steps_done(workdir: Path) -> int:
    return max(steps(workdir), default=0)


def steps(workdir: AnyPath) -> list[int]:
    """Return the steps of a run of pretraining that have a checkpoint."""
    return [int(p.name) for p in checkpoint_folder(workdir).glob("*") if _is_complete(p)]


def has_checkpoint(workdir: AnyPath) -> bool:
    """Return whether the workdir belongs to a run, as it does from the first checkpoint on."""
    if not (workdir / "config.json").exists():
        return False
    if steps(workdir):
        return True
    of_seeds = [] if paths.is_remote(workdir) else workdir.glob("*/checkpoints/*")
    return any(path.name.isdigit() for path in of_seeds)


def checkpoint_folder(workdir: AnyPath) -> AnyPath:
    """Return the folder of the checkpoints of a run of pretraining, on a disk or in a bucket."""
    return mirror.address(workdir) / "checkpoints"


@contextlib.contextmanager
def hold(workdir: Path) -> Iterator[None]:
    """Lock a workdir; turn a failed write into a TrainingError."""
    with contextlib.ExitStack() as stack:
        try:
            hosts.run_on_main(lambda: stack.enter_context(locked(workdir)))
            yield
        except BrokenPipeError:  # of the reader of what is printed
            raise
        except OSError as error:
            wrong = f"{error.filename or workdir}: {error.strerror or error}"
            raise TrainingError(f"{wrong}; {RESUME}") from error


def resume_settings(config: TrainConfig | FinetuneConfig, workdir: Path) -> None:
    """Set what a run that resumes has resolved: `dtype`, `vocab_size`, the steps of phases."""
    if not has_checkpoint(workdir):
        return
    saved = _saved_config(type(config), workdir / "config.json")
    if config.model.dtype == "auto":
        config.model.dtype = saved.model.dtype
    config.model.vocab_size = config.model.vocab_size or saved.model.vocab_size
    if isinstance(config, TrainConfig):
        # A share of other steps is another step, and a phase that has begun keeps its first one.
        share, known = (each.data.length_warmup_fraction for each in (config, saved))
        before, now = make_schedule(saved), make_schedule(config)
        is_new = known < 1 and known != share  # it was set for this command
        if share < 1 and not is_new and now.length_warmup != before.length_warmup:
            config.data.length_warmup_fraction = float(before.length_warmup)
        changed, done = list(config.data.phases), max(_steps_done(workdir), 1)
        stages = zip(before.main_stages[1:], now.main_stages[1:], strict=False)
        for index, (was, stage) in enumerate(stages):
            first, is_share = was.first_step, changed[index].start < 1
            if first < done and is_share and stage.first_step != first:
                changed[index] = dataclasses.replace(changed[index], start=float(first))
        config.data.phases = tuple(changed)


def own_config(workdir: AnyPath, fork: str | AnyPath | None = None) -> TrainConfig | None:
    """Return the config of the run that owns a workdir, or of what it forks; None without."""
    path = workdir / "config.json"
    # Without a checkpoint the command that began the run is needed: it may have had --init.
    with remote.reading(workdir):
        owns = paths.exists(path) and has_checkpoint(workdir)
    if fork and not owns:
        path = fork_checkpoint(fork) / "config/metadata"
    return _saved_config(TrainConfig, path) if owns or fork else None


def fork_checkpoint(fork: str | AnyPath) -> AnyPath:
    """Return the checkpoint of a run that is meant by RUN, RUN@STEP or its own path."""
    name, at, step = str(fork).rpartition("@")
    if not (at and step.isdigit()) or os.path.exists(fork):
        name, step = str(fork), ""
    path = paths.as_path(name)
    with remote.reading(path):
        if path.name.isdigit() and paths.is_folder(path / "state"):
            return path
        found = list_checkpoints(path / "checkpoints")
    if not found:
        advice = "give RUN or RUN@STEP, with the workdir RUN of pretraining, or --init for weights"
        raise UserError(f"--fork={fork}: {name} is no workdir with checkpoints; {advice}")
    steps = sorted(int(path.name) for path in found)
    if step and int(step) not in steps:
        kept = ", ".join(f"{each:,}" for each in steps)
        raise UserError(f"--fork={fork}: {name} has no such checkpoint; choose of {kept}")
    return path / "checkpoints" / str(int(step or steps[-1]))


def list_checkpoints(folder: AnyPath) -> list[AnyPath]:
    """Return the checkpoints in a folder, those in a bucket once they are complete."""
    found = folder.glob("*") if paths.is_folder(folder) else ()
    return [path for path in found if _is_complete(path) and (path / "state").is_dir()]


def _is_complete(path: AnyPath) -> bool:
    # In a bucket, where Orbax cannot rename a folder when it is complete, it adds a file.
    is_renamed = not paths.is_remote(path)
    return path.name.isdigit() and (is_renamed or (path / "commit_success.txt").exists())


def _saved_config(kind: type, path: AnyPath) -> Any:
    values = read_json(path, "mend it or choose another --workdir")
    return settings.from_dict(kind, values, str(path))


def check_text(workdir: Path, fingerprint: str) -> None:
    """Refuse to resume a run on other training data, whose hash is `fingerprint`."""
    path = workdir / _TEXT
    if not (has_checkpoint(workdir) and path.exists()):
        return
    if not path.is_file() or path.read_bytes().strip() != fingerprint.encode():
        wrong = "was trained on other text, with another tokenizer or from another --init"
        remedy = "choose another --workdir, or restore them"
        raise UserError(f"{mirror.address(workdir)} {wrong}; {remedy}")


def check_shared(workdir: Path) -> None:
    """Refuse a workdir that is not the same folder on every host."""
    if hosts.count() == 1 or mirror.url_of(workdir):
        return
    marker = workdir / f".{hosts.broadcast_from_main(lambda: secrets.token_hex(8))}"

    def share_marker() -> None:
        if hosts.is_main():
            workdir.mkdir(parents=True, exist_ok=True)
            marker.touch()
        for _ in range(10 * _SEEN_WITHIN):
            if marker.exists():
                return
            time.sleep(0.1)
        wrong = f"--workdir {workdir} is not the folder that host 0 writes to"
        raise UserError(f"{wrong}; choose one on a file system that all hosts share")

    try:
        hosts.run_on_all_hosts(share_marker)
    finally:
        marker.unlink(missing_ok=True)


def claim(
    workdir: Path, config: TrainConfig | FinetuneConfig, tokenizer: Tokenizer, fingerprint: str
) -> None:
    """Write the config and the tokenizer of a run, which hold from its first checkpoint on."""
    if hosts.is_main():
        tokenizer.save(workdir / "tokenizer")
    write(workdir / _TEXT, fingerprint + "\n")
    write(workdir / "config.json", settings.to_json(config))


def read_results(workdir: AnyPath) -> dict[str, Any]:
    """Return what a run has recorded in its `results.json`; nothing where it has none."""
    path = workdir / "results.json"
    return read_json(path, "move it away") if path.exists() else {}


def write_results(workdir: Path, results: Mapping[str, Any]) -> None:
    """Write `results.json`: what a run began with, and at its end its scores and baselines."""
    write(workdir / "results.json", json.dumps(results, indent=2) + "\n")


def write(path: Path, content: str) -> None:
    """Write a file under a temporary name and rename it; of several hosts only the first does."""
    if hosts.is_main():
        write_text(path, content)


def checksum(params: Any) -> str:
    """Return a checksum of parameters."""
    crc = 0
    for value in jax.tree.leaves(params):
        crc = google_crc32c.extend(crc, np.ascontiguousarray(value).tobytes())
    return f"{crc:08x}"
