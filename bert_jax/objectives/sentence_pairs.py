"""Sentence pairs, beside masked tokens: next sentence (NSP) or sentence order prediction (SOP).

Source: Devlin et al. 2019, and of SOP Lan et al. 2020 (ALBERT).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float

from bert_jax.batches import loader
from bert_jax.batches.packing import PairStatistics
from bert_jax.config import TrainConfig
from bert_jax.config.schedule import Stage
from bert_jax.errors import UserError
from bert_jax.models.architecture import architecture, num_token_types
from bert_jax.models.encoder import EncoderOutput
from bert_jax.models.layers import Dense
from bert_jax.objectives.base import cross_entropy
from bert_jax.objectives.masked_lm import (
    BertForMaskedLM,
    MaskedLM,
    MaskedLMOutput,
    check_separators,
)
from bert_jax.text.sentences import MAX_DOCUMENT_SENTENCES
from bert_jax.text.store import Corpus
from bert_jax.training.objective import Batch, Figure, Metrics, Weights

_MOST_CUT = 0.1  # the share of the text beyond which what is never read is worth a warning
_ONE_LABEL = 0.8  # the share of the more frequent label above which labels have little to teach


@struct.dataclass
class PreTrainingOutput(MaskedLMOutput):
    """The output of the model.

    Attributes:
      nsp_logits: [B, 2], or [B, T, 2] of packed sequences, in float32.
    """

    nsp_logits: Any


class BertForPreTraining(BertForMaskedLM):
    """The encoder with the MLM head, the pooler and the NSP head."""

    add_pooling_layer = True

    def setup(self) -> None:
        super().setup()
        self.nsp_head = Dense(self.config, (self.config.hidden_size, 2), ("embed", "label"))

    def heads(self, output: EncoderOutput, hidden: Float[Array, "B P D"]) -> Any:
        """Return the output of both heads."""
        nsp_logits = self.nsp_head(output.pooled).astype(jnp.float32)
        return PreTrainingOutput(self.mlm_logits(hidden), hidden, nsp_logits)


class SentencePairs(MaskedLM):
    """Masked LM, and whether the second text of a pair follows the first."""

    @property
    def figures(self) -> Sequence[Figure]:
        name = self.config.data.pairs.upper()
        return (
            *super().figures,
            Figure("nsp_loss", f"{name} loss", "z.3f", unit="nats"),
            Figure("nsp_accuracy", f"{name} accuracy", ".1%", "majority class"),
        )

    @classmethod
    def is_default(cls, config: TrainConfig) -> bool:
        return config.data.pairs != "none"

    @classmethod
    def make_model(cls, config: TrainConfig) -> nn.Module:
        return BertForPreTraining(config.model)

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        pairs, model = config.data.pairs, config.model
        if pairs == "none":
            raise UserError("objective sentence_pairs needs data.pairs; set it to nsp or sop")
        if not architecture(model).pretrains_on_pairs:
            raise UserError(
                f"data.pairs {pairs} needs a head that model.model_type {model.model_type} does "
                "not have; set data.pairs to none, and objective to auto"
            )
        if num_token_types(model) < 2:
            name = "pair_token_types of 2" if model.pair_token_types else "pair_separators of 1"
            name = name if model.type_vocab_size > 1 else "type_vocab_size of 2"
            raise UserError(
                f"data.pairs {pairs} needs a model.{name}; set it, or data.pairs to none and "
                "objective to auto"
            )
        check_separators(config)

    def head_flops(self, stage: Stage) -> float:
        return super().head_flops(stage) + 6.0 * self.config.model.hidden_size**2

    def prepare(self, key: Array, batch: Batch) -> Batch:
        """Mask the tokens, and add `predictions`, and `nsp_label` and `nsp_weight` of each pair."""
        label = batch["next_sentence_label"]
        is_pair = label >= 0
        if label.ndim == 1:  # in packed sequences padding has no pairs
            is_pair &= batch["attention_mask"][:, 0] > 0
        return {
            **super().prepare(key, batch),
            "nsp_label": jnp.maximum(label, 0),
            "nsp_weight": is_pair.astype(jnp.float32),
        }

    def weights(self, batch: Batch) -> Weights:
        return {**super().weights(batch), "nsp": batch["nsp_weight"].sum()}

    def loss(
        self, params: Any, batch: Batch, weights: Weights, dropout_key: Array | None
    ) -> tuple[Float[Array, ""], Metrics]:
        loss, metrics, output = self.masked_lm_loss(params, batch, weights, dropout_key)
        metrics |= cross_entropy("nsp_", output.nsp_logits, batch["nsp_label"], batch["nsp_weight"])
        return loss + metrics["nsp_loss"].total / jnp.maximum(weights["nsp"], 1.0), metrics

    def check_text(self, corpus: Corpus) -> None:
        for part in corpus.parts:
            for name, split in (("training", part.train), ("held-out", part.eval)):
                if split.num_sentences == 1:
                    of = f" of {part.name}" if part.name else ""
                    raise UserError(
                        f"the {name} text{of} is a single sentence, of which no pair can be made; "
                        "set data.pairs to none and objective to auto, or give more text"
                    )

    def text_warnings(self, corpus: Corpus, statistics: Mapping[int, PairStatistics]) -> list[str]:
        name, found, longest = self.config.data.pairs.upper(), [], statistics[max(statistics)]
        without = "--config.data.pairs=none"
        if self.config.objective != "auto":
            without += " --config.objective=auto"
        # Short sequences hold few pairs.
        if reason := self._unlearnable(corpus, longest.majority):
            found.append(f"{reason}; train without {name} by {without}")
        cut = statistics[self.config.data.max_length].cut  # a later phase may cut less
        if cut > _MOST_CUT:
            found.append(
                f"{cut:.0%} of the text is cut off, as its sentences are beyond data.max_length; "
                "split them by --config.data.sentences=split if they are several (of one document "
                f"a line, as .jsonl), or train on all of it by {without}"
            )
        return found

    def _from_one_document(self, corpus: Corpus) -> str:
        """Return which text is one document, so that none of its pairs is from two, or ""."""
        for part in corpus.parts:
            of = f" of {part.name}" if part.name else ""
            for name, split, fault in (
                ("training", part.train, "little to learn"),
                ("held-out", part.eval, "no true scores"),
            ):
                if len(split.documents) == 2:  # where the one starts, and ends
                    return (
                        f"NSP has {fault}: the {name} text{of} is one document, so no pair is from "
                        "two"
                    )
        return ""

    def _unlearnable(self, corpus: Corpus, majority: float) -> str:
        """Return why the pairs of a text teach little or nothing, or ""."""
        name = self.config.data.pairs.upper()
        counts = np.concatenate([np.diff(part.train.documents) for part in corpus.parts])
        if majority > _ONE_LABEL:
            reason = "few of them are of two sentences of a document that fit into data.max_length"
            if (single := (counts == 1).mean()) > 0.5:
                reason = f"{single:.0%} of the documents are a single sentence"
            share = f"{majority:.0%} of the pairs have one label"
            return f"{name} has little to learn: {share}, as {reason}"
        if self.config.data.pairs == "nsp" and (fault := self._from_one_document(corpus)):
            return fault
        # Some sentences of a full document may be empty.
        is_full = counts > 0.95 * MAX_DOCUMENT_SENTENCES
        if counts[is_full].sum() > 0.5 * counts.sum():
            return (
                f"most documents are cut at {MAX_DOCUMENT_SENTENCES:,} sentences, as where a text "
                f"has no blank lines; {name} cannot be learned if its lines are unrelated"
            )
        return ""

    def baselines(self, corpus: Corpus, stage: Stage) -> dict[str, float]:
        share, config = 0.0, self.config
        most = config.eval_rows // len(corpus.parts)
        for part in corpus.parts:
            batches = loader.EvalBatches(part, stage, config.data, most)
            labels = [x["next_sentence_label"][x["attention_mask"][:, 0] > 0] for x in batches]
            share += part.weight * float(np.concatenate(labels).mean())
        return {**super().baselines(corpus, stage), "nsp_accuracy": max(share, 1 - share)}
