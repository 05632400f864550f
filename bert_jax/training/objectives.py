"""What a train step minimizes: losses and accuracies, as weighted sums over examples.

Sums of microbatches and of devices add up exactly; means would not, where the weights differ.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int

from bert_jax.models.layers import DropoutKey
from bert_jax.training.masking import Masking

# The MLM loss is Σ(w·CE) / (Σw + 1e-5), as in google-research/bert `run_pretraining.py`.
_MLM_WEIGHT_FLOOR = 1e-5


@struct.dataclass
class WeightedSum:
    """A sum over examples, and the sum of their weights; the mean is `total / weight`."""

    total: Any
    weight: Any


# The metric whose total is the number of tokens without padding, and whose mean is their share.
TOKENS = "token_share"

Batch = Mapping[str, Any]
Metrics = Mapping[str, WeightedSum]
Weights = Mapping[str, Float[Array, ""]]


@dataclasses.dataclass(frozen=True, eq=False)
class Objective(abc.ABC):
    """What a train step minimizes."""

    model: nn.Module

    def apply(
        self, params: Any, batch: Batch, dropout_key: Array | None, *inputs: Any, **packing: Any
    ) -> Any:
        """Return the model's output for a batch; without a key, without dropout."""
        names = ("input_ids", "token_type_ids", "attention_mask")
        key = None if dropout_key is None else DropoutKey(dropout_key, batch["index"])
        arguments = (*(batch[name] for name in names), *inputs, key)
        return self.model.apply({"params": params}, *arguments, **packing)

    def prepare(self, key: Array, batch: Batch) -> Batch:
        """Return the loader's batch as `loss` takes it, with everything random drawn."""
        return batch

    @abc.abstractmethod
    def weights(self, batch: Batch) -> Weights:
        """Return the divisor of each term of the loss; `loss` has that of the global batch."""

    @abc.abstractmethod
    def loss(
        self, params: Any, batch: Batch, weights: Weights, dropout_key: Array | None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Return these sequences' share of the loss, and their metrics; no key, no dropout."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pretraining(Objective):
    """Masked LM and, where the data has pairs, next sentence (or sentence order) prediction."""

    masking: Masking

    def prepare(self, key: Array, batch: Batch) -> Batch:
        """Mask the tokens, and add `predictions`, and `nsp_label` and `nsp_weight` of each pair."""
        index, attention_mask = batch["index"], batch["attention_mask"]
        input_ids, predictions = self.masking(key, batch["input_ids"], attention_mask, index)
        label = batch.get("next_sentence_label", jnp.full_like(index, -1))
        is_pair = label >= 0
        if label.ndim == 1:  # in packed sequences padding has no pairs
            is_pair &= attention_mask[:, 0] > 0
        return {
            **batch,
            "input_ids": input_ids,
            "predictions": predictions,
            "nsp_label": jnp.maximum(label, 0),
            "nsp_weight": is_pair.astype(jnp.float32),
        }

    def weights(self, batch: Batch) -> Weights:
        return {"mlm": batch["predictions"].weights.sum(), "nsp": batch["nsp_weight"].sum()}

    def loss(
        self, params: Any, batch: Batch, weights: Weights, dropout_key: Array | None
    ) -> tuple[Float[Array, ""], Metrics]:
        predictions = batch["predictions"]
        packing = {name: batch.get(name) for name in ("position_ids", "segment_starts")}
        output = self.apply(params, batch, dropout_key, predictions.positions, **packing)
        metrics = _cross_entropy("mlm_", output.mlm_logits, predictions.labels, predictions.weights)
        is_token = (batch["attention_mask"] > 0).astype(jnp.float32)
        metrics[TOKENS] = WeightedSum(is_token.sum(), jnp.float32(is_token.size))
        loss = metrics["mlm_loss"].total / (weights["mlm"] + _MLM_WEIGHT_FLOOR)
        if output.nsp_logits is not None:
            labels, pair_weights = batch["nsp_label"], batch["nsp_weight"]
            metrics |= _cross_entropy("nsp_", output.nsp_logits, labels, pair_weights)
            loss += metrics["nsp_loss"].total / jnp.maximum(weights["nsp"], 1.0)
        return loss, metrics


def _cross_entropy(
    prefix: str,
    logits: Float[Array, "*any N"],
    labels: Int[Array, "*any"],
    weights: Float[Array, "*any"],
) -> dict[str, WeightedSum]:
    """Return the cross-entropy in nats, "loss", and the "accuracy" of the argmax."""
    labels = labels[..., None]
    label_logits = jnp.take_along_axis(logits, labels, axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - label_logits[..., 0]
    # `logits.argmax(-1) == labels`, in half its time on a CPU: the first of equal logits wins.
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    is_lower = (logits < label_logits) | ((logits == label_logits) & (classes >= labels))
    correct = is_lower.all(axis=-1).astype(jnp.float32)
    values = {"loss": losses, "accuracy": correct}
    weight = weights.sum()
    return {prefix + k: WeightedSum((weights * v).sum(), weight) for k, v in values.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class TaskObjective(Objective):
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

    def metrics(self, logits: Float[Array, "*labels N"], labels: Array) -> Metrics:
        """Return the loss and, of classes, the accuracy, over everything labelled."""
        weights = self._has_label(labels)
        labels = jnp.where(weights > 0, labels, 0)
        if self.is_regression:
            losses = weights * jnp.square(logits[..., 0] - labels)
            return {"loss": WeightedSum(losses.sum(), weights.sum())}
        return _cross_entropy("", logits, labels, weights)

    def _has_label(self, labels: Array) -> Float[Array, "*labels"]:
        # A number that is missing is NaN, a class is negative.
        has_label = ~jnp.isnan(labels) if self.is_regression else labels >= 0
        return has_label.astype(jnp.float32)
