"""Frozen embeddings of texts: of any layer or a sum of layers, by text, by token or by word."""

import dataclasses
import functools
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from tokenizers import Regex, pre_tokenizers

from bert_jax.config import ModelConfig, TaskConfig
from bert_jax.distributed.fsdp import Collectives
from bert_jax.distributed.mesh import compile_step, make_mesh, replicated_layout
from bert_jax.errors import TextWarning, UserError
from bert_jax.models.architecture import make_encoder
from bert_jax.models.heads import BertForEmbedding
from bert_jax.tasks.base import build_sequence, max_text_tokens, truncate
from bert_jax.text.tokenizer import Tokenizer, warn_unknown

POOLINGS = ("mean", "cls", "max", "tokens", "words")
_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_BATCH_TOKENS = 4096
# Texts of a chunk are sorted by length, and their vectors are held in memory at once.
_CHUNK_TEXTS, _CHUNK_CHARACTERS = 4096, 400_000


@dataclasses.dataclass(frozen=True)
class Embedding:
    """The embedding of one text."""

    vectors: np.ndarray  # [D] float32; [n, D] for n tokens or words
    spans: np.ndarray | None  # [n, 2] int32, the characters of each token or word; None for a text
    is_truncated: bool  # whether the text was longer than what the model sees


# Source: `_is_chinese_char` in google-research/bert `tokenization.py`.
_CHINESE = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_CHINESE += "\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f"
_LETTER = rf"[^\s\x1c-\x1f\u200b\p{{P}}\p{{S}}{_CHINESE}]"  # U+200B separates words of Khmer
_MARK, _CHINESE_MARK = r"[\p{P}\p{S}&&[^\u3001-\uffff]]", r"[\p{P}\p{S}&&[\u3001-\uffff]]"
_WORD = rf"{_LETTER}+(?:{_MARK}+{_LETTER}+)*|{_MARK}|[{_CHINESE}{_CHINESE_MARK}]"
_WORDS = pre_tokenizers.Split(Regex(_WORD), "removed", invert=True)


def word_spans(text: str) -> np.ndarray:
    """Return the first and the end character of each word of a text, [n, 2].

    Words are separated by white space. Marks at their ends and Chinese characters are words too.
    """
    spans = [span for _, span in _WORDS.pre_tokenize_str(text)]
    return np.array(spans, np.int32).reshape(-1, 2)


