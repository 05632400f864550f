"""Start a run: its resolved config, and the weights of a model or the state of another run."""

import copy
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax import linen as nn
from flax import traverse_util

from bert_jax import console, settings
from bert_jax.bert import Bert
from bert_jax.config import FinetuneConfig, ModelConfig, TrainConfig, validate_model
from bert_jax.convert import names
from bert_jax.distributed import hosts
from bert_jax.distributed.mesh import Layout, init_sharded
from bert_jax.distributed.precision import resolve_dtype
from bert_jax.errors import UserError
from bert_jax.models.heads import make_pretraining_model
from bert_jax.training import checkpoint, sinks
from bert_jax.training import workdir as workdirs
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.step import TrainState

_COMPUTATION = ("dtype", "remat", "scan_layers", "attention")
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_Config = TypeVar("_Config", TrainConfig, FinetuneConfig)


def resolve(
    config: _Config,
    workdir: Path,
    init: str | Path | None,
    initial: Bert | None,
    model_fields: Iterable[str] | None,
    validate: Callable[[_Config], None],
    fork: Path | None = None,
) -> _Config:
    """Return the config of a run with its model resolved, once it is valid on all hosts."""
    config = copy.deepcopy(config)
    if fork and isinstance(config, TrainConfig):
        check_fork(config, fork, workdir)
    if initial:
        config.model = model_config(initial, config.model, model_fields)
    validate(config)
    workdirs.check_path(workdir)
    workdirs.resume_settings(config, workdir)
    config.model = resolve_dtype(config.model, jax.local_devices()[0])
    flags = {"init": init and str(init), "fork": fork and str(fork)}
    hosts.check_same_run(config, workdir=str(workdir), **flags)
    if hosts.count() > 1 and config.parallel.mode == "pmap":
        raise UserError("parallel.mode pmap runs on one host; set it to mesh")
    hosts.run_on_all_hosts(lambda: workdirs.check(workdir, config))
    hosts.run_on_all_hosts(lambda: sinks.check(config.log_to))
    return config


def initial_state(
    checkpoints: Checkpoints,
    new_state: Callable[[jax.Array], TrainState],
    abstract_state: TrainState,
    layout: Layout,
    seed: int,
    params: Any = None,
    fork: Path | None = None,
) -> tuple[int, TrainState]:
    """Return the step and state of the latest checkpoint or of `fork`, or new ones."""
    latest = checkpoints.latest()
    if source := fork if latest is None else checkpoints.folder / str(latest):
        with console.working("restoring the checkpoint", says_end=False):
            return int(source.name), checkpoint.read_state(source, abstract_state)
    with console.working("initializing", says_end=False):
        state = init_sharded(new_state, layout.state, jax.random.key(seed))
        if params:
            state = state.replace(params=copy_params(state.params, params))
        return 0, state


def check_fork(config: TrainConfig, fork: Path, workdir: Path) -> None:
    """Set the vocabulary of a fork; refuse a field with which its state would be another's."""
    if workdir.resolve() in fork.resolve().parents:
        raise UserError(f"--fork begins a new run; choose another --workdir than {workdir}")
    saved = settings.from_dict(TrainConfig, checkpoint.read_json(fork, "config"), f"{fork}/config")
    config.model.vocab_size = config.model.vocab_size or saved.model.vocab_size
    values, free = settings.flatten(saved), (*_COMPUTATION, *_DROPOUTS, "initializer_range")
    fixed = [name for name in values if name.startswith("model.") and name[6:] not in free]
    for name in (*fixed, "optimizer.name", "data.pairs"):
        there, here = values[name], settings.flatten(config)[name]
        if there != here and (name != "data.pairs" or "none" in (there, here)):
            wrong = f"{name} is {there!r} there and {here!r} here"
            advice = "set the field back, or take the weights alone by --init"
            raise UserError(f"--fork={fork} has another state: {wrong}; {advice}")
    if config.steps < int(fork.name):
        wrong = f"--fork={fork} has done {int(fork.name):,} steps, and steps is {config.steps:,}"
        raise UserError(f"{wrong}; raise it, or fork an earlier one by RUN@STEP")


def model_config(
    init: Bert, config: ModelConfig, fields: Iterable[str] | None = None
) -> ModelConfig:
    """Return the config of `init`, but for how it computes and for `fields` of `config`."""
    if fields is None:  # of the command line; from Python, dropouts that are not the defaults
        default = ModelConfig()
        fields = [name for name in _DROPOUTS if getattr(config, name) != getattr(default, name)]
    kept = {name: getattr(config, name) for name in {*_COMPUTATION, *fields}}
    if not kept.get("vocab_size"):  # 0 is the size that the checkpoint has
        kept.pop("vocab_size", None)
    model = dataclasses.replace(init.config, **kept)
    validate_model(model, "config")
    module = make_pretraining_model(model, next_sentence=True)
    shapes = jax.eval_shape(module.init_params, jax.random.key(0))
    wanted: Any = traverse_util.flatten_dict(nn.unbox(shapes), sep="/")
    params: Any = traverse_util.flatten_dict(init.params, sep="/")
    heads = tuple(f"{module}/" for module in names.OPTIONAL_MODULES)
    for name, param in params.items():
        # A head that only `init` has is left out: of a task, or of another objective.
        is_used = name in wanted or not f"{name}/".startswith(heads)
        if is_used and (name not in wanted or wanted[name].shape != param.shape):
            wrong = f"--init has {name} of shape {param.shape}, which the config does not ask for"
            raise UserError(f"{wrong}; leave the shape of the model out of the command")
    return model


def copy_params(params: Any, source: Any) -> Any:
    """Return `params` with those that `source` has too replaced by copies, on the same devices."""
    sources: Any = traverse_util.flatten_dict(source, sep="/")
    copied: Any = traverse_util.flatten_dict(params, sep="/")
    for name in sources.keys() & copied.keys():
        value = np.asarray(sources[name])
        # Copies, since a step reuses the memory of the state that it is given.
        copied[name] = jax.make_array_from_callback(
            value.shape, copied[name].sharding, lambda index, value=value: np.array(value[index])
        )
    return traverse_util.unflatten_dict(copied, sep="/")
