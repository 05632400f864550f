"""The objective of embeddings: losses over all texts of the global batch, in any memory.

Embeddings of the whole batch are gathered, the loss and its gradient by embedding are computed,
and each sequence's gradient is that of the product of its embeddings and this gradient. With
microbatches the embeddings are computed first, without keeping anything for the gradient, and each
microbatch is then encoded again. Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch
Size under Memory Limited Setup".
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Shaped

from bert_jax.config import EmbeddingConfig
from bert_jax.distributed.fsdp import SINGLE_DEVICE, Collectives
from bert_jax.models.heads import normalized
from bert_jax.training.objective import (
    Batch,
    Metrics,
    PredictionObjective,
    WeightedSum,
    Weights,
)

_BLOCK = 256  # queries whose scores of every passage are in memory at once


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddingObjective(PredictionObjective):
    """How near the texts of an example are, beside all others of the batch or by their score."""

    embedding: EmbeddingConfig

    def weights(self, batch: Batch) -> Weights:
        is_example = _is_example(_by_example(batch["labels"]))
        return {"loss": is_example.sum(dtype=jnp.float32)}

    def gradient(
        self,
        params: Any,
        batch: Batch,
        dropout_key: Array | None,
        collectives: Collectives,
        microbatches: int,
    ) -> tuple[Any, Metrics]:
        weight = jnp.maximum(collectives.psum(self.weights(batch)["loss"]), 1.0)
        if microbatches == 1:
            encode = partial(self.apply, batch=batch, dropout_key=dropout_key)
            vectors, pull_back = jax.vjp(encode, params)
            gradient, metrics = self._by_vector(vectors, batch["labels"], weight, collectives)
            return pull_back(gradient)[0], metrics
        encode = partial(self.apply, params, dropout_key=dropout_key)
        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), dict(batch))
        vectors = jax.lax.map(encode, parts)
        vectors = vectors.reshape(-1, *vectors.shape[2:])
        gradient, metrics = self._by_vector(vectors, batch["labels"], weight, collectives)
        batch, size = {**batch, "vector_gradient": gradient}, len(gradient) // microbatches
        by_parameter = jax.grad(self.loss, has_aux=True)
        summed = optax.microbatch(by_parameter, argnums=1, microbatch_size=size)
        return summed(params, batch, {}, dropout_key)[0], metrics

    def loss(
        self, params: Any, batch: Batch, weights: Weights, dropout_key: Array | None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Return what has the gradient of the loss, not its value."""
        vectors = self.apply(params, batch, dropout_key)
        return jnp.vdot(vectors, batch["vector_gradient"]), {}

    def metrics(
        self,
        vectors: Float[Array, "B T I"],
        labels: Array,
        collectives: Collectives = SINGLE_DEVICE,
    ) -> Metrics:
        """Return this device's share of the loss and, of rankings, the accuracy."""
        labels = _by_example(labels)
        own = vectors.reshape(len(labels), -1, vectors.shape[-1]), labels
        return _metrics(self.embedding, own, collectives.all_gather(own))

    def _by_vector(
        self, vectors: Array, labels: Array, weight: Array, collectives: Collectives
    ) -> tuple[Float[Array, "B T I"], Metrics]:
        """Return the gradient of the global loss by this device's vectors, and the metrics."""
        shape, labels = vectors.shape, _by_example(labels)
        vectors = vectors.reshape(len(labels), -1, shape[-1])

        def share(own: Array, every: Array) -> tuple[Array, Metrics]:
            metrics = _metrics(self.embedding, (own, labels), (every, all_labels))
            return metrics["loss"].total / weight, metrics

        every, all_labels = collectives.all_gather((vectors, labels))
        grad = jax.grad(share, argnums=(0, 1), has_aux=True)
        (by_own, by_every), metrics = grad(vectors, every)
        return (by_own + collectives.psum_scatter(by_every)).reshape(shape), metrics


def _by_example(labels: Shaped[Array, "B E *any"]) -> Shaped[Array, "N *any"]:
    """Return the labels of the examples of all sequences, each of which is packed of E."""
    return labels.reshape(-1, *labels.shape[2:])


