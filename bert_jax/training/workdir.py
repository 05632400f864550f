"""The folder of a run: whose it is, and that it stays so."""

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

import google_crc32c
import jax
import numpy as np

from bert_jax import settings
from bert_jax.config import FinetuneConfig, TrainConfig
from bert_jax.distributed import hosts
from bert_jax.errors import UserError
from bert_jax.text.tokenizer import Tokenizer

_TEXT = "text.sha256"
_SEEN_WITHIN = 30.0  # seconds, in which a network file system shows one host's file to the others


def check(workdir: Path, config: TrainConfig | FinetuneConfig) -> None:
    """Refuses a folder that cannot be made or written, or is another run's; nothing is made yet.

    Raises:
      UserError: it is.
    """
    nearest = next(path for path in (workdir, *workdir.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"--workdir {workdir} cannot be made in {nearest}; choose another")
    if (workdir / "state").exists():
        raise UserError(f"--workdir {workdir} is a checkpoint; choose another folder")
    if (workdir / "config.json").exists():
        check_same_run(config, workdir / "config.json")


def resume_settings(config: TrainConfig | FinetuneConfig, workdir: Path) -> None:
    """Take from the config of a run that resumes what was resolved when it started.

    That is the type that "auto" stood for on the first device, and the vocabulary size that 0
    stood for.
    """
    path = workdir / "config.json"
    if path.exists():
        model = _saved_config(type(config), path).model
        if config.model.dtype == "auto":
            config.model.dtype = model.dtype
        config.model.vocab_size = config.model.vocab_size or model.vocab_size


def check_text(workdir: Path, fingerprint: str) -> None:
    """Refuses to go on with a run on other data than before.

    Args:
      workdir: its folder.
      fingerprint: a hash of what is learned from.

    Raises:
      UserError: the run has learned from something else so far.
    """
    path = workdir / _TEXT
    if path.exists() and path.read_text().strip() != fingerprint:
        raise UserError(
            f"{workdir} was trained on other text, with another tokenizer or from another --init, "
            "than the command now gives; choose another --workdir, or put back what was there"
        )


def check_shared(workdir: Path) -> None:
    """Refuses a folder that is not the same one on every host.

    Raises:
      UserError: what the first host writes there, another does not see.
    """
    if hosts.count() == 1:
        return
    mark = workdir / f".{hosts.broadcast_from_main(lambda: secrets.token_hex(8))}"

    def write_mark() -> None:
        if hosts.is_main():
            workdir.mkdir(parents=True, exist_ok=True)
            mark.touch()

    def look() -> None:
        deadline = time.monotonic() + _SEEN_WITHIN
        while not mark.exists():
            if time.monotonic() > deadline:
                raise UserError(
                    f"--workdir {workdir} is not the folder that host 0 writes to; choose one on a "
                    "file system that all hosts share"
                )
            time.sleep(0.1)

    hosts.run_on_all_hosts(write_mark)
    try:
        hosts.run_on_all_hosts(look)
    finally:
        mark.unlink(missing_ok=True)


def claim(
    workdir: Path, config: TrainConfig | FinetuneConfig, tokenizer: Tokenizer, fingerprint: str
) -> None:
    """Writes the config and the tokenizer: from here on the folder belongs to this run."""
    if not hosts.is_main():
        return
    tokenizer.save(workdir / "tokenizer")
    write(workdir / _TEXT, fingerprint + "\n")
    write(workdir / "config.json", settings.to_json(config))


def write(path: Path, content: str) -> None:
    """Writes a file at once, or not at all; of several processes the first one does."""
    if not hosts.is_main():
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(content)
    os.replace(temporary, path)


def checksum(params: Any) -> str:
    """Returns a checksum of some parameters."""
    crc = 0
    for value in jax.tree.leaves(params):
        crc = google_crc32c.extend(crc, np.ascontiguousarray(value).tobytes())
    return f"{crc:08x}"


def check_same_run(config: TrainConfig | FinetuneConfig, path: Path) -> None:
    """Refuse to resume a run under a config that computes something else.

    Raises:
      UserError: `path`, a workdir's `config.json`, differs in a field that is not resumable.
    """
    saved = settings.flatten(_saved_config(type(config), path))
    for name, value, _, metadata in settings.fields(config):
        if saved[name] != value and not metadata["resumable"]:
            raise UserError(
                f"{path.parent} belongs to another config: {name} is {saved[name]!r} there and "
                f"{value!r} here; choose another --workdir or set the field back"
            )


def _saved_config(kind: type, path: Path) -> Any:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is not JSON ({error}); mend it or choose another --workdir"
        ) from error
    return settings.from_dict(kind, values, str(path))
