"""Fine-tuning: from a checkpoint and a task's examples to scores, predictions and a model.

`finetune` is `start`, which checks everything and reads the examples, and `train`.
"""

import dataclasses
import functools
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax import console
from bert_jax.batches import loader
from bert_jax.batches.buckets import Batcher, BucketedBatches
from bert_jax.bert import Bert
from bert_jax.config import CheckpointConfig, FinetuneConfig, settings
from bert_jax.config.schedule import Stage, make_rate_schedule
from bert_jax.config.validation import validate_finetuning
from bert_jax.console import Level
from bert_jax.distributed import devices, hosts
from bert_jax.distributed import mesh as meshes
from bert_jax.inference.loading import load
from bert_jax.models.heads import TaskModel
from bert_jax.runs import origin, report
from bert_jax.runs.distillation import teacher_labels
from bert_jax.storage import json_files, replacement
from bert_jax.tasks import task_class
from bert_jax.tasks.base import Example, Task
from bert_jax.tasks.datasets import Datasets, check_same_head, load_datasets
from bert_jax.tasks.results import comparison
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import checkpoint, evaluation, loop
from bert_jax.training import workdir as workdirs
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.embedding_loss import task_objective
from bert_jax.training.metrics import Writer
from bert_jax.training.optimizer import learning_rate, make_optimizer
from bert_jax.training.setup import make_setup
from bert_jax.training.step import TrainState, make_predict_step, make_train_step


@dataclasses.dataclass(frozen=True)
class FinetuningResult:
    """The result of a fine-tuning run.

    Attributes:
      scores: of the best model, by the name of each held-out and test set with labels.
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


@dataclasses.dataclass
class Run:
    """A run that is ready to train: its config, resolved and valid, and what its seeds share."""

    config: FinetuneConfig
    workdir: Path
    init: str
    params: Any  # to start from
    tokenizer: Tokenizer
    task: Task
    datasets: Datasets
    mesh: Mesh
    claim: Callable[[], None]  # of the workdir, which is done once it is held
    recipe: str = ""  # its name

    def __post_init__(self):
        config = self.config
        self.indices = partial(meshes.process_indices, self.mesh)
        self.train = self.batcher(self.datasets.train)
        if self.task.config.teacher:
            examples = self.datasets.train
            labels = teacher_labels(self.task, config.model, examples)
            self.train.features.labels = labels
        self.largest = Stage(max_length=self.train.longest, batch_size=config.data.batch_size)
        self.held_out = {name: self.batcher(e) for name, e in self.datasets.evals.items()}
        self.per_epoch = -(-len(self.train.features) // config.data.batch_size)
        self.steps = max(1, round(config.epochs * self.per_epoch))
        self.eval_every = max(1, self.per_epoch // config.evaluations)
        self.model = self.task.model(config.model, config.probe)
        decay, is_probe = config.layer_decay, bool(config.probe)
        self.rate = make_rate_schedule(config.optimizer, self.steps)
        optimizer = make_optimizer(
            config.optimizer, self.rate, layer_decay=decay, freezes_encoder=is_probe
        )
        self.setup = make_setup(self.model, optimizer, config.seed, self.mesh, config.parallel)
        objective = task_objective(self.model, config.task)
        compiled = partial(meshes.compile_step, mode=config.parallel.mode, layout=self.setup.layout)
        train_step = make_train_step(objective, optimizer, config.optimizer.microbatches)
        self.train_step = compiled(train_step, outputs=("state", "metrics"))
        step = compiled(make_predict_step(objective), outputs=("per_example", "metrics"))
        size = config.data.batch_size // config.optimizer.microbatches  # what fits in training
        self.predict = partial(evaluation.predict, step, self.task, size, self.indices)

    def new_state(self, seed: int) -> TrainState:
        """Return a randomly initialized state, on the devices."""
        return dataclasses.replace(self.setup, seed=seed).new_state()

    @console.working("tokenizing the examples", says_end=False)
    def batcher(self, examples: Sequence[Example]) -> Batcher:
        model, length = self.config.model, self.config.data.max_length
        features = self.task.features(examples, self.tokenizer, model, length)
        return Batcher(features, self.tokenizer, model.type_vocab_size, length)

    @functools.cached_property
    def constant_score(self) -> float:
        """Return the best mean score of a constant prediction on the first held-out set."""
        return self.task.constant_score(next(iter(self.datasets.evals.values())))

    @functools.cached_property
    def learning_rate(self) -> Callable[[int], float]:
        """Return the learning rate by step."""
        return learning_rate(self.rate)

    def progress(self, step: int) -> dict[str, float]:
        """Return the learning rate of a step, and the epochs and sequences up to it."""
        seen = step * len(self.train.features) // self.per_epoch
        return {
            "learning_rate": self.learning_rate(step),
            "epoch": step / self.per_epoch,
            "sequences": seen,
        }

    def evaluate(self, params: Any) -> dict[str, float]:
        """Return the scores on the first held-out set."""
        name, batcher = next(iter(self.held_out.items()))
        return self.predict(params, self.datasets.evals[name], batcher)[1]

    def batches(self, seed: int) -> BucketedBatches:
        """Return this process's part of the training batches."""
        size = self.config.data.batch_size
        return BucketedBatches(self.train, size, self.steps, seed, self.indices)