def _is_example(labels: Array) -> Bool[Array, "N"]:
    """Return which examples are no padding: texts are numbered from 0 on, others are no NaN."""
    first = labels.reshape(len(labels), -1)[:, 0]
    return ~jnp.isnan(first) if jnp.issubdtype(labels.dtype, jnp.floating) else first >= 0


_Shard = tuple[Array, Array]  # vectors and labels


def _metrics(config: EmbeddingConfig, own: _Shard, every: _Shard) -> Metrics:
    """Return the metrics of a device's own examples, beside those of every device."""
    (vectors, labels), (all_vectors, all_labels) = own, every
    weight = _is_example(labels).sum(dtype=jnp.float32)
    sizes: Sequence[int] = config.dimensions or (vectors.shape[-1],)
    total, metrics = jnp.float32(0), {}
    for size in sizes:
        mine, others = normalized(vectors[..., :size]), normalized(all_vectors[..., :size])
        if config.loss == "ranking":
            losses, is_first = _ranking(config, mine, labels, others, all_labels)
            metrics["accuracy"] = WeightedSum(is_first, weight)
            total += losses
        elif config.loss == "cosine":
            errors = jnp.where(_is_example(labels), _cosines(mine) - labels, 0.0)
            total += jnp.square(errors).sum()
        else:
            # Of one loss for the whole batch, each device has the share of its examples.
            total += weight * _cosent(_cosines(others), all_labels, config.temperature)
    return {"loss": WeightedSum(total, weight), **metrics}


def _cosines(vectors: Float[Array, "N C I"]) -> Float[Array, "N"]:
    return (vectors[:, 0] * vectors[:, 1]).sum(-1)


def _ranking(
    config: EmbeddingConfig,
    vectors: Float[Array, "N C I"],
    labels: Int[Array, "N C"],
    all_vectors: Float[Array, "G C I"],
    all_labels: Int[Array, "G C"],
) -> tuple[Array, Array]:
    """Return the sum of the cross-entropies, and how many queries have their passage first.

    The first text of an example is a query, the second its passage, the others hard negatives. A
    passage is no negative of a query if it is its own, or that of an equal query.
    """
    queries, query_ids = all_vectors[:, 0], all_labels[:, 0]
    # Positives of all examples, then their negatives.
    passages = all_vectors[:, 1:].swapaxes(0, 1).reshape(-1, vectors.shape[-1])
    passage_ids = all_labels[:, 1:].T.reshape(-1)
    positives = all_labels[:, 1]

    @jax.checkpoint
    def rank(example: tuple[Array, Array]) -> tuple[Array, Array]:
        (query, passage, *_), (query_id, passage_id, *_) = example
        own = query @ passage / config.temperature
        is_own = (query_ids == query_id) | (positives == passage_id)
        is_own = jnp.pad(is_own, (0, len(passages) - len(is_own))) | (passage_ids == passage_id)
        scores = jnp.where(is_own | (passage_ids < 0), -jnp.inf, passages @ query)
        scores /= config.temperature
        loss = jax.nn.logsumexp(jnp.append(scores, own)) - own
        if config.symmetric:
            is_negative = ~is_own[: len(queries)] & (query_ids >= 0)
            backward = jnp.where(is_negative, queries @ passage, -jnp.inf) / config.temperature
            loss = (loss + jax.nn.logsumexp(jnp.append(backward, own)) - own) / 2
        is_example = query_id >= 0
        return jnp.where(is_example, loss, 0.0), is_example & (own > scores.max())

    losses, is_first = jax.lax.map(rank, (vectors, labels), batch_size=_BLOCK)
    return losses.sum(), is_first.sum(dtype=jnp.float32)


def _cosent(
    cosines: Float[Array, "G"], scores: Float[Array, "G"], temperature: float
) -> Float[Array, ""]:
    """Return log(1 + Σ exp((cos_j - cos_i) / temperature)) over pairs whose score i is above j.

    Source: Su 2022 (CoSENT), with its factor of 20.
    """
    differences = (cosines[None] - cosines[:, None]) / temperature
    is_above = scores[:, None] > scores[None]  # NaN is above nothing
    terms = jnp.where(is_above, differences, -math.inf).reshape(-1)
    return jax.nn.logsumexp(jnp.append(terms, 0.0))
