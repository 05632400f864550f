"""The workdir of a run: read it once, check that the run may use it, hold it, write to it."""

import contextlib
import dataclasses
import filecmp
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from bert_jax.batches.loader import Earlier, ReadBefore
from bert_jax.config import FinetuneConfig, TrainConfig, settings
from bert_jax.config.schedule import keep_begun_stages, make_schedule
from bert_jax.distributed import hosts
from bert_jax.errors import TrainingError, UserError, naming, refuse
from bert_jax.storage import mirror, paths
from bert_jax.storage.json_files import read_json, refusing_malformed, write_text
from bert_jax.storage.locks import check_unlocked, locked
from bert_jax.storage.paths import AnyPath
from bert_jax.text import memory
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import checkpoint

_TEXT = "text.sha256"
# What a run writes beside its config.json, and replaces; and what says that a folder is a store.
_OF_A_RUN = (
    *("results.json", "baselines.json", "metrics.jsonl", "predictions*", "tensorboard"),
    *("curves.png", "confusion.png", "tokenizer", "best", "best.new", "store.json"),
)
_REMEDY = "restore it, or choose another --workdir"
_SEEN_WITHIN = 30  # seconds in which a network file system shows one host's file to the others
_Config = TypeVar("_Config", TrainConfig, FinetuneConfig)


@dataclasses.dataclass(frozen=True)
class Workdir(Generic[_Config]):
    """What a workdir holds when a run starts.

    Attributes:
      path: its folder, on a disk.
      address: where it is kept: `path`, or the folder of a bucket that `path` is a copy of.
      config: of the run that owns it, as a run does from its first checkpoint on; None without.
      steps: the steps of pretraining that have a checkpoint, rising.
      fingerprint: the hash of the text of that run, if there is a record of it.
      results: what that run has recorded in its `results.json`.
      config_json: the content of its `config.json`; None without.
    """

    path: Path
    address: AnyPath
    config: _Config | None
    steps: tuple[int, ...]
    fingerprint: bytes | None
    results: dict[str, Any]
    config_json: bytes | None = None

    @property
    def checkpoints(self) -> AnyPath:
        """The folder of the checkpoints of a pretraining run, on a disk or in a bucket."""
        return self.address / "checkpoints"

    @property
    def last_step(self) -> int:
        """The step of the latest checkpoint; 0 without."""
        return max(self.steps, default=0)


def read(path: AnyPath, kind: type[_Config]) -> Workdir[_Config]:
    """Read a workdir of pretraining or fine-tuning, as the class of its config says.

    Raises:
      UserError: a process uses it, a file of it is damaged, or it is of something else than such a
        run.
    """
    address = mirror.address(path)
    with naming(address, path):
        return _read(path, address, kind)


def _read(path: AnyPath, address: AnyPath, kind: type[_Config]) -> Workdir[_Config]:
    if not paths.is_remote(path):
        check_unlocked(Path(path))
    workdir = Workdir(Path(path), address, None, (), None, {})
    config_path, text_path = path / "config.json", path / _TEXT
    if not paths.exists(config_path):
        is_local = not paths.is_remote(path) and os.path.exists(path)
        if is_local and (checkpoint.list_steps(workdir.checkpoints) or _has_seeds(path)):
            raise UserError(
                f"--workdir {path} has a run, and no config.json that says which; {_REMEDY}"
            )
        if is_local:
            _refuse_other_files(Path(path))
        return workdir
    values = read_json(config_path, _REMEDY)
    if "optimizer" not in values:
        raise UserError(
            f"--workdir {path} has a config.json that no run wrote; choose another folder"
        )
    if ("epochs" in values) != (kind is FinetuneConfig):
        of, wanted = ("fine-tuning", "pretraining")[:: 1 if "epochs" in values else -1]
        raise UserError(f"--workdir {path} has a run of {of}; choose another folder for {wanted}")
    workdir = dataclasses.replace(workdir, config_json=config_path.read_bytes())
    steps = tuple(sorted(checkpoint.list_steps(workdir.checkpoints)))
    if not steps and not _has_seeds(path):  # the command that began the run may have had --init
        return workdir
    fingerprint = None
    if text_path.exists():
        fingerprint = text_path.read_bytes().strip() if text_path.is_file() else b""
    config = settings.from_dict(kind, values, str(config_path))
    if isinstance(config, TrainConfig):
        config = with_own_texts(config, path)
    return dataclasses.replace(
        workdir,
        config=config,
        steps=steps,
        fingerprint=fingerprint,
        results=read_results(path) if steps else {},
    )


