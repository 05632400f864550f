"""Checkpoints: each holds the state, the config and the tokenizer, and is self-contained."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import google_crc32c
import jax
import numpy as np
from flax import traverse_util

from bert_jax import console
from bert_jax.config import CheckpointConfig, FinetuneConfig, TrainConfig, settings
from bert_jax.distributed import devices, hosts
from bert_jax.errors import CommandError, TrainingError, UserError, first_line, refuse
from bert_jax.storage import checksums, json_files, paths, remote
from bert_jax.storage.paths import AnyPath
from bert_jax.text import tokenizer_loading
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.metrics import Sums
from bert_jax.training.step import TrainState

with console.logging_kept():  # Orbax logs when it is imported
    import orbax.checkpoint as ocp
    from orbax.checkpoint import checkpoint_managers

RESUME = "fix that, then repeat the command to resume"
_CHECKSUMS = "checksums.json"
_FROM_ORBAX = ("_CHECKPOINT_METADATA", "commit_success.txt")
_DELETED = "deleted"
_REMEDY = "use another one, or move it away: a run that has an earlier one resumes from that"


class _Manager(ocp.CheckpointManager):
    """Orbax's manager, which does not ask whether to stop: a run does, and saves by itself.

    JAX counts how often it is asked. Orbax asks with the number of the step, so that a signal that
    came between its question and the run's was never heard.
    """

    def reached_preemption(self, step: int) -> bool:
        """Return False."""
        return False


def _wait_at_barrier(*, key: str, timeout_ms: int) -> None:
    """Wait for all hosts, unless this one is about to report an error.

    Orbax lets a host whose save has failed wait for the others before it raises the error. They
    wait for its part of the checkpoint, for up to twenty minutes.
    """
    if error := sys.exception():
        raise error
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


class Checkpoints:
    """The checkpoints of a run, written while training continues, each host its own shards."""

    def __init__(
        self,
        folder: AnyPath,
        config: CheckpointConfig,
        tokenizer: Tokenizer,
        rank: Callable[[Mapping[str, float]], float],  # of an evaluation; the highest is kept
    ):
        check_folder(folder)
        self.folder, self.rank = paths.absolute(folder), rank
        # Of a disk, Orbax renames one before it deletes it: a killed run leaves no partial one.
        self._deleted = None if paths.is_remote(folder) else Path(self.folder) / _DELETED
        self._remove_deleted()
        hosts.run_on_main(self._check_steps)
        latest = checkpoint_managers.LatestN(config.keep)
        best = checkpoint_managers.BestN(
            get_metric_fn=rank, n=1, keep_checkpoints_without_metrics=False
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy([latest, best]),
            best_fn=rank,  # without it Orbax does not write the metrics
            todelete_subdir=self._deleted and _DELETED,
            cleanup_tmp_directories=True,  # which a killed run has left
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._complete, barrier_sync_fn=_wait_at_barrier
            ),
        )
        items = ("state", "config", "tokenizer", "log_window")
        with _writing(self.folder):
            self._manager = _Manager(self.folder, item_names=items, options=options)
        self._tokenizer = tokenizer.to_json()

    def save(
        self,
        step: int,
        state: TrainState,
        config: TrainConfig | FinetuneConfig,
        held_out: dict[str, float] | None,  # the scores of this step, if it was evaluated
        sums: Sums | None = None,  # the metrics of the steps that are not logged yet
    ) -> None:
        """Start writing a checkpoint, unless this step has one.

        Raises:
          FileNotFoundError: the folder was moved or deleted; Orbax would make another.
        """
        if not (paths.is_remote(self.folder) or self.folder.is_dir()):
            raise FileNotFoundError(errno.ENOENT, "it was moved or deleted", str(self.folder))
        if hosts.broadcast_from_main(lambda: step in self._manager.all_steps()):
            return
        self._remove_deleted()
        content = {"config": dataclasses.asdict(config), "tokenizer": self._tokenizer}
        content["log_window"] = sums or {}
        items = _items(ocp.args.StandardSave(state), content)
        # Orbax warns where a checkpoint has no scores, which only those of evaluations have.
        with _writing(self.folder), console.silenced("absl"):
            self._manager.save(step, args=items, metrics=held_out)

    def latest_path(self) -> AnyPath | None:
        """Return the latest complete checkpoint, as the first host sees it; None without one."""
        latest = hosts.broadcast_from_main(self._manager.latest_step)
        return None if latest is None else self.folder / str(latest)

    def log_window(self, step: int) -> Sums:
        """Return the sums that were saved with a checkpoint; {} where there are none.

        There are none before the first step, nor in a checkpoint of an earlier version.
        """
        checkpoint = self.folder / str(step)
        return read_json(checkpoint, "log_window") if (checkpoint / "log_window").exists() else {}

    def _check_steps(self) -> None:
        """Check what Orbax reads of every checkpoint at once: its metadata and its metrics."""
        for path in list_checkpoints(self.folder):
            if (path / "_CHECKPOINT_METADATA").exists():
                json_files.read_json(path / "_CHECKPOINT_METADATA", _REMEDY)
            if (scores := read_scores(path)) is not None:
                with _reading(path):
                    self.rank(scores)

    def _remove_deleted(self) -> None:
        # One by one, since Orbax may be moving another into their folder.
        for path in self._deleted.glob("*") if self._deleted and hosts.is_main() else ():
            shutil.rmtree(path, ignore_errors=True)

    def _complete(self) -> None:
        """Add checksums to a checkpoint before Orbax renames it; a bucket has its own."""
        folder = self._deleted.parent if self._deleted and hosts.is_main() else None
        for path in folder.glob("*.orbax-checkpoint-tmp*") if folder else ():
            _write_checksums(path)

    def close(self) -> None:
        """Wait until everything is written."""
        with _writing(self.folder):
            self._manager.close()
        if self._deleted and hosts.is_main():
            shutil.rmtree(self._deleted, ignore_errors=True)


def find(path: str | AnyPath) -> AnyPath:
    """Return the checkpoint at `path`: itself, or the best or latest one of a workdir."""
    path = paths.as_path(path)
    with remote.reading(path):
        if not paths.exists(path):
            raise UserError(f"checkpoint {path} does not exist; {_remedy(path)}")
        # Fine-tuning leaves best, and best.new if it was killed between two renames.
        for folder in (path, path / "best", path / "best.new"):
            if (folder / "state").is_dir():
                return folder
        for folder in (path / "checkpoints", path):
            if checkpoints := list_checkpoints(folder):
                return max(checkpoints, key=lambda p: int(p.name))
    raise UserError(f"{path} holds no checkpoint; give {paths.CHECKPOINT}")


def list_checkpoints(folder: AnyPath) -> list[AnyPath]:
    """Return the checkpoints in a folder, those in a bucket once they are complete."""
    found = folder.glob("*") if paths.is_folder(folder) else ()
    return [path for path in found if _is_complete(path) and (path / "state").is_dir()]


def list_steps(folder: AnyPath) -> list[int]:
    """Return the steps of the complete checkpoints in a folder."""
    return [int(path.name) for path in folder.glob("*") if _is_complete(path)]


def _is_complete(path: AnyPath) -> bool:
    # In a bucket, where Orbax cannot rename a folder when it is complete, it adds a file.
    is_renamed = not paths.is_remote(path)
    return path.name.isdecimal() and (is_renamed or (path / "commit_success.txt").exists())


def _remedy(path: AnyPath) -> str:
    is_name = re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", str(path))
    # The owner of a model is no folder here, as that of a workdir is.
    if is_name and (path.parent == Path() or not os.path.exists(path.parent)):
        return f"train it first, or give hf:{path} for a model of the Hugging Face hub"
    return f"give {paths.CHECKPOINT}"


def check_folder(path: AnyPath) -> None:
    """Refuse a path that is a pattern to Orbax, which then does not find what it has written."""
    name = str(paths.absolute(path))
    refuse(
        "\\" in name or re.search(r"\[.*\]", name),
        f"{name} has brackets or a backslash, in whose folders checkpoints are not whole",
        fix="choose another path",
    )


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint with its checksums, and nothing added."""
    if not (path / "state").is_dir() or not (path / _CHECKSUMS).is_file():
        return False
    known = {*json_files.read_json(path / _CHECKSUMS, _REMEDY), _CHECKSUMS, *_FROM_ORBAX}
    files = (file for file in path.rglob("*") if not file.is_dir())
    return {file.relative_to(path).as_posix() for file in files} <= known


