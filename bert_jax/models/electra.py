"""The ELECTRA encoder: BERT's layers on embeddings that may be of another width.

Source: Clark et al. 2020, and google-research/electra. Shape letters are those of `models.bert`; E
is the width of the embeddings. `objectives.replaced_tokens` pretrains it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from bert_jax.config import ModelConfig
from bert_jax.config.fields import SHARE_OR_ALL, SIZE_OR_ZERO
from bert_jax.config.settings import setting
from bert_jax.models import bert
from bert_jax.models.bert import Bert, BertLayers, BertModel
from bert_jax.models.encoder import EncoderOutput
from bert_jax.models.exchange import Exchange, Head
from bert_jax.models.layers import ACTIVATIONS, Dense
from bert_jax.text.tokenizer import Tokenizer


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


class Electra(Bert):
    """ELECTRA's encoder, which is BERT's on embeddings of another width."""

    encoder = ElectraModel
    settings = ElectraConfig
    has_nsp = False
    exchange = ElectraExchange(
        class_prefix="Electra",
        modules={
            **bert.EXCHANGE.modules,
            "bert/embeddings_project": "bert.embeddings_project",
            "generator_head": "generator_lm_head",
            "generator_head/dense": "generator_predictions.dense",
            "generator_head/layer_norm": "generator_predictions.LayerNorm",
            "discriminator_head/dense": "discriminator_predictions.dense",
            "discriminator_head/output": "discriminator_predictions.dense_prediction",
        },
        layers=bert.EXCHANGE.layers,
        layer_modules=bert.EXCHANGE.layer_modules,
        decoder="generator_lm_head.weight",
        heads={
            "pretraining": Head("ForPreTraining", ("discriminator_head",)),
            "masked-lm": Head("ForMaskedLM", ("generator_head",)),
            "none": Head("Model"),
        },
        encoder_parts=(*bert.EXCHANGE.encoder_parts, "embeddings_project."),
        renamed=bert.EXCHANGE.renamed,
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
        others=(),
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
