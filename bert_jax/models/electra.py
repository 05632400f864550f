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
from bert_jax.models.attention import AttentionMask
from bert_jax.models.bert import BertEmbeddings, BertLayer
from bert_jax.models.encoder import (
    Encoder,
    EncoderOutput,
    PreTrainingOutput,
    Requested,
    gather_positions,
    run_layers,
)
from bert_jax.models.layers import ACTIVATIONS, Dense, DropoutKey, LayerNorm, param
from bert_jax.models.matmul import logits_from_embeddings

# The activation of the generator's head and of the pooler in `transformers`, whatever `hidden_act`.
_HEAD_ACTIVATION = ACTIVATIONS["gelu"]
_NOTHING = Requested(hidden_states=False, attentions=False, queries_keys=False)


def embedding_size(config: ModelConfig) -> int:
    """Return the width of the embeddings, E."""
    return config.embedding_size or config.hidden_size


def generator_config(config: ModelConfig) -> ModelConfig | None:
    """Return the generator as a model of its own; None where the encoder itself generates.

    Its heads are as wide as the encoder's. Source: `get_generator_config` in
    google-research/electra `run_pretraining.py`, where every head is 64 wide.
    """
    if config.model_type != "electra" or not config.generator_hidden_size:
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
    is_electra = config.model_type == "electra"
    return [config, generator_config(config) or config] if is_electra else [config]


class ElectraLayers(nn.Module):
    """BERT's layers on embeddings, projected where these are of another width."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        if embedding_size(c) != c.hidden_size:
            shape, axes = (embedding_size(c), c.hidden_size), ("embed", "hidden")
            self.embeddings_project = Dense(c, shape, axes)
        layer = nn.remat(BertLayer, static_argnums=(4,)) if c.remat else BertLayer
        self.layers = [layer(c, name=f"layer_{i}") for i in range(c.num_hidden_layers)]
        self.any_layer = layer(c, parent=None)

    def encode(
        self,
        embedded: Float[Array, "B L E"],
        mask: AttentionMask,
        dropout_key: DropoutKey | None,
        requested: Requested = _NOTHING,
    ) -> EncoderOutput:
        """Return the output of the layers; the first of the hidden states is the projection."""
        c = self.config
        if embedding_size(c) != c.hidden_size:
            embedded = self.embeddings_project(embedded)

        def call(layer: Any, hidden: Array, index: Any) -> tuple[Array, Any]:
            return layer(hidden, mask, dropout_key and dropout_key.fold(index), requested.maps)

        scanned = [self.any_layer] if c.scan_layers and not self.is_initializing() else []
        return run_layers(call, self.layers, embedded, requested, scanned)


class ElectraModel(ElectraLayers, Encoder):
    """The encoder: embeddings, layers and, with `add_pooling_layer`, a dense layer on [CLS]."""

    def setup(self) -> None:
        super().setup()
        c = self.config
        self.embeddings = BertEmbeddings(dataclasses.replace(c, hidden_size=embedding_size(c)))
        if self.add_pooling_layer:
            self.pooler = Dense(c, (c.hidden_size, c.hidden_size), ("embed", "hidden"))

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        attention_mask: Int[Array, "B L"],
        dropout_key: DropoutKey | None = None,
        *,
        position_ids: Int[Array, "B L"] | None = None,
        segment_starts: Int[Array, "B T"] | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        output_queries_keys: bool = False,
    ) -> EncoderOutput:
        """Encode a batch; see `models.bert.BertModel`."""
        mask = AttentionMask(attention_mask, packed=position_ids is not None)
        embedded = self.embed(input_ids, token_type_ids, dropout_key, position_ids)
        requested = Requested(output_hidden_states, output_attentions, output_queries_keys)
        output = self.encode(embedded, mask, dropout_key, requested)
        if not self.add_pooling_layer:
            return output
        hidden = output.last_hidden_state
        first = hidden[:, 0] if segment_starts is None else gather_positions(hidden, segment_starts)
        return dataclasses.replace(output, pooled=_HEAD_ACTIVATION(self.pooler(first)))

    def embed(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        dropout_key: DropoutKey | None,
        position_ids: Int[Array, "B L"] | None = None,
    ) -> Float[Array, "B L E"]:
        """Return the embeddings before any projection."""
        key = dropout_key and dropout_key.fold(self.config.num_hidden_layers)
        return self.embeddings(input_ids, token_type_ids, key, position_ids)


class GeneratorHead(nn.Module):
    """Scores of every token of the vocabulary, by the product with its embedding."""

    config: ModelConfig

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

    config: ModelConfig

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

    config: ModelConfig

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
