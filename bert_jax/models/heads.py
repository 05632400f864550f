"""What is put on the encoder: the two pretraining heads. Shape letters: `models.bert`."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int

from bert_jax.config import ModelConfig
from bert_jax.models.bert import BertModel
from bert_jax.models.layers import ACTIVATIONS, Dense, LayerNorm, param

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
        return bias + jnp.einsum(
            "BPD,VD->BPV",
            hidden,
            word_embeddings.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )


@struct.dataclass
class PreTrainingOutput:
    """What the pretraining model gives.

    Attributes:
      mlm_logits: [B, P, V] float32, for each predicted position.
      nsp_logits: [B, 2] float32; None without the head.
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
        rows: Int[Array, "B"] | None = None,
    ) -> PreTrainingOutput:
        """Scores the pieces at `positions`, and the two segments; the rest is as in `BertModel`."""
        output = self.bert(input_ids, token_type_ids, attention_mask, rows)
        chosen = jnp.take_along_axis(output.last_hidden_state, positions[:, :, None], axis=1)
        nsp = self.nsp_head(output.pooled).astype(jnp.float32) if self.next_sentence else None
        return PreTrainingOutput(
            mlm_logits=self.mlm_head(chosen, self.bert.embeddings.word_embeddings), nsp_logits=nsp
        )

    def init_params(self, key: Array) -> Any:
        """Returns new parameters, boxed with their logical axes."""
        ids = jnp.zeros((1, 1), jnp.int32)
        return self.init(key, ids, ids, ids, ids)["params"]
