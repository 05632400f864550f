"""Guess masked tokens with the masked LM head of a model."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.inference.embeddings import encoder_inputs, pad, padded_length
from bert_jax.models.heads import PreTrainingModel, TaskModel
from bert_jax.text.tokenizer import Tokenizer

_GUESSES_BY_LAYER = 5  # for a masked token, in the view of a text


@dataclasses.dataclass(frozen=True)
class Guess:
    """A token for a masked position.

    Attributes:
      token: as the vocabulary has it.
      probability: of the token, by the model.
      text: the whole text with the token filled in.
      position: index of the masked token in the sequence, in which [CLS] is 0.

    >>> guess = getfixture("tiny_bert").fill_mask("The [MASK] bank.", top_k=1)[0]
    >>> 0 < guess.probability < 1, guess.position
    (True, 2)
    """

    token: str
    probability: float
    text: str
    position: int


class MaskFiller:
    """The masked LM head with its encoder, which keeps what it has compiled."""

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        model: PreTrainingModel | TaskModel,
        tokenizer: Tokenizer,
    ):
        if {"mlm_head", "generator_head"}.isdisjoint(params):
            lacks = "masked LM head"
            if config.model_type == "electra":
                lacks = "generator, which is what fills masks in an electra"
            raise UserError(
                f"the checkpoint has no {lacks}; take one that was pretrained and not "
                "fine-tuned, or pretrain from it to train one"
            )
        self._has_own_layers = "generator" in params
        self._config, self._tokenizer, self._variables = config, tokenizer, {"params": params}
        self._apply = jax.jit(model.apply)
        self._apply_head = jax.jit(partial(model.apply, method="mlm_logits"))

    def __call__(self, ids: Sequence[int], top_k: int) -> list[Guess]:
        """Return what `Bert.fill_mask` does, for token ids without [CLS] and [SEP]."""
        if top_k < 1:
            raise UserError(f"top_k is {top_k}; it must be at least 1")
        tokenizer, longest = self._tokenizer, self._config.max_position_embeddings
        sequence = [tokenizer.cls_id, *ids, tokenizer.sep_id]
        if (count := len(sequence)) > longest:
            raise UserError(
                f"the text has {count} tokens and the model {longest} positions; shorten it"
            )
        positions = [i for i, token in enumerate(sequence) if token == tokenizer.mask_id]
        padded, _ = pad([positions], (1, -(-len(positions) // 16) * 16), 0)
        length = padded_length(self._config, count)
        inputs = encoder_inputs(self._config, [sequence], [count], length, tokenizer.pad_id)
        logits: Any = self._apply(self._variables, **inputs, positions=padded)
        guesses = []
        probabilities = self._probabilities(logits.mlm_logits[0, : len(positions)])
        for position, row in zip(positions, probabilities, strict=True):
            for token in np.argsort(-row)[:top_k].tolist():
                filled = [*sequence[1:position], token, *sequence[position + 1 : -1]]
                text = tokenizer.decode_with_masks(filled)
                guesses.append(Guess(tokenizer.readable(token), float(row[token]), text, position))
        return guesses

    def by_layer(
        self, states: np.ndarray, positions: np.ndarray
    ) -> dict[int, list[list[tuple[str, float]]]]:
        """Return the best tokens at masked positions by hidden states [layers + 1, L, D].

        A generator with layers of its own cannot read those of the encoder: then there are none.
        """
        if self._has_own_layers:
            return {}
        logits = self._apply_head(self._variables, states[:, positions])
        probabilities = self._probabilities(logits)
        best = np.argsort(-probabilities)[..., :_GUESSES_BY_LAYER]
        return {
            int(position): [
                [(self._tokenizer.readable(int(t)), float(layer[i, t])) for t in tokens[i]]
                for layer, tokens in zip(probabilities, best, strict=True)
            ]
            for i, position in enumerate(positions)
        }

    def _probabilities(self, logits: Any) -> np.ndarray:
        # Embeddings beyond the vocabulary are padding.
        return np.asarray(jax.nn.softmax(logits[..., : self._tokenizer.vocab_size]))