def write_params(
    path: Path, params: Any, description: dict[str, Any], tokenizer: Tokenizer
) -> None:
    """Write a checkpoint of parameters alone to a new folder, which appears when it is complete."""
    check_folder(path)
    content = {"config": description, "tokenizer": tokenizer.to_json()}
    items = _items(ocp.args.PyTreeSave({"params": params}), content)
    with _writing(path), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(path.absolute(), args=items)
    if hosts.is_main():
        _write_checksums(path)


def _items(state: Any, content: Mapping[str, Any]) -> ocp.args.Composite:
    as_json = {name: ocp.args.JsonSave(value) for name, value in content.items()}
    return ocp.args.Composite(state=state, **as_json)


def _write_checksums(checkpoint: Path) -> None:
    """Write the checksums of a checkpoint's items; one without them is not verified."""
    content = checksums.of_files(checkpoint, (p for p in checkpoint.glob("*/**/*") if p.is_file()))
    hosts.write_on_main(checkpoint / _CHECKSUMS, json.dumps(content, indent=1))


def verify(checkpoint: AnyPath, item: str) -> None:
    """Refuse an item of a checkpoint that has changed since it was written."""
    with _reading(checkpoint):
        if not (checkpoint / _CHECKSUMS).exists():  # one of an earlier version
            return
        content = json_files.read_json(checkpoint / _CHECKSUMS, _REMEDY)
        names = [name for name in content if PurePosixPath(name).parts[:1] == (item,)]
        if damage := checksums.find_damage(checkpoint, {name: content[name] for name in names}):
            raise ValueError(damage)