def _refuse_other_files(path: Path) -> None:
    """Refuse a folder without a run that has what a run would replace or remove."""
    if (path / "state").exists():
        raise UserError(f"--workdir {path} is a checkpoint; choose another folder")
    found = next((file.name for name in _OF_A_RUN for file in path.glob(name)), None)
    refuse(
        found,
        f"--workdir {path} has a {found}, and no config.json of a run",
        fix="choose another folder",
    )
    refuse(
        checkpoint.list_checkpoints(path),
        f"--workdir {path} is the folder of a run's checkpoints",
        fix="give the folder of the run, or another",
    )


def with_own_texts(config: TrainConfig, path: AnyPath) -> TrainConfig:
    """Return the config of a run, whose folder with texts from memory may have been moved."""
    texts = path / memory.TEXTS
    if os.path.basename(config.data.source) == memory.TEXTS and paths.exists(texts):
        return dataclasses.replace(config, data=dataclasses.replace(config.data, source=str(texts)))
    return config


def with_texts(
    texts: Any, config: TrainConfig, found: Workdir[TrainConfig]
) -> tuple[TrainConfig, Workdir[TrainConfig]]:
    """Write texts from memory to the workdir; return the config, and the workdir, with their file.

    On the machine that began the run the file had another path.
    """
    refuse(
        mirror.url_of(found.path) and hosts.count() > 1,
        "texts from memory are written to a disk, and with --workdir in a bucket no other host "
        "sees them",
        fix="write them to files, and name these in data.source",
    )
    write = partial(memory.write_texts, texts, found.path / memory.TEXTS, config.data.text_field)
    is_unused = found.config_json is not None and not found.config
    hosts.run_on_main(lambda: write(may_replace=is_unused))
    if found.config:
        own_texts = with_own_texts(found.config, found.path)
        found = dataclasses.replace(found, config=own_texts)
    source = str(found.path / memory.TEXTS)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, source=source)), found


def has_same_text(one: TrainConfig, other: TrainConfig) -> bool:
    """Return whether two runs have one source, or the same texts from memory."""
    first, second = one.data.source, other.data.source
    if first == second:
        return True
    if os.path.basename(first) == os.path.basename(second) == memory.TEXTS:
        both_exist = os.path.exists(first) and os.path.exists(second)
        return both_exist and filecmp.cmp(first, second, shallow=False)
    return False


def _has_seeds(path: AnyPath) -> bool:
    """Return whether a seed of a fine-tuning run has a checkpoint, or a learning rate a result."""
    return not paths.is_remote(path) and any(  # where no run of fine-tuning is
        (folder / "result.json").exists() or checkpoint.list_steps(folder / "checkpoints")
        for name in ("seed-*", "random-*", "rate-*")
        for folder in path.glob(name)
    )


def read_results(path: AnyPath) -> dict[str, Any]:
    """Return what a run has recorded in its `results.json`; nothing where it has none."""
    path = path / "results.json"
    return read_json(path, "move it away") if path.exists() else {}


def read_before(results: Mapping[str, Any], path: AnyPath) -> ReadBefore:
    """Return what the results of a run say of the text that was read before it began."""
    with refusing_malformed(path / "results.json", "move it away"):
        earlier = tuple(Earlier(*map(int, each)) for each in results.get("earlier", []))
        counted_from = int(results.get("counted_from", 0))
        return ReadBefore(counted_from, earlier, int(results.get("shuffled_anew", 0)))


def check_path(path: AnyPath) -> None:
    """Refuse a workdir whose path, or that of a file in it, no file system accepts."""
    checkpoint.check_folder(path)
    try:
        str(path).encode()  # Orbax writes to UTF-8 names only
        os.lstat(path / ("x" * 200))
    except (FileNotFoundError, NotADirectoryError):  # `check` says in which folder
        return
    except (OSError, ValueError) as error:  # ValueError for a NUL byte, or no UTF-8
        reason = getattr(error, "strerror", error)
        raise UserError(f"--workdir {path} cannot be used ({reason}); choose another") from error


def check(workdir: Workdir[_Config], config: _Config) -> None:
    """Refuse a workdir that cannot be written, or belongs to another run; create nothing yet."""
    path = workdir.path
    nearest = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(
            f"--workdir {path} cannot be written: {nearest} is no writable folder; choose another"
        )
    if workdir.config:
        check_same_run(config, workdir.config, workdir.address)
        if isinstance(config, TrainConfig) and isinstance(workdir.config, TrainConfig):
            _check_steps_done(config, workdir.config, workdir)


