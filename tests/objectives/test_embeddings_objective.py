"""Losses of embeddings by their formulas, and the same on any devices and in any memory."""

import dataclasses
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import FakeTokenizer, model_config

from bert_jax.batches.buckets import Batcher, Features, balance
from bert_jax.batches.token_sequences import FILL
from bert_jax.config import EmbeddingConfig, OptimizerConfig, ParallelConfig
from bert_jax.config.schedule import make_rate_schedule
from bert_jax.config.settings import as_variant
from bert_jax.distributed.fsdp import SINGLE_DEVICE
from bert_jax.objectives.contrastive import ContrastiveObjective
from bert_jax.objectives.embeddings import EmbeddingObjective
from bert_jax.tasks.embedding import BertForEmbedding
from bert_jax.tasks.late_interaction import BertForLateInteraction, LateInteractionObjective
from bert_jax.tasks.sparse import BertForSparse, SparseConfig, SparseObjective
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.step import make_predict_step

SIZE, TEXTS, WIDTH, LENGTH = 16, 3, 8, 24
MODEL = model_config(num_hidden_layers=1)  # with dropout, of hidden states and of attention


def vectors(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(SIZE, TEXTS, WIDTH)).astype(np.float32)


def numbers() -> np.ndarray:
    """Numbers of texts: two equal passages, two equal queries, and a sequence of padding.

    A query is a passage too, and another one a hard negative. So is the other passage of a query,
    which is a third one's own too.
    """
    texts = np.arange(SIZE * TEXTS, dtype=np.int32).reshape(SIZE, TEXTS)
    texts[3, 1] = texts[5, 1]
    texts[7, 0] = texts[2, 0]
    texts[4, 1], texts[6, 2] = texts[9, 0], texts[10, 0]
    texts[8, 2] = texts[11, 1] = texts[7, 1]
    texts[-1] = -1
    return texts


def scores() -> np.ndarray:
    values = np.random.default_rng(1).uniform(-1, 1, SIZE).astype(np.float32)
    values[4], values[-1] = values[9], np.nan
    return values


def loss(config: EmbeddingConfig, labels: np.ndarray, name: str = "loss") -> float:
    objective = EmbeddingObjective(BertForEmbedding(MODEL, 0), config)
    measured = objective.metrics(
        jnp.asarray(vectors()), jnp.asarray(labels)[:, None], SINGLE_DEVICE
    )
    return float(measured[name].total / measured[name].weight)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def ranking(x: np.ndarray, texts: np.ndarray, temperature: float, *, symmetric: bool) -> float:
    """The mean cross-entropy of each query's passage, one sum at a time."""
    x, total, count = unit(x), 0.0, len(texts) - 1  # the last is padding
    for i in range(count):
        query, own = x[i, 0], x[i, 0] @ x[i, 1]
        others, queries = [], []
        for j in range(count):
            own_passages = {texts[i, 0], *texts[:count, 1][texts[:count, 0] == texts[i, 0]]}
            own_queries = {texts[i, 1], *texts[:count, 0][texts[:count, 1] == texts[i, 1]]}
            others += [query @ x[j, k] for k in range(1, TEXTS) if texts[j, k] not in own_passages]
            queries += [x[j, 0] @ x[i, 1]] * (texts[j, 0] not in own_queries)
        losses = [
            np.log(np.exp((np.array(s) - own) / temperature).sum() + 1) for s in (others, queries)
        ]
        total += (losses[0] + losses[1]) / 2 if symmetric else losses[0]
    return total / count


@pytest.mark.parametrize("symmetric", [True, False])
def test_ranking(symmetric):
    """Source: Henderson et al. 2017, equation 5; what belongs to an equal text is no negative."""
    config = EmbeddingConfig(temperature=0.3, symmetric=symmetric)
    expected = ranking(vectors(), numbers(), 0.3, symmetric=symmetric)
    assert loss(config, numbers()) == pytest.approx(expected, rel=1e-5)


def test_first_numbers_of_a_vector():
    config = EmbeddingConfig(temperature=0.3, dimensions=(2, 5))
    # All of its numbers are trained too.
    sizes = (2, 5, WIDTH)
    losses = (ranking(vectors()[..., :size], numbers(), 0.3, symmetric=True) for size in sizes)
    assert loss(config, numbers()) == pytest.approx(sum(losses), rel=1e-5)
    # Also where they are named, in any order; and the accuracy is that of them all.
    for named in ((WIDTH, 2, 5), (5, WIDTH, 2)):
        config = dataclasses.replace(config, dimensions=named)
        accuracy = loss(config, numbers(), "accuracy")
        assert accuracy == loss(EmbeddingConfig(temperature=0.3), numbers(), "accuracy")


