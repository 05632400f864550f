"""Reranking: how well each passage of a list answers a query, read together with it."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from scipy.special import expit, log_softmax

from bert_jax import console
from bert_jax.batches.buckets import Features
from bert_jax.config import DataFiles, FinetuneConfig, ModelConfig, TaskConfig
from bert_jax.config.ranges import NOT_NEGATIVE
from bert_jax.config.settings import setting
from bert_jax.errors import UserError, refuse
from bert_jax.models.heads import SequenceScores, TaskModel
from bert_jax.objectives.labels import BinaryObjective, LabelsObjective
from bert_jax.retrieval import bm25, metrics
from bert_jax.tasks import readers
from bert_jax.tasks.base import Task
from bert_jax.tasks.examples import Example
from bert_jax.tasks.foreign import read_labels
from bert_jax.tasks.passages import candidate_lists, judged_passages, training_groups
from bert_jax.tasks.readers import Record, builtin_pairs
from bert_jax.tasks.sequences import join, longest_sequence
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.objective import PredictionObjective

# Where `config.json` says how a score follows from the output: `CrossEncoder` of
# sentence-transformers 4 and later, and before.
_LIBRARY_FIELD, _ACTIVATION = "sentence_transformers", "activation_fn"
_OLD_ACTIVATION = "sbert_ce_default_activation_function"
_ACTIVATIONS = {
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
    "identity": "torch.nn.modules.linear.Identity",
}
_FIRST = ()  # the label where a file has none: the first passage is relevant
_MAX_GROUP = 32  # passages of a query that are scored at once; of more, each alone
_LISTED = 10  # passages of a query in the file of predictions
# Of the order of equal scores; another than the seed of `passages`, whose order it would undo.
_TIES_SEED = 1


@dataclasses.dataclass(slots=True)
class RerankerConfig(TaskConfig):
    """Settings of a reranker.

    Source: Nogueira and Cho 2019 (`binary`); Gao et al. 2021 (`listwise`, their LCE).

    >>> RerankerConfig().negatives
    7
    """

    kind: str = setting("reranker", "kind of task")
    loss: Literal["listwise", "binary"] = setting(
        "listwise",
        "listwise: cross-entropy of the passages of a query; binary: of each passage alone",
    )
    negatives: int = setting(
        7,
        "passages that are not relevant, for each that is: those of the file, then the best of "
        "BM25; 0: pairs as the file has them, by the binary loss",
        NOT_NEGATIVE,
    )
    candidates: int = setting(
        100,
        "held-out passages of a query that BM25 finds and that are ranked; 0: those of the file",
        NOT_NEGATIVE,
    )
    activation: Literal["sigmoid", "identity"] = setting("sigmoid", "from an output to a score")


class Reranker(Task):
    """A query and its passages, each with its relevance. A prediction is their logits, [C].

    The label of an example is the relevance of each passage, and after these that of relevant ones
    which are not among them: a ranking has missed them.
    """

    settings = RerankerConfig
    config: RerankerConfig
    model_class = SequenceScores
    transformers_class = "ForSequenceClassification"
    pipeline_tag = "text-ranking"
    num_outputs = 1
    has_quick_baselines = has_queries = is_ranking_passages = True
    known_metrics = ("ndcg@10", "mrr@10", "map")
    default_metrics = ("ndcg@10",)
    value_form = "a query and its passages, or a dict of the columns of data.text"

    @classmethod
    def check(cls, config: FinetuneConfig) -> None:
        super().check(config)
        task: Any = config.task
        most = _MAX_GROUP - 1
        refuse(
            task.negatives > most,
            f"task.negatives exceeds {most}, and all passages of a query are in one batch",
            fix="lower it",
        )
        refuse(
            task.loss == "listwise" and not task.negatives,
            "task.loss listwise compares passages, and task.negatives is 0",
            fix="raise it, or use the binary loss",
        )

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        yield from builtin_pairs(source) or super().read_records(source, data)

    def task_records(self, records: Iterable[Record], data: DataFiles) -> Iterator[Record]:
        """Yield records with the fields of the task; all have a label, or none has one."""
        has_labels = None
        for record in super().task_records(records, data):
            if has_labels is None:
                has_labels = "label" in record.fields
            refuse(
                has_labels != ("label" in record.fields),
                f"{record.where} has {'no' if has_labels else 'a'} {data.label!r}, unlike those "
                "before it",
                fix="give a label to all or to none",
            )
            yield record

    def select_fields(self, record: Record, data: DataFiles) -> Mapping[str, Any]:
        texts: list[Any] = []
        for name in readers.text_columns(data):
            value = record.field(name, "data.text")
            texts += value if isinstance(value, list | tuple) else [value]
        fields: dict[str, Any] = {"id": record.fields.get("id"), "texts": tuple(texts)}
        if data.label in record.fields:
            fields["label"] = record.fields[data.label]
        return fields

    def plain_fields(self, value: Any) -> Mapping[str, Any] | None:
        is_texts = isinstance(value, list | tuple) and len(value) > 1
        return {"texts": tuple(value), "label": None} if is_texts else None

    def make_example(self, record: Record) -> Example:
        fields, where = record.fields, record.where
        texts = fields["texts"]
        refuse(
            len(texts) < 2,
            f"{where} has a query without a passage",
            fix="give both, whose columns data.text names",
        )
        readers.check_texts(texts, where)
        label: Any = _FIRST
        if "label" in fields:
            label = self._relevance(fields["label"], len(texts) - 1, where)
        return Example(fields.get("id"), where, texts, label)

    def complete(self, example: Example, data: DataFiles, *, labelled: bool) -> Example:
        if example.label != _FIRST:
            return example
        refuse(
            labelled and data.label != DataFiles().label,
            f"{example.where} has no column {data.label!r}",
            fix="set data.label to its name, or leave that out: then the first passage is relevant",
        )
        first = (1.0, *(0.0,) * (len(example.texts) - 2))
        return dataclasses.replace(example, label=first if labelled else None)

    def _relevance(self, label: Any, count: int, where: str) -> tuple[float, ...] | None:
        if label is None or label == "":
            return None
        labels = label if isinstance(label, list | tuple) else [label]
        refuse(
            len(labels) != count,
            f"{where} has {console.counted(len(labels), 'label')} of "
            f"{console.counted(count, 'passage')}",
            fix="give one for each passage, or none where the first alone is relevant",
        )
        values = tuple(map(readers.to_relevance, labels))
        refuse(
            not all(0 <= value < float("inf") for value in values),
            f"{where}: the label {label!r} is no relevance",
            fix="give 0, or above 0 if a passage is relevant",
        )
        return values

    def training_examples(self, examples: Sequence[Example]) -> list[Example]:
        """Return each relevant passage with as many that are not, as the settings say."""
        count, largest = self.config.negatives, max(max(each.label) for each in examples)
        if not count:
            refuse(
                largest > 1,
                f"a label is {largest:g}, and the binary loss takes those from 0 to 1",
                fix="divide them, or set task.negatives",
            )
            refuse(
                len({value for each in examples for value in each.label}) == 1,
                "all labels are equal, so that there is nothing to tell apart",
                fix="name their column in data.label, or set task.negatives",
            )
            return list(examples)
        return training_groups(judged_passages(examples), count)

    def held_out_examples(self, examples: Sequence[Example]) -> list[Example]:
        """Return each query with its candidates, in random order, and their relevance."""
        return candidate_lists(judged_passages(examples), self.config.candidates)

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        texts = list(dict.fromkeys(text for example in examples for text in example.texts))
        ids = dict(zip(texts, tokenizer.encode(texts), strict=True))
        sizes = {len(example.texts) - 1 for example in examples}
        is_together = len(sizes) == 1 and max(sizes) <= _MAX_GROUP
        features = Features(choices=sizes.pop() if is_together else 1)
        longest = longest_sequence(model, max_length)
        for index, example in enumerate(examples):
            query, *passages = example.texts
            labels = np.full(len(passages), np.nan, np.float32)
            if example.label is not None:
                labels[:] = example.label[: len(passages)]
            sequences = []
            for passage in passages:
                pair = ids[query], ids[passage]
                sequence, second_start, is_truncated = join(pair, tokenizer, model, longest)
                sequences.append((sequence, second_start))
                features.truncated += is_truncated
            count = features.choices
            for start in range(0, len(passages), count):
                part = slice(start, start + count)
                features.add(index, labels[part], sequences[part], note=(start, len(passages)))
        return features

    def objective(self, model: TaskModel) -> PredictionObjective:
        is_listwise = self.config.loss == "listwise"
        return LabelsObjective(model) if is_listwise else BinaryObjective(model)

    def collect(self, before: Any, features: Features, index: int, logits: np.ndarray) -> Any:
        start, count = features.notes[index]
        scores = np.full(count, np.nan) if before is None else before
        scores[start : start + len(logits)] = logits  # the features come in any order
        return scores

    def has_loss(self, examples: Sequence[Example]) -> bool:
        """Return whether some passage is relevant, which a listwise loss needs."""
        labels = (each.label[: len(each.texts) - 1] for each in examples)  # without those missed
        return self.config.loss == "binary" or any(map(any, labels))

    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """Return the loss, and the mean scores of the queries' rankings."""
        queries: dict[str, list[int]] = defaultdict(list)
        for index, example in enumerate(examples):
            queries[example.texts[0]].append(index)
        rankings, relevance, losses = [], [], []
        draw = np.random.default_rng(_TIES_SEED)
        for own in queries.values():
            logits = np.concatenate([predictions[index] for index in own])
            labels = [examples[index].label[: len(predictions[index])] for index in own]
            missed = [examples[index].label[len(predictions[index]) :] for index in own]
            losses += self._losses(logits, np.concatenate(labels))
            grades = np.concatenate([*labels, *missed])
            if grades.any():  # no order is better where nothing is relevant
                rankings.append(_ranking(logits, draw))
                relevance.append(dict(enumerate(grades.tolist())))
        # The loss over all candidates of a query, which are in several features.
        means = {"loss": float(np.mean(losses))} if losses else {}
        if not rankings:
            return means
        scores = metrics.ranking_scores(rankings, relevance, (10,))
        return means | {name: float(scores[name].mean()) for name in self.known_metrics}

    def _losses(self, logits: np.ndarray, labels: np.ndarray) -> list[float]:
        if self.config.loss == "binary":
            labels = np.minimum(labels, 1.0)
            return (np.logaddexp(0, logits) - labels * logits).tolist()
        total = labels.sum()
        return [float(-(labels / total) @ log_softmax(logits))] if total else []

    def baselines(
        self, train: Sequence[Example], held_out: Sequence[Example]
    ) -> dict[str, dict[str, float]]:
        """Return the scores of the order in which BM25 has the passages."""
        texts = dict.fromkeys(text for each in held_out for text in each.texts[1:])
        numbers = {text: number for number, text in enumerate(texts)}
        candidates = [[numbers[text] for text in each.texts[1:]] for each in held_out]
        queries = [each.texts[0] for each in held_out]
        scores = self.score(held_out, bm25.scores(list(texts), queries, candidates))
        return {"BM25": {name: scores[name] for name in self.known_metrics}}

    def constant_score(self, examples: Sequence[Example]) -> float:
        constant = [np.zeros(len(example.texts) - 1) for example in examples]
        return self.mean_score(self.score(examples, constant))

    def to_json(self, example: Example, prediction: Any) -> dict[str, Any]:
        scores = self._scores(np.asarray(prediction, np.float64)).tolist()
        if len(scores) == 1:
            return {"score": scores[0]}
        return {"ranking": np.argsort(-prediction, kind="stable").tolist(), "scores": scores}

    def description(self, model: ModelConfig) -> str:
        steps = ", through a sigmoid" if self.config.activation == "sigmoid" else ""
        return (
            f"The output for a query and a passage is the score of the passage{steps}. "
            "`CrossEncoder` of sentence-transformers loads the model too."
        )

    def example_code(self, data: DataFiles) -> tuple[str, str]:
        return '("A query.", "A passage.")', '"A query.", "A passage."'

    def as_line(self, example: Example, result: Mapping[str, Any]) -> str:
        query, *passages = example.texts
        scores = result.get("scores", [result.get("score")])
        best = int(np.argmax(scores))
        return f"{scores[best]:8.4f}  {query} | {passages[best]}"

    def file_fields(self, example: Example, prediction: Any) -> dict[str, Any]:
        """Return a query with its best passages and their scores."""
        query, *passages = example.texts
        scores, listed = self._scores(prediction), []
        for index in np.argsort(-prediction, kind="stable")[:_LISTED]:
            entry = {"text": passages[index], "score": round(float(scores[index]), 6)}
            entry |= {"label": example.label[index]} if example.label else {}
            listed.append(entry)
        return {"query": query, "passages": listed}

    def _scores(self, logits: np.ndarray) -> np.ndarray:
        return expit(logits) if self.config.activation == "sigmoid" else logits

    def transformers_config(self) -> dict[str, Any]:
        names = {"id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return names | {_LIBRARY_FIELD: {_ACTIVATION: _ACTIVATIONS[self.config.activation]}}

    @classmethod
    def transformers_labels(cls, values: Mapping[str, Any], where: str) -> Sequence[str] | None:
        is_number = len(read_labels(values, where)) == 1
        is_own = _LIBRARY_FIELD in values or _OLD_ACTIVATION in values
        return () if is_number and is_own else None

    @classmethod
    def transformers_settings(cls, values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        own = values.get(_LIBRARY_FIELD)
        own = own if isinstance(own, dict) else {}
        name, prompts = own.get(_ACTIVATION, values.get(_OLD_ACTIVATION)), own.get("prompts")
        refuse(
            isinstance(prompts, dict) and prompts.get(str(own.get("default_prompt_name"))),
            f"{where}: the model puts a prompt before its texts, which is not supported",
            fix="put it there yourself, and remove default_prompt_name",
        )
        if name is None:
            return {}
        for activation, theirs in _ACTIVATIONS.items():
            if name == theirs:
                return {"activation": activation}
        both = " and ".join(_ACTIVATIONS.values())
        raise UserError(f"{where} has the activation {str(name)[:80]!r}; only {both} are read")


def _ranking(logits: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return the order of passages by their logits; equal ones are in a random order.

    In training groups, and in many files, the relevant passage is the first.
    """
    order = draw.permutation(len(logits))
    return order[np.argsort(-logits[order], kind="stable")]
