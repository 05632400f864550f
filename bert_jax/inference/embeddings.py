"""Frozen embeddings of texts: of any layer or a sum of layers, by text, by token or by word."""

import dataclasses
import functools
import json
import unicodedata
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Regex, pre_tokenizers

from bert_jax.config import ModelConfig, settings
from bert_jax.errors import UserError
from bert_jax.inference.loading import LoadedModel
from bert_jax.inference.runner import Arrays, apply
from bert_jax.inference.tokenization import sequences_of, warn_unknown
from bert_jax.models.architecture import make_encoder
from bert_jax.models.encoder import Encoder
from bert_jax.retrieval.search import normalize
from bert_jax.tasks import task_class
from bert_jax.tasks.embedding import BertForEmbedding
from bert_jax.tasks.retrieval import EncodingTask
from bert_jax.tasks.sequences import longest_sequence, text_windows
from bert_jax.training import checkpoint

# What the vectors of a model of embeddings depend on, beside its parameters.
_OWN = ("pooling", "dense_activation", "query_prompt", "passage_prompt")
# Settings of a model that do not change its vectors, but for rounding.
_NOT_OF_VECTORS = {
    *("dtype", "initializer_range", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *settings.resumable(ModelConfig),
}
_OF_TOKENS = ("tokens", "words")  # a vector for each
POOLINGS = ("mean", "cls", "max", *_OF_TOKENS)


@dataclasses.dataclass(frozen=True)
class TextEmbedding:
    """The embedding of one text."""

    vectors: np.ndarray  # [D] float32; [n, D] for n tokens or words
    spans: np.ndarray | None  # [n, 2] int32, the characters of each token or word; None for a text
    is_truncated: bool  # whether the text was longer than what the model sees


# Source: `_is_chinese_char` in google-research/bert `tokenization.py`.
_CHINESE = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_CHINESE += "\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f"
_LETTER = rf"[^\s\x1c-\x1f\u200b\p{{P}}\p{{S}}{_CHINESE}]"  # U+200B separates words of Khmer
_MARK, _CHINESE_MARK = r"[\p{P}\p{S}&&[^\u3001-\uffff]]", r"[\p{P}\p{S}&&[\u3001-\uffff]]"
# What joins the character before it, such as U+FE0F after a heart.
_JOINED, _NO_WORD = r"[\p{M}\p{Cf}]*", ("Mn", "Mc", "Me", "Cf", "Cc")
_WORD = rf"{_LETTER}+(?:{_MARK}+{_LETTER}+)*|{_MARK}{_JOINED}|[{_CHINESE}{_CHINESE_MARK}]{_JOINED}"
_WORDS = pre_tokenizers.Split(Regex(_WORD), "removed", invert=True)


def word_spans(text: str) -> np.ndarray:
    """Return the first and the end character of each word of a text, [n, 2].

    Words are separated by white space. Marks at their ends and Chinese characters are words too.
    """
    spans = [
        span
        for word, span in _WORDS.pre_tokenize_str(text)
        if any(unicodedata.category(character) not in _NO_WORD for character in word)
    ]
    return np.array(spans, np.int32).reshape(-1, 2)


class TextEncoder:
    """Embed texts with frozen parameters, on all local devices.

    `pooling` is "mean" or "max" over all tokens, [CLS] and [SEP] included; "cls" for the first;
    "tokens" for one vector a token; "words" for the mean of each of `word_spans`, NaN for one that
    is truncated or has no tokens.
    Without `layers` and `pooling`, a model of embeddings has its own, and any other the last
    layer's mean. Where a model of embeddings was trained on texts of more tokens than it has
    positions, a text is read in windows, and its vector is the mean of theirs. `before` is put
    before each text, as part of it.
    """

    def __init__(
        self,
        model: LoadedModel,
        layers: Sequence[int] | None = None,
        pooling: str | None = None,
        *,
        before: str = "",
        batch_size: int | None = None,
    ):
        own = None
        if layers is None and pooling is None and isinstance(model.model, BertForEmbedding):
            own = model.model
        layers, pooling = (-1,) if layers is None else tuple(layers), pooling or "mean"
        if pooling not in POOLINGS:
            raise UserError(f"pooling is {pooling!r}; choose one of {', '.join(POOLINGS)}")
        count = model.config.num_hidden_layers
        known = range(-count - 1, count + 1)
        if not layers or not all(isinstance(n, Integral) and n in known for n in layers):
            names = ", ".join(map(repr, layers)) or "empty"
            raise UserError(f"layer is {names}; the model has layers 0 (embeddings) to {count}")
        self._model, self._pooling, self._batch_size = model, pooling, batch_size
        self._before, self.is_by_token = before, self._pooling in _OF_TOKENS
        self._is_unit, self._stride = False, 0
        self.max_length = model.config.max_position_embeddings
        self.size = model.config.hidden_size
        if own:
            self.max_length = model.data.max_length
            self._is_unit = own.embedding.normalize
            self._stride = model.task.stride if model.task else 0
            self.size = own.embedding.dense or self.size
            function = functools.partial(_own_embeddings, own)
        else:
            encoder = make_encoder(model.config, add_pooling_layer=False)
            function = functools.partial(_pooled, encoder, layers, pooling)
        name = "embeddings", () if own else layers, pooling
        self._step = model.runner.compile(name, function)

    def encode_chunk(self, texts: Sequence[str]) -> list[TextEmbedding]:
        """Return the embedding of each text, all at once."""
        texts = [self._before + text for text in texts]
        tokenizer, room = self._model.tokenizer, self.max_length - 2
        offsets: list[Any] = []
        if self._pooling in _OF_TOKENS:
            encoded = [tokenizer.encode_with_offsets(text) for text in texts]
            tokens: Sequence[Sequence[int]] = [ids for ids, _ in encoded]
            offsets = [each for _, each in encoded]
        else:
            tokens = tokenizer.encode(texts)
        unknown = sum(list(ids).count(tokenizer.unk_id) for ids in tokens)
        warn_unknown(unknown, sum(map(len, tokens)))
        size = longest_sequence(self._model.config, self.max_length) - 2
        windows = [text_windows(ids[:room], size, self._stride) for ids in tokens]
        vectors = self._vectors(
            [[tokenizer.cls_id, *ids, tokenizer.sep_id] for own in windows for ids in own]
        )
        if len(vectors) > len(texts):
            vectors = self._means(vectors, list(map(len, windows)))
        result = []
        for index, (text, ids) in enumerate(zip(texts, tokens, strict=True)):
            embedded, spans = vectors[index], None
            if offsets:
                spans = np.array(offsets[index], np.int32).reshape(-1, 2)
            if spans is not None and (start := len(self._before)):  # what is embedded is the text
                is_of_text, text = spans[:, 1] > start, text[start:]
                embedded = embedded[is_of_text[: len(embedded)]]
                spans = np.maximum(spans[is_of_text] - start, 0)
            if spans is not None and self._pooling == "words":
                words = word_spans(text)
                embedded, spans = _pool_words(embedded, spans, words), words
            elif spans is not None:
                spans = spans[: len(embedded)]
            result.append(TextEmbedding(embedded, spans, is_truncated=len(ids) > room))
        return result

    def _means(self, vectors: list[np.ndarray], counts: list[int]) -> list[np.ndarray]:
        """Return the vector of each text from those of its windows."""
        means = []
        for end, n in zip(np.cumsum(counts), counts, strict=True):
            mean = np.mean(vectors[end - n : end], axis=0)
            means.append(normalize(mean) if self._is_unit and n > 1 else mean)
        return means

    def _vectors(self, token_ids: list[list[int]]) -> list[np.ndarray]:
        """Return the vector of each sequence, or those of its tokens but [CLS] and [SEP]."""
        vectors = [np.empty(0)] * len(token_ids)
        sequences = sequences_of(self._model, token_ids)
        for indices, values in self._model.runner.run(self._step, sequences, self._batch_size):
            for index, value in zip(indices.tolist(), np.asarray(values), strict=False):
                if self._pooling in _OF_TOKENS:
                    value = value[1 : len(token_ids[index]) - 1]
                # A copy, since a view would keep the padding in memory.
                vectors[index] = value.copy()
        return vectors


def embedding_identity(model: LoadedModel) -> dict[str, Any]:
    """Return JSON that is equal only if two models' embeddings of a text have one direction."""
    # Without what is before the heads of tasks, which some checkpoints of a model lack.
    modules = model.params["bert"].items()
    params = {name: value for name, value in modules if name not in ("pooler", "head")}
    own: Any = "mean of the last layer"
    if isinstance(model.model, BertForEmbedding):
        params = {"bert": params, "dense": model.params.get("dense", {})}
        embedding = dataclasses.asdict(model.model.embedding)
        own = {name: embedding[name] for name in _OWN} | {"max_length": model.data.max_length}
        if model.task and model.data.max_length > model.config.max_position_embeddings:
            # Of the windows of a long text; their vectors are added.
            own |= {"stride": model.task.stride, "normalize": embedding["normalize"]}
    elif model.task and issubclass(kind := task_class(model.task.kind), EncodingTask):
        of_encoder = modules if kind.model_class.kept_heads else params.items()
        encoder = {name: value for name, value in of_encoder if name != "pooler"}
        params = {**model.params, "bert": encoder}
        own = {name: getattr(model.task, name) for name in kind.vector_settings}
        own |= {"kind": model.task.kind, "max_length": model.data.max_length}
        own = json.loads(json.dumps(own))  # which has no tuples
    config = dataclasses.asdict(model.config)
    computed = {name: value for name, value in config.items() if name not in _NOT_OF_VECTORS}
    return {
        "parameters": checkpoint.checksum(params),
        "config": json.loads(json.dumps(computed)),
        "tokenizer": model.tokenizer.fingerprint,
        "pooling": own,
    }


def _own_embeddings(model: BertForEmbedding, params: Any, batch: Arrays) -> jax.Array:
    """Return the vectors of a model that was trained for embeddings, [B, D]."""
    return apply(model, params, batch)[:, 0]


def _pooled(
    encoder: Encoder,
    layers: Sequence[int],
    pooling: str,
    params: Any,
    batch: Arrays,
) -> jax.Array:
    """Return the sum of layers, pooled to [B, D], or [B, L, D] by token."""
    output = apply(encoder, params["bert"], batch, output_hidden_states=True)
    chosen = [output.hidden_states[layer].astype(jnp.float32) for layer in layers]
    hidden: Any = sum(chosen[1:], chosen[0])
    is_token = batch["attention_mask"][:, :, None] > 0
    if pooling == "mean":
        # At least one: a sequence that fills up the batch has no tokens.
        weight = is_token.astype(hidden.dtype)
        return (hidden * weight).sum(1) / jnp.maximum(weight.sum(1), 1)
    if pooling == "max":
        return jnp.where(is_token, hidden, -jnp.inf).max(1)
    return hidden[:, 0] if pooling == "cls" else hidden


def _pool_words(vectors: np.ndarray, tokens: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return the mean of the tokens that overlap each word, [words, D].

    Args:
      vectors: of the first tokens, [T, D]. A word that has other tokens too gets NaN.
      tokens: the span of each token of the text, [tokens, 2].
      words: the span of each word, [words, 2].
    """
    result = np.full((len(words), vectors.shape[1]), np.nan, np.float32)
    # The spans of tokens and of words are both in the order of the text.
    first = np.searchsorted(tokens[:, 1], words[:, 0], side="right")
    end = np.searchsorted(tokens[:, 0], words[:, 1], side="left")
    for word in np.flatnonzero((first < end) & (end <= len(vectors))):
        result[word] = vectors[first[word] : end[word]].mean(0)
    return result
