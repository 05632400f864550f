"""The ModernBERT encoder. Source: Warner et al. 2024, and `modernbert` in `transformers`.

Every third layer attends to the whole sequence, the others to a window. Positions are rotary, each
layer normalizes its input rather than its output, the feed-forward is gated, and nothing has a
bias. Shape letters are those of `models.bert`.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from bert_jax.config import ModelConfig
from bert_jax.config.fields import SHARE, SIZE
from bert_jax.config.settings import setting
from bert_jax.errors import UserError
from bert_jax.models.architecture import Architecture
from bert_jax.models.attention import AttentionMaps, AttentionMask, SelfAttention
from bert_jax.models.encoder import Encoder, EncoderOutput, Requested, gather_positions, run_layers
from bert_jax.models.layers import (
    ACTIVATIONS,
    Dense,
    DropoutKey,
    LayerNorm,
    apply_dropout,
    dense_layers,
    param,
    round_to_dtype,
    truncated_normal,
)
from bert_jax.models.positions import rotation


@dataclasses.dataclass(slots=True)
class ModernBertConfig(ModelConfig):
    """The settings of a ModernBERT, by default those of the published models but for its size.

    >>> ModernBertConfig(num_hidden_layers=4).position_embedding_type
    'rotary'
    """

    model_type: str = setting("modernbert", "architecture")
    hidden_act: Literal["gelu", "gelu_new", "relu"] = setting("gelu", "activation function")
    hidden_dropout_prob: float = setting(0.0, "dropout of hidden states", SHARE)
    attention_probs_dropout_prob: float = setting(0.0, "dropout of attention weights", SHARE)
    position_embedding_type: str = setting("rotary", "kind of positions")
    type_vocab_size: int = setting(1, "token types, which have no effect", SIZE)
    layer_norm_eps: float = setting(1e-5, "epsilon of layer normalization")
    global_attn_every_n_layers: int = setting(3, "layers from a global to the next")
    local_attention: int = setting(128, "tokens of the window of the other layers; even")
    global_rope_theta: float = setting(160_000.0, "rotary base of global layers")
    local_rope_theta: float = setting(10_000.0, "rotary base of local layers")
    classifier_pooling: Literal["cls", "mean"] = setting("cls", "features of a text")


class ModernBertEmbeddings(nn.Module):
    """Word embeddings, normalized."""

    config: ModernBertConfig

    def setup(self) -> None:
        c = self.config
        init, shape = truncated_normal(c.initializer_range), (c.vocab_size, c.hidden_size)
        axes = ("vocab", "embed")
        self.word_embeddings = param(self, "word_embeddings", init, shape, axes, c.dtype)
        self.layer_norm = LayerNorm(c, use_bias=False)

    def __call__(
        self, input_ids: Int[Array, "B L"], key: DropoutKey | None
    ) -> Float[Array, "B L D"]:
        c = self.config
        hidden = round_to_dtype(jnp.take(self.word_embeddings, input_ids, axis=0), c.dtype)
        return apply_dropout(self.layer_norm(hidden), key, c.hidden_dropout_prob)


class ModernBertLayer(nn.Module):
    """Attention and a gated feed-forward, each on normalized input, with a residual connection."""

    config: ModernBertConfig
    is_first: bool  # its input is normalized already, as embeddings
    is_local: bool

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "B L D"],
        kinds: Sequence[tuple[AttentionMask, tuple[Array, Array]]],
        key: DropoutKey | None,
        output_maps: bool,
    ) -> tuple[Float[Array, "B L D"], AttentionMaps | None]:
        """Return the layer's output, and its attention maps if `output_maps`.

        `kinds` are mask and rotation of a global layer, and of a local one.
        """
        c = self.config
        size, wide, narrow = c.hidden_size, c.intermediate_size, residual_stddev(c)
        keys = [key and key.fold(number) for number in range(3)]
        x = hidden
        if not self.is_first:
            x = LayerNorm(c, use_bias=False, name="attention_layer_norm")(x)
        attend = SelfAttention(c, use_bias=False, output_stddev=narrow, name="attention")
        mask, rotation = kinds[self.is_local]
        update, maps = attend(x, mask, keys[0], output_maps, rotation)
        hidden += apply_dropout(update, keys[1], c.attention_probs_dropout_prob)
        x = LayerNorm(c, use_bias=False, name="feed_forward_layer_norm")(hidden)
        inner, outer = ("embed", "feed_forward"), ("feed_forward", "embed")
        gated = [Dense(c, (size, wide), inner, False, name=name) for name in ("up", "gate")]
        up, gate = dense_layers(x, gated)
        update = apply_dropout(ACTIVATIONS[c.hidden_act](up) * gate, keys[2], c.hidden_dropout_prob)
        return hidden + Dense(c, (wide, size), outer, False, narrow, name="down")(update), maps


class PredictionHead(nn.Module):
    """The dense layer between the encoder and any head: of masked tokens, texts or tokens."""

    config: ModernBertConfig

    @nn.compact
    def __call__(self, hidden: Float[Array, "*any D"]) -> Float[Array, "*any D"]:
        c = self.config
        shape, axes = (c.hidden_size, c.hidden_size), ("embed", "hidden")
        hidden = Dense(c, shape, axes, False, residual_stddev(c), name="dense")(hidden)
        return LayerNorm(c, use_bias=False, name="layer_norm")(ACTIVATIONS[c.hidden_act](hidden))


class ModernBertModel(Encoder):
    """Embeddings, encoder and the dense layer that all heads share."""

    config: ModernBertConfig

    has_own_transform = True

    def setup(self) -> None:
        c = self.config
        self.embeddings = ModernBertEmbeddings(c)
        layer = ModernBertLayer
        if c.remat:
            layer = nn.remat(layer, static_argnums=(4,))
        count, every = c.num_hidden_layers, c.global_attn_every_n_layers
        make = [partial(layer, c, i == 0, i % every > 0) for i in range(count)]
        self.layers = [make(name=f"layer_{i}") for i, make in enumerate(make)]
        # A step of a scan has a global layer and the local ones up to the next; the first layer,
        # which has other parameters, and those too few for a step are not scanned.
        self.first_scanned = 1 + (count - 1) % every
        self.scanned = [make(parent=None) for make in make[self.first_scanned :][:every]]
        self.final_layer_norm = LayerNorm(c, use_bias=False)
        self.head = PredictionHead(c)

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
        """Encode a batch; see `models.bert.BertModel`. Token types have no effect.

        The last of the hidden states is normalized, and so is `last_hidden_state`.
        """
        c, length = self.config, input_ids.shape[1]
        mask = AttentionMask(attention_mask, packed=position_ids is not None)
        embedded = self.embeddings(input_ids, dropout_key and dropout_key.fold(c.num_hidden_layers))
        positions = jnp.arange(length)[None] if position_ids is None else position_ids
        head_size = c.hidden_size // c.num_attention_heads
        requested = Requested(output_hidden_states, output_attentions, output_queries_keys)
        local = dataclasses.replace(mask, window=c.local_attention // 2)
        kinds = [
            (mask, rotation(positions, head_size, c.global_rope_theta)),
            (local, rotation(positions, head_size, c.local_rope_theta)),
        ]

        def call(layer: Any, hidden: Array, index: Any) -> tuple[Array, Any]:
            return layer(hidden, kinds, dropout_key and dropout_key.fold(index), requested.maps)

        scanned = self.scanned if c.scan_layers and not self.is_initializing() else []
        output = run_layers(call, self.layers, embedded, requested, scanned, self.first_scanned)
        hidden = self.final_layer_norm(output.last_hidden_state)
        states = output.hidden_states and (*output.hidden_states[:-1], hidden)
        pooled = None
        if self.add_pooling_layer:
            pooled = self.head(self._pool(hidden, attention_mask, segment_starts))
        return dataclasses.replace(
            output, last_hidden_state=hidden, hidden_states=states, pooled=pooled
        )

    def _pool(self, hidden: Array, mask: Array, segment_starts: Array | None) -> Array:
        if segment_starts is not None:
            return gather_positions(hidden, segment_starts)
        if self.config.classifier_pooling == "cls":
            return hidden[:, 0]
        weights = (mask > 0)[:, :, None].astype(hidden.dtype)
        return (hidden * weights).sum(1) / jnp.maximum(weights.sum(1), 1)

    def token_features(self, hidden: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        """Return what the heads for tokens see of hidden states."""
        return self.head(hidden)

    def classifier_stddev(self) -> float:
        """Return the initial standard deviation of a classifier on the encoder."""
        return self.config.hidden_size**-0.5


def residual_stddev(config: ModernBertConfig) -> float:
    """Return the initial standard deviation of what is added to the residual stream."""
    return config.initializer_range / math.sqrt(2.0 * config.num_hidden_layers)


class ModernBert(Architecture):
    """ModernBERT."""

    encoder = ModernBertModel
    settings = ModernBertConfig
    rotates = True

    def check(self, config: ModernBertConfig, where: str) -> None:
        """Refuse a window that is not the same on both sides of a token."""
        if config.local_attention % 2:
            raise UserError(
                f"{where}: model.local_attention {config.local_attention} is odd; make it even, "
                "as half of it is on either side of a token"
            )

    def attended_keys(self, config: ModernBertConfig, length: int) -> int:
        """Return the keys that a token attends to at most: in local layers, those of its window."""
        every, local = config.global_attn_every_n_layers, min(length, config.local_attention + 1)
        return sum(local if i % every else length for i in range(config.num_hidden_layers))

    def encoder_flops(self, config: ModernBertConfig, length: int) -> float:
        """Return the operations of a sequence: BERT's, and the gate of the feed-forward."""
        size = config.hidden_size
        layer = 24 * size**2 + 18 * size * config.intermediate_size
        keys = 12 * size * self.attended_keys(config, length)
        return float(length * (config.num_hidden_layers * layer + keys))


ARCHITECTURE = ModernBert()
