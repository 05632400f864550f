"""The tokenizer of a Unigram `tokenizer.json`, such as `transformers` makes of a SentencePiece."""

from collections.abc import Sequence

import tokenizers

from bert_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer
from bert_jax.text.tokenizer import FastTokenizer

# The names of padding, unknown text, [CLS], [SEP] and [MASK], those that are preferred first.
_PAD, *_OTHERS = SentencePieceTokenizer.SPECIAL
_SPECIAL = (_PAD, ("<unk>", "[UNK]"), *_OTHERS)


class UnigramTokenizer(FastTokenizer):
    """A Unigram tokenizer, whose ids may differ from its .model's (Conneau et al. 2020)."""

    kind = "unigram"
    _continuation = SentencePieceTokenizer._continuation

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        known = tokenizer.get_vocab()
        pad, unk, cls, sep, mask = (
            next((name for name in names if name in known), names[-1]) for names in _SPECIAL
        )
        self.special = pad, unk, cls, sep, mask
        super().__init__(tokenizer)

    def encode_rest(self, text: str) -> Sequence[int]:
        # After [MASK], so that the pre-tokenizer adds a space before the text only where it does
        # so there, too; then without it.
        return self.encode([self.id_to_token(self.mask_id) + text])[0][1:]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, offsets = super().encode_with_offsets(text)
        # A token that starts a word may include the space before it.
        return ids, [(end - len(text[start:end].lstrip()), end) for start, end in offsets]
