"""Guess masked tokens with the masked LM head of a model."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from scipy.special import softmax

from bert_jax.errors import UserError, check_count
from bert_jax.inference.loading import LoadedModel
from bert_jax.inference.runner import Arrays, apply
from bert_jax.inference.tokenization import sequences_of

_GUESSES_BY_LAYER = 5  # for a masked token, in the view of a text
_POSITIONS_MULTIPLE = 16  # masked positions are padded, as each number of them compiles a program


@dataclasses.dataclass(frozen=True)
class Guess:
    """A token for a masked position.

    Attributes:
      token: as the vocabulary has it.
      probability: of the token, by the model.
      text: the whole text with the token filled in, as the tokenizer decodes it: without words that
        it does not know, and in lower case where it lower-cases.
      position: index of the masked token in the sequence, in which [CLS] is 0.

    >>> guess = getfixture("tiny_bert").fill_mask("The [MASK] bank.", top_k=1)[0]
    >>> 0 < guess.probability < 1, guess.position
    (True, 2)
    """

    token: str
    probability: float
    text: str
    position: int


def check_head(model: LoadedModel) -> None:
    """Refuse a model without a masked LM head."""
    if getattr(model.model, "mask_head", None) not in model.params:
        raise UserError(
            "the checkpoint has no masked LM head, and no generator with one, to fill masks; take "
            "one that was pretrained and not fine-tuned, or pretrain from it to train one"
        )


def fill_masks(model: LoadedModel, token_ids: Sequence[int], top_k: int) -> list[Guess]:
    """Return what `Bert.fill_mask` does, for token ids without [CLS] and [SEP]."""
    check_head(model)
    check_count(top_k, "top_k")
    tokenizer, longest = model.tokenizer, model.config.max_position_embeddings
    sequence = [tokenizer.cls_id, *token_ids, tokenizer.sep_id]
    if (count := len(sequence)) > longest:
        raise UserError(
            f"the text has {count} tokens and the model {longest} positions; shorten it"
        )
    positions = [i for i, token in enumerate(sequence) if token == tokenizer.mask_id]
    padding = -len(positions) % _POSITIONS_MULTIPLE
    padded = np.pad(np.array(positions, np.int32), (0, padding))[None]
    module = model.model

    def logits_of(params: Any, batch: Arrays) -> jax.Array:
        return apply(module, params, batch).mlm_logits

    step = model.runner.compile("masked LM", logits_of)
    batch = {**sequences_of(model, [sequence]).all(), "positions": padded}
    logits = model.runner.call(step, batch)[0, : len(positions)]
    guesses = []
    for position, row in zip(positions, _probabilities(model, logits), strict=True):
        for token in np.argsort(-row)[:top_k].tolist():
            filled = [*sequence[1:position], token, *sequence[position + 1 : -1]]
            text = tokenizer.decode_with_masks(filled)
            guesses.append(Guess(tokenizer.readable(token), float(row[token]), text, position))
    return guesses


def guesses_by_layer(
    model: LoadedModel, states: np.ndarray, positions: np.ndarray
) -> dict[int, list[list[tuple[str, float]]]]:
    """Return the best tokens at masked positions by hidden states [layers + 1, L, D].

    A generator with layers of its own cannot read those of the encoder: then there are none.
    """
    if "generator" in model.params:
        return {}
    step = model.runner.compile(
        "masked LM head", functools.partial(apply, model.model, method="mlm_logits")
    )
    logits = model.runner.call(step, {"hidden": states[:, positions]})
    probabilities = _probabilities(model, logits)
    best = np.argsort(-probabilities)[..., :_GUESSES_BY_LAYER]
    return {
        int(position): [
            [(model.tokenizer.readable(int(t)), float(layer[i, t])) for t in tokens[i]]
            for layer, tokens in zip(probabilities, best, strict=True)
        ]
        for i, position in enumerate(positions)
    }


def _probabilities(model: LoadedModel, logits: np.ndarray) -> np.ndarray:
    # Embeddings beyond the vocabulary are padding.
    return softmax(logits[..., : model.tokenizer.vocab_size], axis=-1)
