"""A fine-tuning run that is ready to train: its examples, its schedule and its compiled steps."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from jax.sharding import Mesh

from bert_jax import console
from bert_jax.batches import Batch, loader
from bert_jax.batches.buckets import Batcher, BucketedBatches
from bert_jax.config import FinetuneConfig
from bert_jax.config.schedule import RateSchedule, Stage
from bert_jax.distributed import mesh as meshes
from bert_jax.errors import UserError
from bert_jax.inference.predictions import predict_examples
from bert_jax.runs.workdir import Workdir
from bert_jax.tasks.base import Task
from bert_jax.tasks.datasets import Datasets
from bert_jax.tasks.examples import Example
from bert_jax.tasks.sequences import make_batcher
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.objective import Metrics, PredictionObjective
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.setup import Setup, make_setup
from bert_jax.training.step import (
    PREDICT_OUTPUTS,
    TrainState,
    make_predict_step,
    make_train_step,
)


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

    settings: FinetuneConfig  # resolved, as the workdir has it
    config: FinetuneConfig  # with the labels that were found in the data
    workdir: Workdir[FinetuneConfig]  # as it was when the run started
    init_name: str  # of the checkpoint
    recipe: str  # its name, or ""
    params: Any  # to start from
    tokenizer: Tokenizer
    examples: Examples
    rate: RateSchedule
    program: Program
    tried: Sequence[dict[str, Any]] = ()  # learning rates, each with its scores

    @property
    def task(self) -> Task:
        """The task with its labels."""
        return self.examples.task

    @functools.cached_property
    def constant_score(self) -> float:
        """The score of the best constant prediction on the first held-out set."""
        return self.task.constant_score(next(iter(self.examples.datasets.evals.values())))

    @property
    def largest(self) -> Stage:
        """The length and the number of the longest sequences of a step."""
        features = self.examples.train.features
        count = 1 if features.is_packed else features.choices
        return Stage(self.examples.train.longest, self.config.data.batch_size * count)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch."""
        return batches_per_epoch(self.config, self.examples)

    @property
    def steps(self) -> int:
        """The number of steps of a seed."""
        return self.rate.steps

    @property
    def eval_every(self) -> Fraction:
        """The number of steps between evaluations, each with a checkpoint."""
        return Fraction(self.steps_per_epoch, self.config.evaluations)

    def at_rate(self, learning_rate: float, examples: Examples) -> "Run":
        """Return a copy of the run with this learning rate and these examples.

        The number of epochs stays; warm-up and decay are scaled to the steps.
        """
        optimizer = dataclasses.replace(self.config.optimizer, learning_rate=learning_rate)
        config = dataclasses.replace(self.config, optimizer=optimizer)
        steps = num_steps(config, examples)
        rate = dataclasses.replace(
            self.rate,
            steps=steps,
            warmup=round(self.rate.warmup * steps / self.steps),
            decay=round(self.rate.decay * steps / self.steps),
            peaks=((0, learning_rate),),
        )
        program = compile_program(config, self.task, rate, self.program.setup.layout.mesh)
        return dataclasses.replace(
            self, config=config, examples=examples, rate=rate, program=program
        )

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
            batch_size=self.config.data.batch_size,
        )

    def evaluate(self, params: Any) -> dict[str, float]:
        """Return the scores on the first held-out set."""
        name, batcher = next(iter(self.examples.held_out.items()))
        _, scores = self.predict(params, self.examples.datasets.evals[name], batcher)
        return scores


def num_steps(config: FinetuneConfig, examples: Examples) -> int:
    """Return the number of steps that the epochs of a config have."""
    return max(1, round(config.epochs * batches_per_epoch(config, examples)))


def batches_per_epoch(config: FinetuneConfig, examples: Examples) -> int:
    """Return the number of steps of an epoch."""
    return -(-len(examples.train.features) // config.data.batch_size)


def compile_program(config: FinetuneConfig, task: Task, rate: RateSchedule, mesh: Mesh) -> Program:
    """Return the objective and the initial state of a run, with its compiled steps."""
    model = task.model(config.model, config.probe)
    optimizer = make_optimizer(
        config.optimizer,
        rate,
        layer_decay=config.layer_decay,
        freezes_encoder=bool(config.probe),
    )
    setup = make_setup(model, optimizer, config.seed, mesh, config.parallel)
    objective = task.objective(model)
    microbatches = config.optimizer.microbatches
    train_step = make_train_step(objective, optimizer, microbatches, steps=rate.steps)
    compiled = partial(meshes.compile_step, mode=config.parallel.mode, layout=setup.layout)
    return Program(
        objective=objective,
        setup=setup,
        train_step=compiled(train_step, outputs=("state", "metrics")),
        predict_step=compiled(make_predict_step(objective, microbatches), outputs=PREDICT_OUTPUTS),
    )


@console.working("tokenizing the examples", says_end=False)
def tokenize(
    config: FinetuneConfig,
    task: Task,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    *,
    is_training: bool,
) -> Batcher:
    """Tokenize examples, and return what makes batches of them.

    Raises:
      UserError: none of the examples to train on has a label that can be used.
    """
    model, length = config.model, config.data.max_length
    features = task.features(examples, tokenizer, model, length)
    unusable = features.skipped
    if is_training and unusable and len(unusable) == len(examples):
        raise UserError(
            f"none of {console.counted(len(examples), 'example')} has a label that can be used; "
            f"the first: {unusable[0]}; correct the labels"
        )
    return make_batcher(features, tokenizer, model, length)
