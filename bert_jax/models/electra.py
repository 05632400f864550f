"""The ELECTRA encoder and its generator. Source: Clark et al. 2020, and google-research/electra.

The generator fills masked positions with tokens that it samples. The encoder, as discriminator,
says of each token whether it was replaced. Both are BERT's layers, each on its own projection of
the same embeddings. Shape letters are those of `models.bert`; E is the width of the embeddings.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from bert_jax.config import ModelConfig
from bert_jax.config.fields import SHARE_OR_ALL, SIZE_OR_ZERO
from bert_jax.config.settings import setting
from bert_jax.models.attention import AttentionMask
from bert_jax.models.bert import Bert, BertLayers, BertModel
from bert_jax.models.encoder import (
    EncoderOutput,
    PreTrainingOutput,
    gather_positions,
)
from bert_jax.models.layers import ACTIVATIONS, Dense, DropoutKey, LayerNorm, param
from bert_jax.models.matmul import logits_from_embeddings

# The activation of the generator's head and of the pooler in `transformers`, whatever `hidden_act`.
_HEAD_ACTIVATION = ACTIVATIONS["gelu"]


@dataclasses.dataclass(slots=True)
class ElectraConfig(ModelConfig):
    """The settings of an ELECTRA, and of the generator that it is pretrained with.

    >>> ElectraConfig(hidden_size=256, embedding_size=128).generator_hidden_size
    0.25
    """

    model_type: str = setting("electra", "architecture")
    embedding_size: int = setting(0, "width of embeddings; 0: hidden_size", SIZE_OR_ZERO)
    generator_hidden_size: float = setting(
        0.25, "size of the generator as a share; 0: the encoder itself", SHARE_OR_ALL
    )


def embedding_size(config: ElectraConfig) -> int:
    """Return the width of the embeddings, E."""
    return config.embedding_size or config.hidden_size


def generator_config(config: ModelConfig) -> ElectraConfig | None:
    """Return the generator as a model of its own; None where the encoder itself generates.

    Its heads are as wide as the encoder's. Source: `get_generator_config` in
    google-research/electra `run_pretraining.py`, where every head is 64 wide.
    """
    if not isinstance(config, ElectraConfig) or not config.generator_hidden_size:
        return None
    every = config.num_attention_heads
    heads = max(1, round(every * config.generator_hidden_size))
    return dataclasses.replace(
        config,
        hidden_size=config.hidden_size // every * heads,
        num_attention_heads=heads,
        intermediate_size=round(config.intermediate_size * heads / every),
        embedding_size=embedding_size(config),
        generator_hidden_size=0.0,
    )


def pretrained_encoders(config: ModelConfig) -> list[ModelConfig]:
    """Return the config of each encoder that a pretraining step runs."""
    is_electra = isinstance(config, ElectraConfig)
    return [config, generator_config(config) or config] if is_electra else [config]


class ElectraLayers(BertLayers):
    """BERT's layers on embeddings, projected where these are of another width."""

    config: ElectraConfig

    def setup(self) -> None:
        super().setup()
        c = self.config
        if embedding_size(c) != c.hidden_size:
            shape, axes = (embedding_size(c), c.hidden_size), ("embed", "hidden")
            self.embeddings_project = Dense(c, shape, axes)

    def encode(self, embedded: Float[Array, "B L E"], *args: Any, **kwargs: Any) -> EncoderOutput:
        """Return the output of the layers; the first of the hidden states is the projection."""
        if embedding_size(self.config) != self.config.hidden_size:
            embedded = self.embeddings_project(embedded)
        return super().encode(embedded, *args, **kwargs)


class ElectraModel(ElectraLayers, BertModel):
    """The encoder: embeddings, layers and, with `add_pooling_layer`, a dense layer on [CLS]."""

    pooler_activation = staticmethod(_HEAD_ACTIVATION)


