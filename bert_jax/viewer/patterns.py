"""Where attention heads look: shares of attention by kind of token, over any number of texts."""

import dataclasses
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bert_jax.console import counted
from bert_jax.errors import UserError
from bert_jax.inference.loading import LoadedModel
from bert_jax.inference.runner import Arrays, Sequences, apply
from bert_jax.inference.tokenization import each_text, sequences_of, warn_truncated
from bert_jax.models.architecture import make_encoder
from bert_jax.tasks.sequences import join
from bert_jax.text.memory import chunks
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.viewer import page

# The kinds, in the order of a page; all but the last are kinds of tokens.
EXPLANATIONS = {
    "next": "The token after the query.",
    "previous": "The token before the query.",
    "same": "The query's own token where it occurs elsewhere in the sequence.",
    "cls": "[CLS], at the start of the sequence.",
    "sep": "[SEP], at the end of each text.",
    "punctuation": "Tokens that are nothing but punctuation or symbols.",
    "other_segment": "The tokens of the other text of a pair.",
    "broad": "The entropy of the attention: 100% where all tokens have the same share.",
}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Patterns:
    """Where the attention heads of a model look in texts: what `Bert.attention_patterns` returns.

    Queries are the tokens of the texts, without [CLS] and [SEP]. A value is the share of a head's
    attention that goes to keys of a kind, its mean over all queries that have such a key; as in
    section 3 of Clark et al. 2019, "What Does BERT Look At?".

    - next, previous: the token beside the query; same: other tokens with the query's token id;
      punctuation: tokens of characters of the Unicode categories P and S; other_segment: the tokens
      of the other text of a pair. None of these are [CLS] and [SEP].
    - cls, sep: [CLS]; each [SEP].
    - broad: the entropy of the attention, divided by the logarithm of the number of tokens of the
      sequence: 1 where all have the same share, 0 where one has it all.

    Attributes:
      model: the model in words.
      num_texts: how many texts, or pairs of texts, were read.
      num_tokens: how many queries they have.
      num_truncated: how many texts are longer than the model's positions and were truncated.
      values: of each kind by its name, [layers, heads] float32; NaN where no query has such a key.
      uniform: what the values would be if all tokens had the same share, [] float32.

    >>> patterns = getfixture("tiny_bert").attention_patterns(["A river bank.", "The bank reads."])
    >>> patterns.num_texts, patterns.values["previous"].shape
    (2, (2, 2))
    >>> layer, head, share = patterns.strongest("previous")[0]
    >>> share == float(patterns.values["previous"][layer - 1, head - 1])
    True
    """

    model: str
    num_texts: int
    num_tokens: int
    num_truncated: int
    values: Mapping[str, np.ndarray]
    uniform: Mapping[str, np.ndarray]

    def __repr__(self) -> str:
        texts, tokens = counted(self.num_texts, "text"), counted(self.num_tokens, "token")
        return f"Patterns({texts}, {tokens}, by {self.model})"

    def strongest(self, name: str, count: int = 3) -> list[tuple[int, int, float]]:
        """Return the heads with the largest values of a kind, as (layer, head, value).

        Layers and heads are counted from 1, as in the page. There are none where values are NaN.

        Raises:
          UserError: there is no such kind.
        """
        if name not in self.values:
            raise UserError(f"the pattern is {name!r}; choose one of {', '.join(self.values)}")
        values = self.values[name]
        best = np.argsort(-values, axis=None)[: 0 if np.isnan(values).any() else count]
        heads = [divmod(int(index), values.shape[1]) for index in best]
        return [(i + 1, j + 1, float(values[i, j])) for i, j in heads]

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as plain values; null for NaN."""
        values, uniform = (
            {name: _plain(array) for name, array in arrays.items()}
            for arrays in (self.values, self.uniform)
        )
        return {
            "texts": self.num_texts,
            "tokens": self.num_tokens,
            "truncated": self.num_truncated,
            "names": list(EXPLANATIONS),
            "explanations": EXPLANATIONS,
            "values": values,
            "uniform": uniform,
        }

    def save(self, path: str | Path, *, force: bool = False) -> int:
        """Write the page, and the numbers as `.json` beside it; return the bytes of the page.

        Args:
          path: of the page, one HTML file that needs no network.
          force: whether to replace files that are there.

        Raises:
          UserError: one of the files exists or cannot be written.

        >>> path = getfixture("tmp_path") / "patterns.html"
        >>> patterns = getfixture("tiny_bert").attention_patterns(["A river bank."])
        >>> patterns.save(path) == path.stat().st_size
        True
        >>> json.loads(path.with_suffix(".json").read_text())["texts"]
        1
        """
        for each in files(path):
            page.check_output(each, force=force)
        html, numbers = files(path)
        content = json.dumps({"model": self.model, **self.to_json()}, ensure_ascii=False)
        page.write(numbers, content + "\n", force=force)
        return page.write(html, self._render(), force=force)

    def _repr_html_(self) -> str:
        return page.frame(self._render())

    def _render(self) -> str:
        return page.render({"model": self.model, "texts": [], "patterns": self.to_json()}, {})


def _plain(array: np.ndarray) -> Any:
    if array.ndim:
        return [_plain(each) for each in array]
    return None if np.isnan(array) else round(float(array), 4)


def files(path: str | Path) -> tuple[Path, Path]:
    """Return the paths of a page of patterns and of its numbers."""
    page.check_file(path)
    path = Path(path)
    if path.suffix == ".json":
        raise UserError(f"{path} is for the numbers of a page; give the page a name in .html")
    return path, path.with_suffix(".json")


def survey(model: LoadedModel, texts: Iterable[str | tuple[str, str]]) -> Patterns:
    """Return the patterns of texts and pairs of texts; see `Bert.attention_patterns`."""
    # A scan would hold the maps of all layers at once.
    unrolled = dataclasses.replace(model.config, scan_layers=False)
    encoder = make_encoder(unrolled, add_pooling_layer=False)
    roles = _roles(model.tokenizer, range(model.tokenizer.vocab_size))

    def sums_of(params: Any, batch: Arrays) -> tuple[Array, ...]:
        inputs = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
        output = apply(encoder, params["bert"], inputs, output_attentions=True)
        of_tokens = jnp.asarray(roles)[batch["input_ids"]] * batch["attention_mask"]
        return _sum(output.attentions, batch["input_ids"], of_tokens, batch["second_start"])

    step = model.runner.compile("patterns", sums_of)
    sums = uniform = weights = np.zeros(())
    num_texts = num_truncated = 0
    for chunk in chunks(each_text(texts, pairs=True), lambda text: sum(map(len, text))):
        sequences, truncated = _sequences(model, chunk)
        num_texts += len(sequences.lengths)
        num_truncated += truncated
        for indices, outputs in model.runner.run(step, sequences):
            # After those of the texts are those of padding.
            added = [np.asarray(x)[: len(indices)].sum(0, dtype=float) for x in outputs]
            sums, uniform, weights = sums + added[0], uniform + added[1], weights + added[2]
    if not num_texts:
        raise UserError("there is no text with tokens; give one or more")
    warn_truncated(num_truncated, num_texts, model.config.max_position_embeddings)
    return _patterns(repr(model), num_texts, num_truncated, sums, uniform, weights)


def _sequences(model: LoadedModel, texts: Sequence[str | tuple[str, str]]) -> tuple[Sequences, int]:
    """Return texts and pairs that have tokens as sequences, and how many are truncated."""
    config, longest = model.config, model.config.max_position_embeddings
    columns = [[text] if isinstance(text, str) else text for text in texts]
    encoded = iter(model.tokenizer.encode([text for column in columns for text in column]))
    tokens = [[next(encoded) for _ in column] for column in columns]
    kept = [each for each in tokens if all(map(len, each))]
    joined = [join(each, model.tokenizer, config, longest) for each in kept]
    token_ids, second_starts, truncated = zip(*joined, strict=True) if joined else ((), (), ())
    column = np.array(second_starts, np.int32)
    return sequences_of(model, token_ids, second_starts, second_start=column), sum(truncated)


def of_text(
    model: str,
    tokenizer: Tokenizer,
    maps: np.ndarray,
    input_ids: np.ndarray,
    second_start: int,
    *,
    is_truncated: bool,
) -> Patterns:
    """Return the patterns of one text's maps [layers, heads, L, L]."""
    roles, starts = _roles(tokenizer, input_ids)[None], np.array([second_start])
    totals = jax.jit(_sum)(maps[:, None], input_ids[None], roles, starts)
    sums, uniform, weights = (np.asarray(x[0], float) for x in totals)
    return _patterns(model, 1, int(is_truncated), sums, uniform, weights)


