"""The ModernBERT encoder. Source: Warner et al. 2024, and `modernbert` in `transformers`.

Every third layer attends to the whole sequence, the others to a window. Positions are rotary, each
layer normalizes its input rather than its output, the feed-forward is gated, and nothing has a
bias. Shape letters are those of `models.bert`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from bert_jax.config import ModelConfig
from bert_jax.config.ranges import SHARE, SIZE
from bert_jax.config.settings import setting
from bert_jax.errors import UserError, refuse
from bert_jax.models.architecture import Architecture
from bert_jax.models.attention import AttentionMaps, AttentionMask, SelfAttention
from bert_jax.models.encoder import Encoder, EncoderOutput, Requested, gather_positions, run_layers
from bert_jax.models.exchange import Exchange, Head, check_switches
from bert_jax.models.layers import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    Dense,
    DropoutKey,
    LayerNorm,
    apply_dropout,
    dense_layers,
    fold_key,
    param,
    round_to_dtype,
    truncated_normal,
)
from bert_jax.models.positions import rotation
from bert_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(slots=True)
class ModernBertConfig(ModelConfig):
    """The settings of a ModernBERT, by default those of the published models but for its size.

    `classifier_pooling` too has another default, that of `transformers`; the published have "mean".

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
        keys = [fold_key(key, number) for number in range(3)]
        x = hidden
        if not self.is_first:
            x = LayerNorm(c, use_bias=False, name="attention_layer_norm")(x)
        attend = SelfAttention(c, use_bias=False, output_stddev=narrow, name="attention")
        mask, rotation = kinds[self.is_local]
        update, maps = attend(x, mask, keys[0], output_maps, rotation)
        hidden += apply_dropout(update, keys[1], c.attention_probs_dropout_prob)
        x = LayerNorm(c, use_bias=False, name="feed_forward_layer_norm")(hidden)
        inner, outer = ("embed", "feed_forward"), ("feed_forward", "embed")
        wider = [Dense(c, (size, wide), inner, False, name=name) for name in ("up", "gate")]
        up, gate = dense_layers(x, wider)
        gated = GATED_ACTIVATIONS[c.hidden_act](up, gate)
        update = apply_dropout(gated, keys[2], c.hidden_dropout_prob)
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
        attention_mask: Int[Array | np.ndarray, "B L"],
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
        mask = AttentionMask.of_batch(attention_mask, packed=position_ids is not None)
        embedded = self.embeddings(input_ids, fold_key(dropout_key, c.num_hidden_layers))
        positions = jnp.arange(length)[None] if position_ids is None else position_ids
        head_size = c.hidden_size // c.num_attention_heads
        requested = Requested(output_hidden_states, output_attentions, output_queries_keys)
        local = dataclasses.replace(mask, window=c.local_attention // 2)
        kinds = [
            (mask, rotation(positions, head_size, c.global_rope_theta)),
            (local, rotation(positions, head_size, c.local_rope_theta)),
        ]
        scanned = self.scanned if c.scan_layers and not self.is_initializing() else []
        output = run_layers(
            self.layers, embedded, kinds, dropout_key, requested, scanned, self.first_scanned
        )
        hidden = self.final_layer_norm(output.last_hidden_state)
        states = output.hidden_states and (*output.hidden_states[:-1], hidden)
        pooled = None
        if self.add_pooling_layer:
            pooled = self.head(self._pool(hidden, mask.segment_ids, segment_starts))
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


_ROPES = {"global_rope_theta": "full_attention", "local_rope_theta": "sliding_attention"}


class ModernBertExchange(Exchange):
    """ModernBERT's names, and the forms that its `config.json` has had."""

    def read_fields(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the values of a `config.json` by our names; refuse what is not supported."""
        # A model has one activation and one dropout of hidden states.
        same = {
            "classifier_activation": values.get("hidden_activation", "gelu"),
            "embedding_dropout": values.get("mlp_dropout", 0.0),
        }
        check_switches({"classifier_activation": "gelu", **values}, same, where)
        result = super().read_fields(values, where)
        result |= {"type_vocab_size": 1, "position_embedding_type": "rotary"}
        if (kinds := values.get("layer_types")) is not None:  # the newer form
            result["global_attn_every_n_layers"] = _global_every(kinds, values, where)
        if isinstance(window := values.get("local_attention"), int):
            refuse(
                window < 2,
                f"{where} has local_attention {window}, and windows of 2 tokens or more are read",
                fix="correct it",
            )
            result["local_attention"] = window // 2 * 2  # `transformers` halves it
        ropes = values.get("rope_parameters") or {}
        of_layers = [*_ROPES.values()]
        refuse(
            not isinstance(ropes, dict) or {*ropes}.difference(of_layers),
            f"{where} has rope_parameters {ropes!r}",
            fix=f"a dictionary of {' and '.join(of_layers)} is read",
        )
        for field, kind in _ROPES.items():
            rope = ropes.get(kind) or {}
            plain = {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": None}
            if not isinstance(rope, dict) or {**plain, **rope, "rope_theta": None} != plain:
                raise UserError(f"{where} has rope_parameters {rope!r}; only rope_theta is read")
            result.setdefault(field, getattr(ModernBertConfig(), field))
            result |= {field: rope["rope_theta"]} if "rope_theta" in rope else {}
        if result["local_rope_theta"] is None:  # then it is that of all layers
            result["local_rope_theta"] = result["global_rope_theta"]
        return result

    def write_fields(self, config: ModernBertConfig, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the dropouts and activations that are the same, and the ids of special tokens."""
        return {
            "embedding_dropout": config.hidden_dropout_prob,
            "classifier_dropout": config.hidden_dropout_prob,
            "classifier_activation": config.hidden_act,
            "bos_token_id": tokenizer.cls_id,
            "cls_token_id": tokenizer.cls_id,
            "eos_token_id": tokenizer.sep_id,
            "sep_token_id": tokenizer.sep_id,
        }


def _global_every(kinds: Any, values: Mapping[str, Any], where: str) -> int:
    """Return the layers from one of global attention to the next, by `layer_types`."""
    kinds = kinds if isinstance(kinds, list) else []
    layers = values.get("num_hidden_layers", 22)
    if kinds and len(kinds) != layers:
        raise UserError(
            f"{where} has layer_types of {len(kinds)} layers, and num_hidden_layers {layers}; "
            "fetch it again"
        )
    # With one global layer, any distance as large as the model; what the older form says is kept.
    older = values.get("global_attn_every_n_layers")
    only = max(len(kinds), older) if isinstance(older, int) else len(kinds)
    every = next((i for i, kind in enumerate(kinds) if i and kind == "full_attention"), only)
    regular = ["sliding_attention" if i % every else "full_attention" for i in range(len(kinds))]
    if not kinds or kinds != regular:
        raise UserError(f"{where}: global layers are not at even distances; it is not read")
    return every


class ModernBert(Architecture):
    """ModernBERT."""

    encoder = ModernBertModel
    settings = ModernBertConfig
    rotates = True
    normalizes_inputs = True
    feed_forward_inputs = 2  # one is the gate
    has_pair_types = False
    exchange = ModernBertExchange(
        class_prefix="ModernBert",
        modules={
            "bert/embeddings": "model.embeddings",
            "bert/embeddings/layer_norm": "model.embeddings.norm",
            "bert/final_layer_norm": "model.final_norm",
            "bert/head/dense": "head.dense",
            "bert/head/layer_norm": "head.norm",
            "mlm_head": "decoder",
            "classifier": "classifier",
        },
        layers="model.layers.",
        layer_modules={
            "attention/query": "attn.Wqkv.0",
            "attention/key": "attn.Wqkv.1",
            "attention/value": "attn.Wqkv.2",
            "attention/output": "attn.Wo",
            "attention_layer_norm": "attn_norm",
            "up": "mlp.Wi.0",
            "gate": "mlp.Wi.1",
            "down": "mlp.Wo",
            "feed_forward_layer_norm": "mlp_norm",
        },
        decoder="decoder.weight",
        # What `transformers` takes where the file says nothing.
        config_defaults={
            "num_hidden_layers": 22,
            "intermediate_size": 1152,
            "max_position_embeddings": 8192,
        },
        heads={
            "masked-lm": Head("ForMaskedLM", ("bert/head", "mlm_head")),
            "none": Head("Model"),
        },
        encoder="model.",
        encoder_parts=("embeddings.", "layers.", "final_norm."),
        words="tok_embeddings",
        stacked={"attn.Wqkv": 3, "mlp.Wi": 2},
        config_names={
            "hidden_activation": "hidden_act",
            "norm_eps": "layer_norm_eps",
            "mlp_dropout": "hidden_dropout_prob",
            "attention_dropout": "attention_probs_dropout_prob",
        },
        switches={
            "norm_bias": False,
            "attention_bias": False,
            "mlp_bias": False,
            "classifier_bias": False,
            "decoder_bias": True,
            "rope_scaling": None,
        },
        others=(
            *("layer_types", "rope_parameters", "classifier_activation", "embedding_dropout"),
            *("initializer_cutoff_factor", "sparse_prediction", "sparse_pred_ignore_index"),
            *("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"),
        ),
        not_written=("position_embedding_type", "type_vocab_size"),
    )

    def check(self, config: ModernBertConfig, where: str) -> None:
        """Refuse token types, and a window that is not the same on both sides of a token."""
        if config.pair_token_types == 2:
            raise UserError(
                f"{where}: model.pair_token_types is 2, and a modernbert has no token types; set "
                "it to 0"
            )
        if config.local_attention % 2:
            raise UserError(
                f"{where}: model.local_attention {config.local_attention} is odd; make it even, "
                "as half of it is on either side of a token"
            )

    def windows(self, config: ModernBertConfig) -> list[int]:
        """Return half of the window in local layers, 0 in global ones."""
        every, window = config.global_attn_every_n_layers, config.local_attention // 2
        return [window if i % every else 0 for i in range(config.num_hidden_layers)]

    def encoder_flops(self, config: ModernBertConfig, length: int) -> float:
        """Return the operations of a sequence, with those of the gate."""
        return self.transformer_flops(config, length)


ARCHITECTURE = ModernBert()
