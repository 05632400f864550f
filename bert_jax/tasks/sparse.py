"""Sparse vectors for search: a weight for each token of the vocabulary, most of them 0 (SPLADE)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy import sparse

from bert_jax.batches.buckets import Features
from bert_jax.config import ModelConfig, TaskConfig
from bert_jax.config.ranges import NOT_NEGATIVE, SHARE
from bert_jax.config.settings import setting
from bert_jax.models.architecture import make_encoder
from bert_jax.models.heads import TaskModel
from bert_jax.models.layers import DropoutKey
from bert_jax.objectives.contrastive import ContrastiveObjective, Shard, dot, is_example, ranking
from bert_jax.objectives.masked_lm import MaskedLMHead
from bert_jax.retrieval import search
from bert_jax.tasks.examples import Example
from bert_jax.tasks.retrieval import EncodingTask, number_texts
from bert_jax.tasks.sequences import build_sequence, longest_sequence
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.objective import Metrics, WeightedSum

_BLOCK = 64  # queries whose scores of every passage are in memory at once
_HEAD = "mlm_head"
_SIZES = ("query_terms", "passage_terms")  # scores: how many weights of a text are not 0


@dataclasses.dataclass(slots=True)
class SparseConfig(TaskConfig):
    """Settings of sparse vectors.

    Source: Formal et al. 2021 (SPLADE v2), without distillation.

    >>> SparseConfig().penalty_warmup_fraction
    0.33
    """

    kind: str = setting("sparse", "kind of task")
    temperature: float = setting(1.0, "divisor of the inner products")
    query_penalty: float = setting(
        5e-5, "penalty on the weights of queries that are not 0; larger: sparser", NOT_NEGATIVE
    )
    passage_penalty: float = setting(
        3e-5, "penalty on the weights of passages that are not 0", NOT_NEGATIVE
    )
    penalty_warmup_fraction: float = setting(
        0.33, "share of the steps over which the penalties grow from 0, quadratically", SHARE
    )


class BertForSparse(TaskModel):
    """Of each text log(1 + the largest score that the MLM head gives a token), [B, C, V].

    A token whose scores are all negative has the weight 0. Source: Formal et al. 2021, equation 2
    with the pooling of section 3.1.
    """

    kept_heads = (_HEAD,)

    def setup(self) -> None:
        c = self.config
        self.bert = make_encoder(c, add_pooling_layer=False)
        self.mlm_head = MaskedLMHead(c, "" if self.bert.has_own_transform else "transform")

    def __call__(
        self,
        input_ids: Int[Array, "B *C L"],
        token_type_ids: Int[Array, "B *C L"],
        attention_mask: Int[Array, "B *C L"],
        dropout_key: DropoutKey | None = None,
    ) -> Float[Array, "B C V"]:
        """Return float32 weights of the texts [B, C, L]; of [B, L] those of one each."""
        hidden = self.last_hidden_states(input_ids, token_type_ids, attention_mask, dropout_key)
        mask = attention_mask.reshape(hidden.shape[:2])
        features = self.bert.token_features(hidden)
        logits = self.mlm_head(features, self.bert.embeddings.word_embeddings)
        largest = jnp.where(mask[..., None] > 0, logits, 0.0).max(1)
        return jnp.log1p(jax.nn.relu(largest)).reshape(len(input_ids), -1, largest.shape[-1])


@dataclasses.dataclass(frozen=True, eq=False)
class SparseObjective(ContrastiveObjective):
    """The cross-entropy of each query's passage, and a penalty on what is not 0.

    Source: of the penalty, Paria et al. 2020 (FLOPS); of its growth, Formal et al. 2021.
    """

    sparse: SparseConfig
    penalty: Any = 1.0  # the share of the penalties that counts

    def at_progress(self, done: Array) -> "SparseObjective":
        warmup = self.sparse.penalty_warmup_fraction
        share = jnp.minimum(done / warmup, 1.0) ** 2 if warmup else 1.0
        return dataclasses.replace(self, penalty=share)

    def shard_metrics(self, own: Shard, every: Shard) -> Metrics:
        all_vectors, all_labels = every
        config, examples = self.sparse, is_example(own[1])
        weight = examples.sum(dtype=jnp.float32)
        losses, is_first = ranking(own, every, dot, config.temperature, block=_BLOCK)
        penalty = config.query_penalty * _flops(all_vectors[:, :1], all_labels)
        penalty += config.passage_penalty * _flops(all_vectors[:, 1:], all_labels)
        # Of one penalty for the whole batch, each device has the share of its examples.
        return {
            "loss": WeightedSum(losses + weight * self.penalty * penalty, weight),
            "accuracy": WeightedSum(is_first, weight),
        }


def _flops(vectors: Float[Array, "G C V"], labels: Int[Array, "G C"]) -> Float[Array, ""]:
    """Return the sum over the vocabulary of the squared mean weight of texts."""
    examples = is_example(labels)
    count = jnp.maximum(examples.sum() * vectors.shape[1], 1)
    total = jnp.where(examples[:, None, None], vectors, 0.0).sum((0, 1))
    return jnp.square(total / count).sum()


class Sparse(EncodingTask):
    """Vectors of the vocabulary whose inner products rank passages. A prediction is [C, V]."""

    settings = SparseConfig
    config: SparseConfig
    model_class = BertForSparse
    pipeline_tag = "feature-extraction"
    vectors_kind = "sparse"

    def objective(self, model: TaskModel) -> ContrastiveObjective:
        return SparseObjective(model, self.config)

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        texts, ids = number_texts(examples)
        features = self.text_features(texts, tokenizer, model, max_length)
        sequences, starts = features.sequences, features.second_starts
        result = Features(choices=ids.shape[1], is_contrastive=True, truncated=features.truncated)
        for index, own in enumerate(ids):
            result.add(index, own, [(sequences[number], starts[number]) for number in own])
        return result

    def text_features(
        self,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        model: ModelConfig,
        max_length: int,
        *,
        is_query: bool = False,
    ) -> Features:
        features, room = Features(), longest_sequence(model, max_length) - 2
        for index, ids in enumerate(tokenizer.encode(texts)):
            features.truncated += len(ids) > room
            sequence = build_sequence([ids[:room]], tokenizer, model)
            features.add(index, index, [sequence], note=len(ids) > room)
        return features

    def collect(
        self, before: Any, features: Features, index: int, logits: np.ndarray
    ) -> sparse.csr_array:
        return sparse.csr_array(logits)

    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """Return how well passages are found, and how many weights are not 0."""
        counts = np.array([np.diff(prediction.indptr) for prediction in predictions])
        sizes = float(counts[:, 0].mean()), float(counts[:, 1:].mean())
        return super().score(examples, predictions) | dict(zip(_SIZES, sizes, strict=True))

    def best_passages(self, queries: list[Any], passages: list[Any], k: int) -> np.ndarray:
        corpus, asked = sparse.vstack(passages), sparse.vstack(queries)
        return search.sparse_top_k(corpus, asked, k).indices

    def vectors_by_text(self, prediction: sparse.csr_array) -> list[sparse.csr_array]:
        return [prediction[[index]] for index in range(len(prediction.indptr) - 1)]

    def similarity(self, prediction: sparse.csr_array) -> float:
        first, second = prediction[[0]], prediction[[1]]
        return float((first @ second.T).toarray()[0, 0])

    def description(self, model: ModelConfig) -> str:
        return (
            f"A vector has {model.vocab_size:,} numbers, one for each token of the vocabulary: "
            "log(1 + the largest score that the masked LM head gives the token). "
            "`SparseEncoder` of sentence-transformers loads the model."
        )
