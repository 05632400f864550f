"""Move to another vocabulary: how the tokens of one tokenizer are spelled by those of another."""

from collections.abc import Sequence
from typing import Any

from tokenizers import models

from bert_jax.text.tokenizer import ByteLevelTokenizer, Tokenizer, WordPieceTokenizer


def spellings(new: Tokenizer, old: Tokenizer) -> list[list[int]]:
    """Return, for each token of `new`, the ids of the tokens of `old` that spell it.

    A special token is spelled by the one of the same role, and a token that both have, if they are
    of one kind, by itself. What `old` does not know is dropped, so that a list may be empty. That
    of a part of a character is empty, unless both write text as bytes.

    Source: fast vocabulary transfer (Gee et al. 2022).

    >>> tokenizer = getfixture("tiny_bert").tokenizer
    >>> spellings(tokenizer, tokenizer) == [[index] for index in range(tokenizer.vocab_size)]
    True
    """
    special = dict(zip((*new.special_ids, new.unk_id), (*old.special_ids, old.unk_id), strict=True))
    ids = {old.id_to_token(index): index for index in range(old.vocab_size)}
    # What continues a word, by the longest WordPieces, one after the other; "" is none.
    pieces = {name[2:]: index for name, index in ids.items() if name.startswith("##")}
    options: Any = {"unk_token": "", "continuing_subword_prefix": ""}
    continuation = models.WordPiece({**pieces, "": 0}, max_input_chars_per_word=1 << 20, **options)
    spelled: dict[int, Sequence[int]] = {}
    words = []  # tokens to encode at once
    for index in range(new.vocab_size):
        tokens = [] if index in special else _spelling(index, new, old, ids, continuation)
        if tokens is None:
            words.append(index)
        else:
            spelled[index] = tokens
    encoded = old.encode_words([_text(new, index) for index in words])
    for index, tokens in zip(words, encoded, strict=True):
        # A mark may have no token with the space before it, but one of its own.
        rest = [] if isinstance(old, WordPieceTokenizer) else old.encode_rest(_text(new, index))
        spelled[index] = rest if len(rest) == 1 < len(tokens) else tokens
    known = {
        index: [int(token) for token in tokens if token != old.unk_id]
        for index, tokens in spelled.items()
    }
    known |= {index: [of_old] for index, of_old in special.items()}
    return [known[index] for index in range(new.vocab_size)]


def _spelling(
    index: int, new: Tokenizer, old: Tokenizer, ids: dict[str, int], continuation: models.WordPiece
) -> Sequence[int] | None:
    """Return the ids of `old` that spell a token; None if it is to be encoded as a word."""
    name, text = new.id_to_token(index), _text(new, index)
    if new.kind == old.kind and name in ids:
        return [ids[name]]
    if isinstance(old, ByteLevelTokenizer) and isinstance(new, ByteLevelTokenizer):
        return old.encode_part(name)
    if not text:
        return []
    if not new.is_continuation[index]:
        return None
    if isinstance(old, WordPieceTokenizer):
        # Punctuation has no such tokens, as it is never within a word.
        found = continuation.tokenize(old.normalized(text))
        return [token.id for token in found if token.value] or None
    return old.encode_rest(text)


def _text(tokenizer: Tokenizer, index: int) -> str:
    """Return the text of a token, "" for a part of a character."""
    text = tokenizer.decode([index]).strip()
    if isinstance(tokenizer, WordPieceTokenizer):
        text = text.removeprefix("##")
    return "" if "\ufffd" in text else text


def summary(found: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """Return how many tokens are spelled by one token, by several, and by none."""
    sizes = [len(each) for each in found]
    one, none = sizes.count(1), sizes.count(0)
    return one, len(sizes) - one - none, none
