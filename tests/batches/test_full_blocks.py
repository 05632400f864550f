"""Full blocks: consecutive text, [SEP] between documents, no padding."""

import numpy as np
import pytest
from helpers import FakeTokenizer
from stores import FIRST_TOKEN, make_store

from bert_jax.batches.full_blocks import FullBlocks

LENGTH = 64


@pytest.mark.parametrize("longest", [3, 30, 200])
def test_blocks(longest):
    """Blocks hold consecutive tokens, [SEP] where documents end, no padding, no token twice."""
    store = make_store(60, longest=longest)
    ends = store.sentences[store.documents[1:]] + FIRST_TOKEN - 1
    blocks = FullBlocks(store, FakeTokenizer(), LENGTH, 0)
    batch = blocks.batch(0, blocks.sequences_per_epoch)
    seen = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        assert mask.all()
        assert ids[0] == FakeTokenizer.cls_id
        assert ids[-1] == FakeTokenizer.sep_id
        text, inside = ids[1:-1], ids[1:-1] != FakeTokenizer.sep_id
        tokens = text[inside]
        np.testing.assert_array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens)))
        for position in np.flatnonzero(~inside):
            assert position == 0 or text[position - 1] in ends
        closed = ends[(ends >= tokens[0]) & (ends < tokens[-1])]
        assert (~inside[1:]).sum() >= len(closed)
        seen.append(tokens)
    seen = np.concatenate(seen)
    assert len(np.unique(seen)) == len(seen)
    assert len(seen) > 0.9 * len(store.tokens) - 2 * LENGTH
    # What one epoch drops, others do not.
    others = [blocks.batch(epoch, blocks.sequences_per_epoch) for epoch in range(1, 30)]
    seen = np.concatenate([seen, *(batch["input_ids"].ravel() for batch in others)])
    assert np.isin(store.tokens[2 * LENGTH : -2 * LENGTH], seen).all()
