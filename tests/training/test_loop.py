"""The loop: which steps are saved, and values that are not finite."""

import contextlib
import math
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, ClassVar

import jax.numpy as jnp
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.config import CheckpointConfig, TrainConfig
from bert_jax.errors import TrainingError
from bert_jax.objectives.labels import LabelsObjective
from bert_jax.training import loop
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.loop import Stage, Step, Training
from bert_jax.training.metrics import Writer
from bert_jax.training.objective import WeightedSum
from bert_jax.training.step import TrainState

STEPS = 12
OBJECTIVE = LabelsObjective(nn.Dense(1))


class Unfinished:
    """A metric of a step that is in flight until somebody waits for it."""

    steps: ClassVar[list["Unfinished"]] = []

    def __init__(self):
        self.steps.append(self)

    def block_until_ready(self) -> None:
        self.steps.remove(self)


@contextlib.contextmanager
def training_of(folder, tokenizer, train_step, evaluate, objective=OBJECTIVE) -> Iterator[Training]:
    """Yield the training of twelve steps."""
    config, rank = CheckpointConfig(keep=1), lambda scores: -scores["loss"]
    checkpoints = Checkpoints(folder / "checkpoints", config, tokenizer, rank)
    state = TrainState(jnp.int32(0), {"w": jnp.ones(2)}, {}, jnp.zeros(2, jnp.uint32))
    stages = [Stage(STEPS, 4, 4, train_step, evaluate)]
    with (
        Writer(folder, 0) as writer,
        Training(state, stages, iter(range(STEPS)), checkpoints, writer, objective).shown() as run,
    ):
        yield run


def train(
    folder, tokenizer, losses: dict[int, float], *, eval_every: int, save_every: int
) -> list[int]:
    """Train for twelve steps with given held-out losses; return the steps of the checkpoints."""

    def train_step(state, _):
        metrics = {"loss": WeightedSum(jnp.float32(1), jnp.float32(1))}
        return state.replace(step=state.step + 1), metrics

    def evaluate(state):
        return {"loss": losses[int(state.step)], "sequences_per_second": 1.0}

    with training_of(folder, tokenizer, train_step, evaluate) as run:
        for step in run.steps(log_every=5, eval_every=eval_every):
            if step.is_due(save_every) or step.is_best:
                run.save(step, TrainConfig())
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def test_at_most_two_steps_are_in_flight(tmp_path, tokenizer):
    def train_step(state, _):
        return state, {"loss": WeightedSum(Unfinished(), 1.0)}

    in_flight = []
    with training_of(tmp_path, tokenizer, train_step, evaluate=len) as run:
        for step in run.steps(log_every=1000, eval_every=1000):
            in_flight.append(len(Unfinished.steps))
            if step.number == STEPS - 1:
                break
    assert in_flight == [1] + [2] * (STEPS - 2)


@pytest.mark.parametrize(
    ("losses", "eval_every", "save_every", "kept"),
    [
        ([3.0, 1.0, 2.0, 1.5], 3, 5, [6, 12]),
        ([3.0, 2.0, 5.0, 4.0, 3.0, 2.5], 2, 1000, [4, 12]),  # the end alone is due
    ],
)
def test_the_best_is_kept_whatever_the_intervals(
    tmp_path, tokenizer, losses, eval_every, save_every, kept
):
    by_step = {eval_every * number: loss for number, loss in enumerate(losses, start=1)}
    options = {"eval_every": eval_every, "save_every": save_every}
    assert train(tmp_path, tokenizer, by_step, **options) == kept


