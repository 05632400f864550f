"""Split raw text into sentences, by punctuation."""

import re
from collections.abc import Iterator, Sequence

from bert_jax.text.scripts import CHINESE_AND_KANA

# Bounds the memory that a text without blank lines, or without sentence ends, can take.
MAX_SENTENCE_CHARACTERS = 10_000
MAX_DOCUMENT_SENTENCES = 1_000
MAX_DOCUMENT_CHARACTERS = MAX_SENTENCE_CHARACTERS * MAX_DOCUMENT_SENTENCES

# Marks that may stand within a sentence, as in an abbreviation, end one before a space alone.
# Others end one anywhere: of Chinese and Japanese, Armenian, Ethiopic, Burmese, Khmer (but for its
# "etc."), Mongolian, Santali, Meetei and Chakma, and the shad of Tibetan, which also ends clauses.
# From the first mark of a run, so that the time does not grow with the square of its length.
_SENTENCE_END = re.compile(
    r"((?<![.!?…؟۔।॥])[.!?…؟۔।॥]+[\"'”’»)\]]*)\s+"
    r"|(?:[。｡！？։።፧፨။៕᠃᠉᱾᱿꯫𑅁-𑅃]|．(?![０-９])|។(?!ល។)(?<!។ល។))+[」』”’»）]*\s*"
    r"|[།༎](?:\s*[།༎])*\s*"
)
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'])(?:[^\W\d_]|e\.g|i\.e|cf|vs|etc|al|approx|no|nos|vol|fig|eq|sec|ch|pp|ed|eds"
    r"|mr|mrs|ms|dr|prof|rev|gen|col|lt|sgt|capt|sen|rep|gov|pres|st|jr|sr|inc|ltd|co|corp"
    r"|nr|ca|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec)\.$",
    re.IGNORECASE,
)
# The end of a line within Chinese or Japanese, which have no space there.
_UNSPACED_LINE_END = re.compile(rf"(?<=[{CHINESE_AND_KANA}])\s*\n\s*(?=[{CHINESE_AND_KANA}])")


def join_lines(paragraph: str) -> str:
    """Return a paragraph in one line, with spaces between words of different lines."""
    return _UNSPACED_LINE_END.sub("", paragraph).replace("\n", " ")


def split_sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph: none ends after an abbreviation or before lower case."""
    sentences, start = [], 0
    for match in _SENTENCE_END.finditer(paragraph):
        if match[1] is not None:
            before = paragraph[max(0, match.end(1) - 12) : match.end(1)]
            after = paragraph[match.end() : match.end() + 1]
            # Georgian, which has no upper case in texts, is lower case to Unicode.
            is_lower = after.islower() and not "\u10d0" <= after <= "\u10ff"
            if is_lower or _ABBREVIATION.search(before):
                continue
        sentences.append(paragraph[start : match.end()].strip())
        start = match.end()
    return [s for s in (*sentences, paragraph[start:].strip()) if s]


def split_text(text: str) -> list[str]:
    """Return the sentences of a text whose paragraphs are separated by blank lines."""
    paragraphs = (join_lines(paragraph) for paragraph in re.split(r"\n\s*\n", text))
    lines = (" ".join(paragraph.split()) for paragraph in paragraphs)
    return [sentence for line in lines for sentence in split_sentences(line)]


def split_long_sentence(sentence: str) -> Iterator[str]:
    """Yield parts of at most `MAX_SENTENCE_CHARACTERS`, split at spaces where there are any."""
    start = 0
    while len(sentence) - start > MAX_SENTENCE_CHARACTERS:
        end = start + MAX_SENTENCE_CHARACTERS
        space = sentence.rfind(" ", start + 1, end)
        end = space if space > 0 else end
        if part := sentence[start:end].strip():
            yield part
        start = end
    if rest := sentence[start:].strip():
        yield rest


def is_prose(lines: Sequence[str]) -> bool:
    """Return whether lines are paragraphs or wrapped prose, rather than one sentence each."""
    sentences = sum(len(split_sentences(line)) for line in lines)
    # Wrapped prose has sentences that end inside a line, and lines that end inside a sentence.
    ended = sum(bool(_SENTENCE_END.search(line[-4:] + " ")) for line in lines)
    is_wrapped = sentences > 1.05 * len(lines) and ended < 0.5 * len(lines)
    return is_wrapped or sentences > 1.5 * len(lines)
