"""The passages of queries: which are relevant, which are not, and which BM25 finds."""

from collections.abc import Mapping, Sequence

import numpy as np

from bert_jax import console
from bert_jax.errors import refuse
from bert_jax.retrieval import bm25
from bert_jax.tasks.examples import Example

_POOL = 20_000  # passages, at most, among which BM25 looks for the negatives of a query
_SEED = 0  # of negatives and of the order of candidates: the same for every seed of a run

# Of each query, the relevance of its passages; 0 for none.
Judged = Mapping[str, Mapping[str, float]]


def judged_passages(examples: Sequence[Example]) -> dict[str, dict[str, float]]:
    """Return the passages of each query, each with its highest relevance."""
    judged: dict[str, dict[str, float]] = {}
    for example in examples:
        query, *passages = example.texts
        own = judged.setdefault(query, {})
        for passage, value in zip(passages, example.label, strict=True):
            own[passage] = max(value, own.get(passage, 0.0))
    return judged


def training_groups(judged: Judged, count: int) -> list[Example]:
    """Return each relevant passage with its query and `count` passages that are not relevant."""
    positives = [
        (query, passage)
        for query, passages in judged.items()
        for passage, value in passages.items()
        if value > 0
    ]
    refuse(not positives, "no passage is relevant", fix="give labels above 0")
    queries = list(dict.fromkeys(query for query, _ in positives))
    show_skipped(len(judged) - len(queries))
    negatives = _negatives(judged, queries, count)
    target = (1.0, *(0.0,) * count)
    return [
        Example(None, f"query {query!r}", (query, passage, *negatives[query]), target)
        for query, passage in positives
    ]


def show_skipped(count: int) -> None:
    """Show how many queries are of no use, as none of their passages is relevant."""
    if count:
        queries = f"{count:,} quer{'y' if count == 1 else 'ies'}"
        console.show(f"skipped    {queries} without a relevant passage")


@console.working("finding passages that are not relevant", says_end=False)
def _negatives(judged: Judged, queries: Sequence[str], count: int) -> dict[str, list[str]]:
    """Return `count` passages that are not relevant to each query: its own, then BM25's best."""
    generator, corpus = np.random.default_rng(_SEED), _corpus(judged)
    chosen = {
        query: [text for text, value in judged[query].items() if not value][:count]
        for query in queries
    }
    lacking = [query for query in queries if len(chosen[query]) < count]
    size = max(1, _POOL * len(lacking) // max(1, len(corpus)))  # queries that share a pool
    for start in range(0, len(lacking), size):
        asked = lacking[start : start + size]
        pool = generator.permutation(len(corpus))[:_POOL]
        texts = [corpus[index] for index in np.sort(pool)]
        # As many more as may be relevant, or the query itself.
        most = count + 1 + max(len(judged[query]) for query in asked)
        found = _ranked(texts, asked, most)
        for query, indices in zip(asked, found, strict=True):
            relevant = {*judged[query], query}
            own = chosen[query]
            others = [texts[index] for index in indices if texts[index] not in relevant]
            own += others[: count - len(own)]
            refuse(
                len(own) < count,
                f"the query {query!r} has {len(own)} passages that are not relevant, of "
                f"{count} that task.negatives asks for",
                fix="lower it, or give more passages",
            )
    return chosen


def candidate_lists(judged: Judged, count: int) -> list[Example]:
    """Return each query that has a relevant passage with its candidates, in random order.

    Candidates are the `count` best passages of all by BM25; for 0, those of the query. After the
    relevance of each comes that of relevant passages which are not among them.
    """
    generator, corpus = np.random.default_rng(_SEED), _corpus(judged)
    found: dict[str, list[str]] = {query: list(texts) for query, texts in judged.items()}
    if count:
        ranked = _ranked(corpus, list(judged), count + 1)  # as one may be the query itself
        for query, indices in zip(judged, ranked, strict=True):
            texts = (corpus[index] for index in indices)
            found[query] = [x for x in texts if x != query or judged[query].get(x)][:count]
    result = []
    for query, candidates in found.items():
        if not any(judged[query].values()):  # no order of them is better than another
            continue
        order = generator.permutation(len(candidates))
        passages = [candidates[index] for index in order]
        of_query = dict(judged[query])
        relevance = [of_query.pop(text, 0.0) for text in passages]
        relevance += filter(None, of_query.values())
        texts = (query, *passages)
        result.append(Example(None, f"query {query!r}", texts, tuple(relevance)))
    show_skipped(len(found) - len(result))
    refuse(not result, "no held-out query has a relevant passage", fix="give labels above 0")
    return result


def _ranked(texts: Sequence[str], queries: Sequence[str], count: int) -> list[list[int]]:
    """Return the indices of the best texts for each query by BM25, then of others at random.

    A text that shares no word with a query has no rank, and the first ones of a file would be
    those of all such queries.
    """
    generator, count = np.random.default_rng(_SEED), min(count, len(texts))
    result: list[list[int]] = [[] for _ in queries]
    if any(map(bm25.words, texts)):
        found = bm25.rank(texts, queries, count)
        pairs = zip(found.indices, found.scores, strict=True)
        result = [indices[scores > 0].tolist() for indices, scores in pairs]
    for best in result:
        if len(best) < count:
            others = np.setdiff1d(np.arange(len(texts)), best)
            best += generator.permutation(others)[: count - len(best)].tolist()
    return result


def _corpus(judged: Judged) -> list[str]:
    """Return the passages of all queries, each once."""
    return list(dict.fromkeys(text for texts in judged.values() for text in texts))
