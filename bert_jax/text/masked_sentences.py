"""Choose held-out sentences with a masked word, to show what a model fills in."""

import functools
import re
import unicodedata
from collections.abc import Iterator

import numpy as np

from bert_jax.text.store import Corpus

NUM_SENTENCES = 50
_MAX_CANDIDATES = 20  # sentences that are looked at for each one


def masked_sentences(corpus: Corpus, longest: int) -> Iterator[tuple[list[int], str]]:
    """Yield held-out sentences from all over the text, with a central word masked, and the word."""
    store, tokenizer, longest = corpus.eval, corpus.tokenizer, min(24, longest)
    lengths = np.diff(store.sentences)

    @functools.cache
    def letters(index: int) -> int:  # of a token, 0 if it has anything else but marks on them
        text = tokenizer.decode([index]).strip().removeprefix("##")
        kinds = "".join(unicodedata.category(character)[0] for character in text)
        return kinds.count("L") if re.fullmatch("L[LM]*", kinds) else 0

    pools = ((lengths >= 8) & (lengths <= longest), lengths >= 8, lengths > 1)
    candidates = next((p for p in pools if p.sum() >= NUM_SENTENCES), pools[-1]).nonzero()[0]
    for part in np.array_split(candidates, NUM_SENTENCES):
        ranked = []
        for index in part[:_MAX_CANDIDATES].tolist():
            start, end = store.sentences[index : index + 2].tolist()
            ids = store.tokens[start : min(end, start + longest)].tolist()
            continues = [*tokenizer.is_continuation[ids], False]
            has_words = 2 * sum(letters(token) > 0 for token in ids) > len(ids)  # unlike a heading
            for i in range(len(ids)):
                if count := letters(ids[i]):
                    is_partial = continues[i] or continues[i + 1]
                    off_center = abs(i - len(ids) // 2)
                    rank = (not has_words, is_partial, count < 3, off_center, len(ranked))
                    ranked.append((rank, i, ids))
        if ranked:
            _, i, ids = min(ranked)
            while tokenizer.decode(ids).endswith("\ufffd"):  # bytes of a character that is cut
                ids.pop()
            yield [*ids[:i], tokenizer.mask_id, *ids[i + 1 :]], tokenizer.readable(ids[i])
