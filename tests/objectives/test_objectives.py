"""Losses and accuracies as weighted sums."""

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from bert_jax.objectives.base import hidden_similarity
from bert_jax.objectives.labels import LabelsObjective


def accuracy(logits, labels) -> float:
    metric = LabelsObjective(nn.Dense(1)).metrics(jnp.asarray(logits), jnp.asarray(labels))
    return float(metric["accuracy"].total / metric["accuracy"].weight)


def test_of_equal_logits_the_first_class_is_predicted():
    """As argmax does: equal logits are right for one label in N, not for all."""
    assert accuracy(np.zeros((4, 4), np.float32), np.arange(4)) == 0.25
    assert accuracy(np.array([[0.0, 2.0, 2.0]] * 4, np.float32), np.array([0, 1, 2, 2])) == 0.25
    assert accuracy(np.full((2, 3), np.nan, np.float32), np.array([0, 2])) == 0


def test_accuracy_is_that_of_argmax():
    generator = np.random.default_rng(0)
    logits = generator.integers(0, 4, (500, 7)).astype(np.float32)
    labels = generator.integers(-1, 7, 500)
    expected = (logits.argmax(-1) == labels)[labels >= 0].mean()
    np.testing.assert_allclose(accuracy(logits, labels), expected, rtol=1e-6)


def test_hidden_similarity_is_the_mean_cosine_of_the_pairs_of_a_sequence():
    generator = np.random.default_rng(1)
    hidden, counts = generator.normal(size=(3, 6, 5)).astype(np.float32), (6, 3, 1)
    weights = (np.arange(6) < np.array(counts)[:, None]).astype(np.float32)
    pairs = [
        (s[i], s[j])
        for s, n in zip(hidden, counts, strict=True)
        for i in range(n)
        for j in range(n)
        if i != j
    ]
    expected = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]
    metric = hidden_similarity(jnp.asarray(hidden), jnp.asarray(weights))
    assert metric.weight == len(pairs)
    np.testing.assert_allclose(metric.total / metric.weight, np.mean(expected), rtol=1e-5)
