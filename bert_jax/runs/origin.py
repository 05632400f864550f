"""How a run begins: new, from a model's weights, from another run's state, or resumed."""

import copy
import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, TypeVar

import jax

from bert_jax.batches.loader import NOTHING_READ, ReadBefore, has_same_order, has_same_sequences
from bert_jax.bert import Bert, load
from bert_jax.config import FinetuneConfig, ModelConfig, TrainConfig, settings
from bert_jax.config.schedule import make_schedule
from bert_jax.config.validation import validate, validate_model
from bert_jax.distributed import hosts
from bert_jax.distributed.devices import resolve_dtype
from bert_jax.errors import UserError, refuse
from bert_jax.models.positions import position_kind
from bert_jax.runs import forks, vocabulary, weights
from bert_jax.runs import workdir as workdirs
from bert_jax.runs.workdir import Workdir
from bert_jax.storage import paths, remote
from bert_jax.storage.paths import AnyPath
from bert_jax.text import mixture, prepare, tokenizer_loading
from bert_jax.text.store import is_store
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import checkpoint, sinks

_MODEL = "model."  # before the names of its fields
_Config = TypeVar("_Config", TrainConfig, FinetuneConfig)


@dataclasses.dataclass(frozen=True)
class Origin:
    """How a pretraining run begins, found out once.

    Attributes:
      kind: "new"; "initialized" with the weights of a model; "forked" from the state of another
        run; or "resumed" from the latest checkpoint of its own workdir.
      config: the settings of the run, resolved and valid.
      bert: the model of --init, also where a run resumes that began with it; if its folder is
        gone by then, that of the latest checkpoint.
      fork: the checkpoint of the other run.
      before: the settings that the state of a fork or of a resumed run was trained with.
      tokenizer: that of the run; None if its text has one, or one is to be trained on it.
      read_before: what the runs that a fork continues have read of its text.
      text_before: the identity of the text of the run that a fork continues; None if unknown.
    """

    kind: Literal["new", "initialized", "forked", "resumed"]
    config: TrainConfig
    bert: Bert | None = None
    fork: AnyPath | None = None
    before: TrainConfig | None = None
    tokenizer: Tokenizer | None = None
    read_before: ReadBefore = NOTHING_READ
    text_before: str | None = None

    def with_text(self, identity: str) -> "Origin":
        """Return the origin of a run on a text: a fork to another text has read nothing of it."""
        if self.text_before in (None, identity):
            return self
        return dataclasses.replace(self, read_before=_shuffled_anew(self.read_before.counted_from))


def _shuffled_anew(step: int) -> ReadBefore:
    return ReadBefore(counted_from=step, shuffled_anew=step)


