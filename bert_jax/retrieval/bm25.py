"""Search by words: BM25 and TF-IDF, the baselines of search by vectors.

Shapes: N texts, Q queries, V words.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse
from tokenizers import Regex, pre_tokenizers

from bert_jax.errors import UserError
from bert_jax.retrieval.search import TopK, sparse_top_k

# Robertson and Zaragoza 2009, equation 3.15; the values are those of Lucene's BM25Similarity.
K1, B = 1.2, 0.75
# Han, kana, Thai, Lao, Tibetan, Burmese and Khmer, which have no spaces between words.
_SPACELESS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_SPACELESS += "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff"
_LETTERS = r"\p{L}\p{M}\p{N}_"
_WORDS = pre_tokenizers.Split(
    Regex(rf"[{_LETTERS}&&[{_SPACELESS}]]+|[{_LETTERS}&&[^{_SPACELESS}]]+"), "removed", invert=True
)
_IS_SPACELESS = re.compile(f"[{_SPACELESS}]")


def baselines(texts: Sequence[str], queries: Sequence[str], k: int) -> dict[str, TopK]:
    """Return the k best texts for each query, by "BM25" and by "TF-IDF".

    Words are those of `words`.

    Raises:
      UserError: the texts have no words.

    >>> found = baselines(["remove a file", "open a file", "a sum"], ["how to remove it"], k=1)
    >>> {name: top.indices.tolist() for name, top in found.items()}
    {'BM25': [[0]], 'TF-IDF': [[0]]}
    """
    from sklearn.feature_extraction.text import TfidfTransformer  # a second

    counts, asked = _count(texts, queries)
    tfidf = TfidfTransformer().fit(counts)  # its vectors have unit length
    return {
        "BM25": sparse_top_k(bm25_weights(counts), asked, k),
        "TF-IDF": sparse_top_k(tfidf.transform(counts), tfidf.transform(asked), k),
    }


def rank(texts: Sequence[str], queries: Sequence[str], k: int) -> TopK:
    """Return the k best texts for each query by BM25; see `baselines`.

    >>> rank(["remove a file", "open a file"], ["to open it"], k=1).indices.tolist()
    [[1]]
    """
    counts, asked = _count(texts, queries)
    return sparse_top_k(bm25_weights(counts), asked, k)


def scores(
    texts: Sequence[str], queries: Sequence[str], candidates: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Return the scores by BM25 of some texts for each query, given by their indices.

    >>> found = scores(["remove a file", "open a file"], ["to open it"], [[1, 0]])
    >>> [values.argmax().item() for values in found]
    [0]
    """
    counts, asked = _count(texts, queries)
    weights = bm25_weights(counts)
    return [
        (weights[indices] @ query.T).toarray().ravel()
        for indices, query in zip(candidates, asked, strict=True)
    ]


def words(text: str) -> list[str]:
    """Return the words of a text in lower case: runs of letters, marks, digits and underscores.

    Of a run without spaces between its words, as in Chinese, they are the pairs of neighboring
    characters, as in Lucene's CJKBigramFilter.

    >>> words("Remove_it, नमस्ते"), words("删除文件 x")
    (['remove_it', 'नमस्ते'], ['删除', '除文', '文件', 'x'])
    """
    found: list[str] = []
    for run, _ in _WORDS.pre_tokenize_str(text.lower()):
        is_pairs = len(run) > 1 and _IS_SPACELESS.match(run)
        found += map("".join, itertools.pairwise(run)) if is_pairs else [run]
    return found


def words_and_pairs(text: str) -> list[str]:
    """Return the `words` of two characters or more, and the pairs of neighboring ones.

    >>> words_and_pairs("open a file")
    ['open', 'file', 'open file']
    """
    found = [word for word in words(text) if len(word) > 1]
    return found + [" ".join(pair) for pair in itertools.pairwise(found)]


def _count(texts: Sequence[str], queries: Sequence[str]) -> tuple[Any, Any]:
    """Return how often each word of the texts is in a text, [N, V], and in a query, [Q, V]."""
    from sklearn.feature_extraction.text import CountVectorizer

    options: dict[str, Any] = {"analyzer": words}
    vectorizer = CountVectorizer(**options)
    try:
        counts = vectorizer.fit_transform(texts)
    except ValueError as error:  # no words
        raise UserError(f"{len(texts):,} texts have no words to search for") from error
    return counts, vectorizer.transform(queries)


def bm25_weights(counts: Any) -> sparse.csr_matrix:
    """Return what each word of a text adds to its score, [N, V], from how often it occurs.

    With N texts, of which n have the word, f times in a text of length l, where the mean is m:
    log(1 + (N - n + 0.5) / (n + 0.5)) * f / (f + k1 * (1 - b + b * l / m)).
    """
    counts = sparse.csr_matrix(counts, dtype=np.float64)
    number, lengths = counts.shape[0], np.asarray(counts.sum(1)).ravel()
    having = np.bincount(counts.indices, minlength=counts.shape[1])
    rarity = np.log(1 + (number - having + 0.5) / (having + 0.5))
    damping = K1 * (1 - B + B * lengths / lengths.mean())
    weights = counts.copy()
    weights.data /= weights.data + np.repeat(damping, np.diff(counts.indptr))
    weights.data *= rarity[counts.indices]
    return weights
