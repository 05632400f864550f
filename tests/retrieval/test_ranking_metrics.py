"""Scores of ranked results: worked by hand, and against `pytrec_eval`."""

import numpy as np
import pytest

from bert_jax.retrieval.metrics import ranking_scores

LOG3 = np.log2(3)


def scores(rankings, relevance, cutoffs=(10,)) -> dict[str, list[float]]:
    return {k: v.tolist() for k, v in ranking_scores(rankings, relevance, cutoffs).items()}


def test_worked_by_hand():
    """Relevant results 2 and 9 are ranked 1 and 3; 9 is of grade 3, and 4 is not found."""
    found = scores([[2, 5, 9, 0]], [{2: 1.0, 9: 3.0, 4: 1.0, 5: 0.0}], (1, 3))
    assert found["map"] == pytest.approx([(1 / 1 + 2 / 3) / 3])
    assert found["recall@1"] == pytest.approx([1 / 3])
    assert found["recall@3"] == pytest.approx([2 / 3])
    assert found["mrr@1"] == found["mrr@3"] == [1.0]
    assert found["ndcg@1"] == pytest.approx([1 / 3])
    assert found["ndcg@3"] == pytest.approx([(1 + 3 / 2) / (3 + 1 / LOG3 + 1 / 2)])


def test_the_first_relevant_result():
    relevance = [{1: 1.0}, {1: 1.0}, {7: 1.0}]
    found = scores([[0, 3, 1], [1], [1, 2, 3]], relevance, (2, 3))
    assert found["mrr@3"] == pytest.approx([1 / 3, 1.0, 0.0])
    assert found["mrr@2"] == [0.0, 1.0, 0.0]
    assert found["recall@2"] == [0.0, 1.0, 0.0]
    assert found["ndcg@3"] == pytest.approx([0.5, 1.0, 0.0])  # log2(4) = 2


def test_nothing_relevant_scores_nothing():
    found = scores([[1, 2], []], [{}, {3: 0.0}])
    assert all(values == [0.0, 0.0] for values in found.values())


@pytest.mark.parity
def test_equal_to_pytrec_eval():
    pytrec_eval = pytest.importorskip("pytrec_eval")
    generator, number, cutoffs = np.random.default_rng(0), 60, (1, 5, 10, 30)
    rankings = [generator.permutation(50)[: generator.integers(1, 31)] for _ in range(number)]
    relevance = [
        {int(i): int(generator.integers(0, 4)) for i in generator.permutation(50)[:size]}
        for size in generator.integers(1, 25, number)
    ]
    judged = {str(q): {str(i): g for i, g in r.items()} for q, r in enumerate(relevance)}
    run = {
        str(q): {str(i): float(-rank) for rank, i in enumerate(ranking)}
        for q, ranking in enumerate(rankings)
    }
    names = ",".join(map(str, cutoffs))
    measures = {f"ndcg_cut.{names}", f"recall.{names}", "map", "recip_rank"}
    expected = pytrec_eval.RelevanceEvaluator(judged, measures).evaluate(run)
    found = ranking_scores(rankings, relevance, cutoffs)
    columns = {"map": "map"} | {f"mrr@{k}": "" for k in cutoffs}
    columns |= {f"ndcg@{k}": f"ndcg_cut_{k}" for k in cutoffs}
    columns |= {f"recall@{k}": f"recall_{k}" for k in cutoffs}
    assert set(columns) == set(found)
    for name, theirs in columns.items():
        values = [expected[str(q)][theirs or "recip_rank"] for q in range(number)]
        if not theirs:  # it has no cut of the reciprocal rank
            k = int(name.partition("@")[2])
            values = [value * (value >= 1 / k) for value in values]
        np.testing.assert_allclose(found[name], values, rtol=1e-12, atol=1e-12)