def find(
    config: TrainConfig,
    workdir: Workdir[TrainConfig],
    parts: mixture.Parts,
    *,
    init: str | Path | None,
    fork: str | Path | None,
    fields: Collection[str] | None,
) -> Origin:
    """Return how a run begins, or refuse settings, a workdir or a checkpoint that do not fit."""
    if init is not None and fork is not None:
        raise UserError("--init and --fork are both set; --fork has the weights too: leave one")
    for flag, given in {"--init": init, "--fork": fork}.items():
        refuse(
            given is not None and workdir.results.get("init", given) is None,
            f"{workdir.address} has a run that began with random weights, not with {flag} {given}",
            fix=f"leave {flag} out to resume it, or choose another --workdir",
        )
    bert = None if init is None else _initial_model(init, workdir)
    if bert and not workdir.last_step:
        check_same_model(bert)
    if not workdir.config:
        kept_by = next((flag for flag, by in {"--init": init, "--fork": fork}.items() if by), "")
        vocabulary.check(config, kept_by, fields or ())
        refuse(
            config.data.eval_source and "data.eval_fraction" in (fields or ()),
            f"data.eval_fraction {config.data.eval_fraction} has no effect beside data.eval_source "
            f"{config.data.eval_source}",
            fix="leave one out",
        )
    if bert:
        resumed = workdir.path if workdir.config else None
        tokenizer = vocabulary.chosen_tokenizer(config, parts, bert, resumed)
        hosts.check_same(
            {"the tokenizer": tokenizer.fingerprint[:16]},
            "copy what tokenizer.path names, and with tokenizer.add the text, once more",
        )
        bert = vocabulary.with_tokenizer(bert, tokenizer)
    if fork is not None and not workdir.config:
        return _find_fork(config, workdir, forks.find(fork), fields or ())
    config = resolve(config, workdir, validate, bert=bert, fields=fields)
    if bert:
        # To the host's memory: a second copy of them would stay on a device to the end of the run.
        bert = dataclasses.replace(bert, params=jax.device_get(bert.params))
    tokenizer = bert.tokenizer if bert else None
    if not workdir.config:
        return Origin("initialized" if bert else "new", config, bert=bert, tokenizer=tokenizer)
    if fork is not None:
        paths.check_named(fork)
        began = workdir.results.get("init", fork)
        hosts.warn_on_main(
            f"{workdir.address} has a run that began with {began}, which resumes; --fork is not "
            "used again"
        )
    tokenizer = tokenizer or _tokenizer_of_resumed(config, parts, workdir)
    return Origin(
        "resumed",
        config,
        bert=bert,
        before=workdir.config,
        tokenizer=tokenizer,
        read_before=workdirs.read_before(workdir.results, workdir.address),
    )


def check_same_model(bert: Bert) -> None:
    """Refuse copies of the model of --init that differ between hosts."""
    if hosts.count() == 1:  # whose checksum nobody asks for
        return
    values = {
        "the content of --init": checkpoint.checksum(bert.params),
        "the tokenizer of --init": bert.tokenizer.fingerprint[:16],
    }
    hosts.check_same(values, "copy it once more")


def _initial_model(init: str | Path, workdir: Workdir) -> Bert:
    """Return the model of --init, or what a run has made of it where the folder is gone.

    A machine that resumes a run, such as one in place of another, may not have the folder, and need
    not download it again from the hub.
    """

    def is_missing() -> bool:
        if paths.is_on_hub(init):
            return workdir.results.get("init") == str(init)
        with remote.reading(init):
            return not paths.exists(paths.as_path(init))

    # All hosts read the same one, and wait for each other.
    is_gone = any(hosts.gather(hosts.run_on_all_hosts(is_missing)))
    if is_gone and workdir.config and workdir.results.get("init") and workdir.last_step:
        bert = load(workdir.checkpoints / str(workdir.last_step))
        # A phase may have another rotary base than the run.
        return dataclasses.replace(bert, config=workdir.config.model)
    return load(init)


def _tokenizer_of_resumed(
    config: TrainConfig, parts: mixture.Parts, workdir: Workdir
) -> Tokenizer | None:
    """Return the tokenizer of a run that resumes, unless its store has trained it."""
    store = workdir.path / "store"
    # A machine that resumes a run from a bucket has no store yet.
    was_given = workdir.results.get("init") or config.tokenizer.path
    if parts.weights or (was_given and not is_store(store)):
        return tokenizer_loading.load(workdir.path / "tokenizer")
    return prepare.given_tokenizer(store)


