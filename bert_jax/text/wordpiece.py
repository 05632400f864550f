"""What a WordPiece tokenizer is made of: BERT's way, or with letters and marks composed."""

from collections.abc import Sequence
from unicodedata import category, normalize

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from bert_jax.errors import UserError

# Words as BERT splits them, and symbols such as emoji, which would make a word unknown to BERT, as
# would its length: longer words are cut every 100 characters.
_ONE = r"\p{So}[\p{M}\x{1F3FB}-\x{1F3FF}]*"  # with what changes it, such as the colour of a skin
_SYMBOLS = rf"[\x{{1F1E6}}-\x{{1F1FF}}]{{2}}|{_ONE}(?:\u200d{_ONE})*"  # flags; what is joined
_SYMBOL = pre_tokenizers.Split(tokenizers.Regex(_SYMBOLS), "isolated")
_CUT = pre_tokenizers.Split(tokenizers.Regex(".{100}"), "isolated")
WORDPIECE_SPLITTER = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), _SYMBOL, _CUT])


def wordpiece_normalizer(*, lowercase: bool, strip_accents: bool) -> normalizers.Normalizer:
    """Return BERT's normalizer, but with joiners kept, as Persian needs, and letters composed."""
    controls = tokenizers.Regex(r"[\p{Cc}\p{Cf}\ufffd&&[^\s\u200b-\u200d\u0600-\u0605\u06dd]]")
    cleaned = normalizers.Replace(controls, "")
    spaced = normalizers.Replace("\u200b", " ")  # between words of Khmer and Thai
    bert = normalizers.BertNormalizer(
        clean_text=False, strip_accents=strip_accents, lowercase=lowercase
    )
    return normalizers.Sequence([cleaned, spaced, bert, normalizers.NFC()])


def end_of_composed(text: str, start: int, end: int, limit: int) -> int:
    """Return `end`, moved past the characters before `limit` that NFC merges into a token.

    Marks are merged too, which BERT's normalizer may have removed.
    """
    while end < limit and text[end] > "\u02ff":  # no character up to it composes with another
        length, extended = (len(normalize("NFC", text[start:stop])) for stop in (end, end + 1))
        if extended > length and category(text[end]) != "Mn":
            break
        end += 1
    return end


def wordpiece_model(
    tokens: Sequence[str], lowercase: bool, strip_accents: bool | None = None
) -> tokenizers.Tokenizer:
    """Return BERT's tokenizer, or with `strip_accents`, true or false, as it is trained here."""
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if ids.setdefault(token, index) != index:
            raise UserError(
                f"the vocabulary has the token {token!r} twice, as {ids[token]} and {index}; "
                "rename the first to what no text has, such as [unused0], so that no other moves"
            )
    # The original turns words of over 100 characters into [UNK].
    model = models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if strip_accents is not None:
        normalizer = wordpiece_normalizer(lowercase=lowercase, strip_accents=strip_accents)
        tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = WORDPIECE_SPLITTER
    return tokenizer
