"""Start a run: its resolved config, and the weights of a model or the state of another run."""

import copy
import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax import linen as nn
from flax import traverse_util

from bert_jax import console
from bert_jax.bert import Bert
from bert_jax.config import FinetuneConfig, ModelConfig, TrainConfig, settings
from bert_jax.config.schedule import make_schedule
from bert_jax.config.validation import validate_model
from bert_jax.convert import names
from bert_jax.distributed import hosts
from bert_jax.distributed.precision import resolve_dtype
from bert_jax.errors import UserError
from bert_jax.objectives import objective_name, pretraining_model
from bert_jax.storage import mirror
from bert_jax.storage.paths import AnyPath
from bert_jax.training import checkpoint, sinks
from bert_jax.training import workdir as workdirs
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.step import TrainState

_COMPUTATION = ("dtype", "remat", "scan_layers", "attention")
_POSITIONS = "position_embeddings"  # the parameter
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_Config = TypeVar("_Config", TrainConfig, FinetuneConfig)


def resolve(
    config: _Config,
    workdir: Path,
    init: str | Path | None,
    initial: Bert | None,
    model_fields: Iterable[str] | None,
    validate: Callable[[_Config], None],
    fork: AnyPath | None = None,
) -> _Config:
    """Return the config of a run with its model resolved, once it is valid on all hosts."""
    config, source = copy.deepcopy(config), initial and initial.config
    if fork and isinstance(config, TrainConfig):
        source = check_fork(config, fork, workdir)
    if initial:
        config.model = model_config(initial, config.model, model_fields)
    validate(config)
    workdirs.check_path(workdir)
    if source and not workdirs.has_checkpoint(workdir):
        _say_if_interpolated(source, config.model)
    workdirs.resume_settings(config, workdir)
    validate(config)  # again: what a run keeps may not fit its new steps
    config.model = resolve_dtype(config.model, jax.local_devices()[0])
    flags = {"init": init and str(init), "fork": fork and str(fork)}
    hosts.check_same_run(config, workdir=str(mirror.address(workdir)), **flags)
    if hosts.count() > 1 and config.parallel.mode == "pmap":
        raise UserError("parallel.mode pmap runs on one host; set it to mesh")
    hosts.run_on_all_hosts(lambda: workdirs.check(workdir, config))
    hosts.run_on_all_hosts(lambda: sinks.check(config.log_to))
    return config


def initial_state(
    checkpoints: Checkpoints,
    new_state: Callable[[], TrainState],
    abstract_state: TrainState,
    params: Any = None,
    fork: AnyPath | None = None,
) -> tuple[int, TrainState]:
    """Return the step and state of the latest checkpoint or of `fork`, or new ones."""
    latest = checkpoints.latest()
    if source := fork if latest is None else checkpoints.folder / str(latest):
        with console.working("restoring the checkpoint", says_end=False):
            return int(source.name), _read_state(source, abstract_state, is_fork=latest is None)
    with console.working("initializing", says_end=False):
        state = new_state()
        if params:
            state = dataclasses.replace(state, params=copy_params(state.params, params))
        return 0, state


def _read_state(source: AnyPath, like: TrainState, *, is_fork: bool) -> TrainState:
    """Read a state; interpolate the learned positions of a fork, with their moments, to more."""
    if not is_fork:
        return checkpoint.read_state(source, like)
    count = checkpoint.read_json(source, "config")["model"]["max_position_embeddings"]

    def stored(path: Any, leaf: Any) -> Any:
        is_position = any(getattr(key, "key", None) == _POSITIONS for key in path)
        return leaf.update(shape=(count, *leaf.shape[1:])) if is_position else leaf

    def resize(value: jax.Array, leaf: Any) -> jax.Array:
        if value.shape == leaf.shape:
            return value
        resized = partial(interpolate, count=leaf.shape[0])
        return jax.jit(resized, out_shardings=leaf.sharding)(value)

    state = checkpoint.read_state(source, jax.tree.map_with_path(stored, like))
    return jax.tree.map(resize, state, like)


def interpolate(positions: Any, count: int) -> jax.Array:
    """Return a table of learned positions for longer sequences, linearly interpolated."""
    return jax.image.resize(positions, (count, positions.shape[1]), "linear")


def _say_if_interpolated(source: ModelConfig, model: ModelConfig) -> None:
    few, many = source.max_position_embeddings, model.max_position_embeddings
    if few < many and source.position_embedding_type == "absolute":
        hosts.print_on_main(f"positions  {few:,} learned positions, interpolated to {many:,}")


