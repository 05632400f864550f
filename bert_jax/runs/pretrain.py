"""Pretraining: from a config and text to checkpoints.

`pretrain` is `start`, which checks everything and prepares the text, and `train_run`.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax

from bert_jax import console
from bert_jax.batches import loader
from bert_jax.bert import Bert
from bert_jax.config import TrainConfig, settings
from bert_jax.config.schedule import make_schedule
from bert_jax.console import Level
from bert_jax.distributed import devices, hosts
from bert_jax.distributed import mesh as meshes
from bert_jax.objectives import make_objective
from bert_jax.runs import origin as origins
from bert_jax.runs import report, run_text, weights
from bert_jax.runs import workdir as workdirs
from bert_jax.runs.pretraining_run import Run
from bert_jax.storage import mirror, paths
from bert_jax.storage.paths import AnyPath
from bert_jax.text import mixture
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import checkpoint, loop
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.metrics import Writer, remove_metrics
from bert_jax.training.optimizer import learning_rate
from bert_jax.training.setup import set_up
from bert_jax.training.step import TrainState, make_eval_step, make_train_step


@dataclasses.dataclass(frozen=True)
class PretrainingResult:
    """The result of a pretraining run.

    Attributes:
      scores: by name, of the held-out text: losses (nats), accuracies, hidden_similarity and what
        else the objective has; of a mixture also the losses of each text.
      baselines: of the scores that the objective has one of: of "mlm_loss" the unigram entropy of
        the held-out text, of "mlm_accuracy" the share of its most frequent token.
      checkpoint: the latest checkpoint.
      bert: the trained model; None where several hosts share it.

    >>> result = getfixture("tiny_run")
    >>> result.checkpoint.name, sorted(result.scores)[:3]
    ('2', ['hidden_similarity', 'loss', 'mlm_accuracy'])
    """

    scores: dict[str, float]
    baselines: dict[str, float]
    checkpoint: AnyPath
    bert: Bert | None


def pretrain(
    config: TrainConfig,
    workdir: str | AnyPath,
    *,
    init: str | Path | None = None,
    fork: str | Path | None = None,
    texts: Any = None,
    quiet: bool = False,
) -> PretrainingResult:
    """Pretrain an encoder, or resume a run.

    Args:
      config: every setting of the run; `bert_jax.recipe("tiny")` returns one.
      workdir: folder of checkpoints, metrics and pictures, on a disk or "gs://BUCKET/FOLDER". A run
        that is there resumes.
      init: a checkpoint whose weights, architecture and tokenizer to continue from. Of
        `config.model`, its dtype, remat, scan_layers and attention still count, dropouts that
        differ from their defaults, and positions beyond 512 and those of `init` (learned ones are
        interpolated).
      fork: a run, "RUN" or "RUN@STEP", whose state to continue from in a new workdir: parameters,
        optimizer, step and random key. `config` must have the model and the optimizer's name of
        that run, but for dropouts, how it computes, and more positions. Not with `init`.
      texts: documents in memory, in place of `config.data.source`: texts, or dictionaries with a
        text in `config.data.text_field`, in a list or any iterable, or a table as `finetune` takes.
        They are written to `texts.jsonl` in the workdir; a run resumes with the same ones.
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
    with console.output(Level.NOTHING if quiet else Level.PROGRESS), console.logging_kept():
        return train_run(start(config, paths.as_path(workdir), init, fork=fork, texts=texts))


