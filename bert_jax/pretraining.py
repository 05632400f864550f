"""Pretraining: from a config and text to checkpoints.

`pretrain` is `start`, which checks everything and prepares the text, and `train`.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax

from bert_jax import console, initialization, report
from bert_jax.batches import loader
from bert_jax.bert import Bert, load
from bert_jax.config import TrainConfig, phases, validate
from bert_jax.distributed import hosts
from bert_jax.distributed.mesh import (
    Layout,
    check_divides,
    check_model,
    compile_step,
    init_sharded,
    make_layout,
    make_mesh,
    process_indices,
)
from bert_jax.distributed.precision import resolve_dtype
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForPreTraining
from bert_jax.text import prepare, store
from bert_jax.text.store import Corpus
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import checkpoint, loop
from bert_jax.training import workdir as workdirs
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.masking import make_masking
from bert_jax.training.metrics import Writer
from bert_jax.training.objectives import Pretraining
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.step import init_state, make_eval_step, make_train_step

PANELS = {
    "mlm_loss": "MLM loss (nats)",
    "mlm_accuracy": "MLM accuracy",
    "nsp_loss": "NSP loss (nats)",
    "nsp_accuracy": "NSP accuracy",
}


@dataclasses.dataclass(frozen=True)
class PretrainingResult:
    """The result of a pretraining run.

    Attributes:
      scores: losses (nats) and accuracies on the held-out text, by name.
      baselines: of "mlm_loss", "mlm_accuracy" and "nsp_accuracy": the unigram entropy of the
        held-out text, the share of its most frequent token, and that of the larger class.
      checkpoint: the latest checkpoint.
      bert: the trained model; None where several hosts share it.

    >>> result = getfixture("tiny_run")
    >>> result.checkpoint.name, sorted(result.scores)[:3]
    ('2', ['loss', 'mlm_accuracy', 'mlm_loss'])
    """

    scores: dict[str, float]
    baselines: dict[str, float]
    checkpoint: Path
    bert: Bert | None


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is ready to train: its config, resolved and valid, and its text."""

    config: TrainConfig
    workdir: Path
    init: Bert | None
    init_name: str
    corpus: Corpus


def pretrain(
    config: TrainConfig, workdir: str | Path, *, init: str | Path | None = None, quiet: bool = False
) -> PretrainingResult:
    """Pretrain an encoder, or resume a run.

    Args:
      config: every setting of the run; `bert_jax.recipe("tiny")` returns one.
      workdir: folder of checkpoints, metrics and pictures. A run that is there resumes.
      init: a checkpoint whose weights, shape and tokenizer to continue from; fields of
        `config.model` that differ from their defaults must fit it.
      quiet: whether to print nothing and draw nothing.

    Raises:
      UserError: a setting, the text, the workdir or `init` cannot be used.
      TrainingError: a loss or a gradient is not finite.

    >>> result = getfixture("tiny_run")
    >>> sorted(result.baselines)
    ['mlm_accuracy', 'mlm_loss', 'nsp_accuracy']
    >>> result.bert
    Bert(bert, 2 layers of 16, 2 heads, 6,722 parameters, wordpiece of 64 tokens)
    """
    with console.quiet(quiet or console.is_quiet()):
        return train(start(config, Path(workdir), init))


def start(
    config: TrainConfig,
    workdir: Path,
    init: str | Path | None = None,
    model_fields: Iterable[str] | None = None,
) -> Run:
    """Check a run against its workdir and the devices, and prepare its text.

    Args:
      config: every setting of the run.
      workdir: its folder.
      init: a checkpoint to continue from.
      model_fields: fields of `config.model` that `init` must fit; None for those that differ from
        their defaults.

    Raises:
      UserError: something cannot be used.
    """
    config = copy.deepcopy(config)
    initial = load(init) if init else None
    if initial:
        config.model = initialization.model_config(initial, config.model, model_fields)
    validate(config)
    workdirs.resume_settings(config, workdir)
    config.model = resolve_dtype(config.model, jax.local_devices()[0])
    hosts.check_same_run(config, workdir=str(workdir), init=init and str(init))
    if hosts.count() > 1 and config.parallel.mode == "pmap":
        raise UserError("parallel.mode pmap runs on one host; set it to mesh")
    if initial:
        weights = {"the content of --init": workdirs.checksum(initial.params)}
        hosts.check_same(weights, "copy it once more")
    hosts.run_on_all_hosts(lambda: workdirs.check(workdir, config))
    tokenizer = initial.tokenizer if initial else None
    vocab_size = hosts.run_on_all_hosts(
        lambda: prepare.resolve_vocab_size(config, tokenizer) if hosts.is_main() else 0
    )
    config.model.vocab_size = hosts.broadcast_from_main(lambda: vocab_size)
    mesh = make_mesh(config.parallel)
    lengths = [phase.max_length for _, phase in phases(config)]
    check_model(config.model, mesh, lengths, packed=config.data.packing)
    for _, phase in phases(config):
        check_divides(phase.batch_size, config.optimizer.microbatches, mesh)
    corpus = _read_text(config, tokenizer, workdir / "store")
    workdirs.check_text(workdir, corpus.fingerprint)
    workdirs.check_shared(workdir)
    return Run(config, workdir, initial, str(init), corpus)


