"""What the tests of text share."""

import pytest
from texts import CHUNK_BYTES

from bert_jax.text import file_source, prepare


@pytest.fixture
def small_chunks(monkeypatch):
    """Divide a text of some kilobytes as one of many chunks and batches is."""
    monkeypatch.setattr(file_source, "_CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(prepare, "_BATCH_CHARACTERS", 400)
