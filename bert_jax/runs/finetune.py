"""Fine-tuning: from a checkpoint and a task's examples to scores, predictions and a model.

`finetune` is `start`, which checks everything and reads the examples, and `train_run`.
"""

import dataclasses
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax

from bert_jax import console
from bert_jax.bert import Bert, load
from bert_jax.config import FinetuneConfig, TaskConfig, settings
from bert_jax.config.schedule import make_rate_schedule
from bert_jax.config.validation import validate_finetuning
from bert_jax.console import Level
from bert_jax.distributed import devices, hosts
from bert_jax.distributed import mesh as meshes
from bert_jax.errors import refuse
from bert_jax.inference.predictions import write_predictions
from bert_jax.models.heads import TaskModel
from bert_jax.runs import origin, report, weights
from bert_jax.runs import workdir as workdirs
from bert_jax.runs.learning_rates import find_rate
from bert_jax.runs.seed import train_seed
from bert_jax.runs.task_run import Examples, Run, compile_program, num_steps, tokenize
from bert_jax.runs.workdir import Workdir
from bert_jax.storage import paths, replacement
from bert_jax.storage.paths import AnyPath
from bert_jax.tasks import task_class
from bert_jax.tasks.datasets import check_same_head, load_datasets
from bert_jax.tasks.results import comparison
from bert_jax.tasks.sequences import longest_sequence
from bert_jax.training import checkpoint


@dataclasses.dataclass(frozen=True)
class FinetuningResult:
    """The result of a fine-tuning run.

    Attributes:
      scores: of the best model, by the name of each held-out and test set; empty without labels.
      comparison: scores on the first held-out set of each seed and of each baseline: dictionaries
        with "name" and "scores".
      checkpoint: the best checkpoint.
      bert: the best model.

    >>> result = getfixture("tiny_finetuning")
    >>> result.checkpoint.name, sorted(result.scores["eval"])[:2]
    ('best', ['accuracy', 'f1'])
    """

    scores: dict[str, dict[str, float]]
    comparison: list[dict[str, Any]]
    checkpoint: Path
    bert: Bert


def finetune(
    config: FinetuneConfig,
    init: str | Path | Bert,
    workdir: str | Path,
    *,
    train: Any = None,
    eval: Any = None,
    quiet: bool = False,
) -> FinetuningResult:
    """Fine-tune a model for a task, with one seed or several, or resume.

    Args:
      config: every setting of the run; `bert_jax.recipe("finetune/classification")` returns one.
        Of `config.model`, its dtype, remat, scan_layers and attention count, and dropouts that
        differ from their defaults, and positions beyond 512 and those of `init`; the rest is that
        of `init`. Settings of vectors that are at their default, such as `task.embedding.pooling`,
        are taken from an `init` of the same kind.
      init: the checkpoint to fine-tune, or a model.
      workdir: folder of results, predictions, checkpoints and pictures. A run that is there
        resumes.
      train: training examples in memory, where `config.data.train` is empty: dictionaries
        with the columns that `config.data` names, in a list or any iterable; a dictionary of
        columns; a data frame of pandas or polars, a table of Arrow, or a `datasets.Dataset`. A run
        resumes with the same ones.
      eval: held-out examples, as `train`, where `config.data.eval` is empty.
      quiet: whether to print nothing and draw nothing.

    Raises:
      UserError: a setting, a file, the workdir or `init` cannot be used.
      TrainingError: a loss or a gradient is not finite.

    >>> result = getfixture("tiny_finetuning")
    >>> result.comparison[-1]["name"]
    'best constant prediction'
    >>> result.bert.task.labels
    ('first', 'second')
    """
    with console.output(Level.NOTHING if quiet else Level.PROGRESS), console.logging_kept():
        return train_run(start(config, init, workdir, train=train, held_out=eval))


