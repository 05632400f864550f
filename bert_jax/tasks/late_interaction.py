"""Late interaction for search: a vector for each token, compared token by token (ColBERT)."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bert_jax.batches.buckets import Features
from bert_jax.config import DataFiles, FinetuneConfig, ModelConfig, TaskConfig
from bert_jax.config.ranges import SIZE
from bert_jax.config.settings import setting
from bert_jax.errors import refuse
from bert_jax.models.architecture import architecture, make_encoder
from bert_jax.models.heads import TaskModel, normalized
from bert_jax.models.layers import Dense, DropoutKey
from bert_jax.objectives.contrastive import ContrastiveObjective, Shard, is_example, ranking
from bert_jax.retrieval import search
from bert_jax.tasks.examples import Example
from bert_jax.tasks.retrieval import EncodingTask, number_texts
from bert_jax.tasks.sequences import longest_sequence
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.objective import Metrics, WeightedSum

_BLOCK = 4  # queries whose scores of every passage are in memory at once
_ATTENDED = "lower task.query_length, or set task.expansion to attended or none"
_NONE = -1e9  # the score of a passage that has no tokens
# Roles of tokens; padding has 0.
# Attended to and scored; attended to only; scored only.
_SCORED, _READ, _EXPANSION = 1, 2, 3


@dataclasses.dataclass(slots=True)
class LateInteractionConfig(TaskConfig):
    """Settings of late interaction.

    Source: Khattab and Zaharia 2020 (ColBERT). The defaults are PyLate's, but for tokens that mark
    texts or are skipped, of which there are none.

    >>> LateInteractionConfig().size
    128
    """

    kind: str = setting("late_interaction", "kind of task")
    size: int = setting(128, "numbers of a token's vector", SIZE)
    temperature: float = setting(1.0, "divisor of the scores, which are sums over a query's tokens")
    query_length: int = setting(
        32, "tokens of a query, at most; of a passage data.max_length", SIZE
    )
    expansion: Literal["none", "unattended", "attended"] = setting(
        "unattended",
        "fill queries up with [MASK]s, which are scored too; unattended: the query is read without "
        "them; attended: with them",
    )
    query_token: str = setting("", "token after [CLS] in queries, such as [unused0], or none")
    passage_token: str = setting("", "token after [CLS] in passages, or none")
    skipped_tokens: tuple[str, ...] = setting((), "tokens of a passage that are not scored")


class BertForLateInteraction(TaskModel):
    """Vectors of the tokens of each text, of unit length, [B, C, L, I].

    A token that is not scored has a vector of zeros.
    """

    size: int = 128

    def setup(self) -> None:
        c = self.config
        self.bert = make_encoder(c, add_pooling_layer=False)
        self.dense = Dense(c, (c.hidden_size, self.size), ("embed", "label"), use_bias=False)

    def __call__(
        self,
        input_ids: Int[Array, "B *C L"],
        token_type_ids: Int[Array, "B *C L"],
        attention_mask: Int[Array, "B *C L"],
        dropout_key: DropoutKey | None = None,
        *,
        token_roles: Int[Array, "B *C L"] | None = None,
    ) -> Float[Array, "B C L I"]:
        """Return float32 vectors of the texts [B, C, L]; of [B, L] those of one each."""
        roles = attention_mask if token_roles is None else token_roles
        is_read = ((roles == _SCORED) | (roles == _READ)).astype(jnp.int32)
        hidden = self.last_hidden_states(input_ids, token_type_ids, is_read, dropout_key)
        vectors = normalized(self.dense(hidden).astype(jnp.float32))
        is_scored = ((roles == _SCORED) | (roles == _EXPANSION)).reshape(hidden.shape[:2])
        vectors = jnp.where(is_scored[..., None], vectors, 0.0)
        return vectors.reshape(len(input_ids), -1, *vectors.shape[1:])


def max_similarity(
    queries: Float[Array, "Q L I"], passages: Float[Array, "P M I"]
) -> Float[Array, "Q P"]:
    """Return the largest product of each token of a query with one of the passage, summed."""
    products = jnp.einsum("qli,pmi->qplm", queries, passages)
    is_scored = (passages != 0).any(-1)
    return jnp.where(is_scored[:, None], products, _NONE).max(-1).sum(-1)


@dataclasses.dataclass(frozen=True, eq=False)
class LateInteractionObjective(ContrastiveObjective):
    """The cross-entropy of each query's passage among all of the batch."""

    temperature: float

    def shard_metrics(self, own: Shard, every: Shard) -> Metrics:
        weight = is_example(own[1]).sum(dtype=jnp.float32)
        losses, is_first = ranking(own, every, max_similarity, self.temperature, block=_BLOCK)
        return {"loss": WeightedSum(losses, weight), "accuracy": WeightedSum(is_first, weight)}


