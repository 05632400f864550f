"""The BERT encoder. Source: google-research/bert `modeling.py` and Devlin et al. 2019.

Shapes, here and in every module of the package:

    B  rows of a batch          H  attention heads           V  vocabulary
    L  tokens of a row          K  size of a head            P  predicted positions of a row
    M  the same, of the keys    F  size of the feed-forward
    D  hidden size, H * K       T  texts of a packed row
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int

from bert_jax.config import ModelConfig
from bert_jax.models.attention import AttentionMask, BertSelfAttention
from bert_jax.models.layers import (
    ACTIVATIONS,
    Dense,
    Dropout,
    DropoutKey,
    LayerNorm,
    param,
    round_to_dtype,
    truncated_normal,
)
from bert_jax.models.positions import sinusoidal_positions


@struct.dataclass
class BertOutput:
    """What the encoder gives.

    Attributes:
      last_hidden_state: [B, L, D].
      pooled: [B, D], tanh of a dense layer on the first token; [B, T, D] of packed rows, on the
        first of each text; None without that layer.
      hidden_states: where asked for, the embeddings and the output of each layer, each [B, L, D].
      attentions: where asked for, the attention map of each layer before dropout, [B, H, L, L].
    """

    last_hidden_state: Any
    pooled: Any
    hidden_states: Any = None
    attentions: Any = None


class BertEmbeddings(nn.Module):
    """The sum of word, position and token type embeddings, normalized."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        tables = {
            "word_embeddings": (c.vocab_size, "vocab"),
            "token_type_embeddings": (c.type_vocab_size, "type"),
        }
        if c.position_embedding_type == "absolute":
            tables["position_embeddings"] = (c.max_position_embeddings, "position")
        for name, (size, axis) in tables.items():
            spread = c.initializer_range
            if name == "word_embeddings" and c.position_embedding_type == "sinusoidal":
                # Or positions of amplitude 1 drown the words, and next to nothing is learned;
                # Vaswani et al. 2017 (3.4) multiply the embeddings by as much.
                spread *= math.sqrt(c.hidden_size)
            init = truncated_normal(spread)
            shape, axes = (size, c.hidden_size), (axis, "embed")
            setattr(self, name, param(self, name, init, shape, axes, c.dtype))
        self.layer_norm = LayerNorm(c)
        self.dropout = Dropout(c.hidden_dropout_prob)

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        key: DropoutKey | None,
        position_ids: Int[Array, "B L"] | None = None,
    ) -> Float[Array, "B L D"]:
        c, length = self.config, input_ids.shape[1]
        hidden: Any = round_to_dtype(jnp.take(self.word_embeddings, input_ids, axis=0), c.dtype)
        positions: Any = None
        if c.position_embedding_type == "absolute":
            positions = round_to_dtype(self.position_embeddings[:length], c.dtype)
        elif c.position_embedding_type == "sinusoidal":
            positions = jnp.asarray(sinusoidal_positions(length, c.hidden_size))
        if positions is not None:
            hidden += positions if position_ids is None else positions[position_ids]
        # As a product: the gradient of a lookup in so short a table is a slow scatter.
        types = jax.nn.one_hot(token_type_ids, c.type_vocab_size, dtype=jnp.float32)
        of_types: Any = round_to_dtype(self.token_type_embeddings, c.dtype)
        hidden += types @ of_types
        return self.dropout(self.layer_norm(hidden), key)


class BertLayer(nn.Module):
    """Attention and feed-forward, each added to its input and then normalized."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "B L D"],
        mask: AttentionMask,
        key: DropoutKey | None,
        output_attentions: bool = True,
    ) -> tuple[Float[Array, "B L D"], Float[Array, "B H L M"] | None]:
        """Returns the layer's output, and its attention map before dropout, if it is wanted."""
        c = self.config
        inside, first, second = (key and key.fold(place) for place in range(3))

        def add(name: str, update: Array, to: Array, key: DropoutKey | None) -> Array:
            dropped = Dropout(c.hidden_dropout_prob, name=f"{name}_dropout")(update, key)
            return LayerNorm(c, name=f"{name}_layer_norm")(dropped + to)

        attend = BertSelfAttention(c, name="attention")
        attended, attention = attend(hidden, mask, inside, output_attentions)
        hidden = add("attention", attended, hidden, first)
        wide = Dense(c, (c.hidden_size, c.intermediate_size), ("embed", "feed_forward"), name="up")
        narrow = Dense(
            c, (c.intermediate_size, c.hidden_size), ("feed_forward", "embed"), name="down"
        )
        update = narrow(ACTIVATIONS[c.hidden_act](wide(hidden)))
        return add("feed_forward", update, hidden, second), attention


