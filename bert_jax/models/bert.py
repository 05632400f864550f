"""The BERT encoder. Source: google-research/bert `modeling.py` and Devlin et al. 2019.

Shapes, here and in every module of the package:

    B  sequences of a batch     H  attention heads      V  vocabulary
    L  tokens of a sequence     K  head size, D / H     P  predicted positions of a sequence
    M  the same, as keys        N  labels               T  segments of a packed sequence
    D  hidden size              C  choices              I, O  inputs and outputs of a dense layer
    E  embedding size, D in most architectures

`jax.grad` works through the model. Forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) works on
accelerators with plain attention. It raises a TypeError on a CPU, whose matrix products have
gradients written by hand, and through the fused kernels, which have, too.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from bert_jax.config import ModelConfig
from bert_jax.models.architecture import Architecture, architecture
from bert_jax.models.attention import AttentionMaps, AttentionMask, SelfAttention
from bert_jax.models.encoder import (
    NOTHING,
    Encoder,
    EncoderOutput,
    Requested,
    gather_positions,
    run_layers,
)
from bert_jax.models.exchange import Exchange, Head
from bert_jax.models.layers import (
    ACTIVATIONS,
    Dense,
    DropoutKey,
    LayerNorm,
    apply_dropout,
    fold_key,
    param,
    round_to_dtype,
    truncated_normal,
)
from bert_jax.models.positions import position_kind


class BertEmbeddings(nn.Module):
    """The sum of word, position and token type embeddings, normalized."""

    config: ModelConfig

    def setup(self) -> None:
        c, kind = self.config, position_kind(self.config)
        tables = {
            "word_embeddings": (c.vocab_size, "vocab"),
            "token_type_embeddings": (c.type_vocab_size, "type"),
        }
        if kind.is_learned:
            tables["position_embeddings"] = (c.max_position_embeddings, "position")
        for name, (size, axis) in tables.items():
            stddev = c.initializer_range
            if name == "word_embeddings" and kind.embeddings:
                # Positions of amplitude 1 would drown the words, and almost nothing is learned.
                # Vaswani et al. 2017 (3.4) scale the embeddings by the same factor.
                stddev *= math.sqrt(c.hidden_size)
            init = truncated_normal(stddev)
            shape, axes = (size, c.hidden_size), (axis, "embed")
            setattr(self, name, param(self, name, init, shape, axes, c.dtype))
        self.layer_norm = LayerNorm(c)

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        key: DropoutKey | None,
        position_ids: Int[Array, "B L"] | None = None,
    ) -> Float[Array, "B L D"]:
        c, kind, length = self.config, position_kind(self.config), input_ids.shape[1]
        hidden = round_to_dtype(jnp.take(self.word_embeddings, input_ids, axis=0), c.dtype)
        positions = None
        if kind.is_learned:
            positions = round_to_dtype(self.position_embeddings[:length], c.dtype)
        elif kind.embeddings:
            positions = jnp.asarray(kind.embeddings(length, c.hidden_size))
        if positions is not None:
            hidden += positions if position_ids is None else positions[position_ids]
        # As a matrix product: the gradient of a lookup in so short a table is a slow scatter.
        types = jax.nn.one_hot(token_type_ids, c.type_vocab_size, dtype=jnp.float32)
        hidden += types @ round_to_dtype(self.token_type_embeddings, c.dtype)
        return apply_dropout(self.layer_norm(hidden), key, c.hidden_dropout_prob)


class BertLayer(nn.Module):
    """Attention and feed-forward, each with a residual connection and then normalized."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "B L D"],
        mask: AttentionMask,
        key: DropoutKey | None,
        output_maps: bool,
    ) -> tuple[Float[Array, "B L D"], AttentionMaps | None]:
        """Return the layer's output, and its attention maps if `output_maps`."""
        c = self.config
        size, wide = c.hidden_size, c.intermediate_size
        keys = [fold_key(key, number) for number in range(3)]
        attend = SelfAttention(c, name="attention")
        update, maps = attend(hidden, mask, keys[0], output_maps)
        update = apply_dropout(update, keys[1], c.hidden_dropout_prob)
        hidden = LayerNorm(c, name="attention_layer_norm")(hidden + update)
        update = ACTIVATIONS[c.hidden_act](
            Dense(c, (size, wide), ("embed", "feed_forward"), name="up")(hidden)
        )
        update = Dense(c, (wide, size), ("feed_forward", "embed"), name="down")(update)
        update = apply_dropout(update, keys[2], c.hidden_dropout_prob)
        return LayerNorm(c, name="feed_forward_layer_norm")(hidden + update), maps


class BertLayers(nn.Module):
    """The layers of the encoder."""

    config: Any

    def setup(self) -> None:
        c = self.config
        layer = nn.remat(BertLayer, static_argnums=(4,)) if c.remat else BertLayer
        self.layers = [layer(c, name=f"layer_{i}") for i in range(c.num_hidden_layers)]
        self.any_layer = layer(c, parent=None)

    def encode(
        self,
        embedded: Float[Array, "B L D"],
        mask: AttentionMask,
        dropout_key: DropoutKey | None,
        requested: Requested = NOTHING,
    ) -> EncoderOutput:
        """Return the output of the layers; the first of the hidden states is their input."""
        is_scanned = self.config.scan_layers and not self.is_initializing()
        scanned = [self.any_layer] if is_scanned else []
        return run_layers(self.layers, embedded, mask, dropout_key, requested, scanned)