class Encoder:
    """Embed texts with frozen parameters, on all local devices.

    `pooling` is "mean" or "max" over all tokens, [CLS] and [SEP] included; "cls" for the first;
    "tokens" for one vector a token; "words" for the mean of each of `word_spans`, NaN if truncated.
    Without `layers` and `pooling`, a model of embeddings has its own, and any other the last
    layer's mean.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        tokenizer: Tokenizer,
        model: nn.Module,
        max_length: int,
        layers: Sequence[int] | None,
        pooling: str | None,
    ):
        own = model if layers is None and pooling is None else None
        own = own if isinstance(own, BertForEmbedding) else None
        layers, pooling = (-1,) if layers is None else layers, pooling or "mean"
        if pooling not in POOLINGS:
            raise UserError(f"pooling is {pooling!r}; choose one of {', '.join(POOLINGS)}")
        count = config.num_hidden_layers
        if not layers or not all(-count - 1 <= layer <= count for layer in layers):
            names = ", ".join(map(str, layers))
            raise UserError(f"layer is {names}; the model has layers 0 (embeddings) to {count}")
        self._tokenizer, self._layers, self._pooling = tokenizer, layers, pooling
        self.max_length = config.max_position_embeddings
        if own:
            self.max_length = min(max_length, self.max_length)
        self.size = (own and own.embedding.dense) or config.hidden_size
        self._run = BatchRunner(
            config,
            params if own else params["bert"],
            tokenizer.pad_id,
            self._apply if own else self._embed_batch,
            own,
        )

    def _apply(self, encode: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        return encode(ids, jnp.zeros_like(ids), mask)[:, 0]

    def _embed_batch(self, encode: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        output = encode(ids, jnp.zeros_like(ids), mask, output_hidden_states=True)
        chosen = [output.hidden_states[layer].astype(jnp.float32) for layer in self._layers]
        hidden: Any = sum(chosen[1:], chosen[0])
        is_token = mask[:, :, None] > 0
        if self._pooling == "mean":
            # At least one: a sequence that fills up the batch has no tokens.
            return (hidden * is_token).sum(1) / jnp.maximum(is_token.sum(1), 1)
        if self._pooling == "max":
            return jnp.where(is_token, hidden, -jnp.inf).max(1)
        return hidden[:, 0] if self._pooling == "cls" else hidden

    def __call__(self, texts: Iterable[str]) -> Iterator[Embedding]:
        """Yield the embedding of each text, in order, some thousands at a time."""
        for chunk in chunks(texts):
            yield from self.encode_chunk(chunk)

    def encode_chunk(self, texts: Sequence[str]) -> list[Embedding]:
        """Return the embedding of each text, all at once."""
        tokenizer = self._tokenizer
        with_offsets = []
        if self._pooling in ("tokens", "words"):
            with_offsets = [tokenizer.encode_with_offsets(text) for text in texts]
            tokens: Sequence[Sequence[int]] = [ids for ids, _ in with_offsets]
        else:
            tokens = tokenizer.encode(texts)
        unknown = sum(list(ids).count(tokenizer.unk_id) for ids in tokens)
        warn_unknown(unknown, sum(map(len, tokens)))
        room = self.max_length - 2
        sequences = [[tokenizer.cls_id, *ids[:room], tokenizer.sep_id] for ids in tokens]
        vectors = [np.empty(0)] * len(texts)
        for indices, values in self._run(sequences):
            for index, value in zip(indices, values, strict=False):
                # A copy, since a view would keep the padding in memory.
                vectors[index] = value[: None if value.ndim == 1 else len(sequences[index])].copy()
        result = []
        for index, (text, ids) in enumerate(zip(texts, tokens, strict=True)):
            embedded, spans = vectors[index], None
            if with_offsets:
                spans = np.array(with_offsets[index][1], np.int32).reshape(-1, 2)[:room]
                embedded = embedded[1:-1]
                if self._pooling == "words":
                    words = word_spans(text)
                    embedded, spans = _pool_words(embedded, spans, words), words
            result.append(Embedding(embedded, spans, len(ids) > room))
        return result


class BatchRunner:
    """Run the encoder on sequences in batches of similar lengths, on all local devices.

    `function(encode, batch)` returns, for a call of `BertModel`, or of `model`, with its parameters
    and a padded batch, arrays with one entry for each sequence.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        pad_id: int,
        function: Callable[..., Any],
        model: nn.Module | None = None,
    ):
        self._config, self._pad_id = config, pad_id
        mesh = make_mesh(devices=jax.local_devices())
        layout = replicated_layout(mesh)
        self._num_devices = mesh.size
        self._params = jax.device_put(params, layout.params)
        apply = (model or make_encoder(config, add_pooling_layer=False)).apply

        def run_shard(params: Any, _: Any, batch: Mapping[str, jax.Array]) -> Any:
            return function(functools.partial(apply, {"params": params}), batch)

        def step(params: Any, batch: Any, collectives: Collectives) -> Any:
            return collectives.run(run_shard, "per_example")(params, (), batch)

        self._step = compile_step(step, "mesh", layout, "per_example")

    def __call__(
        self, sequences: Sequence[Sequence[int] | np.ndarray], **columns: np.ndarray
    ) -> Iterator[tuple[list[int], Any]]:
        """Yield the indices of sequences and the function's outputs for them, then for padding.

        `columns` are further entries of the batch, with a number for each sequence.
        """
        order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))

        def outputs() -> Iterator[tuple[list[int], Any]]:
            start = 0
            while start < len(order):
                length = padded_length(self._config, len(sequences[order[start]]))
                indices = order[start : start + max(1, _BATCH_TOKENS // length)]
                start += len(indices)
                # All batches of a length have one size, but for the very last.
                size = len(indices) if start < len(order) else 1 << (len(indices) - 1).bit_length()
                size = -(-size // self._num_devices) * self._num_devices
                tokens = [sequences[index] for index in indices]
                ids, mask = pad(tokens, (size, length), self._pad_id)
                batch = {"input_ids": ids, "attention_mask": mask}
                for name, column in columns.items():
                    batch[name] = np.resize(column[indices], size)
                yield indices, self._step(self._params, batch)

        # In pairs, so that the device computes one batch while the host copies another.
        for (indices, values), _ in pairwise(chain[Any](outputs(), [None])):
            yield indices, jax.tree.map(np.asarray, values)


def pad(
    sequences: Sequence[Sequence[int] | np.ndarray], shape: tuple[int, int], pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences as `input_ids` and `attention_mask`, both of `shape` and int32."""
    ids, mask = np.full(shape, pad_id, np.int32), np.zeros(shape, np.int32)
    for index, sequence in enumerate(sequences):
        ids[index, : len(sequence)] = sequence
        mask[index, : len(sequence)] = 1
    return ids, mask


def encoder_inputs(
    config: ModelConfig,
    sequences: Sequence[Sequence[int] | np.ndarray],
    second_starts: Sequence[int],  # of the second text of a pair, or the end of the sequence
    length: int,
    pad_id: int,
) -> dict[str, np.ndarray]:
    """Return `input_ids`, `token_type_ids` and `attention_mask` of sequences, [N, length]."""
    input_ids, mask = pad(sequences, (len(sequences), length), pad_id)
    types = mask * (np.arange(length) >= np.array(second_starts)[:, None])
    types *= config.type_vocab_size > 1
    return {"input_ids": input_ids, "token_type_ids": types, "attention_mask": mask}


def tokenize(
    config: ModelConfig,
    tokenizer: Tokenizer,
    texts: str | Iterable[str],
    text_pairs: str | Iterable[str] | None,
    max_length: int | None,
) -> tuple[Sequence[Sequence[int]], Sequence[int], int]:
    """Return texts or pairs as sequences, where their second texts begin, and how many are cut.

    `Bert.tokenize` says what the arguments are.
    """
    columns = [text_list(texts)]
    if text_pairs is not None:
        columns.append(text_list(text_pairs, "text_pairs"))
    if not columns[0]:
        raise UserError("there are no texts; give one or more")
    if len(columns[0]) != len(columns[-1]):
        counts = f"{len(columns[0])} texts and {len(columns[1])} second texts"
        raise UserError(f"there are {counts}; give each text its second one")
    longest = config.max_position_embeddings
    length = longest if max_length is None else max_length
    room = max_text_tokens(len(columns), config, length)
    if room < 1 or length > longest:
        raise UserError(f"max_length is {length}; it must leave room and be at most {longest}")
    encoded = [tokenizer.encode(column) for column in columns]
    examples = list(zip(*encoded, strict=True))
    joined = [build_sequence(truncate(each, room), tokenizer, config) for each in examples]
    sequences, second_starts = zip(*joined, strict=True)
    return sequences, second_starts, sum(sum(map(len, each)) > room for each in examples)


def text_list(texts: Any, name: str = "texts") -> list[str]:
    """Return one text or several as a list; UserError where one is no text."""
    if isinstance(texts, str):
        texts = [texts]
    if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise UserError(f"{name} is {reprlib.repr(texts)}; give a text, or a list of texts")
    result = list(texts)
    for index, text in enumerate(result):
        if not isinstance(text, str):
            raise UserError(f"{name}[{index}] is {reprlib.repr(text)}; give a text, as a str")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise UserError(f"{name}[{index}] is not Unicode ({error}); mend it") from error
    return result


def prompt_of(task: TaskConfig | None, name: str) -> str:
    """Return what a model puts before each "query" or "passage"; nothing without a name."""
    prompts = ("query", "passage") if task and task.kind == "embedding" else ()
    if name and name not in prompts:
        known = " and ".join(prompts) or "none, as it was not trained for embeddings"
        raise UserError(f"prompt is {name!r}; the model has {known}")
    return own_prompt(task, name) if name else ""


def own_prompt(task: TaskConfig | None, name: str) -> str:
    """Return what a model puts before each "query" or "passage", if it has any prompts."""
    if not task or task.kind != "embedding":
        return ""
    return getattr(task.embedding, f"{name}_prompt")


def warn_truncated(number: int, of: int, length: int, stacklevel: int = 3) -> None:
    """Warn the caller of the function that calls this of texts that were truncated to a length."""
    if number:
        text = f"{number:,} of {of:,} texts are longer than the model's {length} tokens"
        text += " and were truncated"
        warnings.warn(text, TextWarning, stacklevel=stacklevel)


def padded_length(config: ModelConfig, length: int) -> int:
    """Return what to pad sequences of a length to: one of few, as each compiles a program."""
    fits = next((size for size in _LENGTHS if size >= length), -(-length // 256) * 256)
    return min(fits, config.max_position_embeddings)


_Text = TypeVar("_Text")


def chunks(texts: Iterable[_Text], length: Callable[[_Text], int] = len) -> Iterator[list[_Text]]:
    """Yield some thousands of texts at a time, fewer where they are long.

    `length` returns the characters of what is not a text by itself.
    """
    chunk: list[_Text] = []
    characters = 0
    for text in texts:
        chunk.append(text)
        characters += length(text)
        if len(chunk) == _CHUNK_TEXTS or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _pool_words(vectors: np.ndarray, tokens: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return the mean of the tokens that overlap each word: [words, D] from [tokens, D]."""
    result = np.full((len(words), vectors.shape[1]), np.nan, np.float32)
    # The spans of tokens and of words are both in the order of the text.
    first = np.searchsorted(tokens[:, 1], words[:, 0], side="right")
    end = np.searchsorted(tokens[:, 0], words[:, 1], side="left")
    for word in np.flatnonzero(first < end):
        result[word] = vectors[first[word] : end[word]].mean(0)
    return result