@meshes.own_settings()
def start(
    config: FinetuneConfig,
    init: str | Path | Bert,
    workdir: str | AnyPath,
    fields: Collection[str] | None = None,
    recipe: str = "",
    *,
    train: Any = None,
    held_out: Any = None,
) -> Run:
    """Check a run against its checkpoint, its workdir and the devices, and read its examples."""
    settings.check_class(config, FinetuneConfig)
    config = settings.check(config)
    init_name = str(init.source or "a model") if isinstance(init, Bert) else str(init)
    hosts.check_same_command(config, {"workdir": workdir, "init": init_name})
    folder = paths.on_disk(workdir)
    workdirs.check_path(folder)
    found = workdirs.read(folder, FinetuneConfig)
    initial = init if isinstance(init, Bert) else load(init)
    if initial.task and initial.task.kind == config.task.kind:
        names = [name.removeprefix("task.") for name in fields or ()]
        task = task_class(config.task.kind).continued(
            config.task, initial.task, names, new_head=config.new_head
        )
        config = dataclasses.replace(config, task=task)
    chosen = origin.resolve(config, found, validate_finetuning, bert=initial, fields=fields)
    _report_if_finished(chosen, folder)
    mesh, microbatches = meshes.make_mesh(chosen.parallel), chosen.optimizer.microbatches
    meshes.check_divides(chosen.data.batch_size, microbatches, mesh)
    workdirs.check_shared(folder)
    head = _head_to_keep(chosen, initial)
    params = initial.params if head else _kept_params(initial, chosen)
    examples = _read_examples(chosen, initial, head, found, train=train, held_out=held_out)
    packed = examples.train.features.is_packed
    length = longest_sequence(chosen.model, chosen.data.max_length)
    meshes.check_model(chosen.model, mesh, [length], packed=packed)
    config = dataclasses.replace(chosen, task=examples.task.config)
    rate = make_rate_schedule(config.optimizer, num_steps(config, examples))
    run = Run(
        settings=chosen,
        config=config,
        workdir=found,
        init_name=init_name,
        recipe=recipe,
        params=params,
        tokenizer=initial.tokenizer,
        examples=examples,
        rate=rate,
        program=compile_program(config, examples.task, rate, mesh),
    )
    per_sequence = run.batches(config.seed).per_sequence
    meshes.check_divides(config.data.batch_size, microbatches, mesh, per_sequence)
    if not config.probe:  # which needs no gradient of the layers
        devices.check_fits(config.model, run.largest, config.optimizer, mesh)
    return run


def _report_if_finished(config: FinetuneConfig, workdir: Path) -> None:
    """Say so at once if every seed has a result."""
    kinds = ("seed", "random") if config.compare else ("seed",)
    folders = (f"{k}-{config.seed + i}" for k in kinds for i in range(config.seeds))
    if all((workdir / folder / "result.json").exists() for folder in folders):
        report.finished(
            f"{workdir} has trained every seed",
            "the best is evaluated anew; for other files set --config.data.test",
            "train longer with a larger --config.epochs and another --workdir",
        )


def _head_to_keep(config: FinetuneConfig, initial: Bert) -> TaskConfig | None:
    """Return the task of a checkpoint whose head is trained on, or None for a new head."""
    # The head of a probe fits another kind of probe no better than a new one.
    is_same_kind = isinstance(initial.model, TaskModel) and initial.model.probe == config.probe
    other = initial.task.kind if initial.task else config.task.kind
    kinds = other, config.task.kind
    is_headless = kinds[0] != kinds[1] and any(task_class(kind).is_headless for kind in kinds)
    return initial.task if is_same_kind and not (is_headless or config.new_head) else None


def _kept_params(initial: Bert, config: FinetuneConfig) -> dict[str, Any]:
    """Return the parameters that a run takes from a checkpoint without the head of its task."""
    kept = task_class(config.task.kind).model_class.kept_heads
    absent = [name for name in kept if name not in initial.params]
    refuse(
        absent,
        f"the checkpoint has no masked LM head on its encoder, which {config.task.kind} needs",
        fix="take a BERT, RoBERTa or ModernBERT that was pretrained and not fine-tuned",
    )
    return {name: initial.params[name] for name in ("bert", *kept)}


def _read_examples(
    config: FinetuneConfig,
    initial: Bert,
    head: TaskConfig | None,
    workdir: Workdir[FinetuneConfig],
    *,
    train: Any,
    held_out: Any,
) -> Examples:
    """Read and tokenize the examples; the labels are those of the head, or of the examples."""
    with console.working("reading the examples"):
        # Those of another kind of head, which is refused below, say nothing about the examples.
        labels = head.labels if head and head.kind == config.task.kind else ()
        task, datasets = hosts.run_on_all_hosts(
            lambda: load_datasets(config, labels, train=train, held_out=held_out)
        )
    if head:
        check_same_head(task, head)
    origin.check_same_model(initial)
    train_data, test_data = datasets.fingerprint(), datasets.fingerprint(of_tests=True)
    same = {"the training data": train_data, "the test data": test_data}
    hosts.check_same(same, "copy the files once more")
    fingerprint = f"{train_data}-{checkpoint.checksum(initial.params)}"
    workdirs.check_text(workdir, fingerprint)
    return Examples(
        task=task,
        datasets=datasets,
        fingerprint=fingerprint,
        train=tokenize(config, task, initial.tokenizer, datasets.train, is_training=True),
        held_out={
            name: tokenize(config, task, initial.tokenizer, examples, is_training=False)
            for name, examples in {**datasets.evals, **datasets.tests}.items()
        },
    )


