"""What is put on the encoder: the pretraining heads, and one for each kind of task.

Shape letters are those of `models.bert`; besides, N labels and C choices.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.models.bert import BertModel, gather_positions
from bert_jax.models.layers import (
    ACTIVATIONS,
    Dense,
    Dropout,
    DropoutKey,
    LayerNorm,
    param,
)
from bert_jax.models.matmul import product_with_rows

NUM_NSP_LABELS = 2  # 0 where B follows A, 1 where it is random (or the two are swapped)


class MaskedLMHead(nn.Module):
    """Scores every piece for given positions, by their product with its embedding.

    Source: `get_masked_lm_output` in google-research/bert `run_pretraining.py`.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "B P D"], word_embeddings: Float[Array, "V D"]
    ) -> Float[Array, "B P V"]:
        """Returns float32 logits."""
        c = self.config
        hidden = Dense(c, (c.hidden_size, c.hidden_size), ("embed", "hidden"), name="transform")(
            hidden
        )
        hidden = LayerNorm(c, name="layer_norm")(ACTIVATIONS[c.hidden_act](hidden))
        bias = param(self, "bias", nn.initializers.zeros, (c.vocab_size,), ("vocab",))
        return jnp.add(product_with_rows(hidden, word_embeddings, jnp.float32), bias)


@struct.dataclass
class PreTrainingOutput:
    """What the pretraining model gives.

    Attributes:
      mlm_logits: [B, P, V] float32, for each predicted position.
      nsp_logits: [B, 2] float32, or [B, T, 2] of packed rows; None without the head.
    """

    mlm_logits: Any
    nsp_logits: Any


class BertForPreTraining(nn.Module):
    """The encoder with the masked LM head and, where `next_sentence`, pooler and second head."""

    config: ModelConfig
    next_sentence: bool = True

    def setup(self) -> None:
        c = self.config
        self.bert = BertModel(c, add_pooling_layer=self.next_sentence)
        self.mlm_head = MaskedLMHead(c)
        if self.next_sentence:
            self.nsp_head = Dense(c, (c.hidden_size, NUM_NSP_LABELS), ("embed", "label"))

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        attention_mask: Int[Array, "B L"],
        positions: Int[Array, "B P"],
        dropout_key: DropoutKey | None = None,
        *,
        position_ids: Int[Array, "B L"] | None = None,
        segment_starts: Int[Array, "B T"] | None = None,
    ) -> PreTrainingOutput:
        """Scores the pieces at `positions`, and the two segments; the rest is as in `BertModel`."""
        output = self.bert(
            input_ids,
            token_type_ids,
            attention_mask,
            dropout_key,
            position_ids=position_ids,
            segment_starts=segment_starts,
        )
        chosen = gather_positions(output.last_hidden_state, positions)
        nsp = self.nsp_head(output.pooled).astype(jnp.float32) if self.next_sentence else None
        return PreTrainingOutput(
            mlm_logits=self.mlm_head(chosen, self.bert.embeddings.word_embeddings), nsp_logits=nsp
        )

    def init_params(self, key: Array) -> Any:
        """Returns new parameters, boxed with their logical axes."""
        ids = jnp.zeros((1, 1), jnp.int32)
        return self.init(key, ids, ids, ids, ids)["params"]


class TaskModel(nn.Module):
    """The encoder with a dense layer on its output, "classifier".

    Source: google-research/bert `run_classifier.py` (`create_model`); of the probe, Peters et al.
    2018.

    Attributes:
      config: of the encoder.
      num_labels: outputs of the classifier.
      probe: "" to train the encoder too; else it is left as it is, without dropout, and what the
        classifier sees is the output of one layer, by its number, or a learned "mix" of all.
    """

    config: ModelConfig
    num_labels: int
    probe: str = ""

    uses_pooler = False
    has_dropout = True

    def setup(self) -> None:
        c = self.config
        pools = self.uses_pooler and not self.probe
        self.bert = BertModel(c, add_pooling_layer=pools)
        self.classifier = Dense(c, (c.hidden_size, self.num_labels), ("embed", "label"))
        self.dropout = Dropout(c.hidden_dropout_prob if self.has_dropout else 0.0)
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
        """Returns float32 logits, for each row or token; the arguments are those of `BertModel`."""
        if self.probe:
            output = self.bert(input_ids, token_type_ids, attention_mask, output_hidden_states=True)
            hidden = self._mixed(output.hidden_states)
            if self.uses_pooler:
                seen = attention_mask[:, :, None]
                hidden = (hidden * seen).sum(1) / jnp.maximum(seen.sum(1), 1)
        else:
            output = self.bert(input_ids, token_type_ids, attention_mask, dropout_key)
            hidden = output.pooled if self.uses_pooler else output.last_hidden_state
        key = dropout_key and dropout_key.fold(self.config.num_hidden_layers + 1)
        return self.classifier(self.dropout(hidden, key)).astype(jnp.float32)

    def _mixed(self, states: Sequence[Float[Array, "B L D"]]) -> Float[Array, "B L D"]:
        states = [jax.lax.stop_gradient(state) for state in states]
        if self.probe != "mix":
            return states[int(self.probe)]
        shares = jax.nn.softmax(self.mix)
        mixed: Any = sum(share * state for share, state in zip(shares, states, strict=True))
        return mixed

    def init_params(self, key: Array) -> Any:
        """Returns new parameters, boxed with their logical axes."""
        ids = jnp.zeros((1, 1), jnp.int32)
        return self.init(key, ids, ids, ids)["params"]


