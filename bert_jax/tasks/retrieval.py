"""The base of tasks in which a query must find its passage: examples, scores and baselines."""

import abc
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.batches.buckets import Features
from bert_jax.config import DataFiles, FinetuneConfig, ModelConfig
from bert_jax.errors import UserError, refuse
from bert_jax.retrieval import bm25, metrics
from bert_jax.tasks import readers
from bert_jax.tasks.base import Task
from bert_jax.tasks.examples import Example
from bert_jax.tasks.readers import Record, builtin_pairs
from bert_jax.text.tokenizer import Tokenizer

RETRIEVAL_METRICS = ("ndcg@10", "mrr@10", "recall@1", "recall@10", "map")
_RANKED = 100  # passages of a query that MAP looks at, as in sentence-transformers
_IS_PAIR, _IS_APART = 1.0, 0.0  # the label of texts that belong together, and of others


class Retrieval(Task):
    """A query, its passage and perhaps other passages. A prediction has the vectors of them all.

    Scores: each query of the held-out examples asks for its own passages among all of theirs.
    """

    num_outputs = 1  # so that no label is the name of an output
    is_headless = has_quick_baselines = has_queries = True
    library = "sentence-transformers"
    known_metrics: Sequence[str] = RETRIEVAL_METRICS
    default_metrics: Sequence[str] = ("ndcg@10",)
    value_form = "two texts (a tab in a line separates them), or a dict of the columns of data.text"
    is_ranking = is_retrieval = True  # in training, and in evaluation

    @property
    def has_pairs_alone(self) -> bool:
        """Whether all texts of an example belong together, so that it needs no label."""
        return self.is_ranking and self.is_retrieval

    @abc.abstractmethod
    def best_passages(self, queries: list[Any], passages: list[Any], k: int) -> np.ndarray:
        """Return the indices of the k best passages of each query, [Q, k], the best first."""

    @abc.abstractmethod
    def vectors_by_text(self, prediction: Any) -> Sequence[Any]:
        """Return what each text of an example becomes."""

    @abc.abstractmethod
    def similarity(self, prediction: Any) -> float:
        """Return the score of the first two texts of an example."""

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        yield from builtin_pairs(source) or super().read_records(source, data)

    def select_fields(self, record: Record, data: DataFiles) -> Mapping[str, Any]:
        texts = tuple(record.field(name, "data.text") for name in readers.text_columns(data))
        # The latter name is that of rerankers.
        labels = [record.fields.get(name) for name in (data.label, DataFiles().label)]
        is_absent = all(label is None or label == "" for label in labels)
        # Without a label, the usual column of scored pairs may say that they are none.
        labels = [record.fields.get("score")] if is_absent else labels
        relevances = list(map(readers.to_relevance, labels))  # of those without one NaN
        is_apart = any(each == 0 or (is_absent and each < 0) for each in relevances)
        is_hidden = any(each < 0 for each in relevances) and not is_absent
        # A score that is no label says that they belong together, and not how well.
        grades = [each for each in relevances if 0 < each < math.inf and not is_absent]
        grade = max(grades, default=_IS_PAIR)
        return {
            "id": record.fields.get("id"),
            "texts": texts,
            "pair_label": None if is_hidden else _IS_APART if is_apart else grade,
            "absent_column": data.label if is_absent else "",
        }

    def plain_fields(self, value: Any) -> Mapping[str, Any] | None:
        is_texts = isinstance(value, list | tuple) and len(value) == 2
        # Without a label, where a record without one is a pair that belongs together.
        return {"texts": tuple(value), "pair_label": None} if is_texts else None

    def make_example(self, record: Record) -> Example:
        texts, where = record.fields["texts"], record.where
        if len(texts) < 2:
            raise UserError(f"{where} has one text; name two columns or more in data.text")
        readers.check_texts(texts, where)
        label = record.fields.get("pair_label", _IS_PAIR)
        absent_column = record.fields.get("absent_column", DataFiles().label)
        return Example(record.fields.get("id"), where, texts, label, absent_column)

    def example_from(self, value: Any, index: int | str, data: DataFiles) -> Example:
        """Return the example of a Python value, which has no label that it does not name."""
        example = super().example_from(value, index, data)
        return dataclasses.replace(example, label=None) if example.absent_column else example

    def complete(self, example: Example, data: DataFiles, *, labelled: bool) -> Example:
        if labelled and self.has_pairs_alone:
            refuse(
                example.absent_column not in ("", DataFiles().label),
                f"{example.where} has no label in {data.label!r}",
                fix="fill it in, or set data.label to the name of its column; leave that out if "
                "the texts of each row belong together",
            )
            _refuse_apart(example, example.label is None or example.label <= 0)
        return example

    def has_loss(self, examples: Sequence[Example]) -> bool:
        """Return whether all are pairs, which a ranking loss takes them for."""
        return not self.is_ranking or all(each.label > 0 for each in examples)

    def training_examples(self, examples: Sequence[Example]) -> Sequence[Example]:
        """Return the pairs, which a ranking loss takes to belong together whatever their scores."""
        if not self.is_ranking:
            return examples
        # One without a label is a pair.
        pairs = [
            dataclasses.replace(each, label=_IS_PAIR) if each.label is None else each
            for each in examples
        ]
        for pair in pairs:
            _refuse_apart(pair, pair.label <= 0)
        return pairs

    def held_out_examples(self, examples: Sequence[Example]) -> Sequence[Example]:
        if self.is_retrieval:
            is_asked = any(_is_asked_for(example) for example in examples)
            refuse(not is_asked, "no held-out pair has a score above 0", fix="give some that have")
        return examples

    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """Return how well passages are found; nothing where none is asked for."""
        collection = _Collection(examples)
        if not collection.queries:
            return {}
        by_query: dict[str, Any] = {}
        by_passage: dict[str, Any] = {}
        for example, prediction in zip(examples, predictions, strict=True):
            by_query[example.texts[0]], *own = self.vectors_by_text(prediction)
            by_passage |= zip(example.texts[1:], own, strict=True)
        asked = [by_query[text] for text in collection.queries]
        corpus = [by_passage[text] for text in collection.passages]
        return collection.scores(self.best_passages(asked, corpus, _RANKED + 1))

    def baselines(
        self, train: Sequence[Example], held_out: Sequence[Example]
    ) -> dict[str, dict[str, float]]:
        collection = _Collection(held_out)
        found = bm25.baselines(collection.passages, collection.queries, _RANKED + 1)
        # A text without a word of the query is not found.
        return {
            name: collection.scores(
                [i[s > 0].tolist() for i, s in zip(top.indices, top.scores, strict=True)]
            )
            for name, top in found.items()
        }

    def constant_score(self, examples: Sequence[Example]) -> float:
        """Return the score of passages in the order in which they are given."""
        collection = _Collection(examples)
        if not self.is_retrieval or not collection.queries:
            return 0.0
        order = [*range(min(_RANKED + 1, len(collection.passages)))]
        return self.mean_score(collection.scores([order] * len(collection.queries)))

    def file_fields(self, example: Example, prediction: Any) -> dict[str, Any]:
        fields = super().file_fields(example, prediction)
        if example.absent_column:  # the label is that of all pairs of a file without any
            fields.pop("label", None)
        return fields

    def to_json(self, example: Example, prediction: Any) -> dict[str, Any]:
        return {"similarity": self.similarity(prediction)}


