"""Where attention heads look: shares of attention by kind of token, over any number of texts."""

import dataclasses

import numpy as np

from bert_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Patterns:
    """Stub."""

    model: str


def of_text(
    model: str, tokenizer: Tokenizer, maps: np.ndarray, input_ids: np.ndarray, second_start: int
) -> Patterns:
    """Return the patterns of one text's maps [layers, heads, L, L]."""
    raise NotImplementedError