class BertModel(BertLayers, Encoder):
    """Embeddings, encoder and, unless `add_pooling_layer` is False, pooler."""

    pooler_activation = staticmethod(jnp.tanh)

    def setup(self) -> None:
        super().setup()
        c = self.config
        width = architecture(c).embedding_size(c)
        self.embeddings = BertEmbeddings(dataclasses.replace(c, hidden_size=width))
        if self.add_pooling_layer:
            self.pooler = Dense(c, (c.hidden_size, c.hidden_size), ("embed", "hidden"))

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        attention_mask: Int[Array | np.ndarray, "B L"],
        dropout_key: DropoutKey | None = None,
        *,
        position_ids: Int[Array, "B L"] | None = None,
        segment_starts: Int[Array, "B T"] | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        output_queries_keys: bool = False,
    ) -> EncoderOutput:
        """Encode a batch.

        Args:
          input_ids: token ids, below V.
          token_type_ids: which text of a pair each token is of, below `type_vocab_size`.
          attention_mask: 1 for tokens and 0 for padding, to which nothing attends. In packed
            sequences, the number of the segment from 1 on; tokens attend to their own segment.
            cuDNN's attention takes padding at the end of a sequence only. A NumPy array of ones,
            whose values are known when the model is traced, spares a kernel the mask.
          dropout_key: the key of dropout in training; None turns dropout off.
          position_ids: in packed sequences, the position of each token in its segment.
          segment_starts: in packed sequences, the position of each segment's first token; any
            position where there are fewer segments.
          output_hidden_states: whether to return the embeddings and the output of every layer.
          output_attentions: whether to return the attention map of every layer.
          output_queries_keys: whether to return the queries and keys of every layer. Attention is
            plain where maps, queries or keys are returned.
        """
        mask = AttentionMask.of_batch(attention_mask, packed=position_ids is not None)
        embedded = self.embed(input_ids, token_type_ids, dropout_key, position_ids)
        requested = Requested(output_hidden_states, output_attentions, output_queries_keys)
        output = self.encode(embedded, mask, dropout_key, requested)
        if not self.add_pooling_layer:
            return output
        hidden = output.last_hidden_state
        first = hidden[:, 0] if segment_starts is None else gather_positions(hidden, segment_starts)
        return dataclasses.replace(output, pooled=self.pooler_activation(self.pooler(first)))

    def embed(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        dropout_key: DropoutKey | None,
        position_ids: Int[Array, "B L"] | None = None,
    ) -> Float[Array, "B L E"]:
        """Return the embeddings, the input of `encode`."""
        key = fold_key(dropout_key, self.config.num_hidden_layers)
        return self.embeddings(input_ids, token_type_ids, key, position_ids)


EXCHANGE = Exchange(
    class_prefix="Bert",
    modules={
        "bert/embeddings": "bert.embeddings",
        "bert/embeddings/layer_norm": "bert.embeddings.LayerNorm",
        "bert/pooler": "bert.pooler.dense",
        "mlm_head": "cls.predictions",
        "mlm_head/transform": "cls.predictions.transform.dense",
        "mlm_head/layer_norm": "cls.predictions.transform.LayerNorm",
        "nsp_head": "cls.seq_relationship",
        "classifier": "classifier",
    },
    layers="bert.encoder.layer.",
    layer_modules={
        "attention/query": "attention.self.query",
        "attention/key": "attention.self.key",
        "attention/value": "attention.self.value",
        "attention/distance": "attention.self.distance_embedding",
        "attention/output": "attention.output.dense",
        "attention_layer_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "feed_forward_layer_norm": "output.LayerNorm",
    },
    # Some files store the word embeddings a second time, as the output matrix, with its bias.
    decoder="cls.predictions.decoder.weight",
    heads={
        "pretraining": Head("ForPreTraining", ("bert/pooler", "mlm_head", "nsp_head")),
        "masked-lm": Head("ForMaskedLM", ("mlm_head",)),
        "none": Head("Model", ("bert/pooler",)),
    },
    encoder_parts=("embeddings.", "encoder.", "pooler."),
    renamed={
        "LayerNorm.gamma": "LayerNorm.weight",
        "LayerNorm.beta": "LayerNorm.bias",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    class_prefixes={"BertForQuestionAnswering": {"qa_outputs.": "classifier."}},
    others=(  # of a pooler of several layers, which Google's code never had
        *("directionality", "pooler_type", "pooler_fc_size", "pooler_num_fc_layers"),
        *("pooler_num_attention_heads", "pooler_size_per_head"),
    ),
)


class Bert(Architecture):
    """BERT, and what the architectures with its layers share."""

    encoder = BertModel
    pretrains_on_pairs = True
    exchange: ClassVar[Exchange | None] = EXCHANGE

    def encoder_flops(self, config: Any, length: int) -> float:
        """Return the operations of a sequence, forward and backward."""
        return self.transformer_flops(config, length)


ARCHITECTURE = Bert()