@meshes.own_settings()
def start(
    config: TrainConfig,
    workdir: AnyPath,
    init: str | Path | None = None,
    fields: Collection[str] | None = None,
    fork: str | Path | None = None,
    recipe: str = "",
    texts: Any = None,
    fit: Callable[[TrainConfig], TrainConfig] | None = None,
) -> Run:
    """Check a run against its workdir and the devices, and prepare its text.

    `fit` returns the config of the run, such as one of fewer steps, from all that is found of it.
    """
    settings.check_class(config, TrainConfig)
    config = settings.check(config)
    hosts.check_same_command(config, {"workdir": workdir, "init": init, "fork": fork})
    found = _read_workdir(workdir)
    if texts is not None:  # of which the origin may add words to a vocabulary
        config, found = workdirs.with_texts(texts, config, found)
    parts = run_text.find(config.data.source)
    origin = origins.find(config, found, parts, init=init, fork=fork, fields=fields)
    config = origin.config
    if not found.config:  # a run that resumes keeps the settings that it began with
        mixture.check_settings(parts, fields or ())
    is_open = not config.model.vocab_size
    corpus = None
    if fit and is_open:  # the time of a step depends on the vocabulary
        corpus = run_text.read(config, parts, origin.tokenizer, found)
        config = _with_vocab_size(config, corpus.tokenizer.vocab_size)
    config = fit(config) if fit else config
    if config.steps in found.steps:
        report.finished(
            f"{workdir} has done its {config.steps:,} steps",
            "train longer with a larger --config.steps",
            "evaluate anew, on another number of sequences, with --config.eval_rows",
        )
    if is_open:
        config = _with_vocab_size(config, _expected_vocab_size(config, parts, origin.tokenizer))
    schedule, mesh = make_schedule(config), meshes.make_mesh(config.parallel)
    objective = make_objective(config)
    objective.check_mesh(mesh, schedule.stages)
    for stage in schedule.stages:
        devices.check_fits(config.model, stage, config.optimizer, mesh)
    setup = None if is_open else set_up(objective.model, config, schedule.rate, mesh)
    state = None
    if setup and hosts.count() == 1 and origin.kind == "new":
        # Compiled while the text is prepared. Python waits for it before it exits.
        state = ThreadPoolExecutor(1).submit(setup.new_state)
    is_new = not run_text.has_store(found)
    corpus = corpus or run_text.read(config, parts, origin.tokenizer, found)
    with run_text.removed_if_refused(found, is_new=is_new):
        if is_open:  # the text may have fewer tokens than were asked for
            config = _with_vocab_size(config, corpus.tokenizer.vocab_size)
            objective = make_objective(config)
            objective.check_mesh(mesh, schedule.stages)
        objective.check_text(corpus)
        workdirs.check_text(found, corpus.fingerprint)
    setup = setup or set_up(objective.model, config, schedule.rate, mesh)
    workdirs.check_shared(found.path)
    return Run(
        config=config,
        has_open_vocabulary=is_open,
        schedule=schedule,
        workdir=found,
        origin=origin.with_text(corpus.text_identity),
        init_name=str(init),
        recipe=recipe,
        corpus=corpus,
        objective=objective,
        setup=setup,
        new_state=state.result if state else setup.new_state,
    )


def _read_workdir(workdir: AnyPath) -> workdirs.Workdir[TrainConfig]:
    """Return what a workdir holds, which all hosts see alike."""
    folder = hosts.run_on_all_hosts(lambda: mirror.open_workdir(workdir, jax.process_index()))
    workdirs.check_path(folder)
    found = hosts.run_on_all_hosts(lambda: workdirs.read(folder, TrainConfig))
    hosts.check_same(
        {"--workdir's checkpoints": found.steps, "--workdir's run": found.config is not None},
        "give a folder that all hosts share, and start again once each of them sees its files",
    )
    return found


def _expected_vocab_size(
    config: TrainConfig, parts: mixture.Parts, tokenizer: Tokenizer | None
) -> int:
    """Return the vocabulary size of the run's tokenizer, which may have to be trained yet."""
    return hosts.result_from_main(lambda: mixture.resolve_vocab_size(config, parts, tokenizer))


def _with_vocab_size(config: TrainConfig, size: int) -> TrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


