"""A fine-tuning step is the same whole, in parts of their own lengths, and on any devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers import FakeTokenizer, model_config

from bert_jax.batches.buckets import Batcher, Plan, TrainSteps
from bert_jax.batches.features import Features
from bert_jax.distributed.mesh import (
    compile_step,
    compile_update,
    init_sharded,
    make_layout,
    make_mesh,
    replicated,
    replicated_layout,
)
from bert_jax.models import heads
from bert_jax.training.objectives import TaskObjective
from bert_jax.training.step import (
    Partial,
    init_state,
    make_part_steps,
    make_predict_step,
    make_train_step,
)

HEADS = {
    "regression": (heads.BertForSequenceClassification, 1),
    "spans": (heads.BertForQuestionAnswering, 2),
    "choices": (heads.BertForMultipleChoice, 1),
}
MODEL = model_config(num_hidden_layers=1)  # with dropout, keyed by the row's place in the step


def batcher(kind: str) -> Batcher:
    """41 rows of 3 to 30 pieces, a part of them without labels."""
    generator = np.random.default_rng(3)
    choices = 2 if kind == "choices" else 1
    sizes = generator.integers(3, 31, 41 * choices)
    sequences = [generator.integers(5, 100, size).astype(np.int32) for size in sizes]
    labels = {
        "regression": lambda size: [float("nan"), *generator.normal(size=3)][generator.integers(4)],
        "spans": lambda size: generator.integers(0, size, 2) if size % 3 else np.array([-1, -1]),
        "choices": lambda size: int(generator.integers(-1, 2)),
    }[kind]
    rows = Features(
        sequences,
        [size // 2 for size in sizes],
        np.arange(41),
        [labels(size) for size in sizes[:41]],
        choices=choices,
    )
    return Batcher(rows, FakeTokenizer(), 2, 32)


def setting(kind: str):
    module = HEADS[kind][0](MODEL, HEADS[kind][1])
    objective = TaskObjective(module, is_regression=kind == "regression")
    optimizer = optax.sgd(0.5)

    def new_state(key):
        return init_state(module.init_params(key), optimizer, 7)

    return objective, optimizer, new_state


def trained(kind: str, plan: Plan, mode: str = "mesh", devices: int = 1, steps=2):
    """Returns the parameters and the sums after some steps."""
    objective, optimizer, new_state = setting(kind)
    mesh = make_mesh(devices=jax.devices()[:devices])
    _, layout = make_layout(new_state, mesh)
    state = init_sharded(new_state, layout.state, jax.random.key(0))
    compiled = partial(compile_step, mode=mode, layout=layout)
    batches = TrainSteps(batcher(kind), plan, 16, steps, seed=1)
    whole = replicated(mesh)
    one = compiled(
        make_train_step(objective, optimizer),
        in_sharding=layout.state,
        outputs=("state", "metrics"),
    )
    begin, add, finish = make_part_steps(objective, optimizer)
    of_part = Partial(layout.state, layout.gradients, whole)
    begin = compile_update(begin, mode, (layout.state,), of_part)
    add = compiled(add, in_sharding=of_part, outputs=("state",))
    taken = (layout.state, layout.gradients, whole)
    finish = compile_update(finish, mode, taken, (layout.state, whole))
    sums = None
    for step in range(steps):
        parts = batches[step]
        if len(parts) == 1:
            state, sums = one(state, parts[0])
        else:
            run = begin(state)
            for part in parts:
                run = add(run, part)
            state, sums = finish(run.state, run.gradients, run.sums)
    return jax.device_get((state.params, sums))


WHOLE = Plan(1, (32,), 32.0)


@pytest.mark.parametrize("kind", ["regression", "spans", "choices"])
def test_a_step_in_parts_is_the_whole_step(kind):
    wanted, sums = trained(kind, WHOLE)
    found, of_parts = trained(kind, Plan(4, (16, 32), 20.0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, wanted)
    for name, part in sums.items():
        np.testing.assert_allclose(of_parts[name].total, part.total, rtol=1e-4)


def test_devices_agree():
    wanted, _ = trained("choices", WHOLE)
    for mode in ("mesh", "pmap"):
        found, _ = trained("choices", Plan(2, (32,), 32.0), mode, 8)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, wanted)


@pytest.mark.parametrize(("mode", "devices"), [("mesh", 1), ("mesh", 8), ("pmap", 8)])
def test_predictions_come_in_order_whatever_the_devices(mode, devices):
    objective, _, new_state = setting("spans")
    params = nn.unbox(new_state(jax.random.key(0)).params)
    mesh = make_mesh(devices=jax.devices()[:devices])
    layout = replicated_layout(mesh)
    params = jax.device_put(params, layout.params) if mode == "mesh" else params
    step = compile_step(
        make_predict_step(objective), mode, layout, layout.params, ("per_example", "metrics")
    )
    batch = batcher("spans").make(np.arange(16), 32)
    wanted = objective.logits(params, jax.tree.map(jnp.asarray, batch))
    logits, sums = step(params, batch)
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    assert float(sums["loss"].weight) == (batch["labels"] >= 0).sum()
