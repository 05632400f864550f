"""What a model computes for one text: attention maps, queries, keys and hidden states."""

import dataclasses
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unicodedata import category

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError, refuse
from bert_jax.inference import masked_lm
from bert_jax.inference.hidden_states import encoder_output
from bert_jax.inference.loading import LoadedModel
from bert_jax.inference.predictions import predict_texts
from bert_jax.inference.tokenization import sequences_of, warn_truncated
from bert_jax.models.architecture import architecture
from bert_jax.models.positions import position_kind
from bert_jax.retrieval.search import normalize
from bert_jax.tasks.sequences import join
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
      position_scores: what is added to the scores before they are divided by √K, by relative
        positions or by the window of a local layer (very negative outside it, 0 in other layers),
        [layers, heads, L, L]; None without both.
      hidden_states: the embeddings and the output of each layer, [layers + 1, L, D] float32.
      guesses: for the index of each [MASK], the most probable tokens as (token, probability) by the
        masked LM head on the embeddings and on each layer; empty without masks, and of an ELECTRA
        whose generator has layers of its own.
      prediction: of a fine-tuned model, as in `Bert.predict`; None of a pretrained one, and where
        the task does not take such texts.
      is_truncated: whether the text is longer than the model's positions.
      prediction_length: the most tokens that the prediction reads at once, where the text has more;
        0 otherwise.

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
    prediction_length: int = 0

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


def view(model: LoadedModel, texts: Sequence[str]) -> AttentionView:
    """Return the view of a text or a pair; see `Bert.attention`."""
    config, tokenizer = model.config, model.tokenizer
    encoded = [tokenizer.encode_with_masks(text) for text in texts]
    if not all(encoded):
        raise UserError("a text is empty; give one with words")
    longest = config.max_position_embeddings
    input_ids, second_start, is_truncated = join(encoded, tokenizer, config, longest)
    count = len(input_ids)
    check_size(config, count, num_texts=1)
    masked = np.flatnonzero(input_ids == tokenizer.mask_id)
    if masked.size:
        masked_lm.check_head(model)
    warn_truncated(int(is_truncated), 1, longest)
    output = encoder_output(
        model,
        sequences_of(model, [input_ids], [second_start]),
        output_hidden_states=True,
        output_attentions=True,
        output_queries_keys=True,
    )
    layers = output.queries_keys
    states, maps = _by_layer(output.hidden_states), _by_layer(output.attentions)
    refuse(
        not (np.isfinite(states).all() and np.isfinite(maps).all()),
        "the model computes numbers for this text that are not finite, which no page can show",
        fix="load it as float32, or take another checkpoint",
    )
    prediction = predict_texts(model, texts)
    is_longer = prediction is not None and (is_truncated or count > model.data.max_length)
    return AttentionView(
        model=repr(model),
        tokenizer=tokenizer,
        texts=texts,
        input_ids=input_ids,
        second_start=second_start,
        maps=maps,
        queries=_by_layer(layer.query for layer in layers)[..., :count, :],
        keys=_by_layer(layer.key for layer in layers)[..., :count, :],
        position_scores=_position_scores([layer.position_scores for layer in layers], count),
        hidden_states=states,
        guesses=masked_lm.guesses_by_layer(model, states, masked) if masked.size else {},
        prediction=prediction,
        is_truncated=is_truncated,
        prediction_length=min(longest, model.data.max_length) if is_longer else 0,
    )


def check_size(config: ModelConfig, length: int, *, num_texts: int) -> None:
    """Refuse the page of some texts of so many tokens each, where it would be too large."""
    windows, heads = architecture(config).windows(config), config.num_attention_heads
    has_position_scores = position_kind(config).scores or any(windows)
    # What `_layer` writes: maps, perhaps position scores, and cosines; queries and keys.
    bytes_of_pair = (3 if has_position_scores else 1) * heads + 2
    size_of_layer = bytes_of_pair * length**2 + 4 * config.hidden_size * length
    size = num_texts * len(windows) * size_of_layer
    what = f"texts of up to {length:,} tokens" if num_texts > 1 else f"{length:,} tokens"
    refuse(
        size > page.MAX_BYTES,
        f"the page of {what} would have {size / 1e6:,.0f} MB of numbers, "
        f"more than the {page.MAX_BYTES / 1e6:.0f} MB that a browser reads well",
        fix="shorten them, or give fewer" if num_texts > 1 else "shorten the text",
    )


def _by_layer(arrays: Iterable[Any]) -> np.ndarray:
    """Return the arrays of each layer for the one text, [layers, ...] float32."""
    return np.stack([np.asarray(array[0], np.float32) for array in arrays])


