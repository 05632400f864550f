"""The ELECTRA encoder: BERT's layers on embeddings that may be of another width.

Source: Clark et al. 2020, and google-research/electra. Shape letters are those of `models.bert`; E
is the width of the embeddings. `objectives.replaced_tokens` pretrains it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Float

from bert_jax.config import ModelConfig
from bert_jax.config.ranges import SHARE_OR_ALL, SIZE_OR_ZERO
from bert_jax.config.settings import setting
from bert_jax.errors import UserError
from bert_jax.models import bert
from bert_jax.models.attention import AttentionMask
from bert_jax.models.bert import Bert, BertLayers, BertModel
from bert_jax.models.encoder import NOTHING, EncoderOutput, Requested
from bert_jax.models.exchange import Exchange, Head, Params
from bert_jax.models.layers import ACTIVATIONS, Dense, DropoutKey
from bert_jax.text.tokenizer import Tokenizer

# What a generator has as its discriminator has it.
_SAME = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_SAME += ("vocab_size", "max_position_embeddings", "type_vocab_size", "hidden_act")
_SAME += ("layer_norm_eps", "position_embedding_type")


@dataclasses.dataclass(slots=True)
class ElectraConfig(ModelConfig):
    """The settings of an ELECTRA, and of the generator that it is pretrained with.

    >>> ElectraConfig(hidden_size=256, embedding_size=128).generator_hidden_size
    0.25
    """

    model_type: str = setting("electra", "architecture")
    # Google's ELECTRA has the form of BERT's first release.
    hidden_act: Literal["gelu", "gelu_new", "relu"] = setting("gelu", "activation function")
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


class ElectraLayers(BertLayers):
    """BERT's layers on embeddings, projected where these are of another width."""

    config: ElectraConfig

    def setup(self) -> None:
        super().setup()
        c = self.config
        if embedding_size(c) != c.hidden_size:
            shape, axes = (embedding_size(c), c.hidden_size), ("embed", "hidden")
            self.embeddings_project = Dense(c, shape, axes)

    def encode(
        self,
        embedded: Float[Array, "B L E"],
        mask: AttentionMask,
        dropout_key: DropoutKey | None,
        requested: Requested = NOTHING,
    ) -> EncoderOutput:
        """Return the output of the layers; the first of the hidden states is the projection."""
        if embedding_size(self.config) != self.config.hidden_size:
            embedded = self.embeddings_project(embedded)
        return super().encode(embedded, mask, dropout_key, requested)


class ElectraModel(ElectraLayers, BertModel):
    """The encoder: embeddings, layers and, with `add_pooling_layer`, a dense layer on [CLS]."""

    # As in `transformers`, whatever `hidden_act`.
    pooler_activation = staticmethod(ACTIVATIONS["gelu"])


