"""Move to another vocabulary: how the tokens of one tokenizer are spelled by those of another."""

from collections.abc import Sequence

from bert_jax.text.tokenizer import ByteLevelTokenizer, Tokenizer, WordPieceTokenizer


def spellings(new: Tokenizer, old: Tokenizer) -> list[list[int]]:
    """Return, for each token of `new`, the ids of the tokens of `old` that spell it.

    A token that both have is spelled by itself, and a special token by its like. The list is empty
    where `old` does not know the text of a token, or where the token is a part of a character and
    `old` does not write text as bytes, too.

    Source: fast vocabulary transfer (Gee et al. 2022).

    >>> tokenizer = getfixture("tiny_bert").tokenizer
    >>> spellings(tokenizer, tokenizer) == [[index] for index in range(tokenizer.vocab_size)]
    True
    """
    special = {
        index: [of_old]
        for index, of_old in zip(
            (*new.special_ids, new.unk_id), (*old.special_ids, old.unk_id), strict=True
        )
    }
    ids = {old.id_to_token(index): index for index in range(old.vocab_size)}
    is_same_kind, found = new.kind == old.kind, [[] for _ in range(new.vocab_size)]
    starts: dict[int, str] = {}  # texts that start a word, to encode at once
    for index in range(new.vocab_size):
        name, text = new.id_to_token(index), _text(new, index)
        tokens: Sequence[int] = []
        if index in special:
            tokens = special[index]
        elif is_same_kind and name in ids:
            tokens = [ids[name]]
        elif isinstance(old, ByteLevelTokenizer) and isinstance(new, ByteLevelTokenizer):
            tokens = old.encode_part(name)
        elif text and not new.is_continuation[index]:
            starts[index] = text
        elif text and isinstance(old, WordPieceTokenizer):
            tokens = _continuation(text, ids)
            if not tokens:  # such as punctuation, which is never within a word
                starts[index] = text
        elif text:
            tokens = old.encode_rest(text)
        found[index] = [int(token) for token in tokens]
    encoded = old.encode([f" {text}" for text in starts.values()])
    for index, tokens in zip(starts, encoded, strict=True):
        found[index] = [int(token) for token in tokens]
    return [
        tokens if index in special else [token for token in tokens if token != old.unk_id]
        for index, tokens in enumerate(found)
    ]


def _text(tokenizer: Tokenizer, index: int) -> str:
    """Return the text of a token, "" for a part of a character."""
    text = tokenizer.decode([index]).strip()
    if isinstance(tokenizer, WordPieceTokenizer):
        text = text.removeprefix("##")
    return "" if "\ufffd" in text else text


def _continuation(text: str, ids: dict[str, int]) -> list[int]:
    """Return the longest WordPieces, one after the other, that continue a word."""
    found, start = [], 0
    while start < len(text):
        ends = range(len(text), start, -1)
        end = next((end for end in ends if f"##{text[start:end]}" in ids), None)
        if end is None:
            return []
        found.append(ids[f"##{text[start:end]}"])
        start = end
    return found


def summary(found: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """Return how many tokens are spelled by one token, by several, and by none."""
    sizes = [len(each) for each in found]
    one, none = sizes.count(1), sizes.count(0)
    return one, len(sizes) - one - none, none
