"""What a model computes for one text: attention maps, queries, keys and hidden states."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.inference.embeddings import encoder_inputs, padded_length
from bert_jax.inference.masked_lm import MaskFiller
from bert_jax.tasks.base import build_sequence, max_text_tokens, truncate
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.viewer import page, patterns
from bert_jax.viewer.patterns import Patterns


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AttentionView:
    """What a model computes for a text or a pair: what `Bert.attention` returns.

    Attributes:
      model: the model in words.
      tokenizer: its tokenizer.
      texts: the text, and the second of a pair.
      input_ids: of the sequence, [CLS] and [SEP] included, [L] int32.
      second_start: index of the first token of the second text; L for a single text.
      maps: attention probabilities by query and key, [layers, heads, L, L] float32.
      queries, keys: of each head, [layers, heads, L, K] float32.
      position_scores: the relative positions' term of the scores before they are divided by √K,
        [layers, heads, L, L]; None without relative positions.
      hidden_states: the embeddings and the output of each layer, [layers + 1, L, D] float32.
      guesses: for the index of each [MASK], the most probable tokens as (token, probability) by the
        masked LM head on the embeddings and on each layer; empty without masks or without the head.
      prediction: of a fine-tuned model, as in `Bert.predict`; None of a pretrained one.
      is_truncated: whether the text is longer than the model's positions.

    >>> view = getfixture("tiny_bert").attention("A river bank.")
    >>> view.maps.shape == (2, 2, len(view.tokens), len(view.tokens))
    True
    """

    model: str
    tokenizer: Tokenizer
    texts: Sequence[str]
    input_ids: np.ndarray
    second_start: int
    maps: np.ndarray
    queries: np.ndarray
    keys: np.ndarray
    position_scores: np.ndarray | None
    hidden_states: np.ndarray
    guesses: Mapping[int, Sequence[Sequence[tuple[str, float]]]]
    prediction: Mapping[str, Any] | None
    is_truncated: bool

    @property
    def tokens(self) -> list[str]:
        """The tokens of the sequence, as the vocabulary has them."""
        return [self.tokenizer.readable(int(index)) for index in self.input_ids]

    def __repr__(self) -> str:
        return f"AttentionView({' '.join(self.tokens)!r} by {self.model})"

    def patterns(self) -> Patterns:
        """Return where each head looks in this text; see `Patterns`."""
        return patterns.of_text(
            self.model,
            self.tokenizer,
            self.maps,
            self.input_ids,
            self.second_start,
            is_truncated=self.is_truncated,
        )

    def similarities(self) -> np.ndarray:
        """Return the cosine of each two tokens' hidden states, [layers + 1, L, L] float32."""
        return cosines(self.hidden_states)

    def save(self, path: str | Path, *, force: bool = False) -> int:
        """Write the page, one HTML file that needs no network, and return its bytes.

        Args:
          path: of the file.
          force: whether to replace a file that is there.

        Raises:
          UserError: the file exists or cannot be written.

        >>> path = getfixture("tmp_path") / "attention.html"
        >>> getfixture("tiny_bert").attention("A river bank.").save(path) == path.stat().st_size
        True
        """
        return page.write(path, _render([self]), force=force)

    def _repr_html_(self) -> str:
        return page.frame(_render([self]))


