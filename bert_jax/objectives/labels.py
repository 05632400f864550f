"""The objective of a task with labels: of texts, tokens, spans or choices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from bert_jax.distributed.fsdp import SINGLE_DEVICE, Collectives
from bert_jax.objectives.base import cross_entropy
from bert_jax.training.objective import Batch, Metrics, PredictionObjective, WeightedSum, Weights


@dataclasses.dataclass(frozen=True, eq=False)
class LabelsObjective(PredictionObjective):
    """The mean cross-entropy, or squared error, over everything labelled in texts or choices."""

    # Source: google-research/bert `run_classifier.py` and `run_squad.py`; of regression, Hugging
    # Face's `num_labels` 1.
    is_regression: bool = False

    def weights(self, batch: Batch) -> Weights:
        return {"loss": self._has_label(batch["labels"]).sum()}

    def loss(
        self, params: Any, batch: Batch, weights: Weights, dropout_key: Array | None
    ) -> tuple[Float[Array, ""], Metrics]:
        metrics = self.metrics(self.apply(params, batch, dropout_key), batch["labels"])
        return metrics["loss"].total / jnp.maximum(weights["loss"], 1.0), metrics

    def metrics(
        self,
        logits: Float[Array, "*labels N"],
        labels: Array,
        collectives: Collectives = SINGLE_DEVICE,
    ) -> Metrics:
        """Return the loss and, of classes, the accuracy, over everything labelled."""
        weights = self._has_label(labels)
        if labels.ndim == logits.ndim and not self.is_regression:  # a weight of each
            labels = jnp.where(weights[..., None] > 0, labels, 0.0)
            losses = -(labels * jax.nn.log_softmax(logits)).sum(-1)
            return {"loss": WeightedSum(losses.sum(), weights.sum())}
        labels = jnp.where(weights > 0, labels, 0)
        if self.is_regression:
            losses = weights * jnp.square(logits[..., 0] - labels)
            return {"loss": WeightedSum(losses.sum(), weights.sum())}
        return cross_entropy("", logits, labels, weights)

    def _has_label(self, labels: Array) -> Float[Array, "*labels"]:
        # A number that is missing is NaN, a class is negative.
        if jnp.issubdtype(labels.dtype, jnp.floating) and not self.is_regression:
            has_label = ~jnp.isnan(labels).any(-1)  # of several weights
        else:
            has_label = ~jnp.isnan(labels) if self.is_regression else labels >= 0
        return has_label.astype(jnp.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class BinaryObjective(LabelsObjective):
    """The mean binary cross-entropy over the outputs of an example, as in `transformers`."""

    def metrics(
        self,
        logits: Float[Array, "*labels N"],
        labels: Array,
        collectives: Collectives = SINGLE_DEVICE,
    ) -> Metrics:
        """Return the loss. `labels` are from 0 to 1, or NaN if unknown."""
        weights = self._has_label(labels)
        labels = jnp.where(weights[..., None] > 0, labels, 0.0)
        losses = optax.sigmoid_binary_cross_entropy(logits, labels)
        return {"loss": WeightedSum((weights * losses.mean(-1)).sum(), weights.sum())}