def finetune(
    config: FinetuneConfig, init: str | Path, workdir: str | Path, *, quiet: bool = False
) -> FinetuningResult:
    """Fine-tune a model for a task, with one seed or several, or resume.

    Args:
      config: every setting of the run; `bert_jax.recipe("finetune/classification")` returns one.
        Of `config.model`, its dtype, remat, scan_layers and attention count, and dropouts that
        differ from their defaults; the rest is that of `init`.
      init: the checkpoint to fine-tune.
      workdir: folder of results, predictions, checkpoints and pictures. A run that is there
        resumes.
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
    with console.output(Level.NOTHING if quiet else Level.PROGRESS):
        return train(start(config, init, Path(workdir)))


def start(
    config: FinetuneConfig,
    init: str | Path,
    workdir: Path,
    model_fields: Iterable[str] | None = None,
    recipe: str = "",
) -> Run:
    """Check a run against its checkpoint, its workdir and the devices, and read its examples."""
    settings.check_class(config, FinetuneConfig)
    initial = load(init)
    if initial.task and initial.task.kind == config.task.kind:
        task = task_class(config.task.kind).continued(config.task, initial.task)
        config = dataclasses.replace(config, task=task)
    config = origin.resolve(config, workdir, init, initial, model_fields, validate_finetuning)
    kinds = ("seed", "random") if config.compare else ("seed",)
    folders = (f"{k}-{config.seed + i}" for k in kinds for i in range(config.seeds))
    if all((workdir / folder / "result.json").exists() for folder in folders):
        report.finished(
            f"{workdir} has trained every seed",
            "the best is evaluated anew; for other files set --config.data.test",
            "train longer with a larger --config.epochs and another --workdir",
        )
    mesh = meshes.make_mesh(config.parallel)
    meshes.check_model(config.model, mesh, [config.data.max_length])
    divided = config.data.batch_size, config.optimizer.microbatches, mesh
    meshes.check_divides(*divided)
    # The head of a probe fits another kind of probe no better than a new one.
    is_same_kind = isinstance(initial.model, TaskModel) and initial.model.probe == config.probe
    other = initial.task.kind if initial.task else config.task.kind
    is_headless = other != config.task.kind and task_class(other).is_headless
    head = initial.task if is_same_kind and not (is_headless or config.new_head) else None
    labels = head.labels if head else ()
    with console.working("reading the examples"):
        task, datasets = hosts.run_on_all_hosts(lambda: load_datasets(config, labels))
    if head:
        check_same_head(task, head)
    fingerprint = f"{datasets.fingerprint()}-{workdirs.checksum(initial.params)}"
    hosts.check_same({"the training data": fingerprint}, "copy the files once more")
    workdirs.check_text(workdir, fingerprint)
    workdirs.check_shared(workdir)
    params = initial.params if head else {"bert": initial.params["bert"]}
    labelled = dataclasses.replace(config, task=task.config)
    claim = partial(workdirs.claim, workdir, config, initial.tokenizer, fingerprint)
    shared = (params, initial.tokenizer, task, datasets, mesh, claim)
    run = Run(labelled, workdir, str(init), *shared, recipe)
    meshes.check_divides(*divided, run.batches(config.seed).per_sequence)
    if not config.probe:  # which needs no gradient of the layers
        devices.check_fits(config.model, run.largest, config.optimizer.microbatches, mesh)
    return run


def train(run: Run, stop: Callable[[], str] = lambda: "") -> FinetuningResult:
    """Train with each seed, predict everything with the best, and write the results."""
    with workdirs.hold(run.workdir), devices.out_of_memory_refused(run.largest, jax.devices()[0]):
        return _train(run, stop)


def _train(run: Run, stop: Callable[[], str]) -> FinetuningResult:
    config, workdir, train_features = run.config, run.workdir, run.train.features
    run.claim()
    batches = run.batches(config.seed)
    report.finetuning_start(config, run.datasets, run.train, batches, run.mesh, workdir, run.recipe)
    report.initialized_from(run.init, run.setup.abstract_state.params, run.params)

    seeds = range(config.seed, config.seed + config.seeds)
    results = [_train_seed(run, s, run.params, workdir / f"seed-{s}", stop) for s in seeds]
    others = seeds if config.compare else ()
    random = [_train_seed(run, s, None, workdir / f"random-{s}", stop) for s in others]
    best = max(results, key=lambda result: run.task.rank(result["best"]))
    params = checkpoint.read_params(workdir / best["checkpoint"], run.setup.abstract_state.params)
    params = origin.copy_params(run.setup.abstract_state.params, params)
    scores, truncated = _predict_all(run, params)
    tuned = run.task.config  # on the held-out examples
    model = config.model, params, run.tokenizer, run.model
    bert = Bert(*model, task=tuned, data=config.data, source=workdir / "best")
    _write_best(bert, config, workdir)
    rows = comparison(run.task, run.datasets, results, random, _score_untrained(run))
    summary = {
        "init": run.init,
        "task": dataclasses.asdict(tuned),
        "best": best["checkpoint"],
        "scores": scores,
        "summary": rows,
        "seeds": results,
        "random_weights": random,
        "padding": {"before": run.train.padding, "after": batches.padding},
        "skipped": {"training_examples": train_features.skipped},
        "truncated": {"train": train_features.truncated, **truncated},
    }
    workdirs.write_results(workdir, summary)
    report.finetuning_end(rows, scores, truncated, workdir)
    return FinetuningResult(scores, rows, workdir / "best", bert)


@console.working("scoring the encoder before training", says_end=False)
def _score_untrained(run: Run) -> dict[str, float] | None:
    """Return the scores of the encoder that training starts from, of a task without a head."""
    if not run.task.is_headless:
        return None
    params = run.new_state(run.config.seed).params
    params = origin.copy_params(params, run.params)
    return run.evaluate(params)


def _train_seed(
    run: Run, seed: int, params: Any, folder: Path, stop: Callable[[], str]
) -> dict[str, Any]:
    """Train with one seed from `params`, or None for random ones; return the result, as kept."""
    config, task, path = run.config, run.task, folder / "result.json"
    remedy = f"remove {folder} to train this seed again"
    earlier = hosts.broadcast_from_main(
        lambda: json_files.read_json(path, remedy) if path.exists() else None
    )
    if earlier:
        return earlier
    if config.seeds > 1 or config.compare:
        hosts.print_on_main(f"\n{folder.name}")
    started = time.monotonic()
    keep, description = CheckpointConfig(keep=1), dataclasses.asdict(config)
    checkpoints = Checkpoints(
        folder / "checkpoints", keep, lambda _: description, run.tokenizer, rank=task.rank
    )
    new_state = partial(run.new_state, seed)
    step, state = origin.initial_state(checkpoints, new_state, run.setup.abstract_state, params)
    if step:
        hosts.print_on_main(f"resuming from step {step:,}")

    def evaluate(state: TrainState) -> dict[str, float]:
        return run.evaluate(state.params)

    baselines = {task.metrics[0]: run.constant_score} if len(task.metrics) == 1 else {}
    with Writer(folder, step, config, run.progress, baselines) as writer:
        size = config.data.batch_size
        loop.fit(
            state,
            [loop.Stage(run.steps, size, size, run.train_step, evaluate)],
            loader.prefetch(run.batches(seed), step),
            checkpoints,
            writer,
            log_every=config.log_every,
            eval_every=run.eval_every,
            save_every=run.eval_every,
            patience=config.patience,
            stop=stop,
        )
        records = writer.records
        seconds = time.monotonic() - started if step == 0 else None
        result = hosts.broadcast_from_main(lambda: _result(run, seed, records, seconds, folder))
        writer.write_table(result["best"]["step"], result["best"])
    if hosts.is_main():
        json_files.write_record(path, result)
    return result


def _result(
    run: Run, seed: int, records: list[dict[str, Any]], seconds: float | None, folder: Path
) -> dict[str, Any]:
    """Return the best evaluation of a seed among those whose checkpoint was kept."""
    task, kept = run.task, workdirs.list_checkpoints(folder / "checkpoints")
    # Not from the records, whose file could have been changed.
    read = ((int(path.name), checkpoint.read_scores(path)) for path in kept)
    evaluations = [{"step": step, "split": "eval", **scores} for step, scores in read if scores]
    best = max(evaluations, key=lambda each: (task.rank(each), each["step"]))
    speeds = [r["sequences_per_second"] for r in records if r["split"] == "train"]
    return {
        "seed": seed,
        "best": best,
        "degenerate": task.mean_score(best) <= run.constant_score,
        "seconds": seconds,
        "sequences_per_second": statistics.median(speeds) if speeds else None,
        "checkpoint": f"{folder.name}/checkpoints/{best['step']}",
    }


@console.working("predicting", says_end=False)
def _predict_all(run: Run, params: Any) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Predict every held-out and test set, and return their scores and truncated texts."""
    task, datasets, workdir = run.task, run.datasets, run.workdir
    main_set = next(iter(datasets.evals))
    scores, truncated = {}, {}
    for name, examples in {**datasets.evals, **datasets.tests}.items():
        batcher = run.held_out.get(name) or run.batcher(examples)
        truncated[name] = batcher.features.truncated
        predictions, scores[name] = run.predict(params, examples, batcher)
        del scores[name]["sequences_per_second"]
        if name == main_set:
            if hosts.is_main() and not console.is_quiet():
                task.draw(workdir / "confusion.png", examples, predictions)
            task.tune(scores[name])
            scores[name] |= task.score(examples, predictions)
        stem = "predictions" if name == main_set else f"predictions.{name}"
        evaluation.write(task, examples, predictions, workdir / stem)
    return scores, truncated


@console.working("saving", says_end=False)
def _write_best(bert: Bert, config: FinetuneConfig, workdir: Path) -> None:
    """Write the best model as a checkpoint; at any moment there is a complete one to load."""
    new = workdir / "best.new"  # which `checkpoint.find` takes where best is not there
    if hosts.is_main():
        shutil.rmtree(new, ignore_errors=True)
    description = dataclasses.asdict(dataclasses.replace(config, task=bert.task))
    checkpoint.write_params(new, bert.params, description, bert.tokenizer)
    if hosts.is_main():
        replacement.replace(new, workdir / "best")
