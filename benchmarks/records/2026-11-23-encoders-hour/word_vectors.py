"""What the pretraining text can tell about reviews without any encoder: word2vec and TF-IDF.

python word_vectors.py enwiki.train.txt REVIEWS   # needs gensim 4; ten minutes on three cores
"""

import csv
import re
import sys
from pathlib import Path

import numpy as np
from gensim.models import Word2Vec  # pyright: ignore[reportMissingImports]
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression


def words(text: str) -> list[str]:
    """Return the words and the signs of a text."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


class Sentences:
    """The sentences of a file, any number of times."""

    def __init__(self, path: str):
        self._path = path

    def __iter__(self):
        with open(self._path, encoding="utf-8") as file:
            yield from filter(None, map(words, file))


def read(path: Path) -> tuple[list[str], list[str]]:
    """Return the sentences of a table and their labels."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row["sentence"] for row in rows], [row["label"] for row in rows]


text, folder = sys.argv[1], Path(sys.argv[2])
vectors = Word2Vec(
    Sentences(text), vector_size=300, window=5, sg=1, negative=10, epochs=5, workers=3, seed=1
).wv


def mean_vector(sentence: str) -> np.ndarray:
    """Return the mean of the vectors of the words that have one."""
    found = [vectors[word] for word in words(sentence) if word in vectors]
    return np.mean(found, axis=0) if found else np.zeros(300)


(train, labels), (dev, dev_labels) = read(folder / "train.tsv"), read(folder / "dev.tsv")
means, dev_means = (np.array([mean_vector(s) for s in each]) for each in (train, dev))
means, dev_means = means / means.std(axis=0), dev_means / means.std(axis=0)
tfidf = TfidfVectorizer(tokenizer=words, token_pattern=None, ngram_range=(1, 2), sublinear_tf=True)
counts, dev_counts = tfidf.fit_transform(train), tfidf.transform(dev)
both = (sparse.hstack(parts) for parts in ((counts, means / 20), (dev_counts, dev_means / 20)))
for name, c, one, other in (
    ("word vectors", 0.01, means, dev_means),
    ("TF-IDF of words and pairs of words", 4.0, counts, dev_counts),
    ("both", 4.0, *both),
):
    classifier = LogisticRegression(C=c, max_iter=2000).fit(one, labels)
    print(f"{name}: {classifier.score(other, dev_labels):.4f}")
