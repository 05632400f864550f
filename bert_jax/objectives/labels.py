"""The objectives of tasks with labels: of texts, tokens, spans or choices.

Source: google-research/bert `run_classifier.py` and `run_squad.py`; of regression and of several
labels a text, `transformers`; of passages, Gao et al. 2021 (LCE).
"""

import abc
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
    """The mean cross-entropy over the classes that are known. One below 0 is unknown."""

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
        """Return the loss and the accuracy."""
        is_known = self.is_known(labels)
        known = jnp.where(is_known, labels, 0)
        return cross_entropy("", logits, known, is_known.astype(jnp.float32))

    def is_known(self, labels: Array) -> Bool[Array, "*labels"]:
        """Return which labels are known; the others have no loss."""
        return labels >= 0


class _NumbersObjective(LabelsObjective, abc.ABC):
    """The mean of a loss over labels that are numbers, NaN if unknown."""

    @abc.abstractmethod
    def losses(self, logits: Float[Array, "*labels N"], labels: Array) -> Float[Array, "*labels"]:
        """Return the loss of each label."""

    def metrics(
        self,
        logits: Float[Array, "*labels N"],
        labels: Array,
        collectives: Collectives = SINGLE_DEVICE,
    ) -> Metrics:
        """Return the loss."""
        weights = self.is_known(labels).astype(jnp.float32)
        losses = self.losses(logits, jnp.nan_to_num(labels))
        return {"loss": WeightedSum((weights * losses).sum(), weights.sum())}


class RegressionObjective(_NumbersObjective):
    """The mean squared error of the first output."""

    def is_known(self, labels: Array) -> Bool[Array, "*labels"]:
        return ~jnp.isnan(labels)

    def losses(self, logits: Float[Array, "*labels N"], labels: Array) -> Float[Array, "*labels"]:
        return jnp.square(logits[..., 0] - labels)


class ListwiseObjective(_NumbersObjective):
    """The mean cross-entropy with the weights that each label gives to the outputs."""

    def is_known(self, labels: Array) -> Bool[Array, "*labels"]:
        return ~jnp.isnan(labels).any(-1)

    def losses(self, logits: Float[Array, "*labels N"], labels: Array) -> Float[Array, "*labels"]:
        return -(labels * jax.nn.log_softmax(logits)).sum(-1)


class BinaryObjective(ListwiseObjective):
    """The mean binary cross-entropy over the outputs, each of which has a label from 0 to 1."""

    def losses(self, logits: Float[Array, "*labels N"], labels: Array) -> Float[Array, "*labels"]:
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean(-1)