@meshes.own_settings()
def train_run(run: Run, stop: Callable[[], str] = lambda: "") -> PretrainingResult:
    """Train, from the latest checkpoint on, and evaluate."""
    refusing = devices.out_of_memory_refused(run.schedule.largest, jax.devices()[0])
    with workdirs.hold(run.workdir.path), mirror.sending(run.workdir.path), refusing:
        checkpoints = Checkpoints(
            run.workdir.checkpoints,
            run.config.checkpoint,
            run.corpus.tokenizer,
            rank=lambda scores: -scores["loss"],
        )
        with closing(checkpoints):  # an error may come while one is written
            return _train(run, checkpoints, stop)


def _train(run: Run, checkpoints: Checkpoints, stop: Callable[[], str]) -> PretrainingResult:
    config, schedule, corpus, objective = run.config, run.schedule, run.corpus, run.objective
    mesh, origin = run.setup.layout.mesh, run.origin
    indices = partial(meshes.process_indices, mesh)
    batches = loader.TrainBatches(
        corpus, schedule.stages, config.data, config.seed, indices, origin.read_before
    )
    step, state = _initial_state(run, checkpoints)
    report.origin(origin, run.init_name, step, state)
    results = _claim_workdir(run)
    if run.origin.fork:  # so that the run needs the other one no more
        checkpoints.save(step, state, run.config_at(step), None)
    report.pretraining_start(run, state, batches)
    if run.origin.before:
        report.new_schedule(make_schedule(run.origin.before), schedule, step)

    with console.working("scoring the baselines", says_end=False):
        baselines = objective.baselines(corpus, schedule.stages[-1])

    stages = _make_stages(run, indices)
    with _open_metrics(run, step, batches, baselines) as writer:
        if step:  # the records of later steps are gone
            mirror.try_to_send(run.workdir.path)
        with loop.Training(
            state, stages, loader.prefetch(batches, step), checkpoints, writer, objective
        ).shown() as training:
            _take_steps(run, training, baselines, stop)
        scores = _final_scores(run, stages[-1], training.state)
        baselines = {**baselines, **objective.moving_baselines(scores)}
    sizes = report.sizes(part.train for part in corpus.parts)
    text = dict(zip(("tokens", "documents"), sizes, strict=True))
    results |= {"step": config.steps, "scores": scores, "baselines": baselines, "text": text}
    workdirs.write_results(run.workdir.path, results)
    bert = _trained_bert(run, training.state)
    report.pretraining_end(run, batches, scores, baselines, bert)
    return PretrainingResult(scores, baselines, run.last_checkpoint, bert)


def _open_metrics(
    run: Run, step: int, batches: loader.TrainBatches, baselines: Mapping[str, float]
) -> Writer:
    """Open the records and the curves of a run, which continue from a step."""
    rate = learning_rate(run.schedule.rate)
    return Writer(
        run.workdir.path,
        step,
        run.config,
        progress=lambda step: {"learning_rate": rate(step), **batches.progress(step)},
        baselines=baselines,
        figures=run.objective.figures,
        changes=[
            stage.first_step
            for before, stage in pairwise(run.schedule.stages)
            if stage.max_length != before.max_length
        ],
    )


def _initial_state(run: Run, checkpoints: Checkpoints) -> tuple[int, TrainState]:
    """Return the step and the state of the latest checkpoint, or those that the run begins with."""
    origin, latest = run.origin, checkpoints.latest_path()
    positions = None
    if origin.before and not latest:  # of a fork
        positions = origin.before.model.max_position_embeddings
    return weights.initial_state(
        latest or origin.fork,
        run.new_state,
        run.setup.abstract_state,
        params=origin.bert and origin.bert.params,
        positions=positions,
    )


