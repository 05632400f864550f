"""Replaced token detection (RTD): ELECTRA's pretraining. Source: Clark et al. 2020.

A generator, which is trained by masked language modelling, fills masked positions with tokens that
it samples. The encoder, as discriminator, says of each token whether it was replaced. Both are
BERT's layers, each on its own projection of the same embeddings. Shape letters are those of
`models.bert`; E is the width of the embeddings. Source of the numbers: google-research/electra.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int
from scipy import special

from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.config.schedule import Stage
from bert_jax.errors import UserError, refuse
from bert_jax.models.attention import AttentionMask
from bert_jax.models.electra import (
    ElectraConfig,
    ElectraLayers,
    ElectraModel,
    generator_config,
)
from bert_jax.models.encoder import gather_positions
from bert_jax.models.layers import ACTIVATIONS, Dense, DropoutKey, fold_key, random_bits
from bert_jax.objectives.base import cross_entropy, hidden_similarity
from bert_jax.objectives.masked_lm import (
    MaskedLM,
    MaskedLMHead,
    MaskedLMOutput,
    masked_lm_flops,
)
from bert_jax.training.objective import Batch, Figure, Metrics, WeightedSum, Weights, token_share

_RTD_WEIGHT = 50.0  # of the RTD loss in the sum; `disc_weight` in `configure_pretraining.py`
_BLOCK = 128  # tokens of the vocabulary that are drawn from together
_ORIGINAL = "every token is original"


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

    mask_head = "generator_head"

    def setup(self) -> None:
        c = self.config
        self.bert = ElectraModel(c, add_pooling_layer=False)
        own = generator_config(c)
        self.generator = ElectraLayers(own) if own else None
        self.generator_head = MaskedLMHead(own or c, dense="dense")
        self.discriminator_head = DiscriminatorHead(c)

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        attention_mask: Int[Array | np.ndarray, "B L"],
        positions: Int[Array, "B P"],
        dropout_key: DropoutKey | None = None,
    ) -> MaskedLMOutput:
        """Return the generator's logits of `positions`; see `BertModel`."""
        # Other keys than those of `discriminate`.
        key = fold_key(dropout_key, self.config.num_hidden_layers + 1)
        embedded = self.bert.embed(input_ids, token_type_ids, key)
        mask = AttentionMask.of_batch(attention_mask)
        output = (self.generator or self.bert).encode(embedded, mask, key)
        hidden = gather_positions(output.last_hidden_state, positions)
        return MaskedLMOutput(self.mlm_logits(hidden), hidden)

    def mlm_logits(self, hidden: Float[Array, "B P D"]) -> Float[Array, "B P V"]:
        """Return the score of every token for the generator's hidden states, in float32."""
        return self.generator_head(hidden, self.bert.embeddings.word_embeddings)

    def discriminate(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        attention_mask: Int[Array | np.ndarray, "B L"],
        positions: Int[Array, "B P"],
        dropout_key: DropoutKey | None = None,
    ) -> tuple[Float[Array, "B L"], Float[Array, "B P D"]]:
        """Return the logit of each token that it was replaced, and hidden states of `positions`."""
        hidden = self.bert(input_ids, token_type_ids, attention_mask, dropout_key).last_hidden_state
        return self.discriminator_head(hidden), gather_positions(hidden, positions)

    def init_params(self, key: Array) -> Any:
        """Return random parameters, boxed with their logical axes."""
        ids = jnp.zeros((1, 1), jnp.int32)

        def run(model: "ElectraForPreTraining") -> None:
            model(ids, ids, ids, ids)
            model.discriminate(ids, ids, ids, ids)

        return self.init(key, method=run)["params"]


