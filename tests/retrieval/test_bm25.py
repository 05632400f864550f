"""BM25 and TF-IDF: worked by hand, and against `bm25s` and scikit-learn."""

import re

import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer

from bert_jax import UserError
from bert_jax.retrieval import bm25, search

WORDS = ["file", "remove", "open", "path", "sum", "of", "the", "a", "numbers", "größe", "文字"]


def some_texts(number: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    share = 1 / np.arange(1, len(WORDS) + 1)
    share /= share.sum()
    sizes = generator.integers(1, 12, number)
    return [" ".join(generator.choice(WORDS, size, p=share)) for size in sizes]


def test_worked_by_hand():
    """Four texts, of which two have "file", of length 3, where the mean is 2."""
    counts = np.array([[2, 1, 0], [1, 0, 1], [0, 0, 2], [0, 1, 0]])
    weights = bm25.bm25_weights(counts).toarray()
    rarity = np.log(1 + (4 - 2 + 0.5) / (2 + 0.5))
    assert weights[0, 0] == pytest.approx(rarity * 2 / (2 + 1.2 * (0.25 + 0.75 * 3 / 2)))
    assert weights[1, 0] == pytest.approx(rarity * 1 / (1 + 1.2))
    assert weights[2, 0] == 0


@pytest.mark.parity
def test_equal_to_bm25s():
    bm25s = pytest.importorskip("bm25s")
    texts, queries = some_texts(200), some_texts(20, 1)
    split = [[re.findall(r"\w+", text) for text in some] for some in (texts, queries)]
    theirs = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    theirs.index(split[0], show_progress=False)
    vectorizer = CountVectorizer(token_pattern=r"\b\w+\b")
    weights = bm25.bm25_weights(vectorizer.fit_transform(texts))
    for query, words in zip(queries, split[1], strict=True):
        ours = (vectorizer.transform([query]) @ weights.T).toarray()[0]
        np.testing.assert_allclose(ours, theirs.get_scores(words), rtol=1e-5)


def test_scripts_without_spaces_find_their_passages():
    """Each text has two of its own characters in an order of its own among common ones."""
    generator, characters = np.random.default_rng(0), [chr(0x4E00 + i) for i in range(2000)]
    texts = ["".join(generator.choice(characters, 12)) for _ in range(300)]
    queries = [text[3:8] for text in texts]
    found = bm25.rank(texts, queries, 1).indices[:, 0]
    assert (found == np.arange(300)).mean() > 0.99


def test_the_best_of_both(monkeypatch):
    monkeypatch.setattr(search, "_SCORES", 700)  # in blocks of three queries
    texts, queries = some_texts(200), some_texts(20, 1)
    found = bm25.baselines(texts, queries, 10)
    vectorizer = TfidfVectorizer(token_pattern=r"\b\w+\b").fit(texts)
    cosines = (vectorizer.transform(queries) @ vectorizer.transform(texts).T).toarray()
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :10]
    np.testing.assert_array_equal(found["TF-IDF"].indices, order)
    np.testing.assert_allclose(
        found["TF-IDF"].scores, np.take_along_axis(cosines, order, 1), rtol=1e-6
    )
    assert found["BM25"].indices.shape == (20, 10)
    assert (np.diff(found["BM25"].scores, axis=1) <= 0).all()


def test_unknown_words_and_no_words():
    found = bm25.baselines(["a file", "a sum"], ["unknown", ""], 1)
    assert found["BM25"].scores.tolist() == found["TF-IDF"].scores.tolist() == [[0.0], [0.0]]
    with pytest.raises(UserError, match="2 texts have no words to search for"):
        bm25.baselines(["...", "!"], ["a"], 1)