class ElectraExchange(Exchange):
    """ELECTRA's names, whose standard ones are BERT's; its generator is a model of its own."""

    def read_fields(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the values of a `config.json` by our names."""
        fields = super().read_fields(values, where)
        if values.get("architectures") == ["ElectraForMaskedLM"]:
            fields["generator_hidden_size"] = 0.0  # the encoder is the generator itself
        return fields

    def write_fields(self, config: ElectraConfig, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the width of the embeddings, and a dropout."""
        return {
            "embedding_size": embedding_size(config),
            "summary_last_dropout": config.hidden_dropout_prob,
        }

    def split(self, config: ElectraConfig, params: Params) -> tuple[ElectraConfig, Params] | None:
        """Return the generator as a model that is its own generator; None without one."""
        if "generator_head" not in params:
            return None
        encoder = {name: module for name, module in params["bert"].items() if name != "pooler"}
        if own := generator_config(config):
            encoder = {"embeddings": encoder["embeddings"], **params["generator"]}
        alone = dataclasses.replace(own or config, generator_hidden_size=0.0)
        return alone, {"bert": encoder, "generator_head": params["generator_head"]}

    def join(
        self,
        config: ElectraConfig,
        params: Params,
        companion: ModelConfig,
        companion_params: Params,
        where: str,
    ) -> tuple[ElectraConfig, Params]:
        """Return a discriminator with its generator, which was read from `where`."""
        if not isinstance(companion, ElectraConfig) or "generator_head" not in companion_params:
            raise UserError(
                f"{where} is not the generator of an ELECTRA; remove the folder to read the "
                "discriminator alone"
            )
        joined = {**params, "generator_head": companion_params["generator_head"]}
        if not config.generator_hidden_size:
            return config, joined
        share = min(1.0, companion.num_attention_heads / config.num_attention_heads)
        wanted = generator_config(config)
        if not wanted or wanted.num_attention_heads != companion.num_attention_heads:
            config = dataclasses.replace(config, generator_hidden_size=share)
            wanted = generator_config(config)
        sizes = {"embedding_size": (embedding_size(companion), embedding_size(config))}
        sizes |= {name: (getattr(companion, name), getattr(wanted, name)) for name in _SAME}
        for name, (there, here) in sizes.items():
            if there != here:
                raise UserError(
                    f"{where} has {name} {there}, and beside this model only {here} is read; "
                    "remove the folder to read the discriminator alone"
                )
        layers = dict(companion_params["bert"])
        same = jax.tree.map(np.array_equal, layers.pop("embeddings"), params["bert"]["embeddings"])
        if not jax.tree.all(same):
            raise UserError(
                f"{where} has other embeddings than its model; untied, it is not supported; "
                "remove the folder to read the discriminator alone"
            )
        return config, {**joined, "generator": layers}


class Electra(Bert):
    """ELECTRA's encoder, which is BERT's on embeddings of another width."""

    encoder = ElectraModel
    settings = ElectraConfig
    pretrains_on_pairs = has_mlm_head = False
    mlm_activation = "gelu"  # of the generator, as in `transformers`
    exchange = ElectraExchange.like(
        bert.EXCHANGE,
        class_prefix="Electra",
        others=(),
        modules={
            **bert.EXCHANGE.modules,
            "bert/embeddings_project": "bert.embeddings_project",
            "generator_head": "generator_lm_head",
            "generator_head/dense": "generator_predictions.dense",
            "generator_head/layer_norm": "generator_predictions.LayerNorm",
            "discriminator_head/dense": "discriminator_predictions.dense",
            "discriminator_head/output": "discriminator_predictions.dense_prediction",
        },
        decoder="generator_lm_head.weight",
        heads={
            "pretraining": Head("ForPreTraining", ("discriminator_head",), companion="beside"),
            "masked-lm": Head("ForMaskedLM", ("generator_head",), companion="alone"),
            "none": Head("Model"),
        },
        encoder_parts=(*bert.EXCHANGE.encoder_parts, "embeddings_project."),
        prefixes={"electra.": "bert."},
        class_prefixes={
            "ElectraForSequenceClassification": {
                "classifier.dense.": "bert.pooler.dense.",
                "classifier.out_proj.": "classifier.",
            },
            "ElectraForMultipleChoice": {"sequence_summary.summary.": "bert.pooler.dense."},
            "ElectraForQuestionAnswering": {"qa_outputs.": "classifier."},
        },
        # What `transformers` takes where the file says nothing.
        config_defaults={
            "embedding_size": 128,
            "num_attention_heads": 4,
            "intermediate_size": 1024,
        },
        switches={
            "summary_type": "first",
            "summary_use_proj": True,
            "summary_activation": "gelu",
        },
        companion_modules=("generator", "generator_head"),
    )

    def embedding_size(self, config: ElectraConfig) -> int:
        """Return the width of the embeddings."""
        return embedding_size(config)

    def encoder_flops(self, config: ElectraConfig, length: int) -> float:
        """Return the operations of a sequence: BERT's, and the projection of its embeddings."""
        width, size = embedding_size(config), config.hidden_size
        projection = 6 * width * size * (width != size)
        return super().encoder_flops(config, length) + float(length * projection)


ARCHITECTURE = Electra()