class Electra(Bert):
    """ELECTRA's encoder, which is BERT's on embeddings of another width."""

    encoder = ElectraModel
    settings = ElectraConfig
    has_nsp = False

    def embedding_size(self, config: ElectraConfig) -> int:
        """Return the width of the embeddings."""
        return embedding_size(config)

    def encoder_flops(self, config: ElectraConfig, length: int) -> float:
        """Return the operations of a sequence: BERT's, and the projection of its embeddings."""
        width, size = embedding_size(config), config.hidden_size
        projection = 6 * width * size * (width != size)
        return super().encoder_flops(config, length) + float(length * projection)


ARCHITECTURE = Electra()


class GeneratorHead(nn.Module):
    """Scores of every token of the vocabulary, by the product with its embedding."""

    config: ElectraConfig

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "B P D"], word_embeddings: Float[Array, "V E"]
    ) -> Float[Array, "B P V"]:
        """Return float32 logits."""
        c = self.config
        shape, axes = (c.hidden_size, embedding_size(c)), ("embed", "hidden")
        hidden = _HEAD_ACTIVATION(Dense(c, shape, axes, name="dense")(hidden))
        hidden = LayerNorm(c, name="layer_norm")(hidden)
        bias = param(self, "bias", nn.initializers.zeros, (c.vocab_size,), ("vocab",))
        return jnp.add(logits_from_embeddings(hidden, word_embeddings), bias)


class DiscriminatorHead(nn.Module):
    """The logit of each token that it was replaced."""

    config: ElectraConfig

    @nn.compact
    def __call__(self, hidden: Float[Array, "B L D"]) -> Float[Array, "B L"]:
        """Return float32 logits."""
        c = self.config
        shape, axes = (c.hidden_size, c.hidden_size), ("embed", "hidden")
        hidden = ACTIVATIONS[c.hidden_act](Dense(c, shape, axes, name="dense")(hidden))
        logits = Dense(c, (c.hidden_size, 1), ("embed", "label"), name="output")(hidden)
        return logits[..., 0].astype(jnp.float32)


class ElectraForPreTraining(nn.Module):
    """The generator with its head, and the encoder with the discriminator's.

    With a `generator_hidden_size` of 0 the generator is the encoder itself.
    """

    config: ElectraConfig

    def setup(self) -> None:
        c = self.config
        self.bert = ElectraModel(c, add_pooling_layer=False)
        own = generator_config(c)
        self.generator = ElectraLayers(own) if own else None
        self.generator_head = GeneratorHead(own or c)
        self.discriminator_head = DiscriminatorHead(c)

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        attention_mask: Int[Array, "B L"],
        positions: Int[Array, "B P"],
        dropout_key: DropoutKey | None = None,
    ) -> PreTrainingOutput:
        """Return the generator's logits of `positions`; see `BertModel`."""
        # Other keys than those of `discriminate`.
        key = dropout_key and dropout_key.fold(self.config.num_hidden_layers + 1)
        embedded = self.bert.embed(input_ids, token_type_ids, key)
        output = (self.generator or self.bert).encode(embedded, AttentionMask(attention_mask), key)
        hidden = gather_positions(output.last_hidden_state, positions)
        return PreTrainingOutput(mlm_logits=self.mlm_logits(hidden))

    def mlm_logits(self, hidden: Float[Array, "B P D"]) -> Float[Array, "B P V"]:
        """Return the score of every token for the generator's hidden states, in float32."""
        return self.generator_head(hidden, self.bert.embeddings.word_embeddings)

    def discriminate(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        attention_mask: Int[Array, "B L"],
        positions: Int[Array, "B P"],
        dropout_key: DropoutKey | None = None,
    ) -> PreTrainingOutput:
        """Return the logit of each token that it was replaced, and `hidden` of `positions`."""
        hidden = self.bert(input_ids, token_type_ids, attention_mask, dropout_key).last_hidden_state
        logits = self.discriminator_head(hidden)
        return PreTrainingOutput(rtd_logits=logits, hidden=gather_positions(hidden, positions))

    def init_params(self, key: Array) -> Any:
        """Return random parameters, boxed with their logical axes."""
        ids = jnp.zeros((1, 1), jnp.int32)

        def run(model: "ElectraForPreTraining") -> None:
            model(ids, ids, ids, ids)
            model.discriminate(ids, ids, ids, ids)

        return self.init(key, method=run)["params"]