class BertModel(nn.Module):
    """Embeddings, encoder and, unless `add_pooling_layer` is False, pooler."""

    config: ModelConfig
    add_pooling_layer: bool = True

    def setup(self) -> None:
        c = self.config
        self.embeddings = BertEmbeddings(c)
        kind = nn.remat(BertLayer, static_argnums=(4,)) if c.remat else BertLayer
        self.layers = [kind(c, name=f"layer_{i}") for i in range(c.num_hidden_layers)]
        self.any_layer = kind(c, parent=None)
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
    ) -> BertOutput:
        """Encodes a batch.

        Args:
          input_ids: pieces, below V.
          token_type_ids: the segment of each piece, below `type_vocab_size`.
          attention_mask: 1 for pieces and 0 for padding, to which nothing attends; in packed rows
            the number of the text from 1 on, whose pieces attend to each other alone.
          dropout_key: in training, what dropout is keyed to; None turns it off.
          position_ids: of packed rows, the place of each piece in its text.
          segment_starts: of packed rows, where each text begins; any place where there are fewer.
          output_hidden_states: whether to return the embeddings and every layer's output.
          output_attentions: whether to return every layer's attention map.
        """
        mask = AttentionMask(attention_mask, packed=position_ids is not None)
        embedded = self.embeddings(
            input_ids,
            token_type_ids,
            dropout_key and dropout_key.fold(self.config.num_hidden_layers),
            position_ids,
        )
        encode = self._loop if self.is_initializing() or not self.config.scan_layers else self._scan
        hidden, (states, attentions) = encode(
            embedded, mask, dropout_key, (output_hidden_states, output_attentions)
        )
        first = hidden[:, 0] if segment_starts is None else gather_positions(hidden, segment_starts)
        return BertOutput(
            last_hidden_state=hidden,
            pooled=jnp.tanh(self.pooler(first)) if self.add_pooling_layer else None,
            hidden_states=(embedded, *states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )

    def _loop(
        self, hidden: Array, mask: AttentionMask, key: DropoutKey | None, wanted: tuple[bool, bool]
    ) -> tuple[Array, Any]:
        """Returns the last layer's output and, where wanted, every layer's and its attention."""
        states, attentions = [], []
        for index, layer in enumerate(self.layers):
            hidden, attention = layer(hidden, mask, key and key.fold(index), wanted[1])
            states.append(hidden)
            attentions.append(attention)
        return hidden, (states, attentions)

    def _scan(
        self, hidden: Array, mask: AttentionMask, key: DropoutKey | None, wanted: tuple[bool, bool]
    ) -> tuple[Array, Any]:
        """Does what `_loop` does with one program for all layers, which compiles faster."""
        params = [layer.variables["params"] for layer in self.layers]
        stacked = jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *params)

        def run(hidden: Array, layer: tuple[Any, Array]) -> tuple[Array, Any]:
            of_layer, index = layer
            hidden, attention = self.any_layer.apply(
                {"params": of_layer}, hidden, mask, key and key.fold(index), wanted[1]
            )
            return hidden, (hidden if wanted[0] else (), attention if wanted[1] else ())

        return jax.lax.scan(run, hidden, (stacked, jnp.arange(len(params))))


def gather_positions(
    hidden: Float[Array, "B L D"], places: Int[Array, "B P"]
) -> Float[Array, "B P D"]:
    """Returns what stands at some places of each row."""
    return jnp.take_along_axis(hidden, places[:, :, None], axis=1)