def _position_scores(scores: Sequence[Any], count: int) -> np.ndarray | None:
    """Return those of the first tokens: of all layers, or of those with a window; None of none."""
    known = [each for each in scores if each is not None]
    if not known:
        return None
    zeros = np.zeros(known[0].shape)
    return _by_layer(zeros if each is None else each for each in scores)[..., :count, :count]


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
            "cosines": np.round(self.cosines.astype(float), 4).tolist(),
        }
        return _render(self.views, comparison=comparison)


def compare(model: LoadedModel, texts: Sequence[str], word: str) -> WordComparison:
    """Return how alike the word's vectors are in texts; see `WordComparison`."""
    if not isinstance(word, str):
        raise UserError(f"the word is {reprlib.repr(word)}; give a str")
    if isinstance(texts, str) or len(texts) < 2 or not word.strip():
        raise UserError("there is nothing to compare; give a word and two texts or more")
    spans = [find_word(text, word) for text in texts]
    for text in texts:  # before they are read, for which a [MASK] needs a head
        refuse(
            model.tokenizer.mask_id in model.tokenizer.encode_with_masks(text),
            f"the text {text[:60]!r} has a [MASK]",
            fix="compare texts without",
        )
    views = [view(model, [text]) for text in texts]
    longest = max(len(each.input_ids) for each in views)
    check_size(model.config, longest, num_texts=len(views))
    indices, vectors = [], []
    for each, text, (start, end) in zip(views, texts, spans, strict=True):
        _, offsets = each.tokenizer.encode_with_offsets(text)
        # After [CLS].
        found = [i + 1 for i, (first, last) in enumerate(offsets) if first < end and last > start]
        if not found or found[-1] >= len(each.input_ids) - 1:
            raise UserError(f"{word!r} is not in what the model reads of {text[:60]!r}")
        indices.append(found)
        vectors.append(each.hidden_states[:, found].mean(1))
    return WordComparison(word, views, indices, cosines(np.stack(vectors, axis=1)))


def find_word(text: str, word: str) -> tuple[int, int]:
    """Return where a word starts and ends in a text, in any case; as a whole word if it can."""
    matches = [*re.finditer(re.escape(word), text, re.IGNORECASE)]
    for start, end in map(re.Match.span, matches):
        if not _is_inside_word(text, start) and not _is_inside_word(text, end):
            return start, end
    if matches:
        return matches[0].span()
    raise UserError(f"the text {text[:60]!r} has no {word!r}; compare a word of every text")


def _is_inside_word(text: str, index: int) -> bool:
    """Return whether the characters before and after a place are of one word, as marks are."""
    both = text[index - 1 : index + 1] if 0 < index < len(text) else " "
    return all(c.isalnum() or c == "_" or category(c).startswith("M") for c in both)


def cosines(vectors: np.ndarray) -> np.ndarray:
    """Return the cosine of each two vectors: [..., N, N] of [..., N, D]."""
    normalized = normalize(vectors)
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
    special = special_indices(view.input_ids, view.second_start, view.tokenizer.sep_id)
    outstanding = outstanding_head(view.maps, special)
    return {
        "texts": list(view.texts),
        "tokens": view.tokens,
        "vocabSize": view.tokenizer.vocab_size,
        "secondStart": view.second_start,
        "special": special,
        "layers": layers,
        "heads": heads,
        "headSize": size,
        "outstandingHead": [1 + index for index in outstanding],
        "hasPositionScores": view.position_scores is not None,
        "guesses": {str(index): guesses for index, guesses in view.guesses.items()},
        "prediction": view.prediction,
        "isTruncated": view.is_truncated,
        "predictionLength": view.prediction_length,
    }


def special_indices(input_ids: np.ndarray, second_start: int, sep_id: int) -> list[int]:
    """Return the indices of [CLS], of the last [SEP], and of those between two texts.

    `second_start` is the index of the first token of the second text, L for a single text.
    """
    start = second_start
    while start > 1 and input_ids[start - 1] == sep_id:
        start -= 1
    return sorted({0, *range(start, second_start), len(input_ids) - 1})


def outstanding_head(maps: np.ndarray, special: Sequence[int]) -> tuple[int, int]:
    """Return the layer and the head, from 0, whose tokens most look at one other token each.

    Args:
      maps: attention probabilities, [layers, heads, L, L].
      special: indices of tokens that do not count, since most heads look at them.
    """
    words = np.setdiff1d(np.arange(maps.shape[-1]), special)
    among_words = maps[:, :, words][..., words] * (1 - np.eye(len(words), dtype=maps.dtype))
    favourites = among_words.max(-1, initial=0.0).sum(-1)
    layer, head = np.unravel_index(favourites.argmax(), favourites.shape)
    return int(layer), int(head)


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