def test_scored_pairs():
    x, wanted = unit(vectors()[:-1]), scores()[:-1]
    cosines = (x[:, 0] * x[:, 1]).sum(-1)
    squared = np.square(cosines - wanted).mean()
    assert loss(EmbeddingConfig(loss="cosine"), scores()) == pytest.approx(squared, rel=1e-5)
    pairs = ((i, j) for i in range(SIZE - 1) for j in range(SIZE - 1) if wanted[i] > wanted[j])
    order = np.log(1 + sum(np.exp(20 * (cosines[j] - cosines[i])) for i, j in pairs))
    assert loss(EmbeddingConfig(loss="cosent"), scores()) == pytest.approx(order, rel=1e-5)


def batch(kind: str) -> dict[str, np.ndarray]:
    """Sequences of three texts of 3 to 8 tokens, the last one of padding."""
    draw = np.random.default_rng(0)
    made = {n: np.zeros((SIZE, LENGTH), np.int32) for n in ("attention_mask", "position_ids")}
    made["input_ids"] = draw.integers(5, 100, (SIZE, LENGTH)).astype(np.int32)
    made["token_type_ids"] = np.zeros((SIZE, LENGTH), np.int32)
    made["segment_starts"] = np.zeros((SIZE, TEXTS), np.int32)
    for row in range(SIZE - 1):
        end = 0
        for text in range(TEXTS):
            start, end = end, end + int(draw.integers(3, 9))
            made["attention_mask"][row, start:end] = text + 1
            made["position_ids"][row, start:end] = np.arange(end - start)
            made["segment_starts"][row, text] = start
    labels = numbers() if kind == "ranking" else scores()
    return {**made, "labels": labels[:, None], "index": np.arange(SIZE, dtype=np.int32)}


@functools.cache
def whole(kind: str) -> list[list[float]]:
    return train(kind)


def objective_of(kind: str) -> ContrastiveObjective:
    if kind == "late_interaction":
        return LateInteractionObjective(BertForLateInteraction(MODEL, 0, size=WIDTH), 0.5)
    if kind == "sparse":
        return SparseObjective(BertForSparse(MODEL, 0), SparseConfig(query_penalty=0.1))
    config = EmbeddingConfig(loss=kind, dense=WIDTH, dense_activation="identity", dimensions=(4, 8))
    return EmbeddingObjective(BertForEmbedding(MODEL, 0, embedding=config), config)


def texts_alone() -> dict[str, np.ndarray]:
    """Examples of three sequences, one a text, the last example of padding."""
    draw = np.random.default_rng(0)
    shape = SIZE, TEXTS, WIDTH
    is_token = np.arange(WIDTH) < draw.integers(3, WIDTH + 1, shape[:2])[..., None]
    is_token[-1] = False
    made = {"input_ids": np.where(is_token, draw.integers(5, 100, shape), 0).astype(np.int32)}
    made["token_type_ids"] = np.zeros(shape, np.int32)
    made["attention_mask"] = is_token.astype(np.int32)
    return {**made, "labels": numbers(), "index": np.arange(SIZE, dtype=np.int32)}


def train(kind: str, devices: int = 1, microbatches: int = 1, **parallel) -> list[list[float]]:
    """The loss and the gradient's norm of three steps."""
    objective, by_loss = objective_of(kind), kind in ("ranking", "cosent", "cosine")
    rows = batch(kind) if by_loss else texts_alone()
    adamw = OptimizerConfig(name="adamw", learning_rate=1e-3)
    optimizer = make_optimizer(adamw, make_rate_schedule(adamw, 9))
    config, places = ParallelConfig(**parallel), jax.devices()[:devices]
    _, metrics, _ = helpers.train(objective, optimizer, [rows] * 3, config, places, microbatches)
    names = ("loss", "gradient_norm")
    return [[float(step[name].total / step[name].weight) for name in names] for step in metrics]


CASES = [
    ("ranking", {"microbatches": 4}),
    ("ranking", {"devices": 2, "microbatches": 2}),
    ("sparse", {"devices": 8, "data": 2, "fsdp": 2, "tensor": 2, "microbatches": 2}),
    pytest.param(
        *("late_interaction", {"devices": 8, "fsdp": 2, "microbatches": 2}), marks=pytest.mark.slow
    ),
    pytest.param("cosent", {"devices": 8}, marks=pytest.mark.slow),
    pytest.param("ranking", {"devices": 8, "mode": "pmap"}, marks=pytest.mark.slow),
    pytest.param("cosine", {"devices": 8, "microbatches": 2}, marks=pytest.mark.slow),
]


@pytest.mark.devices(8)
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_same_on_any_devices_and_in_microbatches(kind, options):
    """With dropout, negatives of the whole global batch, and padding."""
    np.testing.assert_allclose(train(kind, **options), whole(kind), rtol=1e-5)
    assert whole(kind)[0][0] != whole(kind)[1][0]


