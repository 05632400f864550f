"""Tokens added to a vocabulary: by hand, beside the trainer of `tokenizers`, and every kind."""

import io
import itertools
import json
from collections import Counter

import numpy as np
import pytest
import sentencepiece
import tokenizers
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from bert_jax.config import TokenizerConfig
from bert_jax.text import tokenizer_loading, tokenizer_training
from bert_jax.text.tokenizer import SentencePieceTokenizer, WordPieceTokenizer
from bert_jax.text.tokenizer_extension import extended, next_merges
from bert_jax.text.vocabulary import spellings

OLD = WordPieceTokenizer.from_vocabulary(
    ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "jump", "##s", "##ed", "##es"],
    lowercase=True,
)
TEXT = ["The encoder reads a whole sentence at once, from both sides."] * 20
DOMAIN = [
    "Der Kodierer liest den ganzen Satz auf einmal: den ganzen, ganzen Satz.",
    "ग्रंथि और ग्रंथि, naïve Kodierer 2024 2024.",
    "Ünïcode Kodierer liest, liest.",
] * 5
KINDS = {
    "wordpiece": TokenizerConfig(kind="wordpiece"),
    "unigram": TokenizerConfig(),
    "bpe": TokenizerConfig(model_type="bpe"),
    "cased": TokenizerConfig(model_type="bpe", lowercase=False),
    "byte_bpe": TokenizerConfig(kind="byte_bpe"),
}