class ReplacedTokens(MaskedLM):
    """The masked LM of a generator, and which of its samples a discriminator finds."""

    @property
    def figures(self) -> Sequence[Figure]:
        return (
            *super().figures,
            Figure("rtd_loss", "RTD loss", "z.3f", "entropy of replaced or not", "nats"),
            Figure("rtd_accuracy", "RTD accuracy", ".1%", _ORIGINAL),
            Figure("rtd_recall", "RTD recall", ".1%", _ORIGINAL),
        )

    @property
    def loss_weights(self) -> Mapping[str, float]:
        return {"rtd_loss": _RTD_WEIGHT}

    @classmethod
    def is_default(cls, config: TrainConfig) -> bool:
        return isinstance(config.model, ElectraConfig)

    @classmethod
    def make_model(cls, config: TrainConfig) -> nn.Module:
        assert isinstance(config.model, ElectraConfig)
        return ElectraForPreTraining(config.model)

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        if not isinstance(config.model, ElectraConfig):
            raise UserError(
                "objective replaced_tokens needs a model.model_type of electra; set it, or "
                "objective to auto"
            )
        refuse(
            config.data.pairs != "none",
            f"data.pairs {config.data.pairs} needs a head that model.model_type "
            f"{config.model.model_type} does not have",
            fix="set data.pairs to none",
        )
        share, every = config.model.generator_hidden_size, config.model.num_attention_heads
        heads = share * every
        # A third may be written as 0.333.
        if share and (round(heads) < 1 or abs(heads - round(heads)) > 0.01):
            raise UserError(
                f"model.generator_hidden_size {share} leaves {heads:.3g} of "
                f"model.num_attention_heads {every}; set it to a multiple of 1/{every}, such as "
                f"{max(1, round(heads)) / every:.5g}"
            )

    @property
    def encoders(self) -> Mapping[str, ModelConfig]:
        model = self.config.model
        return {"model": model, "generator": generator_config(model) or model}

    def head_flops(self, stage: Stage) -> float:
        size, generator = self.config.model.hidden_size, self.encoders["generator"]
        discriminator = 6.0 * stage.max_length * (size**2 + size)
        return discriminator + masked_lm_flops(generator, stage)

    def prepare(self, key: Array, batch: Batch) -> Batch:
        """Mask the tokens, and add `predictions` and the key of the generator's samples."""
        assert self.masking is not None
        index = batch["index"]
        # Source: `mask` in `pretrain_helpers.py`.
        masking = dataclasses.replace(self.masking, mask_share=0.85, random_share=0.0)
        input_ids, predictions = masking(key, batch["input_ids"], batch["attention_mask"], index)
        # One for each sequence, as a batch is split.
        keys = jnp.broadcast_to(jax.random.fold_in(key, 1), index.shape)
        drawn = {"input_ids": input_ids, "predictions": predictions, "sampling_key": keys}
        return {**batch, **drawn}

    def weights(self, batch: Batch) -> Weights:
        is_token = (batch["attention_mask"] > 0).astype(jnp.float32)
        return {**super().weights(batch), "rtd": is_token.sum()}

    def loss(
        self, params: Any, batch: Batch, weights: Weights, dropout_key: Array | None
    ) -> tuple[Float[Array, ""], Metrics]:
        predictions = batch["predictions"]
        positions = predictions.positions
        output = self.apply(params, batch, dropout_key, positions=positions)
        metrics = cross_entropy("mlm_", output.mlm_logits, predictions.labels, predictions.weights)
        input_ids, is_replaced = self._replace(batch, output.mlm_logits)
        corrupted = {**batch, "input_ids": input_ids}
        logits, hidden = self.apply(
            params, corrupted, dropout_key, positions=positions, method="discriminate"
        )
        metrics |= _detection(logits, is_replaced, batch["attention_mask"] > 0)
        if dropout_key is None:  # in evaluations
            metrics["hidden_similarity"] = hidden_similarity(hidden, predictions.weights)
        loss = metrics["mlm_loss"].total / jnp.maximum(weights["mlm"], 1.0)
        rtd = metrics["rtd_loss"].total / jnp.maximum(weights["rtd"], 1.0)
        return loss + _RTD_WEIGHT * rtd, metrics

    def _replace(
        self, batch: Batch, logits: Float[Array, "B P V"]
    ) -> tuple[Int[Array, "B L"], Bool[Array, "B L"]]:
        """Return the sequences with sampled tokens, and which tokens differ from the original."""
        input_ids, predictions = batch["input_ids"], batch["predictions"]
        assert self.masking is not None
        size = self.masking.vocab_size
        sampled = sample_tokens(batch["sampling_key"][0], batch["index"], logits, size)
        is_prediction = predictions.weights > 0
        # Out of the sequence where there is no prediction.
        positions = jnp.where(is_prediction, predictions.positions, input_ids.shape[1])
        where = jnp.arange(len(input_ids))[:, None], positions
        replaced = input_ids.at[where].set(sampled.astype(input_ids.dtype), mode="drop")
        differs = jnp.zeros(input_ids.shape, bool)
        return replaced, differs.at[where].set(sampled != predictions.labels, mode="drop")

    def moving_baselines(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the scores of calling every token original, and the entropy of replaced or not.

        They depend on the share of the generator's samples that are the original token.
        """
        share = scores.get("rtd_accuracy_baseline")
        if share is None:
            return {}
        entropy = float(special.entr([share, 1 - share]).sum())
        return {"rtd_accuracy": share, "rtd_recall": 0.0, "rtd_loss": entropy}


def sample_tokens(
    key: Array, indices: Int[Array, "B"], logits: Float[Array, "B P V"], size: int
) -> Int[Array, "B P"]:
    """Return a token below `size` for each position, drawn from the softmax without a gradient.

    A block of the vocabulary is drawn, then a token of it, each as the argmax with Gumbel noise.
    Noise for every token would take much longer. To invert a sum over the vocabulary would not, but
    its rounding would give other devices other tokens.
    """
    logits = jax.lax.stop_gradient(logits[..., :size])
    count = -(-size // _BLOCK)
    padding = ((0, 0), (0, 0), (0, count * _BLOCK - size))
    blocks = jnp.pad(logits, padding, constant_values=-jnp.inf)
    blocks = blocks.reshape(*logits.shape[:2], count, _BLOCK)
    bits = random_bits(key, indices, (logits.shape[1], count + _BLOCK))
    # In (0, 1), and exact near 0, where the noise is largest.
    noise = -jnp.log(-jnp.log1p(-(bits.astype(jnp.float32) + 0.5) * 2**-32))
    block = (jax.nn.logsumexp(blocks, axis=-1) + noise[..., :count]).argmax(-1)
    tokens = jnp.take_along_axis(blocks, block[..., None, None], axis=2)[:, :, 0]
    return block * _BLOCK + (tokens + noise[..., count:]).argmax(-1)


def _detection(
    logits: Float[Array, "B L"], is_replaced: Bool[Array, "B L"], is_token: Bool[Array, "B L"]
) -> dict[str, WeightedSum]:
    """Return the binary cross-entropy in nats, and how well the replaced tokens are found."""
    found, original = logits > 0, is_token & ~is_replaced
    losses = optax.sigmoid_binary_cross_entropy(logits, is_replaced)
    hits, replaced = found & is_replaced & is_token, is_replaced & is_token
    sums = {
        "loss": (jnp.where(is_token, losses, 0.0), is_token),
        "accuracy": (hits | (original & ~found), is_token),
        "accuracy_baseline": (original, is_token),  # that of calling every token original
        "recall": (hits, replaced),
        "precision": (hits, found & is_token),
    }
    return {
        f"rtd_{name}": WeightedSum(total.sum(dtype=jnp.float32), weight.sum(dtype=jnp.float32))
        for name, (total, weight) in sums.items()
    } | token_share(is_token)
