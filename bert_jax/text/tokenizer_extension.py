"""Add the frequent words of a text to a tokenizer that has been trained on another."""

import heapq
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from bert_jax import console
from bert_jax.errors import UserError
from bert_jax.text import sentencepiece_model, tokenizer_loading
from bert_jax.text.tokenizer import (
    SentencePieceTokenizer,
    Tokenizer,
    WordPieceTokenizer,
)

_LEAD = 1e-3  # in log probability, of an added word over the pieces that spelled it
_MIN_COUNT = 2
# Words of a SentencePiece: letters and their marks, after a space or not.
_WORDS = pre_tokenizers.Split(tokenizers.Regex(r"▁?[\p{L}\p{M}]+"), "isolated")


@console.working("adding tokens to the vocabulary", says_end=False)
def extended(tokenizer: Tokenizer, sentences: Iterable[str], count: int) -> Tokenizer:
    """Return a tokenizer with more tokens, from the frequent words of a text.

    A WordPiece and a unigram SentencePiece get the most frequent words that are no token yet. A BPE
    gets what its training would merge next: the most frequent pair of neighboring tokens within a
    word, then the most frequent pair after that, and so on.

    Args:
      tokenizer: its tokens keep their order. So do their ids, but for special tokens that a
        SentencePiece model lacks, which are the last ones again.
      sentences: of the text.
      count: tokens to add; fewer if the text has no more that occur twice.

    Raises:
      UserError: the tokenizer is a SentencePiece of characters or of words.
    """
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _extended_sentencepiece(tokenizer, sentences, count)
    values = json.loads(tokenizer.files()["tokenizer.json"])
    inner = tokenizers.Tokenizer.from_str(json.dumps(values))
    words = _count_words(inner, sentences)
    known = inner.get_vocab()
    if isinstance(tokenizer, WordPieceTokenizer):
        new = _most_frequent(words, known, count)
    else:
        pieces = lambda word: [token.value for token in inner.model.tokenize(word)]  # noqa: E731
        merges, new = next_merges(_spelled(words, pieces), known, count)
        values["model"]["merges"] += merges
    # A token that is outside the model's own vocabulary keeps its id if it is in there too.
    vocabulary = {**known, **{word: len(known) + index for index, word in enumerate(new)}}
    values["model"]["vocab"] = vocabulary
    files = {"tokenizer.json": json.dumps(values).encode()}
    return tokenizer_loading.from_files(files, "the extended tokenizer")


def _extended_sentencepiece(
    tokenizer: SentencePieceTokenizer, sentences: Iterable[str], count: int
) -> Tokenizer:
    (name, content) = next(iter(tokenizer.files().items()))
    model = sentencepiece_model.Model.FromString(content)
    kind = model.trainer_spec.model_type
    if kind not in (sentencepiece_model.UNIGRAM, sentencepiece_model.BPE):
        raise UserError(
            "tokenizer.add adds words to a SentencePiece of unigrams or of BPE, and this is one of "
            "characters or of words; train another one, and set tokenizer.path to it"
        )
    words: Counter[str] = Counter()
    for sentence in sentences:
        split = _WORDS.pre_tokenize_str(tokenizer.normalize(sentence))
        words.update(word for word, _ in split if any(map(str.isalpha, word)))
    scores = {piece.piece: piece.score for piece in model.pieces}

    def pieces(word: str) -> list[str]:
        text = word.removeprefix("▁")
        ids = tokenizer.encode([text])[0] if text != word else tokenizer.encode_rest(text)
        return [tokenizer.id_to_token(int(index)) for index in ids]

    if kind == sentencepiece_model.BPE:
        _, new = next_merges(_spelled(words, pieces), scores, count)
        lowest = min(scores.values())  # what is merged first has the highest
        added = {word: lowest - 1 - index for index, word in enumerate(new)}
    else:
        total, added = words.total(), {}
        for word in _most_frequent(words, scores, count):
            spelled = sum(scores[piece] for piece in pieces(word))
            added[word] = max(math.log(words[word] / total), spelled + _LEAD)
    for word, score in added.items():
        model.pieces.add(piece=word, score=score)
    return tokenizer_loading.from_files({name: model.SerializeToString()}, "the extended tokenizer")


def _count_words(inner: tokenizers.Tokenizer, sentences: Iterable[str]) -> Counter[str]:
    """Return how often each word of a text occurs, as a tokenizer splits it."""
    counts: Counter[str] = Counter()
    for sentence in sentences:
        text = inner.normalizer.normalize_str(sentence) if inner.normalizer else sentence
        split = inner.pre_tokenizer.pre_tokenize_str(text) if inner.pre_tokenizer else [(text, ())]
        counts.update(word for word, _ in split)
    return counts


def _most_frequent(words: Counter[str], known: Any, count: int) -> list[str]:
    new = [word for word in words if words[word] >= _MIN_COUNT and word not in known]
    return sorted(new, key=lambda word: (-words[word], word))[:count]


def _spelled(
    words: Counter[str], pieces: Callable[[str], list[str]]
) -> list[tuple[list[str], int]]:
    """Return the tokens of each word that has several, and how often it occurs."""
    spelled = ((pieces(word), number) for word, number in sorted(words.items()))
    return [(tokens, number) for tokens, number in spelled if len(tokens) > 1]


def next_merges(
    words: Sequence[tuple[list[str], int]], known: Any, count: int
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the pairs of tokens that BPE merges next, and those of their results that are new.

    Args:
      words: the tokens of each word, which are changed, and how often it occurs.
      known: the tokens that there are.
      count: new tokens, at most.

    Source: Sennrich et al. 2016, algorithm 1.

    >>> next_merges([(["h", "e", "a", "d"], 3), (["r", "e", "a", "d"], 2)], {*"head"}, 2)
    ([('a', 'd'), ('e', 'ad')], ['ad', 'ead'])
    """
    counts: Counter[tuple[str, str]] = Counter()
    where: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for index, (tokens, number) in enumerate(words):
        for pair in itertools.pairwise(tokens):
            counts[pair] += number
            where[pair].add(index)
    queue = [(-number, pair) for pair, number in counts.items()]
    heapq.heapify(queue)
    merges: list[tuple[str, str]] = []
    new: dict[str, None] = {}
    while queue and len(new) < count:
        number, best = heapq.heappop(queue)
        if -number != counts[best]:  # it has changed since, and is in the queue again
            continue
        if -number < _MIN_COUNT:
            break
        merges.append(best)
        if "".join(best) not in known:
            new["".join(best)] = None
        changed: set[tuple[str, str]] = set()
        for index in where.pop(best):
            tokens, number = words[index]
            for pair in itertools.pairwise(tokens):
                counts[pair] -= number
                changed.add(pair)
            _merge(tokens, best)
            for pair in itertools.pairwise(tokens):
                counts[pair] += number
                where[pair].add(index)
                changed.add(pair)
        for pair in changed - {best}:
            heapq.heappush(queue, (-counts[pair], pair))
    return merges, list(new)


def _merge(tokens: list[str], pair: tuple[str, str]) -> None:
    """Replace each occurrence of a pair by one token, from the left, in place."""
    index = 0
    while index < len(tokens) - 1:
        if (tokens[index], tokens[index + 1]) == pair:
            tokens[index : index + 2] = ["".join(pair)]
        index += 1
