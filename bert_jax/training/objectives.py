"""What a train step minimizes: losses and accuracies, as weighted sums over examples.

Sums of microbatches and of devices add up exactly; means would not, where the weights differ.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from bert_jax.distributed.fsdp import SINGLE_DEVICE, Collectives
from bert_jax.models.electra import ElectraForPreTraining
from bert_jax.models.heads import PreTrainingModel
from bert_jax.models.layers import DropoutKey, random_bits
from bert_jax.training.masking import Masking

# The MLM loss is Σ(w·CE) / (Σw + 1e-5), as in google-research/bert `run_pretraining.py`.
_MLM_WEIGHT_FLOOR = 1e-5


@struct.dataclass
class WeightedSum:
    """A sum over examples, and the sum of their weights; the mean is `total / weight`."""

    total: Any
    weight: Any


_BLOCK = 128  # tokens of the vocabulary that are drawn from together

# The metric whose total is the number of tokens without padding, and whose mean is their share.
TOKENS = "token_share"

# The weight of a loss in the sum that is minimized, where it is not 1. Source: `disc_weight` in
# google-research/electra `configure_pretraining.py`.
LOSS_WEIGHTS = {"rtd_loss": 50.0}

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

    def gradient(
        self,
        params: Any,
        batch: Batch,
        dropout_key: Array | None,
        collectives: Collectives,
        microbatches: int,
    ) -> tuple[Any, Metrics]:
        """Return these sequences' share of the gradient, and their metrics, in microbatches."""
        # Of the global batch: any devices and microbatches give the same gradient.
        weights = collectives.psum(self.weights(batch))
        # Neighbours go to different microbatches, which run one after the other.
        size = len(batch["index"]) // microbatches if microbatches > 1 else None
        gradient = jax.grad(self.loss, has_aux=True)
        summed = optax.microbatch(gradient, argnums=1, microbatch_size=size)
        return summed(params, batch, weights, dropout_key)

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
        if dropout_key is None:  # in evaluations
            metrics["hidden_similarity"] = hidden_similarity(output.hidden, predictions.weights)
        is_token = (batch["attention_mask"] > 0).astype(jnp.float32)
        metrics[TOKENS] = WeightedSum(is_token.sum(), jnp.float32(is_token.size))
        loss = metrics["mlm_loss"].total / (weights["mlm"] + _MLM_WEIGHT_FLOOR)
        if output.nsp_logits is not None:
            labels, pair_weights = batch["nsp_label"], batch["nsp_weight"]
            metrics |= _cross_entropy("nsp_", output.nsp_logits, labels, pair_weights)
            loss += metrics["nsp_loss"].total / jnp.maximum(weights["nsp"], 1.0)
        return loss, metrics


def hidden_similarity(hidden: Float[Array, "B P D"], weights: Float[Array, "B P"]) -> WeightedSum:
    """Return the cosine of two hidden states of a sequence, over all pairs of positions."""
    hidden = hidden.astype(jnp.float32)
    norm = jnp.linalg.norm(hidden, axis=-1, keepdims=True)
    unit = weights[..., None] * hidden / jnp.maximum(norm, 1e-9)
    count = weights.sum(1)  # each position has a cosine of 1 with itself
    return WeightedSum((jnp.square(unit.sum(1)).sum(-1) - count).sum(), (count * (count - 1)).sum())


@dataclasses.dataclass(frozen=True, eq=False)
class ReplacedTokenDetection(Objective):
    """ELECTRA's: the masked LM of a generator, and which of its samples a discriminator finds."""

    masking: Masking

    def prepare(self, key: Array, batch: Batch) -> Batch:
        """Mask the tokens, and add `predictions` and the key of the generator's samples."""
        index = batch["index"]
        # Source: `mask` in google-research/electra `pretrain_helpers.py`.
        masking = dataclasses.replace(self.masking, mask_share=0.85, random_share=0.0)
        input_ids, predictions = masking(key, batch["input_ids"], batch["attention_mask"], index)
        # One for each sequence, as a batch is split.
        keys = jnp.broadcast_to(jax.random.fold_in(key, 1), index.shape)
        drawn = {"input_ids": input_ids, "predictions": predictions, "sampling_key": keys}
        return {**batch, **drawn}

    def weights(self, batch: Batch) -> Weights:
        is_token = (batch["attention_mask"] > 0).astype(jnp.float32)
        return {"mlm": batch["predictions"].weights.sum(), "rtd": is_token.sum()}

    def loss(
        self, params: Any, batch: Batch, weights: Weights, dropout_key: Array | None
    ) -> tuple[Float[Array, ""], Metrics]:
        predictions = batch["predictions"]
        output = self.apply(params, batch, dropout_key, predictions.positions)
        metrics = _cross_entropy("mlm_", output.mlm_logits, predictions.labels, predictions.weights)
        input_ids, is_replaced = self._replace(batch, output.mlm_logits)
        corrupted = {**batch, "input_ids": input_ids}
        inputs = corrupted, dropout_key, predictions.positions
        output = self.apply(params, *inputs, method="discriminate")
        metrics |= _detection(output.rtd_logits, is_replaced, batch["attention_mask"] > 0)
        if dropout_key is None:  # in evaluations
            metrics["hidden_similarity"] = hidden_similarity(output.hidden, predictions.weights)
        loss = metrics["mlm_loss"].total / jnp.maximum(weights["mlm"], 1.0)
        rtd = metrics["rtd_loss"].total / jnp.maximum(weights["rtd"], 1.0)
        return loss + LOSS_WEIGHTS["rtd_loss"] * rtd, metrics

    def _replace(
        self, batch: Batch, logits: Float[Array, "B P V"]
    ) -> tuple[Int[Array, "B L"], Bool[Array, "B L"]]:
        """Return the sequences with sampled tokens, and which tokens differ from the original."""
        input_ids, predictions = batch["input_ids"], batch["predictions"]
        size = self.masking.vocab_size
        sampled = sample_tokens(batch["sampling_key"][0], batch["index"], logits, size)
        is_prediction = predictions.weights > 0
        # Out of the sequence where there is no prediction.
        positions = jnp.where(is_prediction, predictions.positions, input_ids.shape[1])
        where = jnp.arange(len(input_ids))[:, None], positions
        replaced = input_ids.at[where].set(sampled.astype(input_ids.dtype), mode="drop")
        differs = jnp.zeros(input_ids.shape, bool)
        return replaced, differs.at[where].set(sampled != predictions.labels, mode="drop")