@pytest.mark.parametrize("kind", ["ranking", "late_interaction"])
def test_a_held_out_loss_is_of_the_whole_batch(kind):
    """In microbatches too, which have fewer negatives."""
    objective, rows = objective_of(kind), batch(kind) if kind == "ranking" else texts_alone()
    params = nn.unbox(objective.model.init_params(jax.random.key(0)))
    (logits, metrics), (wanted_logits, wanted) = (
        jax.jit(make_predict_step(objective, count))(params, rows) for count in (4, 1)
    )
    np.testing.assert_allclose(logits, wanted_logits, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"].total, wanted["loss"].total, rtol=1e-6)


def test_the_same_for_examples_that_share_a_sequence():
    """Without dropout, which is drawn by sequence; the last example is padding."""
    draw, features = np.random.default_rng(0), Features(choices=2, is_packed=True)
    for index, label in enumerate(numbers()[:7, :2]):
        texts = (draw.integers(5, 100, draw.integers(3, 9)) for _ in range(2))
        features.add(index, label, ((text, len(text)) for text in texts))
    batcher = Batcher(features, FakeTokenizer(), 2, 8)
    indices = np.array([4, 2, 6, 0, 1, 5, 3, FILL])
    lengths = np.append(batcher.lengths, 0)[indices]
    model = BertForEmbedding(MODEL, 0, embedding=EmbeddingConfig())
    objective = EmbeddingObjective(model, model.embedding)
    params = model.init_params(jax.random.key(0))

    @jax.jit
    def gradient(batch):
        return objective.gradient(params, batch, None, SINGLE_DEVICE, 1)

    alone, shared = (
        gradient({**batcher.batch(balance(indices, lengths, count), 16 * count), "index": index})
        for count, index in ((1, np.arange(8)), (4, np.arange(2)))
    )
    assert float(alone[1]["loss"].weight) == 7
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, alone, shared)


def test_memory_does_not_grow_with_the_batch():
    """A batch of eight times the sequences, in eight times the microbatches."""
    config = EmbeddingConfig()
    # With two layers the encoder takes more than the scores, which do grow with the batch.
    two_layers = dataclasses.replace(MODEL, num_hidden_layers=2)
    model = BertForEmbedding(two_layers, 0, embedding=config)
    params = jax.eval_shape(model.init_params, jax.random.key(0))
    objective = EmbeddingObjective(model, config)

    def temporary_bytes(times: int, microbatches: int) -> int:
        large = {name: np.repeat(x, times, 0) for name, x in batch("ranking").items()}
        gradient = functools.partial(
            objective.gradient, collectives=SINGLE_DEVICE, microbatches=microbatches
        )
        compiled = jax.jit(gradient).lower(params, large, jax.random.key(0)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    once, all_at_once, in_parts = (temporary_bytes(*sizes) for sizes in ((8, 1), (64, 1), (64, 8)))
    assert all_at_once > 6 * once
    assert in_parts < 2 * once


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("model_type", ["bert", "modernbert", "electra"])
def test_packed_texts_have_the_vectors_of_texts_alone(model_type, pooling):
    config = as_variant(MODEL, model_type)
    if model_type == "modernbert":
        config = dataclasses.replace(config, local_attention=4)
    module = BertForEmbedding(config, 0, embedding=EmbeddingConfig(pooling=pooling))
    params = {"params": module.init_params(jax.random.key(0))}
    rows = jax.tree.map(jnp.asarray, batch("ranking"))
    names = ("input_ids", "token_type_ids", "attention_mask")
    packing = {name: rows[name] for name in ("position_ids", "segment_starts")}
    packed = module.apply(params, *(rows[name] for name in names), **packing)
    assert packed.shape == (SIZE, TEXTS, config.hidden_size)
    for text in range(TEXTS):
        alone = np.zeros((3, SIZE, LENGTH), np.int32)
        for row in range(SIZE - 1):
            where = np.asarray(rows["attention_mask"][row] == text + 1)
            alone[0, row, : where.sum()] = np.asarray(rows["input_ids"][row])[where]
            alone[2, row, : where.sum()] = 1
        found = module.apply(params, *jnp.asarray(alone))
        np.testing.assert_allclose(packed[:-1, text], found[:-1, 0], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(packed[:-1], axis=-1), 1, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_padding_leaves_the_gradient_finite(pooling):
    config = EmbeddingConfig(pooling=pooling)
    model = BertForEmbedding(MODEL, 0, embedding=config)
    objective = EmbeddingObjective(model, config)
    params = nn.unbox(model.init_params(jax.random.key(0)))
    run = jax.jit(lambda rows: objective.gradient(params, rows, None, SINGLE_DEVICE, 1))
    gradients, _ = run(batch("ranking"))
    assert all(np.isfinite(each).all() for each in jax.tree.leaves(gradients))
