"""The base of losses that compare all texts of the global batch, in the memory of a microbatch.

The vectors of the whole batch are gathered, the loss and its gradient by vector are computed, and
each sequence's gradient is that of the product of its vectors and this gradient. With microbatches
the vectors are computed first, without keeping anything for the gradient, and each microbatch is
then encoded again. Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under
Memory Limited Setup".

Shapes: N examples of this device, G of all devices, C texts of an example. A text is represented by
a vector, or by an array of another shape.
"""

import abc
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Shaped

from bert_jax.distributed.fsdp import SINGLE_DEVICE, Collectives
from bert_jax.training.objective import Batch, Metrics, PredictionObjective, Weights

# From Q queries and P passages to their scores, [Q, P].
Similarity = Callable[[Array, Array], Array]
Shard = tuple[Array, Array]  # vectors, [N, C, ...], and labels of as many examples


@dataclasses.dataclass(frozen=True, eq=False)
class ContrastiveObjective(PredictionObjective):
    """A loss of the texts of all examples of the global batch."""

    @abc.abstractmethod
    def shard_metrics(self, own: Shard, every: Shard) -> Metrics:
        """Return the metrics of a device's own examples, beside those of every device."""

    def by_example(self, labels: Shaped[Array, "B *any"]) -> Shaped[Array, "N *any"]:
        """Return the labels of each example, from those of each sequence."""
        return labels

    def weights(self, batch: Batch) -> Weights:
        examples = is_example(self.by_example(batch["labels"]))
        return {"loss": examples.sum(dtype=jnp.float32)}

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
        vectors = self.apply_in_microbatches(params, batch, dropout_key, microbatches)
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
        vectors: Float[Array, "B T *any"],
        labels: Array,
        collectives: Collectives = SINGLE_DEVICE,
    ) -> Metrics:
        """Return this device's share of the loss and of the other metrics."""
        labels = self.by_example(labels)
        own = vectors.reshape(len(labels), -1, *vectors.shape[2:]), labels
        return self.shard_metrics(own, collectives.all_gather(own))

    def _by_vector(
        self, vectors: Array, labels: Array, weight: Array, collectives: Collectives
    ) -> tuple[Float[Array, "B T *any"], Metrics]:
        """Return the gradient of the global loss by this device's vectors, and the metrics."""
        shape, labels = vectors.shape, self.by_example(labels)
        vectors = vectors.reshape(len(labels), -1, *shape[2:])

        def share(own: Array, every: Array) -> tuple[Array, Metrics]:
            metrics = self.shard_metrics((own, labels), (every, all_labels))
            return metrics["loss"].total / weight, metrics

        every, all_labels = collectives.all_gather((vectors, labels))
        grad = jax.grad(share, argnums=(0, 1), has_aux=True)
        (by_own, by_every), metrics = grad(vectors, every)
        return (by_own + collectives.psum_scatter(by_every)).reshape(shape), metrics


def is_example(labels: Array) -> Bool[Array, "N"]:
    """Return which examples are no padding: texts are numbered from 0 on, others are no NaN."""
    first = labels.reshape(len(labels), -1)[:, 0]
    return ~jnp.isnan(first) if jnp.issubdtype(labels.dtype, jnp.floating) else first >= 0


def dot(queries: Float[Array, "Q I"], passages: Float[Array, "P I"]) -> Float[Array, "Q P"]:
    """Return the inner products of vectors."""
    return queries @ passages.T


def ranking(
    own: tuple[Float[Array, "N C *any"], Int[Array, "N C"]],
    every: tuple[Float[Array, "G C *any"], Int[Array, "G C"]],
    similarity: Similarity,
    temperature: float,
    *,
    block: int,
    symmetric: bool = False,
) -> tuple[Array, Array]:
    """Return the sum of the cross-entropies, and how many queries have their passage first.

    The first text of an example is a query, the second its passage, the others hard negatives. A
    passage is no negative of a query if it is its own, that of an equal query, or the query itself,
    wherever its text is among the passages.

    Args:
      own: vectors of this device's examples, and the numbers of their texts.
      every: the same of all devices.
      similarity: the scores of queries and passages.
      temperature: what the scores are divided by.
      block: queries whose scores of every passage are in memory at once.
      symmetric: whether each passage must find its query too.
    """
    all_vectors, all_labels = every
    queries, query_ids = all_vectors[:, 0], all_labels[:, 0]
    # Positives of all examples, then their negatives.
    passages = all_vectors[:, 1:].swapaxes(0, 1).reshape(-1, *all_vectors.shape[2:])
    passage_ids = all_labels[:, 1:].T.reshape(-1)
    positives = all_labels[:, 1]
    # Equal texts have one number, below how many there are.
    texts = jnp.sort(all_labels.reshape(-1))
    numbers_of = partial(jnp.searchsorted, texts)
    all_queries, all_passages = numbers_of(query_ids), numbers_of(passage_ids)
    all_positives = all_passages[: len(positives)]

    def among(numbers: Array, chosen: Array) -> Array:
        """Return which texts are among the chosen."""
        return jnp.zeros(len(texts), bool).at[chosen].set(True)[numbers]

    @jax.checkpoint
    def rank(example: tuple[Array, Array]) -> tuple[Array, Array]:
        (query, passage, *_), (query_id, passage_id, *_) = example
        own_score = similarity(query[None], passage[None])[0, 0] / temperature
        query_number, passage_number = numbers_of(query_id), numbers_of(passage_id)
        own = jnp.where(query_ids == query_id, all_positives, query_number)
        is_own = among(all_passages, own)
        found = similarity(query[None], passages)[0]
        scores = jnp.where(is_own | (passage_ids < 0), -jnp.inf, found) / temperature
        loss = jax.nn.logsumexp(jnp.append(scores, own_score)) - own_score
        if symmetric:
            own = jnp.where(positives == passage_id, all_queries, passage_number)
            is_negative = ~among(all_queries, own) & (query_ids >= 0)
            found = similarity(queries, passage[None])[:, 0]
            backward = jnp.where(is_negative, found, -jnp.inf) / temperature
            loss = (loss + jax.nn.logsumexp(jnp.append(backward, own_score)) - own_score) / 2
        is_real = query_id >= 0
        return jnp.where(is_real, loss, 0.0), is_real & (own_score > scores.max())

    losses, is_first = jax.lax.map(rank, own, batch_size=block)
    return losses.sum(), is_first.sum(dtype=jnp.float32)