def _read_text(config: TrainConfig, tokenizer: Tokenizer | None, folder: Path) -> Corpus:
    """Return the text, which the first host prepares while the others wait."""

    def read() -> Corpus:
        return prepare.read(config, tokenizer, folder)

    if hosts.broadcast_from_main(lambda: store.is_store(config.data.source)):
        corpus = hosts.run_on_all_hosts(read)  # each host has a copy, or all see the same folder
        hosts.check_same({"the text of data.source": corpus.fingerprint}, "copy it once more")
        return corpus
    prepared = hosts.run_on_all_hosts(lambda: read() if hosts.is_main() else None)
    return hosts.run_on_all_hosts(lambda: prepared or store.open_store(folder))


def train(run: Run, stop: Callable[[], str] = lambda: "") -> PretrainingResult:
    """Train, from the latest checkpoint on, and evaluate.

    Args:
      run: what `start` returned.
      stop: asked after each step for a reason to save and stop, such as "SIGTERM".

    Raises:
      TrainingError: a loss or a gradient is not finite.
      Interrupted: `stop` returned a reason; the state has been saved.
    """
    config, workdir, corpus = run.config, run.workdir, run.corpus
    model = BertForPreTraining(config.model, next_sentence=config.data.pairs != "none")
    optimizer = make_optimizer(config.optimizer, config.steps)

    def new_state(key: jax.Array) -> Any:
        return init_state(model.init_params(key), optimizer, config.seed)

    mesh = make_mesh(config.parallel)
    abstract_state, layout = make_layout(new_state, mesh, config.parallel)
    stages = _make_stages(config, corpus, model, optimizer, layout)
    batches = loader.TrainBatches(corpus, config, partial(process_indices, mesh))
    checkpoints = Checkpoints(
        workdir / "checkpoints",
        config.checkpoint,
        dataclasses.asdict(config),
        corpus.tokenizer,
        rank=lambda held_out: -held_out["loss"],
    )
    step = checkpoints.latest()
    if step is None:
        step = 0
        state = init_sharded(new_state, layout.state, jax.random.key(config.seed))
        if run.init:
            params = initialization.copy_params(state.params, run.init.params)
            state = state.replace(params=params)
            report.initialized_from(run.init_name, state.params, run.init.params)
    else:
        state = checkpoints.restore(step, abstract_state)
        if run.init:
            hosts.print_on_main(f"resuming from step {step:,}; --init is not used again")
    workdirs.claim(workdir, config, corpus.tokenizer, corpus.fingerprint)
    report.pretraining_start(config, corpus, mesh, state, batches, workdir)

    with closing(Writer(workdir, step, PANELS)) as writer:
        state = loop.fit(
            state,
            stages,
            loader.prefetch(batches, step),
            checkpoints,
            writer,
            log_every=config.log_every,
            eval_every=config.eval_every,
            save_every=config.checkpoint.every,
            stop=stop,
        )
        scores = writer.latest.get("eval") or stages[-1].evaluate(state)
    # Of several hosts none has all parameters; the checkpoint has.
    bert = None
    if hosts.count() == 1:
        bert = Bert(config.model, state.params, corpus.tokenizer, model)
    scores = {name: x for name, x in scores.items() if name not in ("step", "split")}
    baselines = report.baselines(corpus, config)
    latest = checkpoint.find(workdir)
    report.pretraining_end(scores, baselines, config, corpus, bert, workdir, latest)
    return PretrainingResult(scores, baselines, latest, bert)


def _make_stages(
    config: TrainConfig,
    corpus: Corpus,
    model: BertForPreTraining,
    optimizer: optax.GradientTransformation,
    layout: Layout,
) -> list[loop.Stage]:
    """Return a stage for each phase: the compiled steps of its length and batch size."""
    stages, starts = [], phases(config)
    ends = [first for first, _ in starts[1:]] + [config.steps]
    compiled = partial(compile_step, mode=config.parallel.mode, layout=layout)
    for end, (_, phase) in zip(ends, starts, strict=True):
        objective = Pretraining(model, make_masking(corpus.tokenizer, phase, config.data))
        train_step = make_train_step(objective, optimizer, config.optimizer.microbatches)
        eval_step = make_eval_step(objective)
        indices = partial(process_indices, layout.mesh)
        stages.append(
            loop.Stage(
                end=end,
                batch_size=phase.batch_size,
                train_step=compiled(
                    train_step, in_sharding=layout.state, outputs=("state", "metrics")
                ),
                evaluate=partial(
                    loop.evaluate,
                    compiled(eval_step, in_sharding=layout.params, outputs="metrics"),
                    partial(loader.eval_batches, corpus, config, phase, indices),
                    phase.batch_size,
                ),
            )
        )
    return stages