def check_same_run(config: _Config, saved: _Config, address: AnyPath) -> None:
    """Refuse to resume a run whose own config differs in a field that is not resumable."""
    before = settings.flatten(saved)
    for name, value, _, metadata in settings.fields(config):
        is_same = before[name] == value or (
            name == "data.source" and paths.is_same_file(before[name], value)
        )
        if not is_same and not metadata["resumable"]:
            raise UserError(
                f"{address} belongs to another config: {name} is {before[name]!r} there and "
                f"{value!r} here; choose another --workdir or set the field back"
            )


def _check_steps_done(config: TrainConfig, saved: TrainConfig, workdir: Workdir) -> None:
    """Refuse fewer steps than a run has done, and other phases than it did them with."""
    done = workdir.last_step
    if config.steps < done:
        raise UserError(
            f"{workdir.address} has done {done:,} steps, and steps is {config.steps:,}; raise it "
            "or choose another --workdir"
        )
    before, now = make_schedule(saved), make_schedule(config)
    if before.until(done) == now.until(done):
        return
    refuse(
        before.length_warmup != now.length_warmup,
        f"{workdir.address} was begun with a length warm-up of {before.length_warmup:,} steps, and "
        f"not of {now.length_warmup:,}",
        fix=f"set data.length_warmup_fraction to {saved.data.length_warmup_fraction}",
    )
    raise UserError(
        f"{workdir.address} has done {done:,} steps with other phases; keep those that its "
        f"config.json has and that have begun, and let others start at step {done:,} or later"
    )


def resume_settings(config: TrainConfig | FinetuneConfig, workdir: Workdir) -> None:
    """Set what the run of a workdir has resolved: `dtype`, `vocab_size`, the steps of phases."""
    saved = workdir.config
    if not saved:
        return
    if config.model.dtype == "auto":
        config.model.dtype = saved.model.dtype
    config.model.vocab_size = config.model.vocab_size or saved.model.vocab_size
    if isinstance(config, TrainConfig) and isinstance(saved, TrainConfig):
        keep_begun_stages(config, saved, workdir.last_step)


def check_text(workdir: Workdir, fingerprint: str) -> None:
    """Refuse to resume a run on other training data, whose hash is `fingerprint`."""
    if workdir.fingerprint not in (None, fingerprint.encode()):
        raise UserError(
            f"{workdir.address} was trained on other text, with another tokenizer or from another "
            "--init; choose another --workdir, or restore them"
        )


def check_shared(path: Path) -> None:
    """Refuse a workdir that is not the same folder on every host."""
    if hosts.count() == 1 or mirror.url_of(path):
        return
    marker = path / f".{hosts.broadcast_from_main(lambda: secrets.token_hex(8))}"

    def share_marker() -> None:
        if hosts.is_main():
            path.mkdir(parents=True, exist_ok=True)
            marker.touch()
        for _ in range(10 * _SEEN_WITHIN):
            if marker.exists():
                return
            time.sleep(0.1)
        raise UserError(
            f"--workdir {path} is not the folder that host 0 writes to; choose one on a file "
            "system that all hosts share"
        )

    try:
        hosts.run_on_all_hosts(share_marker)
    finally:
        marker.unlink(missing_ok=True)


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Lock a workdir; turn a failed write into a TrainingError."""
    with contextlib.ExitStack() as stack:
        try:
            hosts.run_on_main(lambda: stack.enter_context(locked(path)))
            yield
        except BrokenPipeError:  # of the reader of what is printed
            raise
        except OSError as error:
            raise TrainingError(
                f"{error.filename or path}: {error.strerror or error}; {checkpoint.RESUME}"
            ) from error


def claim(workdir: Workdir[_Config], config: _Config, tokenizer: Tokenizer, text: str) -> None:
    """Write the config and the tokenizer of a run, which hold from its first checkpoint on.

    Args:
      workdir: as it was read; its folder is locked by now.
      config: of the run.
      tokenizer: of the run.
      text: the fingerprint of its text.

    Raises:
      UserError: another run has written to the workdir since it was read.
    """
    path = workdir.path

    def check_and_save() -> None:
        found = path / "config.json"
        if (found.read_bytes() if found.exists() else None) != workdir.config_json:
            raise UserError(
                f"another run has used --workdir {workdir.address} since this command started; "
                "give the command again, or choose another folder"
            )
        # First: it says that the other files are of a run.
        write_text(found, settings.to_json(config))
        tokenizer.save(path / "tokenizer")

    hosts.run_on_main(check_and_save)
    hosts.write_on_main(path / _TEXT, text + "\n")


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write `results.json`: what a run began with, and at its end its scores and baselines."""
    hosts.write_on_main(path / "results.json", json.dumps(results, indent=2) + "\n")