class LateInteraction(EncodingTask):
    """Vectors of tokens. A prediction is a list of those of each text, [n, I] each."""

    settings = LateInteractionConfig
    config: LateInteractionConfig
    model_class = BertForLateInteraction
    pipeline_tag = "sentence-similarity"
    vectors_kind = "tokens"
    size_setting = "size"
    vector_settings = (
        "size",
        "query_length",
        "expansion",
        "query_token",
        "passage_token",
        "skipped_tokens",
    )

    def model(self, config: ModelConfig, probe: str = "") -> TaskModel:
        return BertForLateInteraction(config, 0, size=self.config.size)

    def objective(self, model: TaskModel) -> ContrastiveObjective:
        return LateInteractionObjective(model, self.config.temperature)

    @classmethod
    def check(cls, config: FinetuneConfig) -> None:
        super().check(config)
        task: Any = config.task
        most = longest_sequence(config.model, config.data.max_length)
        refuse(
            not 8 <= task.query_length <= most,
            f"task.query_length is {task.query_length}",
            fix=f"give 8 to {most}, the tokens of a passage at most",
        )

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        _, ids = number_texts(examples)
        columns = list(zip(*(example.texts for example in examples), strict=True))
        result = Features(choices=ids.shape[1], is_contrastive=True)
        encoded = []
        for number, column in enumerate(columns):
            own = self.text_features(column, tokenizer, model, max_length, is_query=not number)
            result.truncated += own.truncated
            encoded.append(own)
        for index, own in enumerate(ids):
            sequences = [(each.sequences[index], each.second_starts[index]) for each in encoded]
            result.add(index, own, sequences)
            result.roles += [each.roles[index] for each in encoded]
        return result

    def truncation(self, count: int, data: DataFiles) -> str:
        query = f"or of a query to {self.config.query_length}, which is task.query_length"
        return f"{super().truncation(count, data)}, {query}"

    def longest_text(self, max_length: int, *, is_query: bool) -> int:
        return self.config.query_length if is_query else max_length

    def text_features(
        self,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        model: ModelConfig,
        max_length: int,
        *,
        is_query: bool = False,
    ) -> Features:
        config, features = self.config, Features()
        most = self.longest_text(max_length, is_query=is_query)
        most = longest_sequence(model, most)
        token = config.query_token if is_query else config.passage_token
        before = [tokenizer.cls_id, *_mark(token, tokenizer)]
        check_skipped(config.skipped_tokens, tokenizer, "task.skipped_tokens")
        skipped = [] if is_query else _ids_of(config.skipped_tokens, tokenizer)
        room = most - len(before) - 1
        fill = is_query and config.expansion != "none"
        if fill and config.expansion == "unattended":
            check_windows(model, most, _ATTENDED)
        for index, ids in enumerate(tokenizer.encode(texts)):
            features.truncated += len(ids) > room
            sequence = np.array([*before, *ids[:room], tokenizer.sep_id], np.int32)
            roles = np.where(np.isin(sequence, skipped), _READ, _SCORED).astype(np.int32)
            if fill:
                padding = 0, most - len(sequence)
                role = _SCORED if config.expansion == "attended" else _EXPANSION
                sequence = np.pad(sequence, padding, constant_values=tokenizer.mask_id)
                roles = np.pad(roles, padding, constant_values=role)
            features.add(index, index, [(sequence, len(sequence))], note=len(ids) > room)
            features.roles.append(roles)
        return features

    def collect(
        self, before: Any, features: Features, index: int, logits: np.ndarray
    ) -> list[np.ndarray]:
        return [vectors[vectors.any(-1)] for vectors in logits]

    def best_passages(self, queries: list[Any], passages: list[Any], k: int) -> np.ndarray:
        return search.token_top_k(passages, queries, k).indices

    def vectors_by_text(self, prediction: list[np.ndarray]) -> list[np.ndarray]:
        return prediction

    def similarity(self, prediction: list[np.ndarray]) -> float:
        query, passage, *_ = prediction
        return float(search.token_top_k([passage], [query], 1).scores[0, 0])

    def description(self, model: ModelConfig) -> str:
        return (
            f"Each token of a text has a vector of {self.config.size:,} numbers. The score of a "
            "passage is the sum over the query's tokens of the largest product with a token of the "
            "passage. PyLate and `MultiVectorEncoder` of sentence-transformers load the model."
        )


def check_windows(model: ModelConfig, length: int, fix: str) -> None:
    """Refuse queries whose last [MASK]s are too far from the text for a local layer to see it."""
    nearest = min((each for each in architecture(model).windows(model) if each), default=length)
    refuse(
        length - 3 > nearest,  # of a query of one token, with [CLS] and [SEP]
        f"queries are filled up to {length} tokens, and a local layer sees {nearest} to each side",
        fix=fix,
    )


def check_skipped(tokens: Sequence[str], tokenizer: Tokenizer, where: str) -> None:
    """Refuse to skip [CLS] or [SEP], without which a passage of skipped tokens has no vector."""
    always = (tokenizer.id_to_token(tokenizer.cls_id), tokenizer.id_to_token(tokenizer.sep_id))
    found = [token for token in tokens if token in always]
    refuse(
        found,
        f"{where} has {' and '.join(found)}, which every passage is scored by",
        fix="remove it",
    )


def _mark(token: str, tokenizer: Tokenizer) -> list[int]:
    """Return the id of the token that marks a kind of text; none for an empty one."""
    if not token:
        return []
    ids, settings = _ids_of([token], tokenizer), "task.query_token and task.passage_token"
    fix = f"set {settings} to some that it has, or to none"
    refuse(not ids, f"the tokenizer has no token {token!r}", fix=fix)
    # Other libraries put it before a text, of which it would become a part.
    alone, text, together = map(list, tokenizer.encode([token, "a", f"{token}a"]))
    is_word = alone == ids and together != [*ids, *text]
    fix = f"set {settings} to tokens that no text has, such as [unused0]"
    refuse(is_word, f"the token {token!r}, which is to mark texts, is a word of texts", fix=fix)
    return ids


def _ids_of(tokens: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens that a tokenizer has."""
    if not tokens:  # the vocabulary may be large
        return []
    known = {tokenizer.id_to_token(index): index for index in range(tokenizer.vocab_size)}
    return [known[token] for token in tokens if token in known]