def _find_fork(
    config: TrainConfig,
    workdir: Workdir[TrainConfig],
    fork: AnyPath,
    fields: Collection[str],
) -> Origin:
    """Return the origin of a run that continues from a checkpoint of another one."""
    hosts.check_same(
        {"the checkpoint of --fork": str(fork), "the content of --fork": checkpoint.content(fork)},
        "copy the run once more",
    )
    # Each host may have a copy. The first one verifies its own when it reads the state.
    hosts.run_on_all_hosts(lambda: hosts.is_main() or checkpoint.verify(fork, "state"))
    before = forks.read_config(fork)
    config = forks.resolve(config, fork, before, workdir, fields)
    config = resolve(config, workdir, validate, forked_from=before.model)
    tokenizer = checkpoint.read_tokenizer(fork)
    chosen = prepare.choose_tokenizer(config, None)
    if isinstance(chosen, Tokenizer) and chosen.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"tokenizer.path {config.tokenizer.path} is not the tokenizer of {fork}, which --fork "
            "keeps; leave it empty"
        )
    step, run = int(fork.name), fork.parent.parent
    read, is_of_run = _shuffled_anew(step), fork.parent.name == workdir.checkpoints.name
    results = workdirs.read_results(run) if is_of_run else {}
    stages = make_schedule(before).stages
    is_read_on = (
        before.seed == config.seed
        and has_same_sequences(before.data, config.data)
        and has_same_order(stages, make_schedule(config).stages)
        and workdirs.has_same_text(before, config)
    )
    if is_read_on:
        read = workdirs.read_before(results, run).until(step, stages)
    text = results.get("text_identity")
    hosts.check_same(
        {"what the run of --fork has read": [dataclasses.asdict(read), text]},
        "copy the run once more, with its results.json",
    )
    return Origin(
        "forked",
        config,
        fork=fork,
        before=before,
        tokenizer=tokenizer,
        read_before=read,
        text_before=text,
    )


def resolve(
    config: _Config,
    workdir: Workdir[_Config],
    validate: Callable[[_Config], None],
    *,
    bert: Bert | None = None,
    fields: Collection[str] | None = None,
    forked_from: ModelConfig | None = None,
) -> _Config:
    """Return the config of a run with its model resolved, once it is valid on all hosts.

    Args:
      config: the settings as the user wrote them.
      workdir: that of the run.
      validate: refuses settings that do not fit each other.
      bert: the model of --init, whose architecture the run has.
      fields: the dotted names of what the command line has set, the model's fields among them.
      forked_from: the architecture of the run that it forks.
    """
    config = copy.deepcopy(config)
    if bert:
        config.model = model_config(bert, config.model, fields)
    workdirs.resume_settings(config, workdir)  # what is kept decides what fits
    config = settings.check(config)  # with the lists of a model in memory as tuples
    validate(config)
    source = bert.config if bert else forked_from
    if source and not workdir.config:
        _print_if_interpolated(source, config.model)
    config.model = resolve_dtype(config.model, jax.local_devices()[0])
    hosts.check_same(settings.flatten(config), "give all the same model and the same --workdir")
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
    config = forks.read_config(forks.find(fork))
    # A fork keeps the tokenizer, which is neither read from its path nor extended again.
    tokenizer = dataclasses.replace(config.tokenizer, path="", add=0)
    return dataclasses.replace(config, tokenizer=tokenizer)


def _print_if_interpolated(source: ModelConfig, model: ModelConfig) -> None:
    few, many = source.max_position_embeddings, model.max_position_embeddings
    if few < many and position_kind(source).is_learned:
        hosts.print_on_main(f"positions  {few:,} learned positions, interpolated to {many:,}")


def model_config(
    init: Bert, config: ModelConfig, fields: Collection[str] | None = None
) -> ModelConfig:
    """Return the config of `init`, but for how it computes and for what the user has set.

    Of the config these are dropout rates that differ from the defaults, and positions beyond the
    defaults and those of `init`. `fields` are the dotted names of what the command line has set.
    """
    default = type(config)()
    own = [name for name in weights.DROPOUTS if getattr(config, name) != getattr(default, name)]
    longest = config.max_position_embeddings
    if max(default.max_position_embeddings, init.config.max_position_embeddings) < longest:
        own.append("max_position_embeddings")
    own += [name.removeprefix(_MODEL) for name in fields or () if name.startswith(_MODEL)]
    kept = {name: getattr(config, name) for name in {*weights.COMPUTATION, *own}}
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
    weights.check_shapes(init.params, model)
    return model
