"""Scores of ranked results: nDCG, MRR, recall and MAP, as `trec_eval` defines them.

Shapes: Q queries, K results of each.
"""

from collections.abc import Mapping, Sequence

import numpy as np


def ranking_scores(
    rankings: np.ndarray | Sequence[Sequence[int]],
    relevance: Sequence[Mapping[int, float]],
    cutoffs: Sequence[int] = (10,),
) -> dict[str, np.ndarray]:
    """Return the scores of each query; their mean over the queries is what is reported.

    A result without an entry in `relevance` is not relevant. A query without relevant results
    scores 0.

    Args:
      rankings: [Q, K], or Q lists: the indices of the results, the best first, each once.
      relevance: of each query, how relevant results are, above 0 if they are at all. Only nDCG uses
        the grade.
      cutoffs: how many results to look at, for each of "ndcg@k", "mrr@k" and "recall@k".

    Returns:
      [Q] float64 for each name; and for "map", which looks at all K results. nDCG divides a grade
      by log2(rank + 1), as `trec_eval` and BEIR do (Järvelin and Kekäläinen 2002).

    >>> scores = ranking_scores([[7, 3, 5]], [{3: 1.0, 4: 1.0}], cutoffs=(2,))
    >>> {name: value.round(3).tolist() for name, value in scores.items()}
    {'ndcg@2': [0.387], 'mrr@2': [0.5], 'recall@2': [0.5], 'map': [0.25]}
    """
    length = max([*cutoffs, *map(len, rankings)])
    grades, ideal = np.zeros((len(rankings), length)), np.zeros((len(rankings), length))
    totals = np.zeros(len(rankings))
    for query, (ranking, judged) in enumerate(zip(rankings, relevance, strict=True)):
        grades[query, : len(ranking)] = [max(0.0, judged.get(int(index), 0)) for index in ranking]
        sorted_grades = sorted((grade for grade in judged.values() if grade > 0), reverse=True)
        ideal[query, : len(sorted_grades)] = sorted_grades[:length]
        totals[query] = len(sorted_grades)
    ranks = np.arange(1, length + 1)
    is_relevant, found = grades > 0, np.cumsum(grades > 0, axis=1)
    discounts, totals = 1 / np.log2(ranks + 1), np.maximum(totals, 1)
    scores = {}
    for k in cutoffs:
        gain, most = (values[:, :k] @ discounts[:k] for values in (grades, ideal))
        scores[f"ndcg@{k}"] = gain / np.where(most > 0, most, 1)
        scores[f"mrr@{k}"] = (is_relevant / ranks)[:, :k].max(1)
        scores[f"recall@{k}"] = found[:, k - 1] / totals
    return scores | {"map": (is_relevant * found / ranks).sum(1) / totals}
