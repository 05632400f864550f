"""How a run begins: new, from a model's weights, from another run's state, or resumed."""

import copy
import dataclasses
import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from flax import traverse_util

from bert_jax import console
from bert_jax.batches.loader import NOTHING_READ, ReadBefore
from bert_jax.bert import Bert, load
from bert_jax.config import FinetuneConfig, ModelConfig, TrainConfig, settings
from bert_jax.config.schedule import make_schedule
from bert_jax.config.validation import validate, validate_model
from bert_jax.convert import names
from bert_jax.distributed import hosts
from bert_jax.distributed.devices import resolve_dtype
from bert_jax.errors import UserError, refuse
from bert_jax.objectives import objective_name, pretraining_model
from bert_jax.runs import vocabulary
from bert_jax.runs import workdir as workdirs
from bert_jax.runs.workdir import Workdir
from bert_jax.storage import paths, remote
from bert_jax.storage.paths import AnyPath
from bert_jax.text import mixture, prepare, tokenizer_loading
from bert_jax.text.store import is_store
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import checkpoint, sinks
from bert_jax.training.step import TrainState

_COMPUTATION = ("dtype", *settings.resumable(ModelConfig))  # how a model computes
_POSITIONS = "position_embeddings"  # the parameter
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_MODEL = "model."  # before the names of its fields
_Config = TypeVar("_Config", TrainConfig, FinetuneConfig)


@dataclasses.dataclass(frozen=True)
class Origin:
    """How a pretraining run begins, found out once.

    Attributes:
      kind: "new"; "initialized" with the weights of a model; "forked" from the state of another
        run; or "resumed" from the latest checkpoint of its own workdir.
      config: the settings of the run, resolved and valid.
      bert: the model of --init, also where a run resumes that began with it.
      fork: the checkpoint of the other run.
      before: the settings that the state of a fork or of a resumed run was trained with.
      tokenizer: that of the run; None if its text has one, or one is to be trained on it.
      read_before: what the runs that a fork continues have read of its text.
    """

    kind: Literal["new", "initialized", "forked", "resumed"]
    config: TrainConfig
    bert: Bert | None = None
    fork: AnyPath | None = None
    before: TrainConfig | None = None
    tokenizer: Tokenizer | None = None
    read_before: ReadBefore = NOTHING_READ


def find(
    config: TrainConfig,
    workdir: Workdir[TrainConfig],
    *,
    init: str | Path | None,
    fork: str | Path | None,
    fields: Collection[str] | None,
) -> Origin:
    """Return how a run begins, or refuse settings, a workdir or a checkpoint that do not fit."""
    if init is not None and fork is not None:
        raise UserError("--init and --fork are both set; --fork has the weights too: leave one")
    bert = None if init is None else load(init)
    if bert is None and not workdir.config:
        vocabulary.check(config, is_fork=fork is not None)
    if bert:
        resumed = workdir.path if workdir.config else None
        tokenizer = vocabulary.chosen_tokenizer(config, bert, resumed)
        bert = vocabulary.with_tokenizer(bert, tokenizer)
    if fork is not None and not workdir.config:
        return _find_fork(config, workdir, find_fork(fork))
    config = resolve(
        config,
        workdir,
        validate,
        bert=bert,
        fields=fields,
        source=bert and bert.config,
        init=None if init is None else str(init),
    )
    if bert:
        weights = {"the content of --init": checkpoint.checksum(bert.params)}
        hosts.check_same(weights, "copy it once more")
    tokenizer = bert.tokenizer if bert else None
    if not workdir.config:
        return Origin("initialized" if bert else "new", config, bert=bert, tokenizer=tokenizer)
    if fork:
        hosts.warn_on_main(f"{workdir.address} has a run, which resumes; --fork is not used again")
    tokenizer = tokenizer or _tokenizer_of_resumed(config, workdir)
    return Origin(
        "resumed",
        config,
        bert=bert,
        before=workdir.config,
        tokenizer=tokenizer,
        read_before=workdirs.read_before(workdir.results, workdir.path),
    )


def _tokenizer_of_resumed(config: TrainConfig, workdir: Workdir) -> Tokenizer | None:
    """Return the tokenizer of a run that resumes, unless its store has trained it."""
    store = workdir.path / "store"
    # A machine that resumes a run from a bucket has no store yet.
    was_given = workdir.results.get("init") and not is_store(store)
    if was_given or mixture.parse(config.data.source):
        return tokenizer_loading.load(workdir.path / "tokenizer")
    return prepare.given_tokenizer(store)


