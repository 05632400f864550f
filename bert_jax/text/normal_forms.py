"""How WordPiece normalizes text: BERT's way, with letters and marks composed."""

from unicodedata import normalize

import tokenizers
from tokenizers import normalizers


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
    """Return `end`, moved past the characters before `limit` that NFC merges into a token."""
    while end < limit and text[end] > "\u02ff":  # no character up to it composes with another
        length, extended = (len(normalize("NFC", text[start:stop])) for stop in (end, end + 1))
        if extended > length:
            break
        end += 1
    return end
