"""Add the frequent words of a text to a tokenizer that has been trained on another."""

import heapq
import itertools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from bert_jax import console
from bert_jax.errors import refuse
from bert_jax.text import sentencepiece_model, tokenizer_loading
from bert_jax.text.sentencepiece_model import BPE, NORMAL, UNIGRAM
from bert_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer
from bert_jax.text.tokenizer import Tokenizer, WordPieceTokenizer

_NAME = "the extended tokenizer"
_MIN_COUNT = 2  # of what is added
# Words of a SentencePiece: letters and their marks, after a space or not.
_WORDS = pre_tokenizers.Split(tokenizers.Regex(r"▁?[\p{L}\p{M}]+"), "isolated")
_LEAD = 1e-3  # in log probability, of a word over what else could spell it
_MAX_PASSES = 20
_UNKNOWN = 10.0  # that SentencePiece has an unknown piece below the lowest score


@console.working("adding tokens to the vocabulary", says_end=False)
def extended(tokenizer: Tokenizer, sentences: Iterable[str], count: int) -> Tokenizer:
    """Return a tokenizer with more tokens, from the frequent words of a text.

    A WordPiece and a unigram SentencePiece get the most frequent words that are no token yet. A BPE
    gets what its training would merge next: the most frequent pair of neighboring tokens within a
    word, then the most frequent pair after that, and so on. It does not merge what it does not
    know, such as the letters of another script.

    Args:
      tokenizer: its tokens keep their ids. Special tokens that a SentencePiece model lacks follow
        its vocabulary, so theirs grow.
      sentences: of the text.
      count: tokens to add; fewer if the text has no more that occur twice.

    Raises:
      UserError: the tokenizer is of a kind that no words can be added to.
    """
    if isinstance(tokenizer, SentencePieceTokenizer):
        new = _extended_sentencepiece(tokenizer, sentences, count)
    else:
        new = _extended_json(tokenizer, sentences, count)
    return new if new.vocab_size > tokenizer.vocab_size else tokenizer


def _extended_json(tokenizer: Tokenizer, sentences: Iterable[str], count: int) -> Tokenizer:
    """Return a WordPiece or a byte-level BPE with more tokens in its `tokenizer.json`."""
    content = tokenizer.files()["tokenizer.json"].decode()
    values = json.loads(content)
    model = values["model"]
    unknown = "Unigram of a tokenizer.json alone" if model["type"] == "Unigram" else ""
    if model["type"] == "BPE" and model.get("continuing_subword_prefix"):
        unknown = "BPE with a continuing_subword_prefix"
    refuse(
        unknown,
        f"tokenizer.add knows no {unknown}",
        fix="train another tokenizer, and set tokenizer.path to it",
    )
    inner = tokenizers.Tokenizer.from_str(content)
    known = inner.get_vocab()
    words = _count_words(inner, sentences)
    if isinstance(tokenizer, WordPieceTokenizer):
        limit = model["max_input_chars_per_word"]
        shorter = Counter({word: number for word, number in words.items() if len(word) <= limit})
        new = _choose_words(values, _most_frequent(shorter, known), words, count)
    else:
        inner.model.dropout = None  # which would spell a word differently each time
        spelled = ([token.value for token in inner.model.tokenize(word)] for word in words)
        apart = {model.get("unk_token") or ""}
        merges, new = next_merges(_runs(spelled, words.values(), apart), known, count)
        model["merges"] += itertools.filterfalse(
            {*map(tuple, model["merges"])}.__contains__, merges
        )
    model["vocab"] = _with_words(known, new)
    files = {"tokenizer.json": json.dumps(values).encode()}
    return tokenizer_loading.from_files(files, _NAME)


def _with_words(known: dict[str, int], new: Sequence[str]) -> dict[str, int]:
    """Return the ids of a model's tokens, with new ones after all.

    Tokens that were added beside the model are in it too, as `tokenizers` numbers them anew where
    the model's own ids have a gap.
    """
    return {**known, **{word: len(known) + index for index, word in enumerate(new)}}


def _choose_words(
    values: dict[str, Any], candidates: Sequence[str], words: Iterable[str], count: int
) -> list[str]:
    """Return the first candidates of a WordPiece that make no word of the text unknown.

    WordPiece takes the longest token that a word starts with. If nothing continues the word from
    there, all of it is unknown.
    """
    unknown = values["model"]["unk_token"]
    old = tokenizers.Tokenizer.from_str(json.dumps(values))

    def is_known(model: tokenizers.Tokenizer, word: str) -> bool:
        return all(token.value != unknown for token in model.model.tokenize(word))

    obstacles: set[str] = set()
    while True:
        chosen = [word for word in candidates if word not in obstacles][:count]
        model = {**values["model"], "vocab": _with_words(old.get_vocab(), chosen)}
        now = tokenizers.Tokenizer.from_str(json.dumps({**values, "model": model}))
        lost = [word for word in words if not is_known(now, word) and is_known(old, word)]
        if not lost:
            return chosen
        obstacles |= {max(filter(word.startswith, chosen), key=len) for word in lost}