def _find_fork(config: TrainConfig, workdir: Workdir[TrainConfig], fork: AnyPath) -> Origin:
    """Return the origin of a run that continues from a checkpoint of another one."""
    settings.check(config)
    config, before = copy.deepcopy(config), read_fork_config(fork)
    check_fork(config, fork, before, workdir)
    config = resolve(config, workdir, validate, source=before.model, fork=str(fork))
    content = checkpoint.read_json(fork, "tokenizer")
    tokenizer = tokenizer_loading.from_json(content, f"{fork}/tokenizer")
    chosen = prepare.choose_tokenizer(config, None)
    if isinstance(chosen, Tokenizer) and chosen.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"tokenizer.path {config.tokenizer.path} is not the tokenizer of {fork}, which --fork "
            "keeps; leave it empty"
        )
    read, run = ReadBefore(int(fork.name)), fork.parent.parent
    if workdirs.has_same_text(before, config):
        is_of_run = fork.parent.name == workdir.checkpoints.name
        results = workdirs.read_results(run) if is_of_run else {}
        earlier = workdirs.read_before(results, run)
        read = earlier.until(read.counted_from, make_schedule(before).stages)
    return Origin(
        "forked",
        config,
        fork=fork,
        before=before,
        tokenizer=tokenizer,
        read_before=read,
    )


def resolve(
    config: _Config,
    workdir: Workdir[_Config],
    validate: Callable[[_Config], None],
    *,
    bert: Bert | None = None,
    fields: Collection[str] | None = None,
    source: ModelConfig | None = None,
    init: str | None = None,
    fork: str | None = None,
) -> _Config:
    """Return the config of a run with its model resolved, once it is valid on all hosts.

    Args:
      config: the settings as the user wrote them.
      workdir: that of the run.
      validate: refuses settings that do not fit each other.
      bert: the model of --init, whose architecture the run has.
      fields: the dotted names of what the command line has set, the model's fields among them.
      source: the architecture that the parameters to begin with have.
      init, fork: as the user wrote them; every host must have the same.
    """
    config = copy.deepcopy(config)
    if bert:
        config.model = model_config(bert, config.model, fields)
    # Of a run that resumes, what is kept decides what fits.
    (settings.check if workdir.config else validate)(config)
    # As it would be read from a file: a list of Python is the tuple that a setting has.
    config = settings.from_dict(type(config), dataclasses.asdict(config), "config")
    if source and not workdir.config:
        _print_if_interpolated(source, config.model)
    workdirs.resume_settings(config, workdir)
    validate(config)
    config.model = resolve_dtype(config.model, jax.local_devices()[0])
    hosts.check_same_run(config, workdir=str(workdir.address), init=init, fork=fork)
    if hosts.count() > 1 and config.parallel.mode == "pmap":
        raise UserError("parallel.mode pmap runs on one host; set it to mesh")
    hosts.run_on_all_hosts(lambda: workdirs.check(workdir, config))
    hosts.run_on_all_hosts(lambda: sinks.check(config.log_to))
    return config


def own_config(path: AnyPath, fork: str | AnyPath | None = None) -> TrainConfig | None:
    """Return the config of the run that owns a workdir, or of what it forks; None without."""
    with remote.reading(path):
        own = workdirs.read(path, TrainConfig).config
    if own or fork is None:
        return own
    config = read_fork_config(find_fork(fork))
    # A fork keeps the tokenizer, which is neither read from its path nor extended again.
    tokenizer = dataclasses.replace(config.tokenizer, path="", add=0)
    return dataclasses.replace(config, tokenizer=tokenizer)


def find_fork(fork: str | AnyPath) -> AnyPath:
    """Return the checkpoint of a run that is meant by RUN, RUN@STEP or its own path."""
    name, at, step = str(fork).rpartition("@")
    if not (at and step.isdigit()) or os.path.exists(fork):
        name, step = str(fork), ""
    path = paths.as_path(name)
    with remote.reading(path):
        if path.name.isdigit() and paths.is_folder(path / "state"):
            return path
        found = checkpoint.list_checkpoints(path / "checkpoints")
    if not found:
        raise UserError(
            f"--fork={fork}: {name} is no workdir with checkpoints; give RUN or RUN@STEP, with the "
            "workdir RUN of pretraining, or --init for weights"
        )
    steps = sorted(int(path.name) for path in found)
    if step and int(step) not in steps:
        kept = ", ".join(f"{each:,}" for each in steps)
        raise UserError(f"--fork={fork}: {name} has no such checkpoint; choose of {kept}")
    return path / "checkpoints" / str(int(step or steps[-1]))


def read_fork_config(fork: AnyPath) -> TrainConfig:
    """Return the config of the checkpoint that a run forks."""
    values = checkpoint.read_json(fork, "config")
    config = settings.from_dict(TrainConfig, values, f"{fork}/config")
    return workdirs.with_own_texts(config, fork.parent.parent)


def initial_state(
    source: AnyPath | None,
    new_state: Callable[[], TrainState],
    abstract_state: TrainState,
    *,
    params: Any = None,
    positions: int | None = None,
) -> tuple[int, TrainState]:
    """Return the step and the state that a run begins with.

    Args:
      source: the checkpoint to read; None for a new state.
      new_state: returns a randomly initialized state.
      abstract_state: shapes and shardings of the state.
      params: the parameters that replace those of a new state.
      positions: the number of positions of `source`, if they are to be interpolated.
    """
    if source:
        with console.working("restoring the checkpoint", says_end=False):
            return int(source.name), _read_state(source, abstract_state, positions)
    with console.working("initializing", says_end=False):
        state = new_state()
        if params:
            state = dataclasses.replace(state, params=copy_params(state.params, params))
        return 0, state