def _patterns(
    model: str,
    num_texts: int,
    num_truncated: int,
    sums: np.ndarray,
    uniform: np.ndarray,
    weights: np.ndarray,
) -> Patterns:
    def by_kind(totals: np.ndarray) -> dict[str, np.ndarray]:
        means = np.divide(totals, weights, out=np.full_like(totals, np.nan), where=weights > 0)
        return dict(zip(EXPLANATIONS, np.moveaxis(means.astype(np.float32), -1, 0), strict=True))

    count = int(weights[-1])
    return Patterns(model, num_texts, count, num_truncated, by_kind(sums), by_kind(uniform))


# What a token is to the patterns.
_PADDING, _WORD, _PUNCTUATION, _CLS, _SEP = range(5)


def _roles(tokenizer: Tokenizer, ids: Iterable[int]) -> np.ndarray:
    """Return what each token is, [n] int8."""
    special = {tokenizer.pad_id: _PADDING, tokenizer.cls_id: _CLS, tokenizer.sep_id: _SEP}

    def role(token: str) -> int:
        # Without the marks of the start and of the continuation of a word.
        text = re.sub(r"^(##(?=.)|[▁Ġ]+)", "", token)
        is_marks = all(unicodedata.category(character)[0] in "PS" for character in text)
        return _PUNCTUATION if text and is_marks else _WORD

    return np.array(
        [special[i] if i in special else role(tokenizer.readable(i)) for i in map(int, ids)],
        np.int8,
    )