@meshes.own_settings()
def train_run(run: Run, stop: Callable[[], str] = lambda: "") -> FinetuningResult:
    """Train with each seed, predict everything with the best, and write the results."""
    with (
        workdirs.hold(run.workdir.path),
        devices.out_of_memory_refused(run.largest, jax.devices()[0]),
    ):
        return _train(run, stop)


def _train(run: Run, stop: Callable[[], str]) -> FinetuningResult:
    config, workdir, task = run.config, run.workdir.path, run.task
    workdirs.claim(run.workdir, run.settings, run.tokenizer, run.examples.fingerprint)
    batches = run.batches(config.seed)
    report.finetuning_start(run, batches)
    report.initialized_from(run.init_name, run.program.setup.abstract_state.params, run.params)
    run = find_rate(run, stop)
    config = run.config

    seeds = range(config.seed, config.seed + config.seeds)
    results = [train_seed(run, seed, run.params, workdir / f"seed-{seed}", stop) for seed in seeds]
    random = [
        train_seed(run, seed, None, workdir / f"random-{seed}", stop)
        for seed in (seeds if config.compare else ())
    ]
    best = max(results, key=lambda result: task.rank(result["best"]))
    path = workdir / best["checkpoint"]
    fix = f"remove {path.parents[1]} to train this seed again"
    missing = f"{path}, the best of the run, is missing"
    hosts.run_on_main(lambda: refuse(not path.exists(), missing, fix=fix))
    params = checkpoint.read_params(path, run.program.setup.abstract_state.params)
    params = weights.copy_params(run.program.setup.abstract_state.params, params)
    untrained = _score_untrained(run)
    rows = comparison(task, run.examples.datasets, results, run.constant_score, random, untrained)
    scores, truncated = _predict_all(run, params)  # which tunes the task, unlike the baselines
    bert = Bert(
        config.model,
        params,
        run.tokenizer,
        run.program.setup.model,
        task=task.config,  # tuned on the held-out examples
        data=config.data,
        source=paths.absolute(workdir / "best"),
    )
    _write_best(bert, config, workdir)
    summary = {
        "init": run.init_name,
        "task": dataclasses.asdict(task.config),
        "best": best["checkpoint"],
        "scores": scores,
        "summary": rows,
        "seeds": results,
        "random_weights": random,
        "padding": {"before": run.examples.train.padding, "after": batches.padding},
        "skipped": {"training_examples": run.examples.train.features.skipped},
        "truncated": {"train": run.examples.train.features.truncated, **truncated},
        "learning_rates": run.tried,
    }
    workdirs.write_results(workdir, summary)
    shown = {name: task.truncation(n, config.data) for name, n in truncated.items() if n}
    report.finetuning_end(rows, scores, shown, workdir)
    return FinetuningResult(scores, rows, workdir / "best", bert)


@console.working("scoring the encoder before training", says_end=False)
def _score_untrained(run: Run) -> dict[str, float] | None:
    """Return the scores of the encoder that training starts from, of a task without a head."""
    if not run.task.is_headless:
        return None
    params = run.new_state(run.config.seed).params
    params = weights.copy_params(params, run.params)
    return run.evaluate(params)


@console.working("predicting", says_end=False)
def _predict_all(run: Run, params: Any) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Predict every held-out and test set, and return their scores and truncated texts."""
    task, datasets, workdir = run.task, run.examples.datasets, run.workdir.path
    main_set = next(iter(datasets.evals))
    scores, truncated = {}, {}
    for name, examples in {**datasets.evals, **datasets.tests}.items():
        batcher = run.examples.held_out[name]
        truncated[name] = batcher.features.truncated
        predictions, scores[name] = run.predict(params, examples, batcher)
        del scores[name]["sequences_per_second"]
        if name == main_set:
            untuned, before = task.config, scores[name]
            task.tune(examples, predictions, before)
            scores[name] = before | task.score(examples, predictions)
            report.tuned(untuned, task.config, before, scores[name])
            if hosts.is_main() and console.shows(Level.RESULTS):
                task.draw(workdir / "confusion.png", examples, predictions)
        stem = "predictions" if name == main_set else f"predictions.{name}"
        write_predictions(task, examples, predictions, workdir / stem)
    return scores, truncated


@console.working("saving", says_end=False)
def _write_best(bert: Bert, config: FinetuneConfig, workdir: Path) -> None:
    """Write the best model as a checkpoint; at any moment there is a complete one to load."""
    new, best = workdir / "best.new", workdir / "best"
    if hosts.is_main():
        if (new / "state").exists() and not best.exists():  # killed between two renames
            new.rename(best)
        for left in (new, *workdir.glob(".best.*")):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
    description = dataclasses.asdict(dataclasses.replace(config, task=bert.task))
    checkpoint.write_params(new, bert.params, description, bert.tokenizer)
    if hosts.is_main():
        replacement.replace(new, best)