class BertForSequenceClassification(TaskModel):
    """Scores a text or a pair by the pooled output, [B, N]; with one label, a regression."""

    uses_pooler = True


class BertForTokenClassification(TaskModel):
    """Scores every token by itself, [B, L, N]."""


class BertForQuestionAnswering(TaskModel):
    """Scores every token as the first and as the last one of the answer."""

    has_dropout = False  # as in google-research/bert `run_squad.py`

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        attention_mask: Int[Array, "B L"],
        dropout_key: DropoutKey | None = None,
    ) -> Float[Array, "B 2 L"]:
        """Returns logits; padding has none to speak of, so that a row's length does not matter."""
        logits = (
            super().__call__(input_ids, token_type_ids, attention_mask, dropout_key).swapaxes(1, 2)
        )
        return jnp.where(attention_mask[:, None, :] > 0, logits, -1e9)


class BertForMultipleChoice(TaskModel):
    """Scores each of several sequences by its pooled output, with one number."""

    uses_pooler = True

    def __call__(
        self,
        input_ids: Int[Array, "B C L"],
        token_type_ids: Int[Array, "B C L"],
        attention_mask: Int[Array, "B C L"],
        dropout_key: DropoutKey | None = None,
    ) -> Float[Array, "B C"]:
        """Returns logits; the arguments are those of `BertModel`, for each choice."""
        batch, choices, length = input_ids.shape
        ids, types, mask = (
            x.reshape(-1, length) for x in (input_ids, token_type_ids, attention_mask)
        )
        if dropout_key:
            rows = (dropout_key.indices[:, None] * choices + jnp.arange(choices)).reshape(-1)
            dropout_key = DropoutKey(dropout_key.key, rows)
        return super().__call__(ids, types, mask, dropout_key).reshape(batch, choices)

    def init_params(self, key: Array) -> Any:
        ids = jnp.zeros((1, 1, 1), jnp.int32)
        return self.init(key, ids, ids, ids)["params"]


# By `TaskConfig.kind`.
TASK_MODELS: dict[str, type[TaskModel]] = {
    "classification": BertForSequenceClassification,
    "regression": BertForSequenceClassification,
    "token_classification": BertForTokenClassification,
    "question_answering": BertForQuestionAnswering,
    "multiple_choice": BertForMultipleChoice,
}
# Outputs of the kinds that have the same number of them whatever the labels; else one for each.
NUM_OUTPUTS = {"regression": 1, "question_answering": 2, "multiple_choice": 1}


def task_model(config: ModelConfig, kind: str, labels: Sequence[str], probe: str = "") -> TaskModel:
    """Returns the encoder with the head of a task.

    Args:
      config: of the encoder.
      kind: that of `TaskConfig`.
      labels: the names of the outputs, for a kind that is not in `NUM_OUTPUTS`.
      probe: that of `TaskModel`.

    Raises:
      UserError: there is no such kind or layer, or no label, or one of them twice.
    """
    if kind not in TASK_MODELS:
        raise UserError(f"task.kind is {kind!r}; choose one of {', '.join(TASK_MODELS)}")
    if kind not in NUM_OUTPUTS and not 0 < len(set(labels)) == len(labels):
        raise UserError(f"task.labels are {list(labels)}; name every label once")
    layers = [str(layer) for layer in range(config.num_hidden_layers + 1)]
    if probe not in ("", "mix", *layers):
        raise UserError(f"probe is {probe!r}; it is 'mix', or a layer from 0 to {layers[-1]}")
    return TASK_MODELS[kind](config, NUM_OUTPUTS.get(kind, len(labels)), probe)
