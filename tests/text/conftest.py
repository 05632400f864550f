"""What the tests of text share."""

import pytest
from texts import CHUNK_BYTES

from bert_jax.text import prepare, sources


@pytest.fixture(scope="module")
def small_chunks():
    """Divide a text of some kilobytes as one of many chunks and batches is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr(prepare, "_BATCH_CHARACTERS", 400)
        yield