def _sum(
    maps: Iterable[Float[Array, "B H L L"]],
    ids: Int[Array, "B L"],
    roles: Int[Array, "B L"],
    second_start: Int[Array, " B"],
) -> tuple[Float[Array, "B N H P"], Float[Array, "B P"], Int[Array, "B P"]]:
    """Return sums over the queries of each text, for N layers and P kinds of patterns.

    Also those of uniform attention, and the number of queries that each kind has.
    """
    position = jnp.arange(ids.shape[1])
    distance = position - position[:, None]  # of the key from the query
    is_text = (roles == _WORD) | (roles == _PUNCTUATION)
    is_second = position >= second_start[:, None]
    text_key = is_text[:, None, :]
    keys = (
        text_key & (distance == 1),
        text_key & (distance == -1),
        text_key & (distance != 0) & (ids[:, :, None] == ids[:, None, :]),
        (roles == _CLS)[:, None, :],
        (roles == _SEP)[:, None, :],
        (roles == _PUNCTUATION)[:, None, :],
        text_key & (is_second[:, :, None] != is_second[:, None, :]),
    )
    chosen = jnp.stack(jnp.broadcast_arrays(*keys), axis=1) & is_text[:, None, :, None]  # BPLM
    weights = jnp.concatenate([chosen.any(3).sum(2), is_text.sum(1)[:, None]], axis=1)
    is_token = roles != _PADDING
    counts = is_token.sum(1)[:, None]
    # At least two: a sequence that fills up the batch has no tokens.
    most = jnp.log(jnp.maximum(counts, 2))

    def sums(layer: Float[Array, "B H L L"]) -> Float[Array, "B H P"]:
        kinds = chosen.astype(layer.dtype)
        shares = jnp.einsum("BHLM,BPLM->BHP", layer, kinds, precision="highest")
        entropy = jax.scipy.special.entr(layer).sum(3)
        broad = (entropy * is_text[:, None]).sum(2) / most
        return jnp.concatenate([shares, broad[..., None]], axis=2)

    alike = (is_token / jnp.maximum(counts, 1))[:, None, None]
    uniform = sums(jnp.broadcast_to(alike, (len(ids), 1, *distance.shape)))[:, 0]
    return jnp.stack([sums(layer) for layer in maps], axis=1), uniform, weights
