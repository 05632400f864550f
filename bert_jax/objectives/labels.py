"""The objectives of tasks with labels: of texts, tokens, spans or choices.

Source: google-research/bert `run_classifier.py` and `run_squad.py`; of regression and of several
labels a text, `transformers`; of passages, Gao et al. 2021 (LCE).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from bert_jax.distributed.fsdp import SINGLE_DEVICE, Collectives
from bert_jax.objectives.base import cross_entropy
from bert_jax.training.objective import Batch, Metrics, PredictionObjective, WeightedSum, Weights


@dataclasses.dataclass(frozen=True, eq=False)
class LabelsObjective(PredictionObjective):
    """The mean cross-entropy over all labels: classes, or for each label a weight of every output.

    A class below 0 is unknown, and so is a label with a NaN. They have no loss.
    """

    def weights(self, batch: Batch) -> Weights:
        return {"loss": self.is_known(batch["labels"]).astype(jnp.float32).sum()}

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
        """Return the loss and, of classes, the accuracy."""
        weights = self.is_known(labels).astype(jnp.float32)
        if not _are_numbers(labels):
            return cross_entropy("", logits, jnp.where(weights > 0, labels, 0), weights)
        losses = self.losses(logits, jnp.nan_to_num(labels))
        return {"loss": WeightedSum((weights * losses).sum(), weights.sum())}

    def is_known(self, labels: Array) -> Bool[Array, "*labels"]:
        """Return which labels are known."""
        return ~jnp.isnan(labels).any(-1) if _are_numbers(labels) else labels >= 0

    def losses(self, logits: Float[Array, "*labels N"], labels: Array) -> Float[Array, "*labels"]:
        """Return the loss of each label that is numbers, which are finite."""
        return -(labels * jax.nn.log_softmax(logits)).sum(-1)


class RegressionObjective(LabelsObjective):
    """The mean squared error of the first output. A label is a number, NaN if unknown."""

    def is_known(self, labels: Array) -> Bool[Array, "*labels"]:
        return ~jnp.isnan(labels)

    def losses(self, logits: Float[Array, "*labels N"], labels: Array) -> Float[Array, "*labels"]:
        return jnp.square(logits[..., 0] - labels)


class BinaryObjective(LabelsObjective):
    """The mean binary cross-entropy over the outputs. A label has a number from 0 to 1 of each."""

    def losses(self, logits: Float[Array, "*labels N"], labels: Array) -> Float[Array, "*labels"]:
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean(-1)


def _are_numbers(labels: Array) -> bool:
    return jnp.issubdtype(labels.dtype, jnp.floating)
