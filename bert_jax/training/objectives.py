"""Losses and accuracies as sums with weights, so that they add up over any split of a batch."""

import abc
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int

from bert_jax.models.layers import DropoutKey
from bert_jax.training.masking import Masking, Predictions

# Google's guard against a batch without predictions, `run_pretraining.py`.
_MLM_WEIGHT_FLOOR = 1e-5


@struct.dataclass
class WeightedSum:
    """A sum over examples, and the weight to divide it by for their mean.

    Both are sums: two parts of a batch make `WeightedSum(a.total + b.total, a.weight + b.weight)`.
    """

    total: Any
    weight: Any


# The sum whose total is the number of tokens that are not padding, and whose mean is their share.
TOKENS = "token_share"

Batch = Mapping[str, Array]
Metrics = Mapping[str, WeightedSum]
Weights = Mapping[str, Float[Array, ""]]


class Objective(abc.ABC):
    """What a train step trains."""

    @abc.abstractmethod
    def prepare(self, key: Array, batch: Batch) -> Any:
        """Returns the loader's rows as `loss` takes them, with all that is random drawn."""

    @abc.abstractmethod
    def weights(self, batch: Any) -> Weights:
        """Returns what each part of the loss is divided by, of these rows."""

    @abc.abstractmethod
    def loss(
        self, params: Any, batch: Any, weights: Weights, dropout_key: Array | None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Returns these rows' share of the loss, and the sums behind it.

        Args:
          params: of the model.
          batch: all rows of the global batch or some of them, from `prepare`.
          weights: of the whole global batch.
          dropout_key: None turns dropout off.
        """


@struct.dataclass
class MaskedBatch:
    """A batch as the model sees it.

    Attributes:
      input_ids, token_type_ids, attention_mask: [B, L].
      predictions: of the masked positions.
      nsp_label: [B], or [B, T] of packed rows; 1 where B is random or the order is swapped.
      nsp_weight: the same, float32; 0 where there is no pair: in a row of padding alone, in places
        that a packed row leaves over, and in all rows without pairs.
      rows: [B], the place of each row in the global batch.
      position_ids: [B, L], of packed rows, the place of each piece in its pair.
      segment_starts: [B, T], of packed rows, where each pair begins.
    """

    input_ids: Any
    token_type_ids: Any
    attention_mask: Any
    predictions: Predictions
    nsp_label: Any
    nsp_weight: Any
    rows: Any
    position_ids: Any = None
    segment_starts: Any = None


@struct.dataclass
class Pretraining(Objective):
    """Masked LM and, where the rows have pairs, next sentence (or sentence order) prediction.

    The loss is Σ(w·CE) / (Σw + 1e-5) over the predicted positions, plus the mean cross-entropy of
    the pairs, each over the whole global batch (google-research/bert `run_pretraining.py`).
    """

    model: nn.Module = struct.field(pytree_node=False)
    masking: Masking = struct.field(pytree_node=False)

    def prepare(self, key: Array, batch: Batch) -> MaskedBatch:
        rows, attention_mask = batch["index"], batch["attention_mask"]
        input_ids, predictions = self.masking(key, batch["input_ids"], attention_mask, rows)
        label = batch.get("next_sentence_label")
        if label is None:
            label, is_pair = jnp.zeros_like(rows), jnp.zeros_like(rows)
        elif "segment_starts" in batch:
            label, is_pair = jnp.maximum(label, 0), label >= 0
        else:
            is_pair = attention_mask[:, 0]
        return MaskedBatch(
            input_ids=input_ids,
            token_type_ids=batch["token_type_ids"],
            attention_mask=attention_mask,
            predictions=predictions,
            nsp_label=label,
            nsp_weight=is_pair.astype(jnp.float32),
            rows=rows,
            position_ids=batch.get("position_ids"),
            segment_starts=batch.get("segment_starts"),
        )

    def weights(self, batch: MaskedBatch) -> Weights:
        return {"mlm": batch.predictions.weights.sum(), "nsp": batch.nsp_weight.sum()}

    def loss(
        self, params: Any, batch: MaskedBatch, weights: Weights, dropout_key: Array | None
    ) -> tuple[Float[Array, ""], Metrics]:
        output: Any = self.model.apply(
            {"params": params},
            batch.input_ids,
            batch.token_type_ids,
            batch.attention_mask,
            batch.predictions.positions,
            None if dropout_key is None else DropoutKey(dropout_key, batch.rows),
            position_ids=batch.position_ids,
            segment_starts=batch.segment_starts,
        )
        predictions = batch.predictions
        mlm = _classify(output.mlm_logits, predictions.labels, predictions.weights)
        seen = (batch.attention_mask > 0).astype(jnp.float32)
        sums = {
            "mlm_loss": mlm[0],
            "mlm_accuracy": mlm[1],
            TOKENS: WeightedSum(seen.sum(), jnp.float32(seen.size)),
        }
        loss = mlm[0].total / (weights["mlm"] + _MLM_WEIGHT_FLOOR)
        if output.nsp_logits is not None:
            nsp = _classify(output.nsp_logits, batch.nsp_label, batch.nsp_weight)
            sums |= {"nsp_loss": nsp[0], "nsp_accuracy": nsp[1]}
            loss += nsp[0].total / jnp.maximum(weights["nsp"], 1.0)
        return loss, sums


def _classify(
    logits: Float[Array, "*any N"], labels: Int[Array, "*any"], weights: Float[Array, "*any"]
) -> tuple[WeightedSum, WeightedSum]:
    """Returns the cross-entropy in nats and the accuracy, as sums over the labels."""
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    # The greatest is needed for the loss as well, and an argmax costs several times as much.
    correct = (picked >= logits.max(axis=-1)).astype(jnp.float32)
    weight = weights.sum()
    return WeightedSum((weights * losses).sum(), weight), WeightedSum(
        (weights * correct).sum(), weight
    )


@struct.dataclass
class TaskObjective(Objective):
    """The mean cross-entropy over whatever has a label: texts, words, ends of answers, choices.

    With `is_regression`, the mean squared error. Source: google-research/bert `run_classifier.py`
    and `run_squad.py`; BERT's own regression is that of Hugging Face's `num_labels` 1.

    Attributes:
      model: from a batch's pieces to logits, [*labels, N].
      is_regression: whether labels are numbers, and not a number where there is none; otherwise
        they are classes, and below 0 where there is none.
    """

    model: nn.Module = struct.field(pytree_node=False)
    is_regression: bool = struct.field(pytree_node=False, default=False)

    def prepare(self, key: Array, batch: Batch) -> Batch:
        return batch

    def weights(self, batch: Batch) -> Weights:
        return {"loss": self._labelled(batch["labels"]).sum()}

    def loss(
        self, params: Any, batch: Batch, weights: Weights, dropout_key: Array | None
    ) -> tuple[Float[Array, ""], Metrics]:
        logits = self.logits(params, batch, dropout_key)
        sums = self.metrics(logits, batch["labels"])
        return sums["loss"].total / jnp.maximum(weights["loss"], 1.0), sums

    def logits(
        self, params: Any, batch: Batch, dropout_key: Array | None = None
    ) -> Float[Array, "*labels N"]:
        """Returns the head's output for a batch; None turns dropout off."""
        logits: Any = self.model.apply(
            {"params": params},
            batch["input_ids"],
            batch["token_type_ids"],
            batch["attention_mask"],
            None if dropout_key is None else DropoutKey(dropout_key, batch["index"]),
        )
        return logits

    def metrics(self, logits: Float[Array, "*labels N"], labels: Array) -> Metrics:
        """Returns the loss and, of classes, the accuracy, over all that is labelled."""
        labelled = self._labelled(labels)
        known = jnp.where(labelled > 0, labels, 0)
        if self.is_regression:
            losses = labelled * jnp.square(logits[..., 0] - known)
            return {"loss": WeightedSum(losses.sum(), labelled.sum())}
        loss, accuracy = _classify(logits, known, labelled)
        return {"loss": loss, "accuracy": accuracy}

    def _labelled(self, labels: Array) -> Float[Array, "*labels"]:
        known = ~jnp.isnan(labels) if self.is_regression else labels >= 0
        return known.astype(jnp.float32)