def test_neither_an_evaluation_nor_a_checkpoint_counts_in_the_speed(
    tmp_path, tokenizer, monkeypatch
):
    """By a clock on which a step takes a second, and they a hundred."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def train_step(state, _):
        clock.now += 1
        metrics = {"loss": WeightedSum(jnp.float32(1), jnp.float32(1))}
        return state.replace(step=state.step + 1), metrics

    def evaluate(_):
        clock.now += 100
        return {"loss": 1.0}

    with training_of(tmp_path, tokenizer, train_step, evaluate) as run:
        for step in run.steps(log_every=4, eval_every=2):
            if step.is_due(3):
                clock.now += 100
                run.save(step, TrainConfig())
        logged = [each for each in run._writer.records if each["split"] == "train"]
    assert [each["step"] for each in logged] == [4, 8, 12]
    assert [each["sequences_per_second"] for each in logged] == [4, 4, 4]


@pytest.mark.parametrize("compiled", [{4}, {1, 4}, {3, 4}, {1, 5, 8}])
def test_compilation_counts_in_no_speed(tmp_path, tokenizer, monkeypatch, compiled):
    """By a clock on which a step takes a second, and compilation a hundred."""
    clock, training = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def train_step(state, batch):
        seconds = 101 if batch + 1 in compiled else 1
        clock.now += seconds
        if seconds > 1:
            training[0]._progress.inner_seconds += seconds
        metrics = {
            name: WeightedSum(jnp.float32(8), jnp.float32(16)) for name in ("loss", "token_share")
        }
        return state.replace(step=state.step + 1), metrics

    with training_of(tmp_path, tokenizer, train_step, lambda _: {"loss": 1.0}) as run:
        training.append(run)
        assert len(list(run.steps(log_every=4, eval_every=1000))) == STEPS
        logged = [each for each in run._writer.records if each["split"] == "train"]
    assert [each["sequences_per_second"] for each in logged] == [4, 4, 4]
    assert [each["tokens_per_second"] for each in logged] == [8, 8, 8]


def test_the_loss_of_a_log_is_weighted(tmp_path, tokenizer):
    one = jnp.float32(1)

    def train_step(state, _):
        losses = {"mlm_loss": WeightedSum(2 * one, one), "rtd_loss": WeightedSum(3 * one, one)}
        return state.replace(step=state.step + 1), losses

    class Weighted(LabelsObjective):
        loss_weights: ClassVar = {"rtd_loss": 50.0}

    objective = Weighted(nn.Dense(1))
    with training_of(tmp_path, tokenizer, train_step, len, objective) as run:
        next(step for step in run.steps(log_every=1, eval_every=1000) if step.means)
        assert run._writer.records[0]["loss"] == 2 + 50 * 3


def test_a_held_out_loss_that_is_not_finite_ends_the_run(tmp_path, tokenizer):
    with pytest.raises(TrainingError, match=r"held-out loss is nan at step 6; .*checkpoints/3;"):
        train(tmp_path, tokenizer, {3: 1.0, 6: math.nan}, eval_every=3, save_every=100)
    assert '"step": 6' not in (tmp_path / "metrics.jsonl").read_text()


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 5))
def test_every_epoch_has_its_evaluations(per_epoch, evaluations, epochs):
    """As many as asked for, or one a step, and one at its end."""
    last = per_epoch * epochs
    every = Fraction(per_epoch, evaluations)
    steps: list[Any] = [SimpleNamespace(number=n, last=last) for n in range(1, last + 1)]
    due = [step.number for step in steps if Step.is_due(step, every)]
    assert len(due) == epochs * min(evaluations, per_epoch)
    assert {per_epoch * epoch for epoch in range(1, epochs + 1)} <= {*due}


def test_a_gradient_that_is_not_finite_is_not_saved(tmp_path, tokenizer):
    one = jnp.float32(1)

    def train_step(state, _):
        metrics = {"loss": WeightedSum(one, one), "gradient_norm": WeightedSum(one * jnp.nan, one)}
        return state.replace(step=state.step + 1), metrics

    with (
        pytest.raises(TrainingError, match="gradient_norm is nan at step 1"),
        training_of(tmp_path, tokenizer, train_step, len) as run,
    ):
        run.save(next(run.steps(log_every=100, eval_every=100)), TrainConfig())
    assert not [*(tmp_path / "checkpoints").glob("[0-9]*")]


@pytest.mark.parametrize(("patience", "last"), [(0, 12), (1, 4), (2, 10), (9, 12)])
def test_it_ends_after_so_many_evaluations_without_a_better_one(
    tmp_path, tokenizer, patience, last
):
    losses = {2: 3.0, 4: 4.0, 6: 2.0, 8: 3.0, 10: 2.5, 12: 5.0}

    def train_step(state, _):
        metrics = {"loss": WeightedSum(jnp.float32(1), jnp.float32(1))}
        return state.replace(step=state.step + 1), metrics

    def evaluate(state):
        return {"loss": losses[int(state.step)]}

    with training_of(tmp_path, tokenizer, train_step, evaluate) as run:
        steps = [s.number for s in run.steps(log_every=100, eval_every=2, patience=patience)]
    assert steps[-1] == last
