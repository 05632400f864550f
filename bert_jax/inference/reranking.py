"""Rank passages that were found for a query anew, by a model that reads both together."""

from collections.abc import Sequence

import numpy as np

from bert_jax.errors import UserError
from bert_jax.inference.loading import LoadedModel
from bert_jax.inference.predictions import predict
from bert_jax.tasks import task_class


def check_reranker(model: LoadedModel) -> None:
    """Refuse a model that gives no score to a query and a passage."""
    if model.task is None or not task_class(model.task.kind).is_ranking_passages:
        what = f"was trained for {model.task.kind}" if model.task else "has no head of a task"
        raise UserError(
            f"the reranker {model.source or ''} {what}; train one with "
            "bert-jax finetune --config=finetune/reranker"
        )


def relevance(
    model: LoadedModel, queries: Sequence[str], passages: Sequence[Sequence[str]]
) -> list[np.ndarray]:
    """Return the score of each passage of each query.

    Args:
      model: a reranker, as `check_reranker` says.
      queries: Q texts.
      passages: Q lists of texts, each of any length.
    """
    pairs = [
        (query, passage) for query, own in zip(queries, passages, strict=True) for passage in own
    ]
    scores = iter([each["score"] for each in predict(model, pairs)] if pairs else ())
    return [np.array([next(scores) for _ in own]) for own in passages]
