"""What is true of every kind of sequences: pairs, packed pairs and full blocks."""

import numpy as np
import pytest
from helpers import FakeTokenizer
from stores import check_pure, make_store, store_of

from bert_jax.batches import loader
from bert_jax.config import DataConfig
from bert_jax.text.store import TokenStore

KINDS = {
    "nsp": DataConfig(pairs="nsp"),
    "sop": DataConfig(pairs="sop"),
    "packed nsp": DataConfig(pairs="nsp", packing=True),
    "packed sop": DataConfig(pairs="sop", packing=True),
    "blocks": DataConfig(pairs="none"),
}


def make_sequences(store: TokenStore, kind: str, seed: int = 0):
    return loader.make_sequences(store, FakeTokenizer(), KINDS[kind], 64, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_a_pure_function_of_its_number(kind):
    store = make_store(300)
    check_pure(lambda seed: make_sequences(store, kind, seed))


@pytest.mark.parametrize("kind", KINDS)
def test_text_shorter_than_a_sequence(kind):
    batch = make_sequences(store_of([2], [2, 3]), kind).batch(7, 16)
    assert ((batch["attention_mask"] > 0).sum(1) >= 5).all()
    assert set(np.unique(batch["input_ids"])) <= {0, 2, 3, *range(10, 15)}