def _claim_workdir(run: Run) -> dict[str, Any]:
    """Make the workdir that of the run; return what its `results.json` holds so far."""
    workdir, origin = run.workdir.path, run.origin
    workdirs.claim(run.workdir, run.config, run.corpus.tokenizer, run.corpus.fingerprint)
    began_with = origin.fork or (run.init_name if origin.bert else None)
    read_before = dataclasses.asdict(origin.read_before)
    results = {
        "init": began_with and str(began_with),
        "has_open_vocabulary": run.has_open_vocabulary,
        **read_before,
    }
    if origin.kind == "resumed":
        results = run.workdir.results
    else:  # a run that was killed before its first checkpoint may have left some
        hosts.run_on_main(lambda: remove_metrics(workdir))
    results = {**results, "text_identity": run.corpus.text_identity}
    workdirs.write_results(workdir, results)
    mirror.send(workdir)  # with which the first checkpoint makes it that of a run
    return results


def _take_steps(
    run: Run, training: loop.Training, baselines: Mapping[str, float], stop: Callable[[], str]
) -> None:
    """Take every step that is left; warn once of what they show, and save those that are due."""
    config, corpus, warmup = run.config, run.corpus, run.schedule.rate.warmup
    has_warned = False
    for step in training.steps(log_every=config.log_every, eval_every=config.eval_every, stop=stop):
        for values in filter(None, (step.means, step.scores)):
            corpus.verify(0)
            warning = run.objective.warning(step.number, values, baselines, warmup)
            if warning and not has_warned:
                hosts.warn_on_main(warning)
                has_warned = True
        if step.is_due(config.checkpoint.every) or step.is_best or step.stop_reason:
            # Who stops the run may not wait; then the text is verified when it resumes.
            corpus.verify(0 if step.stop_reason else None)
            training.save(step, run.config_at(step.number))
            mirror.try_to_send(run.workdir.path)


def _final_scores(run: Run, stage: loop.Stage, state: TrainState) -> dict[str, float]:
    """Return the held-out scores of the last checkpoint; evaluate if it has no such ones."""

    def saved() -> dict[str, float] | None:
        # Not from the records, whose file could have been changed.
        config = checkpoint.read_json(run.last_checkpoint, "config")
        has_same_rows = config.get("eval_rows") == run.config.eval_rows
        return checkpoint.read_scores(run.last_checkpoint) if has_same_rows else None

    scores = hosts.result_from_main(saved)  # another host may not see the files yet
    if not scores:
        with console.working("evaluating", says_end=False):
            scores = stage.evaluate(state)
    return {name: value for name, value in scores.items() if name != "sequences_per_second"}


def _trained_bert(run: Run, state: TrainState) -> Bert | None:
    """Return the trained model; of several hosts none has all parameters, and None is returned."""
    if hosts.count() > 1:
        return None
    final = run.config_at(run.config.steps)
    return Bert(
        final.model,
        state.params,
        run.corpus.tokenizer,
        run.objective.make_model(final),
        source=paths.absolute(run.last_checkpoint),
        objective=final.objective,
    )


def _make_stages(run: Run, indices: loader.ProcessIndices) -> list[loop.Stage]:
    """Return the compiled steps of each stage's length and batch size."""
    config, corpus, setup = run.config, run.corpus, run.setup
    stages = []
    compiled = partial(meshes.compile_step, mode=config.parallel.mode, layout=setup.layout)
    for stage in run.schedule.stages:
        in_stage = run.objective.in_stage(stage, corpus.tokenizer)
        train_step = make_train_step(
            in_stage, setup.optimizer, config.optimizer.microbatches, steps=config.steps
        )
        eval_step = compiled(make_eval_step(in_stage), outputs="metrics")
        held_out = partial(
            loader.EvalBatches,
            stage=stage,
            data=config.data,
            most=config.eval_rows // len(corpus.parts),
            process_indices=indices,
            microbatches=config.optimizer.microbatches,  # what fits in training
        )
        evaluate = partial(
            loop.evaluate, eval_step, corpus.parts, held_out, run.objective.loss_weights
        )
        train_step = compiled(train_step, outputs=("state", "metrics"))
        tokens = stage.batch_size * stage.max_length
        stages.append(loop.Stage(stage.end, stage.batch_size, tokens, train_step, evaluate))
    return stages
