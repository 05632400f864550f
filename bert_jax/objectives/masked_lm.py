"""Masked language modelling: predict the tokens that were masked. Source: Devlin et al. 2019.

Shape letters are those of `models.bert`.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int
from scipy import special

from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.config.schedule import Stage
from bert_jax.errors import refuse
from bert_jax.models.architecture import (
    architecture,
    make_encoder,
    num_separators,
    num_token_types,
)
from bert_jax.models.encoder import EncoderOutput, gather_positions
from bert_jax.models.layers import ACTIVATIONS, Dense, DropoutKey, LayerNorm, param
from bert_jax.models.matmul import logits_from_embeddings
from bert_jax.objectives.base import Pretraining, cross_entropy, hidden_similarity
from bert_jax.text.store import Corpus
from bert_jax.training.objective import Batch, Figure, Metrics, WeightedSum, Weights, token_share

# The loss is Σ(w·CE) / (Σw + 1e-5), as in google-research/bert `run_pretraining.py`.
_WEIGHT_FLOOR = 1e-5
_BLOCK = 1 << 20  # tokens that are counted at once


@struct.dataclass
class MaskedLMOutput:
    """The output of a model with an MLM head.

    Attributes:
      mlm_logits: of each predicted position, [B, P, V], in float32.
      hidden: the last hidden state of each predicted position, [B, P, D].
    """

    mlm_logits: Any
    hidden: Any


class MaskedLMHead(nn.Module):
    """Scores of every token of the vocabulary, by the product with its embedding.

    Source: `get_masked_lm_output` in google-research/bert `run_pretraining.py`.

    Attributes:
      config: of the encoder.
      dense: the name of the dense layer; "" for an encoder that has one for all its heads.
    """

    config: ModelConfig
    dense: str = "transform"

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "B P D"], word_embeddings: Float[Array, "V E"]
    ) -> Float[Array, "B P V"]:
        """Return float32 logits."""
        c = self.config
        if self.dense:
            shape = c.hidden_size, architecture(c).embedding_size(c)
            hidden = Dense(c, shape, ("embed", "hidden"), name=self.dense)(hidden)
            activation = architecture(c).mlm_activation or c.hidden_act
            hidden = ACTIVATIONS[activation](hidden)
            hidden = LayerNorm(c, name="layer_norm")(hidden)
        bias = param(self, "bias", nn.initializers.zeros, (c.vocab_size,), ("vocab",))
        return jnp.add(logits_from_embeddings(hidden, word_embeddings), bias)


class BertForMaskedLM(nn.Module):
    """The encoder with the MLM head."""

    config: ModelConfig

    mask_head = "mlm_head"  # the module without whose parameters no masks are filled
    add_pooling_layer = False

    def setup(self) -> None:
        c = self.config
        self.bert = make_encoder(c, add_pooling_layer=self.add_pooling_layer)
        self.mlm_head = MaskedLMHead(c, "" if self.bert.has_own_transform else "transform")

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        attention_mask: Int[Array | np.ndarray, "B L"],
        positions: Int[Array, "B P"],
        dropout_key: DropoutKey | None = None,
        **packing: Any,
    ) -> Any:
        """Return the MLM logits of `positions`; see `BertModel`."""
        output = self.bert(input_ids, token_type_ids, attention_mask, dropout_key, **packing)
        hidden = gather_positions(output.last_hidden_state, positions)
        return self.heads(output, hidden)

    def heads(self, output: EncoderOutput, hidden: Float[Array, "B P D"]) -> MaskedLMOutput:
        """Return the output of the heads; `hidden` are the hidden states to predict from."""
        return MaskedLMOutput(self.mlm_logits(hidden), hidden)

    def mlm_logits(self, hidden: Float[Array, "B P D"]) -> Float[Array, "B P V"]:
        """Return the score of every token for hidden states, in float32."""
        features = self.bert.token_features(hidden)
        return self.mlm_head(features, self.bert.embeddings.word_embeddings)

    def init_params(self, key: Array) -> Any:
        """Return random parameters, boxed with their logical axes."""
        ids = jnp.zeros((1, 1), jnp.int32)
        return self.init(key, ids, ids, ids, ids)["params"]


def check_separators(config: TrainConfig) -> None:
    """Refuse sentence pairs for a model with other than one [SEP] between two texts."""
    separators = num_separators(config.model)
    refuse(
        config.data.pairs != "none" and separators != 1,
        f"data.pairs {config.data.pairs} puts one [SEP] between two texts, and the model has "
        f"{separators}",
        fix="set data.pairs to none, or model.pair_separators to 1",
    )


class MaskedLM(Pretraining):
    """The cross-entropy of masked tokens."""

    @property
    def figures(self) -> Sequence[Figure]:
        return (
            Figure("mlm_loss", "MLM loss", "z.3f", "unigram entropy", "nats"),
            Figure("mlm_accuracy", "MLM accuracy", ".1%", "most frequent token"),
        )

    @classmethod
    def is_default(cls, config: TrainConfig) -> bool:
        return True

    @classmethod
    def make_model(cls, config: TrainConfig) -> nn.Module:
        return BertForMaskedLM(config.model)

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        refuse(
            not architecture(config.model).has_mlm_head,
            f"objective masked_lm trains a head that no checkpoint of model.model_type "
            f"{config.model.model_type} has",
            fix="set objective to auto, or model.model_type to bert",
        )
        refuse(
            config.data.pairs != "none" and num_token_types(config.model) < 2,
            f"data.pairs is {config.data.pairs}, and the model has one token type for both texts",
            fix="set data.pairs to none, or model.type_vocab_size to 2 where a bert has 1, or "
            "model.pair_token_types to 2 where it is 1",
        )
        check_separators(config)

    def head_flops(self, stage: Stage) -> float:
        return masked_lm_flops(self.config.model, stage)

    def prepare(self, key: Array, batch: Batch) -> Batch:
        """Mask the tokens, and add `predictions`."""
        assert self.masking is not None
        index, attention_mask = batch["index"], batch["attention_mask"]
        input_ids, predictions = self.masking(key, batch["input_ids"], attention_mask, index)
        return {**batch, "input_ids": input_ids, "predictions": predictions}

    def weights(self, batch: Batch) -> Weights:
        return {"mlm": batch["predictions"].weights.sum()}

    def loss(
        self, params: Any, batch: Batch, weights: Weights, dropout_key: Array | None
    ) -> tuple[Float[Array, ""], Metrics]:
        loss, metrics, _ = self.masked_lm_loss(params, batch, weights, dropout_key)
        return loss, metrics

    def masked_lm_loss(
        self, params: Any, batch: Batch, weights: Weights, dropout_key: Array | None
    ) -> tuple[Float[Array, ""], dict[str, WeightedSum], Any]:
        """Return the share of the MLM loss, its metrics, and the output of the model."""
        predictions = batch["predictions"]
        output = self.apply(params, batch, dropout_key, positions=predictions.positions)
        metrics = cross_entropy("mlm_", output.mlm_logits, predictions.labels, predictions.weights)
        if dropout_key is None:  # in evaluations
            metrics["hidden_similarity"] = hidden_similarity(output.hidden, predictions.weights)
        metrics |= token_share(batch["attention_mask"] > 0)
        return metrics["mlm_loss"].total / (weights["mlm"] + _WEIGHT_FLOOR), metrics, output

    def baselines(self, corpus: Corpus, stage: Stage) -> dict[str, float]:
        """Return the scores of guessing tokens by their frequency in the held-out text."""
        shares: Any = sum(part.weight * _unigrams(part) for part in corpus.parts)
        return {"mlm_loss": float(special.entr(shares).sum()), "mlm_accuracy": float(shares.max())}


def masked_lm_flops(config: ModelConfig, stage: Stage) -> float:
    """Return the operations of an MLM head for a sequence, forward and backward."""
    embedded = architecture(config).embedding_size(config)
    return 6.0 * stage.max_predictions * embedded * (config.hidden_size + config.vocab_size)


def _unigrams(corpus: Corpus) -> Any:
    """Return the share of each token in the held-out text."""
    tokens, size = corpus.eval.tokens, corpus.tokenizer.vocab_size
    # In blocks, since bincount copies its input as int64.
    blocks = (tokens[i : i + _BLOCK] for i in range(0, len(tokens), _BLOCK))
    return sum(np.bincount(block, minlength=size) for block in blocks) / len(tokens)