class Viewer:
    """Compute views of texts by an encoder: its `apply` with its parameters, compiled."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, encode: Callable[..., Any]):
        self._config, self._tokenizer, self._encode = config, tokenizer, encode

    def __call__(
        self, model: str, texts: Sequence[str], mask_filler: Callable[[], MaskFiller]
    ) -> AttentionView:
        """Return the view of a text or a pair, without a prediction; see `Bert.attention`."""
        c, tokenizer = self._config, self._tokenizer
        encoded = [tokenizer.encode_with_masks(text) for text in texts]
        if not all(encoded):
            raise UserError("a text is empty; give one with words")
        kept = truncate(encoded, max_text_tokens(len(texts), c, c.max_position_embeddings))
        ids, second_start = build_sequence(kept, tokenizer, c)
        count = len(ids)
        page.check_size(c.num_hidden_layers, c.num_attention_heads, c.hidden_size, count, 1)
        masked = np.flatnonzero(ids == tokenizer.mask_id)
        filler = mask_filler() if masked.size else None
        length = padded_length(c, count)
        output = self._encode(
            **encoder_inputs(c, [ids], [second_start], length, tokenizer.pad_id),
            output_hidden_states=True,
            output_attentions=True,
            output_queries_keys=True,
        )

        def by_layer(arrays: Iterable[Any]) -> np.ndarray:
            return np.stack([np.asarray(array[0], np.float32) for array in arrays])

        states = by_layer(output.hidden_states)[:, :count]
        layers = output.queries_keys
        scores, positions = [x.position_scores for x in layers], None
        if known := [x for x in scores if x is not None]:  # all, or those of layers with a window
            whole = np.zeros(known[0].shape)
            positions = by_layer(whole if x is None else x for x in scores)[..., :count, :count]
        return AttentionView(
            model=model,
            tokenizer=tokenizer,
            texts=texts,
            input_ids=ids,
            second_start=second_start,
            maps=by_layer(output.attentions)[..., :count, :count],
            queries=by_layer(x.query for x in layers)[..., :count, :],
            keys=by_layer(x.key for x in layers)[..., :count, :],
            position_scores=positions,
            hidden_states=states,
            guesses=filler.by_layer(states, masked) if filler else {},
            prediction=None,
            is_truncated=kept != encoded,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class WordComparison:
    """How alike a model makes a word of several texts: what `Bert.compare` returns.

    Attributes:
      word: the word.
      views: of each text.
      indices: of the word's tokens in the sequence of each text.
      cosines: of the word's vectors in each two texts, after the embeddings and after each layer,
        [layers + 1, texts, texts] float32. A vector is the mean over the word's tokens.

    >>> bert = getfixture("tiny_bert")
    >>> bert.compare(["A river bank.", "The bank reads."], "bank").cosines.shape
    (3, 2, 2)
    """

    word: str
    views: Sequence[AttentionView]
    indices: Sequence[Sequence[int]]
    cosines: np.ndarray

    def save(self, path: str | Path, *, force: bool = False) -> int:
        """Write the page of the texts and the comparison, as `AttentionView.save` does."""
        return page.write(path, self._render(), force=force)

    def _repr_html_(self) -> str:
        return page.frame(self._render())

    def _render(self) -> str:
        comparison = {
            "word": self.word,
            "spans": [find_word(view.texts[0], self.word) for view in self.views],
            "indices": self.indices,
            "cosines": np.round(self.cosines.astype(float), 4).tolist(),
        }
        return _render(self.views, comparison=comparison)


def compare(
    view_of: Callable[[str], AttentionView], config: ModelConfig, texts: Sequence[str], word: str
) -> WordComparison:
    """Return how alike the word's vectors are in texts; see `WordComparison`."""
    if isinstance(texts, str) or len(texts) < 2 or not word.strip():
        raise UserError("there is nothing to compare; give a word and two texts or more")
    views = list(map(view_of, texts))
    sizes = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    page.check_size(*sizes, max(len(view.input_ids) for view in views), len(views))
    indices, vectors = [], []
    for view in views:
        (text,) = view.texts
        start, end = find_word(text, word)
        if view.tokenizer.mask_id in view.input_ids:
            raise UserError(f"the text {text[:60]!r} has a [MASK]; compare texts without")
        _, offsets = view.tokenizer.encode_with_offsets(text)
        # After [CLS].
        found = [i + 1 for i, (first, last) in enumerate(offsets) if first < end and last > start]
        if not found or found[-1] >= len(view.input_ids) - 1:
            raise UserError(f"{word!r} is not in what the model reads of {text[:60]!r}")
        indices.append(found)
        vectors.append(view.hidden_states[:, found].mean(1))
    return WordComparison(word, views, indices, cosines(np.stack(vectors, axis=1)))


def find_word(text: str, word: str) -> tuple[int, int]:
    """Return where a word starts and ends in a text, in any case; as a whole word if it can."""
    for pattern in (rf"\b{re.escape(word)}\b", re.escape(word)):
        if match := re.search(pattern, text, re.IGNORECASE):
            return match.span()
    raise UserError(f"the text {text[:60]!r} has no {word!r}; compare a word of every text")


def cosines(vectors: np.ndarray) -> np.ndarray:
    """Return the cosine of each two vectors: [..., N, N] of [..., N, D]."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    normalized = vectors / np.maximum(norms, np.finfo(np.float32).tiny)
    return np.clip(normalized @ normalized.swapaxes(-1, -2), -1, 1)


def _render(views: Sequence[AttentionView], **rest: Any) -> str:
    """Return the page of texts: "layer-T-I" is layer I of text T, 0 for the embeddings."""
    data = {"model": views[0].model, "texts": [_description(view) for view in views], **rest}
    return page.render(
        data,
        {
            f"layer-{number}-{layer}": _layer(view, layer)
            for number, view in enumerate(views)
            for layer in range(len(view.hidden_states))
        },
    )


def _description(view: AttentionView) -> dict[str, Any]:
    """Return what the page says of a text, beside the numbers of its layers."""
    layers, heads, _, size = view.queries.shape
    return {
        "texts": list(view.texts),
        "tokens": view.tokens,
        "vocabSize": view.tokenizer.vocab_size,
        "secondStart": view.second_start,
        "layers": layers,
        "heads": heads,
        "headSize": size,
        "hasPositionScores": view.position_scores is not None,
        "guesses": {str(index): guesses for index, guesses in view.guesses.items()},
        "prediction": view.prediction,
        "isTruncated": view.is_truncated,
    }


def _layer(view: AttentionView, layer: int) -> bytes:
    """Return the numbers of a layer: little-endian, one array after the other, by rows.

    int16 cosines × 32767 [L, L]; and but for the embeddings float16 queries [H, L, K], keys
    [H, L, K], position scores [H, L, L] if there are any, and the largest weight of each query
    [H, L]; uint8 maps × 255 / that weight [H, L, L].
    """
    arrays = [np.round(cosines(view.hidden_states[layer]) * 32767).astype("<i2")]
    if layer:
        arrays += [x[layer - 1].astype("<f2") for x in (view.queries, view.keys)]
        if view.position_scores is not None:
            largest = np.finfo("<f2").max  # less than what a window hides is multiplied by
            arrays.append(view.position_scores[layer - 1].clip(-largest, largest).astype("<f2"))
        maps = view.maps[layer - 1]
        largest = maps.max(-1).astype("<f2")
        # A weight of a long text, such as 1 / 512, is less than one 255th.
        scaled = maps / largest[..., None].astype(np.float32)
        arrays += [largest, np.round(np.minimum(scaled, 1) * 255).astype("u1")]
    return b"".join(array.tobytes() for array in arrays)
