"""Views of random numbers, whose maps are the softmax of their queries and keys."""

import numpy as np

from bert_jax.viewer.view import AttentionView


class Words:
    """A tokenizer whose tokens are words."""

    sep_id = -1  # of no word

    def __init__(self, words):
        self.words = words
        self.vocab_size = len(words)

    def readable(self, index):
        return self.words[index]


def random_view(tokens, *, second_start=None, layers=3, heads=4, size=8, relative=False, **rest):
    """A view of some tokens, the second text's from `second_start` on."""
    generator, length = np.random.default_rng(len(tokens)), len(tokens)
    queries, keys = generator.normal(size=(2, layers, heads, length, size)).astype(np.float32)
    positions = None
    scores = queries @ keys.swapaxes(-1, -2)
    if relative:
        positions = generator.normal(size=scores.shape).astype(np.float32)
        scores = scores + positions
    powers = np.exp(scores / np.sqrt(size))
    fields = {
        "model": f"Bert(bert, {layers} layers of {heads * size}, {heads} heads)",
        "tokenizer": Words(tokens),
        "texts": [" ".join(tokens)] if second_start is None else ["the first", "the second"],
        "input_ids": np.arange(length, dtype=np.int32),
        "second_start": length if second_start is None else second_start,
        "maps": powers / powers.sum(-1, keepdims=True),
        "queries": queries,
        "keys": keys,
        "position_scores": positions,
        "hidden_states": generator.normal(size=(layers + 1, length, 16)).astype(np.float32),
        "guesses": {},
        "prediction": None,
        "is_truncated": False,
    }
    return AttentionView(**{**fields, **rest})