def _extended_sentencepiece(
    tokenizer: SentencePieceTokenizer, sentences: Iterable[str], count: int
) -> Tokenizer:
    [content] = tokenizer.files().values()
    model = sentencepiece_model.Model.FromString(content)
    trainer, kind = model.trainer_spec, model.trainer_spec.model_type
    refuse(
        kind not in (UNIGRAM, BPE)
        or trainer.treat_whitespace_as_suffix
        or not model.normalizer_spec.escape_whitespaces,
        "tokenizer.add adds words to a SentencePiece of unigrams or of BPE in which ▁ is before a "
        "word, and this is another",
        fix="train another tokenizer, and set tokenizer.path to it",
    )
    words: Counter[str] = Counter()
    for sentence in sentences:
        split = _WORDS.pre_tokenize_str(tokenizer.normalize(sentence))
        words.update(word for word, _ in split if any(map(str.isalpha, word)))
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
    known = {piece.piece for piece in model.pieces}
    lowest = min(scores.values())

    def build(added: Mapping[str, float]) -> SentencePieceTokenizer:
        larger = sentencepiece_model.Model.FromString(content)
        for word, score in added.items():
            larger.pieces.add(piece=word, score=score)
        return SentencePieceTokenizer(larger.SerializeToString())

    if kind == BPE:
        spelled = tokenizer.spell([*words])
        _, new = next_merges(_runs(spelled, words.values(), known - scores.keys()), known, count)
        # Of two pairs, that whose token has the higher score is merged first.
        return build({word: lowest - 1 - index for index, word in enumerate(new)})
    total, new = words.total(), _most_frequent(words, known)[:count]
    added = {word: math.log(words[word] / total) for word in new}

    def several() -> dict[str, list[str]]:
        spelled = dict(zip(added, result.spell([*added]), strict=True))
        return {word: tokens for word, tokens in spelled.items() if tokens != [word]}

    result = build(added)
    # Until each word is one token, and not the shorter ones among them.
    for _ in range(_MAX_PASSES):
        if not (split_words := several()):
            return result
        for word, tokens in split_words.items():
            of_tokens = ({**scores, **added}.get(token, lowest - _UNKNOWN) for token in tokens)
            added[word] = max(added[word], sum(of_tokens)) + _LEAD
        result = build(added)
    for word in several():  # which never are, such as those that the normalizer changes again
        del added[word]
    return build(added)


def _count_words(inner: tokenizers.Tokenizer, sentences: Iterable[str]) -> Counter[str]:
    """Return how often each word of a text occurs, as a tokenizer splits it."""
    counts: Counter[str] = Counter()
    # Added tokens are cut out of a text before its words are split.
    added = [re.escape(token.content) for token in inner.get_added_tokens_decoder().values()]
    cut = re.compile("|".join(added) or "(?!)")
    for part in itertools.chain.from_iterable(map(cut.split, sentences)):
        text = inner.normalizer.normalize_str(part) if inner.normalizer else part
        split = inner.pre_tokenizer.pre_tokenize_str(text) if inner.pre_tokenizer else [(text, ())]
        counts.update(word for word, _ in split)
    return counts


def _most_frequent(words: Counter[str], known: Container[str]) -> list[str]:
    new = [word for word in words if words[word] >= _MIN_COUNT and word not in known]
    return sorted(new, key=lambda word: (-words[word], word))


def _runs(
    spelled: Iterable[list[str]], counts: Iterable[int], apart: Container[str]
) -> list[tuple[list[str], int]]:
    """Return the tokens of words that may be merged, and how often these occur.

    Args:
      spelled: the tokens of each word.
      counts: how often each word occurs.
      apart: tokens that are merged with no other.
    """
    found = []
    for tokens, count in zip(spelled, counts, strict=True):
        for is_apart, run in itertools.groupby(tokens, apart.__contains__):
            if not is_apart and len(together := [*run]) > 1:
                found.append((together, count))
    return found


def next_merges(
    words: Sequence[tuple[list[str], int]], known: Container[str], count: int
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the pairs of tokens that BPE merges next, and those of their results that are new.

    Args:
      words: the tokens of each word, which are changed, and how often it occurs.
      known: the tokens that there are.
      count: new tokens, at most.

    Source: Sennrich et al. 2016, algorithm 1. Of equally frequent pairs the first by name is taken.

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
        negated, best = heapq.heappop(queue)
        if -negated != counts[best]:  # it has changed since, and is in the queue again
            continue
        if counts[best] < _MIN_COUNT:
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