def test_the_most_frequent_words_are_added():
    sentences = ["Foxes jumped", "foxes fox zebra", "foxes zebra zebra zebra the", "jumped"]
    new = extended(OLD, sentences, 2)
    assert [new.id_to_token(i) for i in range(OLD.vocab_size, new.vocab_size)] == ["zebra", "foxes"]
    for text in ("the fox jumps", "fo", "[MASK]"):
        assert new.encode_with_masks(text) == OLD.encode_with_masks(text)
    assert new.encode(["Foxes, zebra foxesed"])[0] == [12, 1, 11, 12, 9]
    assert extended(OLD, sentences, 9).vocab_size == OLD.vocab_size + 3
    assert spellings(new, OLD)[11:] == [[], [6, 10]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_its_tokens_and_spells_the_text_in_fewer(kind):
    old = tokenizer_training.train(
        TEXT + DOMAIN[:3], KINDS[kind], 290 if kind == "byte_bpe" else 90
    )
    new = extended(old, DOMAIN, 12)
    assert old.vocab_size < new.vocab_size <= old.vocab_size + 12
    assert [new.id_to_token(i) for i in range(old.vocab_size)] == [
        old.id_to_token(i) for i in range(old.vocab_size)
    ]
    assert (new.special_ids, new.unk_id) == (old.special_ids, old.unk_id)
    before, after = old.encode(DOMAIN), new.encode(DOMAIN)
    assert sum(map(len, after)) < 0.8 * sum(map(len, before))
    assert {int(i) for ids in after for i in ids} >= {*range(old.vocab_size, new.vocab_size)} or (
        "bpe" in kind or kind == "cased"  # where one may serve the next alone
    )
    assert list(map(new.decode, after)) == list(map(old.decode, before))
    for text in DOMAIN:
        ids, offsets = new.encode_with_offsets(text)
        assert len(ids) == len(offsets)
        assert all(0 <= a <= b <= len(text) for a, b in offsets)
    again = tokenizer_loading.from_json(new.to_json(), "here")
    assert again.fingerprint == new.fingerprint
    assert extended(old, DOMAIN, 12).fingerprint == new.fingerprint
    # Each is spelled by tokens of the old one, from which it gets its embedding.
    for ids in spellings(new, old)[old.vocab_size :]:
        assert len(ids) > 1 or kind in ("byte_bpe", "wordpiece")
    assert extended(old, [], 5).fingerprint == new.fingerprint or (
        extended(old, [], 5).vocab_size == old.vocab_size
    )


@pytest.mark.parametrize("seed", range(5))
def test_merges_are_those_of_the_trainer_of_tokenizers(seed):
    """Trained to a size at once, or to a smaller one and then extended: but for equal counts."""
    generator = np.random.default_rng(seed)
    syllables = ["".join(generator.choice(list("aeioukstlmn"), 2)) for _ in range(40)]
    kinds = ["".join(generator.choice(syllables, generator.integers(1, 5))) for _ in range(400)]
    words = generator.choice(kinds, 6000, p=(p := 1 / np.arange(2, 402)) / p.sum())
    text = [" ".join(part) for part in np.split(words, 60)]
    small, large = (
        tokenizer_training.train(text, TokenizerConfig(kind="byte_bpe"), size)
        for size in (300, 380)
    )
    new = extended(small, text, 80)
    ours, theirs = (
        {each.id_to_token(i) for i in range(300, each.vocab_size)} for each in (new, large)
    )
    assert len(ours & theirs) >= 64
    count, expected = (sum(map(len, each.encode(text))) for each in (new, large))
    assert count == pytest.approx(expected, rel=0.005)


@settings(deadline=None)
@given(st.lists(st.text("abc", min_size=2, max_size=8), min_size=1, max_size=30), st.integers(1, 9))
def test_merges_are_those_of_a_plain_count(texts, count):
    """Sennrich et al. 2016, algorithm 1, counted anew for each merge."""
    counts = Counter(texts)
    words = [(list(word), number) for word, number in sorted(counts.items())]
    merges, new = next_merges([(list(tokens), number) for tokens, number in words], {*"abc"}, count)
    for merge in merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for tokens, number in words:
            for pair in itertools.pairwise(tokens):
                pairs[pair] += number
        assert pairs[merge] == max(pairs.values()) >= 2
        for tokens, _ in words:
            joined, index = [], 0
            while index < len(tokens):
                is_pair = tuple(tokens[index : index + 2]) == merge
                joined.append("".join(merge) if is_pair else tokens[index])
                index += 2 if is_pair else 1
            tokens[:] = joined
    assert new == list(dict.fromkeys(map("".join, merges)))
    assert len(new) <= count


def test_a_bpe_whose_special_tokens_are_outside_its_vocabulary():
    """As ModernBERT's: they have the ids after the vocabulary, and keep them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    inner.add_special_tokens(special)
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 257), ("[SEP]", 258)]
    )
    files = {"tokenizer.json": inner.to_str().encode()}
    old = tokenizer_loading.from_files(files, "here")
    new = extended(old, DOMAIN, 7)
    assert [new.id_to_token(i) for i in range(256, 261)] == special
    assert new.vocab_size == 268
    content = new.files()["tokenizer.json"].decode()
    elsewhere = tokenizers.Tokenizer.from_str(content)
    assert elsewhere.encode("Kodierer [MASK]").ids[0] == 257
    assert elsewhere.token_to_id("[MASK]") == new.mask_id == 260
    assert max(elsewhere.encode(DOMAIN[0]).ids) > 260
    assert elsewhere.decode(elsewhere.encode(DOMAIN[1]).ids) == DOMAIN[1]
    assert len(json.loads(content)["model"]["merges"]) == 7


def test_a_sentencepiece_without_special_tokens_has_them_at_its_end():
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=written, vocab_size=28, minloglevel=2
    )
    old = SentencePieceTokenizer(written.getvalue())
    new = extended(old, DOMAIN, 3)
    assert new.vocab_size == old.vocab_size + 3
    assert new.mask_id == old.mask_id + 3
    found = spellings(new, old)
    assert [found[i] for i in new.special_ids] == [[i] for i in old.special_ids]


def test_a_model_of_characters_gets_no_words():
    tokenizer = tokenizer_training.train(TEXT, TokenizerConfig(model_type="char"), 60)
    with refused("tokenizer.add adds words to a SentencePiece of unigrams or of BPE"):
        extended(tokenizer, DOMAIN, 2)
