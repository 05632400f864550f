"""Models with a head on the encoder, for each kind of fine-tuning task.

Shape letters and arguments are those of `models.bert`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from bert_jax.config import EmbeddingConfig, ModelConfig
from bert_jax.models.architecture import make_encoder
from bert_jax.models.encoder import gather_positions
from bert_jax.models.layers import Dense, DropoutKey, apply_dropout, param


class TaskModel(nn.Module):
    """The encoder with a dense layer on its output, "classifier".

    Source: google-research/bert `run_classifier.py` (`create_model`); of the probe, Peters et al.
    2018.

    Attributes:
      config: of the encoder.
      num_labels: outputs of the classifier.
      probe: "" to train the encoder too. Otherwise the encoder is frozen and without dropout, and
        the classifier sees the output of a layer, given by number, or a learned "mix" of all.
    """

    config: ModelConfig
    num_labels: int
    probe: str = ""

    uses_pooler = False
    has_dropout = True
    input_rank = 2
    keeps_pooler = False  # of a checkpoint, for another task, though this one does not use it

    def setup(self) -> None:
        c = self.config
        self.bert = make_encoder(c, add_pooling_layer=self.uses_pooler and not self.probe)
        shape, axes = (c.hidden_size, self.num_labels), ("embed", "label")
        self.classifier = Dense(c, shape, axes, stddev=self.bert.classifier_stddev())
        if self.probe == "mix":
            layers = (c.num_hidden_layers + 1,)
            self.mix = param(self, "mix", nn.initializers.zeros, layers, ("hidden",))

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        attention_mask: Int[Array, "B L"],
        dropout_key: DropoutKey | None = None,
    ) -> Float[Array, "B *L N"]:
        """Return the float32 logits of each sequence or token."""
        if self.probe:
            output = self.bert(input_ids, token_type_ids, attention_mask, output_hidden_states=True)
            hidden = self._probed(output.hidden_states)
            if self.uses_pooler:
                mask = attention_mask[:, :, None]
                hidden = (hidden * mask).sum(1) / jnp.maximum(mask.sum(1), 1)
        else:
            output = self.bert(input_ids, token_type_ids, attention_mask, dropout_key)
            hidden = output.pooled
            if not self.uses_pooler:
                hidden = self.bert.token_features(output.last_hidden_state)
        if self.has_dropout:
            key = dropout_key and dropout_key.fold(self.config.num_hidden_layers + 1)
            hidden = apply_dropout(hidden, key, self.config.hidden_dropout_prob)
        return self.classifier(hidden).astype(jnp.float32)

    def _probed(self, states: Sequence[Float[Array, "B L D"]]) -> Float[Array, "B L D"]:
        states = [jax.lax.stop_gradient(state) for state in states]
        if self.probe != "mix":
            return states[int(self.probe)]
        weights = jax.nn.softmax(self.mix)
        mixed: Any = sum(weight * state for weight, state in zip(weights, states, strict=True))
        return mixed

    def init_params(self, key: Array) -> Any:
        """Return random parameters, boxed with their logical axes."""
        ids = jnp.zeros((1,) * self.input_rank, jnp.int32)
        return self.init(key, ids, ids, ids)["params"]


class BertForSequenceClassification(TaskModel):
    """Scores of a text or a pair by the pooled output, [B, N]; with one label, a regression."""

    uses_pooler = True


class BertForTokenClassification(TaskModel):
    """Scores of every token, [B, L, N]."""


class BertForQuestionAnswering(TaskModel):
    """Scores of every token as the first and as the last token of the answer."""

    has_dropout = False  # as in google-research/bert `run_squad.py`

    def __call__(self, input_ids, token_type_ids, attention_mask, dropout_key=None) -> Array:
        """Return float32 logits [B, 2, L], very low for padding, so that it has no effect."""
        logits = super().__call__(input_ids, token_type_ids, attention_mask, dropout_key)
        return jnp.where(attention_mask[:, None, :] > 0, logits.swapaxes(1, 2), -1e9)


class BertForMultipleChoice(TaskModel):
    """A score of each of several sequences, by its pooled output."""

    uses_pooler = True
    input_rank = 3

    def __call__(self, input_ids, token_type_ids, attention_mask, dropout_key=None) -> Array:
        """Return float32 logits [B, C] of sequences [B, C, L]."""
        batch, choices, length = input_ids.shape
        if dropout_key:
            indices = dropout_key.indices[:, None] * choices + jnp.arange(choices)
            dropout_key = DropoutKey(dropout_key.key, indices.reshape(-1))
        inputs = (x.reshape(-1, length) for x in (input_ids, token_type_ids, attention_mask))
        return super().__call__(*inputs, dropout_key=dropout_key).reshape(batch, choices)


class BertForEmbedding(TaskModel):
    """Vectors of texts, [B, C, I]: the last layer pooled, perhaps a dense layer, and normalized.

    Source: Reimers and Gurevych 2019, section 3, and the modules of sentence-transformers.
    """

    embedding: EmbeddingConfig = dataclasses.field(default_factory=EmbeddingConfig)

    keeps_pooler = True

    def setup(self) -> None:
        c, size = self.config, self.embedding.dense
        self.bert = make_encoder(c, add_pooling_layer=False)
        if size:
            self.dense = Dense(c, (c.hidden_size, size), ("embed", "label"))

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        attention_mask: Int[Array, "B L"],
        dropout_key: DropoutKey | None = None,
        *,
        position_ids: Int[Array, "B L"] | None = None,
        segment_starts: Int[Array, "B C"] | None = None,
    ) -> Float[Array, "B C I"]:
        """Return float32 vectors of the C texts that a sequence is packed of, or of its one."""
        inputs = input_ids, token_type_ids, attention_mask, dropout_key
        hidden = self.bert(*inputs, position_ids=position_ids).last_hidden_state
        hidden = hidden.astype(jnp.float32)
        if segment_starts is None:
            segment_starts = jnp.zeros((len(input_ids), 1), jnp.int32)
        numbers = jnp.arange(1, 1 + segment_starts.shape[1])
        is_of_text = attention_mask[:, None, :] == numbers[:, None]
        if self.embedding.pooling == "cls":
            vectors = gather_positions(hidden, segment_starts)
        elif self.embedding.pooling == "max":
            vectors = jnp.where(is_of_text[..., None], hidden[:, None], -jnp.inf).max(2)
            vectors = jnp.where(is_of_text.any(-1, keepdims=True), vectors, 0.0)
        else:
            # At least one: a sequence that fills up a batch has no tokens.
            count = jnp.maximum(is_of_text.sum(-1, keepdims=True), 1)
            vectors = jnp.einsum("BCL,BLD->BCD", is_of_text.astype(jnp.float32), hidden) / count
        if self.embedding.dense:
            vectors = self.dense(vectors).astype(jnp.float32)
            if self.embedding.dense_activation == "tanh":
                vectors = jnp.tanh(vectors)
        return normalized(vectors) if self.embedding.normalize else vectors


def normalized(vectors: Float[Array, "*any I"]) -> Float[Array, "*any I"]:
    """Return vectors scaled to unit length; the floor is torch's `normalize`."""
    # By the squares, as the gradient of a norm is not finite at 0.
    squares = jnp.square(vectors).sum(-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))
