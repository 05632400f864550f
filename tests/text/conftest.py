"""What the tests of text share."""

import pytest
from texts import CHUNK_BYTES

from bert_jax.text import prepare, sources, tokenizer_training


@pytest.fixture(scope="module")
def small_chunks():
    """Divide a text of some kilobytes as one of many chunks and batches is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr(prepare, "_BATCH_CHARACTERS", 400)
        yield


@pytest.fixture
def samples(monkeypatch):
    """The sentences that each tokenizer of the test is trained on."""
    train, found = tokenizer_training.train, []

    def recorded(sentences, *args):
        found.append(list(sentences))
        return train(found[-1], *args)

    monkeypatch.setattr(tokenizer_training, "train", recorded)
    return found
