"""Fork a run: continue its state in another workdir, with settings that may differ."""

import copy
import os
from collections.abc import Collection
from pathlib import Path

from bert_jax.config import ModelConfig, TrainConfig, settings
from bert_jax.config.fields import POSITIONS
from bert_jax.config.schedule import keep_begun_stages, make_schedule
from bert_jax.errors import UserError, refuse
from bert_jax.objectives import objective_name
from bert_jax.runs import weights
from bert_jax.runs import workdir as workdirs
from bert_jax.runs.workdir import Workdir
from bert_jax.storage import paths, remote
from bert_jax.storage.paths import AnyPath
from bert_jax.training import checkpoint

# Fields of a model that a fork may change.
_FREE = (*weights.COMPUTATION, *weights.DROPOUTS, "initializer_range", "global_rope_theta")


def find(fork: str | AnyPath) -> AnyPath:
    """Return the path of the checkpoint that is named by RUN, RUN@STEP or its own path."""
    name, at, step = str(fork).rpartition("@")
    if not (at and step.isdecimal()) or os.path.exists(os.path.expanduser(fork)):
        name, step = str(fork), ""
    path = paths.as_path(name)
    if not paths.is_remote(path):
        path = Path(os.path.abspath(path))  # whose folders are those of the run
    with remote.reading(path):
        if path.name.isdecimal() and paths.is_folder(path / "state"):
            return path
        found = checkpoint.list_checkpoints(path / "checkpoints")
    if not found:
        raise UserError(
            f"--fork={fork}: {name} is no workdir with checkpoints; give RUN or RUN@STEP, with the "
            "workdir RUN of pretraining, or --init for weights"
        )
    steps = sorted(int(path.name) for path in found)
    if step and int(step) not in steps:
        kept = ", ".join(map(str, steps))
        raise UserError(f"--fork={fork}: {name} has no such checkpoint; choose one of {kept}")
    return path / "checkpoints" / str(int(step or steps[-1]))


def read_config(fork: AnyPath) -> TrainConfig:
    """Return the config of the checkpoint that a run forks."""
    config = checkpoint.read_config(fork)
    if not isinstance(config, TrainConfig):
        raise UserError(
            f"--fork={fork} is of a fine-tuning run, and only pretraining can be forked; take its "
            "weights by --init"
        )
    return workdirs.with_own_texts(config, fork.parent.parent)


def resolve(
    config: TrainConfig,
    fork: AnyPath,
    saved: TrainConfig,
    workdir: Workdir,
    fields: Collection[str] = (),
) -> TrainConfig:
    """Return `config` with what a fork keeps of the saved run; UserError if they do not fit.

    `fields` are the dotted names of what the command line has set.
    """
    if fork.parent == workdir.checkpoints or workdir.path.resolve() in fork.resolve().parents:
        raise UserError(f"--fork begins a new run; choose another --workdir than {workdir.path}")
    config = copy.deepcopy(config)
    config.model.vocab_size = config.model.vocab_size or saved.model.vocab_size
    keep_begun_stages(config, saved, int(fork.name), set_anew=fields)
    # A shorter run cannot have all steps of the length warm-up that it keeps.
    kept = make_schedule(saved).length_warmup
    if config.data.length_warmup_fraction == kept >= 1:
        config.data.length_warmup_fraction = float(min(kept, config.steps - 1))
    _check_state(config, fork, saved, fields)
    return config


def _check_state(
    config: TrainConfig, fork: AnyPath, saved: TrainConfig, fields: Collection[str]
) -> None:
    """Refuse a field that changes the meaning of the state, and a fork without steps left."""
    there, here = settings.flatten(saved), settings.flatten(config)
    for name in there:
        is_fixed = name.startswith("model.") and name.removeprefix("model.") not in _FREE
        if not is_fixed and name != "optimizer.name":
            continue
        if name == "model.max_position_embeddings" and _fits(saved.model, here[name]):
            continue
        refuse(
            there[name] != here[name],
            f"--fork={fork} has another state: {name} is {there[name]!r} there and "
            f"{here[name]!r} here",
            fix=f"{'leave it out' if name in fields else 'set it back, or leave --config out'}, or "
            "take the weights alone by --init, which keeps the sizes too",
        )
    objectives = objective_name(saved), objective_name(config)
    refuse(
        objectives[0] != objectives[1],
        f"--fork={fork} has another state: its objective is {objectives[0]}, and that of this run "
        f"{objectives[1]}",
        fix="set data.pairs or objective back, or take the weights alone by --init",
    )
    refuse(
        config.steps <= int(fork.name),
        f"--fork={fork} has done {int(fork.name):,} steps, and steps is {config.steps:,}",
        fix="raise it, or fork an earlier one by RUN@STEP",
    )


def _fits(model: ModelConfig, positions: int) -> bool:
    """Return whether the parameters of a model can be used with another number of positions."""
    name, is_longer = model.position_embedding_type, positions >= model.max_position_embeddings
    kind = settings.look_up(POSITIONS, name, "model.position_embedding_type")
    return not kind.scores and (is_longer or not kind.is_learned)