def sample_tokens(
    key: Array, indices: Int[Array, "B"], logits: Float[Array, "B P V"], size: int
) -> Int[Array, "B P"]:
    """Return a token below `size` for each position, drawn from the softmax without a gradient.

    A block of the vocabulary is drawn, then a token of it, each as the argmax with Gumbel noise.
    Noise for every token would take much longer. To invert a sum over the vocabulary would not, but
    its rounding would give other devices other tokens.
    """
    logits = jax.lax.stop_gradient(logits[..., :size])
    count = -(-size // _BLOCK)
    padding = ((0, 0), (0, 0), (0, count * _BLOCK - size))
    blocks = jnp.pad(logits, padding, constant_values=-jnp.inf)
    blocks = blocks.reshape(*logits.shape[:2], count, _BLOCK)
    bits = random_bits(key, indices, (logits.shape[1], count + _BLOCK))
    # In (0, 1), and exact near 0, where the noise is largest.
    noise = -jnp.log(-jnp.log1p(-(bits.astype(jnp.float32) + 0.5) * 2**-32))
    block = (jax.nn.logsumexp(blocks, axis=-1) + noise[..., :count]).argmax(-1)
    tokens = jnp.take_along_axis(blocks, block[..., None, None], axis=2)[:, :, 0]
    return block * _BLOCK + (tokens + noise[..., count:]).argmax(-1)


def _detection(
    logits: Float[Array, "B L"], is_replaced: Bool[Array, "B L"], is_token: Bool[Array, "B L"]
) -> dict[str, WeightedSum]:
    """Return the binary cross-entropy in nats, and how well the replaced tokens are found."""
    found, original = logits > 0, is_token & ~is_replaced
    losses = optax.sigmoid_binary_cross_entropy(logits, is_replaced)
    hits, replaced = found & is_replaced & is_token, is_replaced & is_token
    sums = {
        "loss": (jnp.where(is_token, losses, 0.0), is_token),
        "accuracy": (hits | (original & ~found), is_token),
        "accuracy_baseline": (original, is_token),  # that of calling every token original
        "recall": (hits, replaced),
        "precision": (hits, found & is_token),
    }
    return {
        f"rtd_{name}": WeightedSum(*(x.sum(dtype=jnp.float32) for x in pair))
        for name, pair in sums.items()
    } | {TOKENS: WeightedSum(is_token.sum(dtype=jnp.float32), jnp.float32(is_token.size))}


def pretraining_objective(model: PreTrainingModel, masking: Masking) -> Objective:
    """Return the objective that a model is pretrained by."""
    if isinstance(model, ElectraForPreTraining):
        return ReplacedTokenDetection(model, masking)
    return Pretraining(model, masking)


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

    def metrics(
        self,
        logits: Float[Array, "*labels N"],
        labels: Array,
        collectives: Collectives = SINGLE_DEVICE,
    ) -> Metrics:
        """Return the loss and, of classes, the accuracy, over everything labelled."""
        weights = self._has_label(labels)
        if labels.ndim == logits.ndim and not self.is_regression:  # a teacher's probabilities
            labels = jnp.where(weights[..., None] > 0, labels, 0.0)
            losses = -(labels * jax.nn.log_softmax(logits)).sum(-1)
            return {"loss": WeightedSum(losses.sum(), weights.sum())}
        labels = jnp.where(weights > 0, labels, 0)
        if self.is_regression:
            losses = weights * jnp.square(logits[..., 0] - labels)
            return {"loss": WeightedSum(losses.sum(), weights.sum())}
        return _cross_entropy("", logits, labels, weights)

    def _has_label(self, labels: Array) -> Float[Array, "*labels"]:
        # A number that is missing is NaN, a class is negative.
        if jnp.issubdtype(labels.dtype, jnp.floating) and not self.is_regression:
            has_label = ~jnp.isnan(labels).any(-1)  # of a teacher's probabilities
        else:
            has_label = ~jnp.isnan(labels) if self.is_regression else labels >= 0
        return has_label.astype(jnp.float32)