def content(checkpoint: AnyPath) -> str:
    """Return a hash of what a checkpoint holds, by its checksums; the same for all without them."""
    path = checkpoint / _CHECKSUMS
    with _reading(checkpoint):
        recorded = json_files.read_json(path, _REMEDY) if path.exists() else {}
    return hashlib.sha256(json.dumps(recorded, sort_keys=True).encode()).hexdigest()[:16]


def read_json(checkpoint: AnyPath, item: str) -> dict[str, Any]:
    """Return an item of a checkpoint that is JSON: "config", "tokenizer" or "log_window"."""
    verify(checkpoint, item)
    with _reading(checkpoint):
        return json.loads((checkpoint / item / "metadata").read_text())


def read_config(checkpoint: AnyPath) -> TrainConfig | FinetuneConfig:
    """Return the config of a checkpoint of pretraining or of fine-tuning."""
    values = read_json(checkpoint, "config")
    has_task = isinstance(values, dict) and "task" in values
    return settings.from_dict(
        FinetuneConfig if has_task else TrainConfig, values, f"{checkpoint}/config"
    )


def read_tokenizer(checkpoint: AnyPath) -> Tokenizer:
    """Return the tokenizer of a checkpoint."""
    content = read_json(checkpoint, "tokenizer")
    return tokenizer_loading.from_json(content, f"{checkpoint}/tokenizer")


def read_scores(checkpoint: AnyPath) -> dict[str, float] | None:
    """Return the held-out scores of a checkpoint; None if its step was not evaluated."""
    path = checkpoint / "metrics/metrics"
    if not path.exists():
        return None
    verify(checkpoint, "metrics")
    with _reading(checkpoint):
        return json.loads(path.read_text())


def read_state(checkpoint: AnyPath, like: TrainState) -> TrainState:
    """Read a checkpoint's state onto the devices of `like`, an abstract state."""
    hosts.run_on_main(lambda: verify(checkpoint, "state"))
    with _reading(checkpoint), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        arguments = ocp.args.StandardRestore(like)
        return reader.restore(paths.absolute(checkpoint) / "state", args=arguments)


def read_params(checkpoint: AnyPath, like: Any, optional: Sequence[str] = ()) -> Any:
    """Read a checkpoint's parameters like those of `like`, without `optional` modules it lacks."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    folder = paths.absolute(checkpoint) / "state"
    verify(checkpoint, "state")
    with _reading(checkpoint), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        metadata = reader.metadata(folder).item_metadata
        if metadata is None:
            raise ValueError("the metadata of its state is missing")
        stored: Any = traverse_util.flatten_dict(metadata.tree["params"], sep="/")
        folders = {f"{parent}/" for name in stored for parent in PurePosixPath(name).parents}
        missing = tuple({f"{module}/" for module in optional} - folders)
        wanted = {}
        flat: Any = traverse_util.flatten_dict(like, sep="/")
        for name, leaf in flat.items():
            if name.startswith(missing):
                continue
            if tuple(stored[name].shape) != leaf.shape:  # KeyError for an absent one
                raise ValueError(f"{name} is {stored[name].shape}")
            wanted[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
        item = {"params": traverse_util.unflatten_dict(wanted, sep="/")}
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        return reader.restore(folder, args=args)["params"]


@contextlib.contextmanager
def _writing(folder: AnyPath) -> Iterator[None]:
    """Raise any error of writing checkpoints as a TrainingError."""
    try:
        with console.logging_kept():
            yield
    except CommandError:
        raise
    except Exception as error:  # TensorStore and Orbax raise nearly every kind
        # TensorStore's message ends with the cause and, in brackets, its own details.
        cause = str(error).partition(" [")[0].rpartition(": ")[2]
        reason = getattr(error, "strerror", None) or cause or repr(error)
        raise TrainingError(
            f"{folder} cannot be written ({' '.join(reason.split())}); {RESUME}"
        ) from error


@contextlib.contextmanager
def _reading(checkpoint: AnyPath) -> Iterator[None]:
    """Raise any error of reading a checkpoint as a UserError."""
    try:
        # Of warnings that the state lacks a file, which is a folder above it.
        with console.silenced("absl"), console.logging_kept():
            yield
    except UserError:
        raise
    except Exception as error:  # TensorStore and Orbax raise nearly every kind
        remedy = _REMEDY
        if devices.is_out_of_memory(error):
            remedy = "end what else takes memory, or use a machine with more"
        elif paths.is_remote(str(checkpoint)):
            remedy = f"repeat the command, and if it fails again, {_REMEDY}"
        raise UserError(
            f"checkpoint {checkpoint} cannot be read ({first_line(error)}); {remedy}"
        ) from error


def checksum(params: Any) -> str:
    """Return a checksum of parameters."""
    crc = 0
    for value in jax.tree.leaves(params):
        crc = google_crc32c.extend(crc, np.ascontiguousarray(value).tobytes())
    return f"{crc:08x}"
