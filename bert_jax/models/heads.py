"""The base of models with a head on the encoder for a fine-tuning task.

Shape letters and arguments are those of `models.bert`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from bert_jax.config import ModelConfig
from bert_jax.models.architecture import make_encoder
from bert_jax.models.layers import Dense, DropoutKey, apply_dropout, fold_key, param


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
    keeps_pooler = False  # of a checkpoint, for another task, though this one does not use it
    kept_heads: ClassVar[Sequence[str]] = ()  # heads of pretraining that the task keeps

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
            key = fold_key(dropout_key, self.config.num_hidden_layers + 1)
            hidden = apply_dropout(hidden, key, self.config.hidden_dropout_prob)
        return self.classifier(hidden).astype(jnp.float32)

    def _probed(self, states: Sequence[Float[Array, "B L D"]]) -> Float[Array, "B L D"]:
        states = [jax.lax.stop_gradient(state) for state in states]
        if self.probe != "mix":
            return states[int(self.probe)]
        weights = jax.nn.softmax(self.mix)
        mixed: Any = sum(weight * state for weight, state in zip(weights, states, strict=True))
        return mixed

    def last_hidden_states(
        self,
        input_ids: Int[Array, "B *C L"],
        token_type_ids: Int[Array, "B *C L"],
        attention_mask: Int[Array, "B *C L"],
        dropout_key: DropoutKey | None,
    ) -> Float[Array, "N L D"]:
        """Return the encoder's output for all sequences of a batch, [B, C, L] or [B, L]."""
        length = input_ids.shape[-1]
        output = self.bert(
            input_ids.reshape(-1, length),
            token_type_ids.reshape(-1, length),
            attention_mask.reshape(-1, length),
            self.of_choices(dropout_key, input_ids.shape),
        )
        return output.last_hidden_state

    @staticmethod
    def of_choices(key: DropoutKey | None, shape: Sequence[int]) -> DropoutKey | None:
        """Return the key of each sequence of a batch of `shape`, [B, C, L] or [B, L]."""
        if key is None or len(shape) < 3:
            return key
        indices = key.indices[:, None] * shape[1] + jnp.arange(shape[1])
        return DropoutKey(key.key, indices.reshape(-1))

    def init_params(self, key: Array) -> Any:
        """Return random parameters, boxed with their logical axes."""
        ids = jnp.zeros((1, 1), jnp.int32)
        return self.init(key, ids, ids, ids)["params"]


class SequenceScores(TaskModel):
    """Scores of sequences by their pooled outputs: of a text or a pair, or of several choices."""

    uses_pooler = True

    def __call__(
        self,
        input_ids: Int[Array, "B *C L"],
        token_type_ids: Int[Array, "B *C L"],
        attention_mask: Int[Array, "B *C L"],
        dropout_key: DropoutKey | None = None,
    ) -> Float[Array, "B scores"]:
        """Return float32 logits: of [B, C, L] one of each choice, of [B, L] the N of a sequence."""
        batch, *_, length = input_ids.shape
        logits = super().__call__(
            input_ids=input_ids.reshape(-1, length),
            token_type_ids=token_type_ids.reshape(-1, length),
            attention_mask=attention_mask.reshape(-1, length),
            dropout_key=self.of_choices(dropout_key, input_ids.shape),
        )
        return logits.reshape(batch, -1)


def normalized(vectors: Float[Array, "*any I"]) -> Float[Array, "*any I"]:
    """Return vectors scaled to unit length; the floor is torch's `normalize`."""
    # By the squares, as the gradient of a norm is not finite at 0.
    squares = jnp.square(vectors).sum(-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))
