"""The objective of embeddings: losses over all texts of the global batch, by their cosines."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from bert_jax.config import EmbeddingConfig
from bert_jax.models.heads import normalized
from bert_jax.objectives.contrastive import ContrastiveObjective, Shard, dot, is_example, ranking
from bert_jax.training.objective import Metrics, WeightedSum

_BLOCK = 256  # queries whose scores of every passage are in memory at once


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddingObjective(ContrastiveObjective):
    """How near the texts of an example are, beside all others of the batch or by their score."""

    embedding: EmbeddingConfig

    def by_example(self, labels: Shaped[Array, "B E *any"]) -> Shaped[Array, "N *any"]:
        """Return the labels of the examples of all sequences, each of which is packed of E."""
        return labels.reshape(-1, *labels.shape[2:])

    def shard_metrics(self, own: Shard, every: Shard) -> Metrics:
        """Return the metrics; the loss is the sum of those of `dimensions` and of all numbers."""
        config = self.embedding
        (vectors, labels), (all_vectors, all_labels) = own, every
        examples = is_example(labels)
        weight = examples.sum(dtype=jnp.float32)
        size = vectors.shape[-1]  # of the last, whose accuracy is that of the whole vectors
        sizes = [*(each for each in dict.fromkeys(config.dimensions) if each != size), size]
        total, metrics = jnp.float32(0), {}
        for size in sizes:
            mine, others = normalized(vectors[..., :size]), normalized(all_vectors[..., :size])
            if config.loss == "ranking":
                losses, is_first = ranking(
                    (mine, labels),
                    (others, all_labels),
                    dot,
                    config.temperature,
                    block=_BLOCK,
                    symmetric=config.symmetric,
                )
                metrics["accuracy"] = WeightedSum(is_first, weight)
                total += losses
            elif config.loss == "cosine":
                errors = jnp.where(examples, _cosines(mine) - labels, 0.0)
                total += jnp.square(errors).sum()
            else:
                # Of one loss for the whole batch, each device has the share of its examples.
                total += weight * _cosent(_cosines(others), all_labels, config.temperature)
        return {"loss": WeightedSum(total, weight), **metrics}


def _cosines(vectors: Float[Array, "N C I"]) -> Float[Array, "N"]:
    return (vectors[:, 0] * vectors[:, 1]).sum(-1)


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
