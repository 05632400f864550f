"""Embeddings of texts: queries and passages, scored pairs, or plain text."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bert_jax import console
from bert_jax.batches.buckets import Features
from bert_jax.config import DataFiles, EmbeddingConfig, FinetuneConfig, ModelConfig, TaskConfig
from bert_jax.config.settings import setting
from bert_jax.errors import UserError, refuse
from bert_jax.models.architecture import make_encoder
from bert_jax.models.encoder import gather_positions
from bert_jax.models.heads import TaskModel, normalized
from bert_jax.models.layers import Dense, DropoutKey
from bert_jax.objectives.embeddings import EmbeddingObjective
from bert_jax.retrieval import search
from bert_jax.tasks import readers
from bert_jax.tasks.classification import correlations
from bert_jax.tasks.examples import Example
from bert_jax.tasks.readers import Record
from bert_jax.tasks.retrieval import RETRIEVAL_METRICS, Retrieval, number_texts
from bert_jax.tasks.sequences import build_sequence, longest_sequence, text_windows
from bert_jax.text.files import existing, file_type
from bert_jax.text.records import REMEDY, text_lines
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.objective import PredictionObjective

_PLAIN = ".txt"
_POOLED = {"mean": "the mean of the", "max": "the maximum of the", "cls": "the first of the"}


@dataclasses.dataclass(slots=True)
class EmbeddingTaskConfig(TaskConfig):
    """Settings of a task of embeddings.

    >>> EmbeddingTaskConfig(embedding=EmbeddingConfig(dense=32)).embedding.loss
    'ranking'
    """

    kind: str = setting("embedding", "kind of task")
    embedding: EmbeddingConfig = dataclasses.field(default_factory=EmbeddingConfig)


class BertForEmbedding(TaskModel):
    """Vectors of texts, [B, C, I]: the last layer pooled, perhaps a dense layer, and normalized.

    Source: Reimers and Gurevych 2019, section 3, and the modules of sentence-transformers.
    """

    embedding: EmbeddingConfig = dataclasses.field(default_factory=EmbeddingConfig)

    keeps_pooler = True

    def setup(self) -> None:
        c, size = self.config, self.embedding.dense
        self.bert = make_encoder(c, add_pooling_layer=False)
        if size:
            self.dense = Dense(c, (c.hidden_size, size), ("embed", "label"))

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        attention_mask: Int[Array, "B L"],
        dropout_key: DropoutKey | None = None,
        *,
        position_ids: Int[Array, "B L"] | None = None,
        segment_starts: Int[Array, "B C"] | None = None,
    ) -> Float[Array, "B C I"]:
        """Return float32 vectors of the C texts that a sequence is packed of, or of its one."""
        output = self.bert(
            input_ids, token_type_ids, attention_mask, dropout_key, position_ids=position_ids
        )
        hidden = output.last_hidden_state.astype(jnp.float32)
        if segment_starts is None:
            segment_starts = jnp.zeros((len(input_ids), 1), jnp.int32)
        numbers = jnp.arange(1, 1 + segment_starts.shape[1])
        is_of_text = attention_mask[:, None, :] == numbers[:, None]
        if self.embedding.pooling == "cls":
            vectors = gather_positions(hidden, segment_starts)
        elif self.embedding.pooling == "max":
            vectors = jnp.where(is_of_text[..., None], hidden[:, None], -jnp.inf).max(2)
            vectors = jnp.where(is_of_text.any(-1, keepdims=True), vectors, 0.0)
        else:
            # At least one: a sequence that fills up a batch has no tokens.
            count = jnp.maximum(is_of_text.sum(-1, keepdims=True), 1)
            vectors = jnp.einsum("BCL,BLD->BCD", is_of_text.astype(jnp.float32), hidden) / count
        if self.embedding.dense:
            vectors = self.dense(vectors).astype(jnp.float32)
            if self.embedding.dense_activation == "tanh":
                vectors = jnp.tanh(vectors)
        return normalized(vectors) if self.embedding.normalize else vectors


class Embedding(Retrieval):
    """The texts of an example are near, by a score or more than others.

    A prediction is the embeddings of the texts, [C, I].
    """

    settings = EmbeddingTaskConfig
    config: EmbeddingTaskConfig
    model_class = BertForEmbedding
    has_windows = True
    size_setting = "embedding.dense"
    vector_settings = (
        "embedding.pooling",
        "embedding.dense",
        "embedding.dense_activation",
        "embedding.normalize",
        "embedding.query_prompt",
        "embedding.passage_prompt",
    )
    pipeline_tag = "sentence-similarity"

    def __init__(self, config: EmbeddingTaskConfig, labels: Sequence[str] = ()):
        embedding = config.embedding
        self.is_ranking = embedding.loss == "ranking"
        kind = embedding.evaluation
        kind = "retrieval" if kind == "auto" and self.is_ranking else kind
        self.is_retrieval = kind == "retrieval"
        self.trains_without_labels = self.is_ranking and not self.is_retrieval
        self.known_metrics = RETRIEVAL_METRICS if self.is_retrieval else ("spearman", "pearson")
        self.default_metrics = self.known_metrics[:1]
        super().__init__(config, labels)

    def model(self, config: ModelConfig, probe: str = "") -> TaskModel:
        return BertForEmbedding(config, 0, embedding=self.config.embedding)

    def objective(self, model: TaskModel) -> PredictionObjective:
        return EmbeddingObjective(model, self.config.embedding)

    @classmethod
    def check(cls, config: FinetuneConfig) -> None:
        super().check(config)
        task: Any = config.task
        model, embedding = config.model, task.embedding
        size = embedding.dense or model.hidden_size
        refuse(
            not all(0 < dimension <= size for dimension in embedding.dimensions),
            f"task.embedding.dimensions has {', '.join(map(str, embedding.dimensions))}, and a "
            f"vector has {size} numbers",
            fix=f"give some from 1 to {size}",
        )
        columns = readers.text_columns(config.data)
        refuse(
            embedding.loss != "ranking" and len(columns) > 2,
            f"task.embedding.loss {embedding.loss} compares two texts, and data.text names "
            f"{len(columns)} columns",
            fix="name two",
        )
        refuse(
            config.probe,
            f"probe is {config.probe!r}, and embeddings have no head",
            fix="leave it empty",
        )
        refuse(
            embedding.loss != "cosine" and config.data.batch_size < 2,
            f"task.embedding.loss {embedding.loss} compares the examples of a batch, and "
            "data.batch_size is 1",
            fix="raise it",
        )
        has_dropout = model.hidden_dropout_prob or model.attention_probs_dropout_prob
        refuse(
            embedding.pairs == "same" and not has_dropout,
            "task.embedding.pairs same needs dropout, and the model has none",
            fix="set --config.model.hidden_dropout_prob=0.1 (from code 0.11; 0.1 means unset)",
        )
        refuse(
            embedding.pairs != "columns" and embedding.loss != "ranking",
            f"task.embedding.pairs {embedding.pairs} has no scores for loss {embedding.loss}",
            fix="use ranking",
        )
        # Of plain text, a held-out table of pairs may have the columns.
        refuse(
            embedding.pairs != "columns"
            and len(columns) > 1
            and file_type(config.data.train) != _PLAIN,
            f"task.embedding.pairs {embedding.pairs} makes pairs of a single text, and data.text "
            f"names {len(columns)} columns",
            fix="name one, give data.train a .txt, or leave task.embedding.pairs out",
        )

    def description(self, model: ModelConfig) -> str:
        embedding = self.config.embedding
        steps = [f"{_POOLED[embedding.pooling]} last hidden states"]
        steps += ["a dense layer"] * bool(embedding.dense)
        steps += ["scaled to unit length"] * embedding.normalize
        size = embedding.dense or model.hidden_size
        text = f"An embedding has {size:,} numbers: {', '.join(steps)}."
        prompts = {"query": embedding.query_prompt, "passage": embedding.passage_prompt}
        before = [f"{console.code_span(p)} before each {name}" for name, p in prompts.items() if p]
        return f"{text} Put {' and '.join(before)}." if before else text

    def python_code(self, data: DataFiles) -> str:
        prompt = ', prompt="query"' if self.config.embedding.query_prompt else ""
        return f'print(bert.encode(["A text."]{prompt}).shape)  # one embedding a text'

    def library_code(self, data: DataFiles) -> str:
        prompt = ', prompt_name="query"' if self.config.embedding.query_prompt else ""
        return f'print(model.encode(["A text."]{prompt}).shape)'

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        if file_type(source) == _PLAIN:
            yield from self._read_lines(source)
        else:
            yield from super().read_records(source, data)

    def task_records(self, records: Iterable[Record], data: DataFiles) -> Iterator[Record]:
        fields = super().task_records(records, data)
        makes_pairs = self.config.embedding.pairs != "columns" and "," not in data.text
        return self._make_pairs(fields) if makes_pairs else fields

    def _read_lines(self, source: str) -> Iterator[Record]:
        lines = text_lines(existing(source, REMEDY))
        return self._make_pairs(Record(r.where, {"texts": (r.fields["text"],)}) for r in lines)

    def _make_pairs(self, records: Iterator[Record]) -> Iterator[Record]:
        """Yield pairs of plain texts; one that is empty or missing ends a document."""
        kind = self.config.embedding.pairs
        records = map(_with_text, records)
        if kind == "columns":
            first = next(records, None)
            where = first.where if first else "the file"
            raise UserError(
                f"{where} is a text alone; set task.embedding.pairs to same or neighbours, or give "
                "a table with two columns of data.text"
            )
        if kind == "same":
            records = (each for each in records if each.fields["texts"][0].strip())
            pairs = ((each, each) for each in records)
        else:
            pairs = pairwise(records)
        for first, second in pairs:
            texts = first.fields["texts"][0], second.fields["texts"][0]
            if all(map(str.strip, texts)):
                yield Record(first.where, {"texts": texts})

    def select_fields(self, record: Record, data: DataFiles) -> Mapping[str, Any]:
        fields = super().select_fields(record, data)
        if self.has_pairs_alone:
            return fields
        return {**fields, "score": record.fields.get(data.label), "row": record}

    def plain_fields(self, value: Any) -> Mapping[str, Any] | None:
        fields = super().plain_fields(value)
        return fields and {**fields, "score": None}

    def make_example(self, record: Record) -> Example:
        example = super().make_example(record)
        if "score" not in record.fields:
            return example
        score = self._score(record.fields["score"], record.where)
        return dataclasses.replace(example, label=score, absent_column="")

    def _score(self, value: Any, where: str) -> float | None:
        if value is None or value == "":
            return None
        score, needs = readers.to_number(value), "is no number"
        if self.config.embedding.loss == "cosine" and not -1 <= score <= 1:
            score, needs = (
                math.nan,
                "is no cosine, from -1 to 1; divide it, or set task.embedding.loss to cosent",
            )
        if not math.isfinite(score):
            raise UserError(f"{where}: the score {value!r} {needs}; correct it, or the column")
        return score

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        prompts = self.config.embedding.query_prompt, self.config.embedding.passage_prompt
        texts, ids = number_texts(examples, prompts)
        _, plain_ids = number_texts(examples)  # a query may be a passage too
        encoded = tokenizer.encode(texts)
        features, room = Features(choices=ids.shape[1], is_packed=True), max_length - 2
        features.is_contrastive = True
        size = longest_sequence(model, max_length) - 2
        windows = [
            [
                build_sequence([part], tokenizer, model)
                for part in text_windows(tokens[:room], size, self.config.stride)
            ]
            for tokens in encoded
        ]
        for index, example in enumerate(examples):
            own = ids[index]
            score = math.nan if example.label is None else example.label
            label = plain_ids[index] if self.is_ranking else np.float32(score)
            counts = np.array([len(windows[number]) for number in own])
            # A feature has a window of each text, the last one again where there are no more.
            for window in range(counts.max()):
                chosen = np.minimum(window, counts - 1)
                texts = (windows[number][i] for number, i in zip(own, chosen, strict=True))
                features.add(index, label, texts, note=(window < counts) / counts)
        features.truncated = sum(len(tokens) > room for tokens in encoded)
        features.windowed = sum(len(each) > 1 for each in windows)
        return features

    def collect(self, before: Any, features: Features, index: int, logits: np.ndarray) -> Any:
        """Return the vectors of the texts of an example, each the mean of its windows' vectors."""
        shares = features.notes[index]
        if before is None and (shares == 1).all():
            return logits.copy()
        return (0 if before is None else before) + shares[:, None] * logits

    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """Return the correlations of cosines and scores, or how well passages are found."""
        if not self.is_retrieval:
            scores = [example.label for example in examples]
            return correlations(scores, [*map(self.similarity, predictions)])
        return super().score(examples, predictions)

    def best_passages(self, queries: list[Any], passages: list[Any], k: int) -> np.ndarray:
        asked, corpus = (search.normalize(np.array(vectors)) for vectors in (queries, passages))
        return search.top_k(corpus, asked, k).indices

    def vectors_by_text(self, prediction: np.ndarray) -> list[np.ndarray]:
        return list(prediction)

    def similarity(self, prediction: Any) -> float:
        first, second = search.normalize(prediction[:2])
        return float(first @ second)

    def baselines(
        self, train: Sequence[Example], held_out: Sequence[Example]
    ) -> dict[str, dict[str, float]]:
        return super().baselines(train, held_out) if self.is_retrieval else {}


def _with_text(record: Record) -> Record:
    """Return a record of one text, empty where it is missing; UserError for another value."""
    (text,) = record.fields["texts"]
    if text is not None and not isinstance(text, str):
        raise UserError(f"{record.where}: a text is {text!r}; give texts alone")
    return dataclasses.replace(record, fields={**record.fields, "texts": (text or "",)})