class EncodingTask(Retrieval):
    """A task that encodes each text in a way of its own, other than to one dense vector."""

    def longest_text(self, max_length: int, *, is_query: bool) -> int:
        """Return the most tokens of a text, where those of passages are `max_length`."""
        return max_length

    @abc.abstractmethod
    def text_features(
        self,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        model: ModelConfig,
        max_length: int,
        *,
        is_query: bool = False,
    ) -> Features:
        """Return the features of texts, one a text; `notes` says which were truncated."""

    @classmethod
    def check(cls, config: FinetuneConfig) -> None:
        super().check(config)
        kind = config.task.kind
        refuse(
            config.probe,
            f"probe is {config.probe!r}, and {kind} trains the whole encoder",
            fix="leave it empty",
        )
        refuse(
            config.data.batch_size < 2,
            f"{kind} compares the examples of a batch, and data.batch_size is 1",
            fix="raise it",
        )

    def python_code(self, data: DataFiles) -> str:
        return 'print(bert.encode(["A text."], prompt="query")[0].shape)'

    def library_code(self, data: DataFiles) -> str:
        return 'print(model.encode_query(["A text."])[0].shape)'


def number_texts(
    examples: Sequence[Example], before: tuple[str, str] = ("", "")
) -> tuple[list[str], np.ndarray]:
    """Return the texts of examples, each once, and the numbers of those of each, [N, C] int32.

    `before` is what is put before each query, and before each passage.
    """
    width = len(examples[0].texts) if examples else 2
    odd = next((each for each in examples if len(each.texts) != width), None)
    if odd:
        raise UserError(f"{odd.where} has {len(odd.texts)} texts, and {examples[0].where} {width}")
    texts = [before[i > 0] + text for each in examples for i, text in enumerate(each.texts)]
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(text, len(numbers)) for text in texts]
    return list(numbers), np.array(found, np.int32).reshape(-1, width)


def _refuse_apart(example: Example, is_apart: bool) -> None:
    """Raise UserError where the texts of an example that needs a pair do not belong together."""
    refuse(
        is_apart,
        f"{example.where} has a label of 0 or less, of texts that do not belong together",
        fix="drop such rows, or the column if it says something else; finetune/reranker and "
        "task.embedding.loss=cosent train on labels",
    )


def _is_asked_for(example: Example) -> bool:
    """Return whether the query of a labelled pair asks for its passage: a score above 0 says so."""
    return example.label > 0


class _Collection:
    """The queries and the passages of examples, each once, and what each query asks for.

    `relevance` are the passages of each query by their indices, with their grades. A pair with a
    score of 0 or less is not asked for, nor is a query that has no other.
    """

    def __init__(self, examples: Sequence[Example]):
        passages: dict[str, int] = {}
        relevant: dict[str, dict[int, float]] = {}
        for example in examples:
            query, *texts = example.texts
            indices = [passages.setdefault(text, len(passages)) for text in texts]
            if _is_asked_for(example):
                score, grades = float(example.label), relevant.setdefault(query, {})
                grades[indices[0]] = max(score, grades.get(indices[0], score))
        self.queries, self.passages = list(relevant), list(passages)
        self.relevance = list(relevant.values())

    def scores(self, rankings: Iterable[Iterable[int]]) -> dict[str, float]:
        """Return how good rankings are, each of one passage more than MAP looks at, or fewer.

        A passage that is the query itself is no result, unless the query asks for it. Source: BEIR,
        which ignores identical ids.
        """
        kept = [
            [i for i in ranking if self.passages[i] != query or i in relevant][:_RANKED]
            for ranking, query, relevant in zip(rankings, self.queries, self.relevance, strict=True)
        ]
        scores = metrics.ranking_scores(kept, self.relevance, (1, 10))
        return {name: float(scores[name].mean()) for name in RETRIEVAL_METRICS}