def check_fork(config: TrainConfig, fork: AnyPath, workdir: Path) -> ModelConfig:
    """Set the vocabulary of a fork; refuse a field with which its state would be another's.

    Return the model that is forked.
    """
    own = workdirs.checkpoint_folder(workdir)
    if fork.parent == own or workdir.resolve() in fork.resolve().parents:
        raise UserError(f"--fork begins a new run; choose another --workdir than {workdir}")
    saved = settings.from_dict(TrainConfig, checkpoint.read_json(fork, "config"), f"{fork}/config")
    config.model.vocab_size = config.model.vocab_size or saved.model.vocab_size
    if config.data.length_warmup_fraction < 1:  # of other steps it would be another one
        config.data.length_warmup_fraction = float(make_schedule(saved).length_warmup)
    values = settings.flatten(saved)
    free = (*_COMPUTATION, *_DROPOUTS, "initializer_range", "global_rope_theta")
    fixed = [name for name in values if name.startswith("model.") and name[6:] not in free]
    for name in (*fixed, "optimizer.name"):
        there, here = values[name], settings.flatten(config)[name]
        if name == "model.max_position_embeddings" and _fits(saved.model, here):
            continue
        if there != here:
            raise UserError(
                f"--fork={fork} has another state: {name} is {there!r} there and {here!r} here; "
                "set the field back, or take the weights alone by --init"
            )
    there, here = objective_name(saved), objective_name(config)
    if there != here:
        raise UserError(
            f"--fork={fork} has another state: it is trained by the objective {there}, and this "
            f"run by {here}; set data.pairs or objective back, or take the weights alone by --init"
        )
    if config.steps < int(fork.name):
        wrong = f"--fork={fork} has done {int(fork.name):,} steps, and steps is {config.steps:,}"
        raise UserError(f"{wrong}; raise it, or fork an earlier one by RUN@STEP")
    return saved.model


def _fits(model: ModelConfig, positions: int) -> bool:
    """Return whether the parameters of a model can be used with another number of positions."""
    kind, is_longer = model.position_embedding_type, positions >= model.max_position_embeddings
    return kind in ("rotary", "sinusoidal") or (kind == "absolute" and is_longer)


def model_config(
    init: Bert, config: ModelConfig, fields: Iterable[str] | None = None
) -> ModelConfig:
    """Return the config of `init`, but for how it computes and for `fields` of `config`."""
    if fields is None:  # of the command line; from Python, what differs from the defaults
        default = type(config)()
        fields = [name for name in _DROPOUTS if getattr(config, name) != getattr(default, name)]
        longest = config.max_position_embeddings
        if max(default.max_position_embeddings, init.config.max_position_embeddings) < longest:
            fields.append("max_position_embeddings")
    kept = {name: getattr(config, name) for name in {*_COMPUTATION, *fields}}
    if not kept.get("vocab_size"):  # 0 is the size that the checkpoint has
        kept.pop("vocab_size", None)
    source = init.config
    if "model_type" in kept and type(source) is not type(config):
        source = settings.as_variant(source, config.model_type)
    for name in kept:
        if not hasattr(source, name):
            raise UserError(
                f"--init is a {source.model_type}, which has no model.{name}; leave it out"
            )
    model = dataclasses.replace(source, **kept)
    validate_model(model, "config")
    as_float32 = dataclasses.replace(model, dtype="float32")  # "auto" is not resolved yet
    module = pretraining_model(as_float32, pairs=True)
    shapes = jax.eval_shape(module.init_params, jax.random.key(0))
    wanted: Any = traverse_util.flatten_dict(nn.unbox(shapes), sep="/")
    params: Any = traverse_util.flatten_dict(init.params, sep="/")
    heads = tuple(f"{module}/" for module in names.OPTIONAL_MODULES)
    for name, param in params.items():
        shape = wanted[name].shape if name in wanted else None
        if name.endswith(_POSITIONS) and shape and shape[0] > len(param):
            shape = param.shape  # they are interpolated
        # A head that only `init` has is dropped: of a task, or of another objective.
        is_of_encoder = name.startswith("bert/") and not f"{name}/".startswith(heads)
        is_used = name in wanted or is_of_encoder
        if is_used and shape != param.shape:
            wrong = f"--init has {name} of shape {param.shape}, which the config does not ask for"
            raise UserError(f"{wrong}; leave the shape of the model out of the command")
    return model


def copy_params(params: Any, source: Any) -> Any:
    """Return `params` with those that `source` has too replaced by copies, on the same devices."""
    sources: Any = traverse_util.flatten_dict(source, sep="/")
    copied: Any = traverse_util.flatten_dict(params, sep="/")
    for name in sources.keys() & copied.keys():
        value, count = np.asarray(sources[name]), len(copied[name])
        if name.endswith(_POSITIONS) and len(value) != count:
            value = np.asarray(interpolate(value, count))
        # Copies, since a step reuses the memory of the state that it is given.
        copied[name] = jax.make_array_from_callback(
            value.shape, copied[name].sharding, lambda index, value=value: np.array(value[index])
        )
    return traverse_util.unflatten_dict(copied, sep="/")
