"""One seed of fine-tuning: from the parameters to start from to the seed's best evaluation."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.batches import Batch, loader
from bert_jax.batches.buckets import Batcher, BucketedBatches
from bert_jax.config import CheckpointConfig, FinetuneConfig
from bert_jax.config.schedule import RateSchedule, Stage
from bert_jax.distributed import hosts
from bert_jax.distributed import mesh as meshes
from bert_jax.inference.predictions import predict_examples
from bert_jax.runs import origin
from bert_jax.storage import json_files
from bert_jax.tasks.base import Example, Task
from bert_jax.tasks.datasets import Datasets
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import checkpoint, loop
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.metrics import Writer
from bert_jax.training.objective import Metrics, PredictionObjective
from bert_jax.training.optimizer import learning_rate
from bert_jax.training.setup import Setup
from bert_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples of a run, tokenized, and the task with the labels that they have."""

    task: Task
    datasets: Datasets
    fingerprint: str  # of the examples and the initial parameters
    train: Batcher
    held_out: dict[str, Batcher]


@dataclasses.dataclass(frozen=True)
class Program:
    """What is trained, and its compiled steps."""

    objective: PredictionObjective
    setup: Setup
    train_step: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    predict_step: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is ready to train: its config, resolved and valid, and what its seeds share."""

    settings: FinetuneConfig  # with the labels that the user gave, if any
    config: FinetuneConfig  # with the labels of the task
    workdir: Path
    init: str  # the name of the checkpoint
    recipe: str  # its name, or ""
    params: Any  # to start from
    tokenizer: Tokenizer
    examples: Examples
    steps_per_epoch: int
    rate: RateSchedule
    program: Program

    @property
    def task(self) -> Task:
        """The task with its labels."""
        return self.examples.task

    @property
    def largest(self) -> Stage:
        """The length and the number of the longest sequences of a step."""
        return Stage(self.examples.train.longest, self.config.data.batch_size)

    @property
    def steps(self) -> int:
        """The number of steps of a seed."""
        return self.rate.steps

    @property
    def eval_every(self) -> int:
        """The number of steps between evaluations, each with a checkpoint."""
        return max(1, self.steps_per_epoch // self.config.evaluations)

    def indices(self, size: int) -> np.ndarray:
        """Return the indices that this process reads of a global batch of some size."""
        return meshes.process_indices(self.program.setup.layout.mesh, size)

    def batches(self, seed: int) -> BucketedBatches:
        """Return this process's part of the training batches."""
        size = self.config.data.batch_size
        return BucketedBatches(self.examples.train, size, self.steps, seed, self.indices)

    def new_state(self, seed: int) -> TrainState:
        """Return a randomly initialized state, on the devices."""
        return dataclasses.replace(self.program.setup, seed=seed).new_state()

    def predict(
        self, params: Any, examples: Sequence[Example], batcher: Batcher
    ) -> tuple[list[Any], dict[str, float]]:
        """Return the predictions of examples, and their scores."""

        def step(batch: Batch) -> Any:
            return self.program.predict_step(params, loader.take_indices(batch, self.indices))

        return predict_examples(
            step=step,
            task=self.task,
            examples=examples,
            batcher=batcher,
            # What fits in training.
            batch_size=self.config.data.batch_size // self.config.optimizer.microbatches,
        )

    def evaluate(self, params: Any) -> dict[str, float]:
        """Return the scores on the first held-out set."""
        name, batcher = next(iter(self.examples.held_out.items()))
        _, scores = self.predict(params, self.examples.datasets.evals[name], batcher)
        return scores


def train_seed(
    run: Run,
    seed: int,
    params: Any,
    folder: Path,
    constant_score: float,
    stop: Callable[[], str],
) -> dict[str, Any]:
    """Train with one seed from `params`, or None for random ones; return the result, as kept."""
    config, task, path = run.config, run.task, folder / "result.json"
    remedy = f"remove {folder} to train this seed again"
    earlier = hosts.broadcast_from_main(
        lambda: json_files.read_json(path, remedy, is_record=True) if path.exists() else None
    )
    if earlier:
        return earlier
    if config.seeds > 1 or config.compare:
        hosts.print_on_main(f"\n{folder.name}")
    started = time.monotonic()
    keep = CheckpointConfig(keep=1)
    checkpoints = Checkpoints(folder / "checkpoints", keep, run.tokenizer, rank=task.rank)
    first, state = origin.initial_state(
        checkpoints.latest_path(),
        partial(run.new_state, seed),
        run.program.setup.abstract_state,
        params=params,
    )
    if first:
        hosts.print_on_main(f"resuming from step {first:,}")
    baselines = {task.metrics[0]: constant_score} if len(task.metrics) == 1 else {}
    stage = _make_stage(run)
    with Writer(folder, first, config, _progress(run), baselines) as writer:
        with loop.training(
            state,
            [stage],
            loader.prefetch(run.batches(seed), first),
            checkpoints,
            writer,
            run.program.objective,
        ) as training:
            for step in training.steps(
                log_every=config.log_every,
                eval_every=run.eval_every,
                patience=config.patience,
                stop=stop,
            ):
                if step.scores or step.stop_reason:
                    training.save(step, config)
        records = writer.records
        seconds = time.monotonic() - started if first == 0 else None
        result = hosts.broadcast_from_main(
            lambda: _result(task, seed, records, seconds, folder, constant_score)
        )
        writer.write_table(result["best"]["step"], result["best"], writer.baselines)
    if hosts.is_main():
        json_files.write_record(path, result)
    return result


def _progress(run: Run) -> Callable[[int], dict[str, float]]:
    """Return the counters of a step."""
    rate = learning_rate(run.rate)

    def progress(step: int) -> dict[str, float]:
        epoch = step / run.steps_per_epoch
        sequences = step * len(run.examples.train.features) // run.steps_per_epoch
        return {"learning_rate": rate(step), "epoch": epoch, "sequences": sequences}

    return progress


def _make_stage(run: Run) -> loop.Stage:
    """Return the one stage that fine-tuning has."""
    size = run.config.data.batch_size
    return loop.Stage(
        end=run.steps,
        batch_size=size,
        cost=size,
        train_step=run.program.train_step,
        evaluate=lambda state: run.evaluate(state.params),
    )


def _result(
    task: Task,
    seed: int,
    records: list[dict[str, Any]],
    seconds: float | None,
    folder: Path,
    constant_score: float,
) -> dict[str, Any]:
    """Return the best evaluation of a seed among those whose checkpoint was kept."""
    kept = checkpoint.list_checkpoints(folder / "checkpoints")
    # Not from the records, whose file could have been changed.
    read = ((int(path.name), checkpoint.read_scores(path)) for path in kept)
    evaluations = [{"step": step, "split": "eval", **scores} for step, scores in read if scores]
    best = max(evaluations, key=lambda each: (task.rank(each), each["step"]))
    speeds = [r["sequences_per_second"] for r in records if r["split"] == "train"]
    return {
        "seed": seed,
        "best": best,
        "degenerate": task.mean_score(best) <= constant_score,
        "seconds": seconds,
        "sequences_per_second": statistics.median(speeds) if speeds else None,
        "checkpoint": f"{folder.name}/checkpoints/{best['step']}",
    }