def _read_state(source: AnyPath, like: TrainState, positions: int | None) -> TrainState:
    """Read a state; interpolate the learned positions of a fork, with their moments, to more."""
    if positions is None:
        return checkpoint.read_state(source, like)

    def stored(path: Any, leaf: Any) -> Any:
        is_position = any(getattr(key, "key", None) == _POSITIONS for key in path)
        return leaf.update(shape=(positions, *leaf.shape[1:])) if is_position else leaf

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


def _print_if_interpolated(source: ModelConfig, model: ModelConfig) -> None:
    few, many = source.max_position_embeddings, model.max_position_embeddings
    if few < many and source.position_embedding_type == "absolute":
        hosts.print_on_main(f"positions  {few:,} learned positions, interpolated to {many:,}")


def check_fork(config: TrainConfig, fork: AnyPath, saved: TrainConfig, workdir: Workdir) -> None:
    """Set the vocabulary of a fork; refuse a field that changes the meaning of the saved state."""
    if fork.parent == workdir.checkpoints or workdir.path.resolve() in fork.resolve().parents:
        raise UserError(f"--fork begins a new run; choose another --workdir than {workdir.path}")
    config.model.vocab_size = config.model.vocab_size or saved.model.vocab_size
    workdirs.keep_begun_stages(config, saved, int(fork.name))
    if config.data.length_warmup_fraction >= 1:  # 0 drops what is left of it
        kept = min(config.data.length_warmup_fraction, config.steps - 1)
        config.data.length_warmup_fraction = float(kept)
    values = settings.flatten(saved)
    free = (*_COMPUTATION, *_DROPOUTS, "initializer_range", "global_rope_theta")
    fixed = [name for name in values if name.startswith("model.") and name[6:] not in free]
    for name in (*fixed, "optimizer.name"):
        there, here = values[name], settings.flatten(config)[name]
        if name == "model.max_position_embeddings" and _fits(saved.model, here):
            continue
        refuse(
            there != here,
            f"--fork={fork} has another state: {name} is {there!r} there and {here!r} here",
            fix="set the field back, or take the weights alone by --init",
        )
    there, here = objective_name(saved), objective_name(config)
    refuse(
        there != here,
        f"--fork={fork} has another state: its objective is {there}, and that of this run {here}",
        fix="set data.pairs or objective back, or take the weights alone by --init",
    )
    refuse(
        config.steps <= int(fork.name),
        f"--fork={fork} has done {int(fork.name):,} steps, and steps is {config.steps:,}",
        fix="raise it, or fork an earlier one by RUN@STEP",
    )


def _fits(model: ModelConfig, positions: int) -> bool:
    """Return whether the parameters of a model can be used with another number of positions."""
    kind, is_longer = model.position_embedding_type, positions >= model.max_position_embeddings
    return kind in ("rotary", "sinusoidal") or (kind == "absolute" and is_longer)


def model_config(
    init: Bert, config: ModelConfig, fields: Collection[str] | None = None
) -> ModelConfig:
    """Return the config of `init`, but for how it computes and for what the user has set.

    The dropout rates that differ from the defaults count. `fields` are the dotted names of what the
    command line has set; None is for a config from Python, where more positions count too.
    """
    default = type(config)()
    own = [name for name in _DROPOUTS if getattr(config, name) != getattr(default, name)]
    if fields is None:
        longest = config.max_position_embeddings
        if max(default.max_position_embeddings, init.config.max_position_embeddings) < longest:
            own.append("max_position_embeddings")
    else:
        own += [name.removeprefix(_MODEL) for name in fields if name.startswith(_MODEL)]
    kept = {name: getattr(config, name) for name in {*_COMPUTATION, *own}}
    if not kept.get("vocab_size"):  # 0 is the size that the checkpoint has
        kept.pop("vocab_size", None)
    source = init.config
    if "model_type" in kept and type(source) is not type(config):
        source = settings.as_variant(source, config.model_type)
    for name in kept:
        refuse(
            not hasattr(source, name),
            f"--init is a {source.model_type}, which has no model.{name}",
            fix="leave it out",
        )
    model = dataclasses.replace(source, **kept)
    validate_model(model, "config")
    as_float32 = dataclasses.replace(model, dtype="float32")  # "auto" is not resolved yet
    shapes: Any = names.param_shapes(pretraining_model(as_float32, pairs=True))
    wanted: Any = traverse_util.flatten_dict(shapes, sep="/")
    params: Any = traverse_util.flatten_dict(init.params, sep="/")
    heads = tuple(f"{module}/" for module in names.OPTIONAL_MODULES)
    for name, param in params.items():
        shape = wanted[name].shape if name in wanted else None
        if name.endswith(_POSITIONS) and shape and shape[0] > len(param):
            shape = param.shape  # they are interpolated
        # A head that only `init` has is dropped: of a task, or of another objective.
        is_of_encoder = name.startswith("bert/") and not f"{name}/".startswith(heads)
        is_used = name in wanted or is_of_encoder
        refuse(
            is_used and shape != param.shape,
            f"--init has {name} of shape {param.shape}, which the config does not ask for",
            fix="leave the shape of the model out of the command",
        )
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
