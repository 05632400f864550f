"""What `fill_mask` guesses."""

import dataclasses

import pytest
from helpers import random_bert


def test_embeddings_that_are_of_no_token_are_no_guesses(tiny_bert):
    size = tiny_bert.tokenizer.vocab_size
    config = dataclasses.replace(tiny_bert.config, vocab_size=size + 16)
    guesses = random_bert(config, tiny_bert.tokenizer).fill_mask("the [MASK] bank", top_k=size + 16)
    assert len(guesses) == size
    assert sum(each.probability for each in guesses) == pytest.approx(1)
