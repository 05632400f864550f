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
from bert_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer
from bert_jax.text.tokenizer import WordPieceTokenizer
from bert_jax.text.tokenizer_extension import extended, next_merges
from bert_jax.text.vocabulary import spellings

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
OLD = WordPieceTokenizer.from_vocabulary(
    [*SPECIAL, "the", "fox", "jump", "##s", "##ed", "##es"],
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


def new_tokens(new, old) -> list[str]:
    return [new.id_to_token(index) for index in range(old.vocab_size, new.vocab_size)]


@pytest.mark.parametrize("knows_the_letters", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_its_tokens_and_spells_the_text_in_fewer(kind, knows_the_letters):
    size, known = 290 if kind == "byte_bpe" else 90, DOMAIN[:3] if knows_the_letters else []
    old = tokenizer_training.train(TEXT + known, KINDS[kind], size)
    new = extended(old, DOMAIN, 8)
    assert new.vocab_size == old.vocab_size + 8
    assert [new.id_to_token(i) for i in range(old.vocab_size)] == [
        old.id_to_token(i) for i in range(old.vocab_size)
    ]
    assert (new.special_ids, new.unk_id) == (old.special_ids, old.unk_id)
    before, after = old.encode(DOMAIN), new.encode(DOMAIN)
    assert sum(map(len, after)) < (0.85 if knows_the_letters else 0.95) * sum(map(len, before))
    used = {new.id_to_token(int(i)) for ids in after for i in ids}
    added = {*new_tokens(new, old)}
    # Of a BPE's tokens, one may be there for the next alone.
    assert added <= used or kind in ("bpe", "cased", "byte_bpe")
    assert not any("<unk>" in token or "<0x" in token for token in added)
    if knows_the_letters:
        assert list(map(new.decode, after)) == list(map(old.decode, before))
    for text in DOMAIN:
        ids, offsets = new.encode_with_offsets(text)
        assert len(ids) == len(offsets)
        assert all(0 <= a <= b <= len(text) for a, b in offsets)
    again = tokenizer_loading.from_json(new.to_json(), "here")
    assert again.fingerprint == new.fingerprint
    assert extended(old, DOMAIN, 8).fingerprint == new.fingerprint
    # Each is spelled by tokens of the old one, from which it gets its embedding.
    found = spellings(new, old)[old.vocab_size :]
    assert all(len(ids) > 1 for ids in found) or kind == "wordpiece" or not knows_the_letters
    assert extended(old, [], 5) is old


@pytest.mark.parametrize("kind", ["bpe", "byte_bpe"])
def test_a_merge_joins_what_its_token_is_made_of(kind):
    old = tokenizer_training.train(TEXT, KINDS[kind], 290 if kind == "byte_bpe" else 60)
    new = extended(old, ["Kodierer kodieren. Kodierer"] * 9, 5)
    for token, ids in zip(new_tokens(new, old), spellings(new, old)[old.vocab_size :], strict=True):
        assert "".join(old.id_to_token(index) for index in ids) == token


def test_a_longer_unigram_is_used_beside_its_stem():
    old = tokenizer_training.train(TEXT, KINDS["unigram"], 60)
    text = ["Segel und Segel, Segels."] * 8 + ["日本 日 本 日本語 日本"] * 4
    new = extended(old, text, 7)
    added = new_tokens(new, old)
    assert {"▁segel", "▁segels", "▁und", "▁日本", "▁日本語", "▁日", "▁本"} <= {*added}
    for word in added:
        assert new.spell([word]) == [[word]]


def test_a_word_that_is_never_one_token_is_not_added(tmp_path):
    """Where what a rule returns is changed again by it: q becomes z, and z becomes x."""
    (tmp_path / "rule.tsv").write_text("71\t7a\n7a\t78\n")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=written,
        vocab_size=30,
        hard_vocab_limit=False,
        normalization_rule_tsv=str(tmp_path / "rule.tsv"),
        minloglevel=2,
    )
    old = SentencePieceTokenizer(written.getvalue())
    assert old.normalize("aqa aza") == "▁aza▁axa"
    new = extended(old, ["baqab beside sideside"] * 5, 3)
    names = [new.id_to_token(index) for index in range(new.vocab_size)]
    assert new.vocab_size == old.vocab_size + 2
    assert {"▁beside", "▁sideside"} <= {*names}


def test_a_sentencepiece_that_puts_no_space_before_a_text():
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=written,
        vocab_size=50,
        model_type="bpe",
        hard_vocab_limit=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    old = SentencePieceTokenizer(written.getvalue())
    new = extended(old, ["one side beside one side beside"] * 5, 8)
    assert "▁beside" in new_tokens(new, old)
    assert new.id_to_token(int(new.encode(["one beside"])[0][-1])) == "▁beside"


def test_a_word_that_would_make_another_unknown_is_not_added():
    old = WordPieceTokenizer.from_vocabulary(
        [*SPECIAL, "fox", "##es", "##e", "##d"], lowercase=True
    )
    text = ["foxe foxe foxes zebra zebra"] * 3  # without ##s, nothing continues "foxe" in "foxes"
    new = extended(old, text, 1)
    assert new_tokens(new, old) == ["zebra"]
    assert new_tokens(extended(old, text, 3), old) == ["foxe", "zebra", "foxes"]
    for word in ("foxes", "foxed"):
        assert new.unk_id not in new.encode([word])[0]
    long = "a" * 120
    assert extended(old, [long, long], 3) is old


def test_added_tokens_are_cut_out_first():
    inner = tokenizers.Tokenizer(models.BPE({"<unk>": 0, "a": 1, "b": 2, "c": 3}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner = json.loads(inner.to_str())
    inner["model"]["vocab"] |= {"Ġ": 4}
    inner = tokenizers.Tokenizer.from_str(json.dumps(inner))
    inner.add_tokens(["abc"])
    inner.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    old = tokenizer_loading.from_files({"tokenizer.json": inner.to_str().encode()}, "here")
    new = extended(old, ["abc abc cab abc cab"], 9)
    assert new_tokens(new, old) == ["ab", "cab", "Ġcab"]
    assert new.encode(["abc"]) == old.encode(["abc"])


def test_a_byte_level_bpe_that_lacks_bytes_merges_none_of_its_unknown_tokens():
    values = {"<unk>": 0, "a": 1, "b": 2, "Ġ": 3}
    inner = tokenizers.Tokenizer(models.BPE(values, [], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(SPECIAL)
    old = tokenizer_loading.from_files({"tokenizer.json": inner.to_str().encode()}, "here")
    new = extended(old, ["abzz abz zzab"] * 3, 9)
    assert new_tokens(new, old) == ["ab", "Ġab"]


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


def pair_counts(words) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for tokens, number in words:
        for pair in itertools.pairwise(tokens):
            counts[pair] += number
    return counts


@settings(deadline=None)
@given(
    st.lists(st.text("abc", min_size=2, max_size=8), min_size=1, max_size=30),
    st.integers(1, 9),
    st.sets(st.text("abc", min_size=2, max_size=3)),
)
def test_merges_are_those_of_a_plain_count(texts, count, known):
    """Sennrich et al. 2016, algorithm 1, counted anew for each merge."""
    counts = Counter(texts)
    words = [(list(word), number) for word, number in sorted(counts.items())]
    merges, new = next_merges([(list(tokens), number) for tokens, number in words], known, count)
    for merge in merges:
        pairs = pair_counts(words)
        assert pairs[merge] == max(pairs.values()) >= 2
        for tokens, _ in words:
            joined, index = [], 0
            while index < len(tokens):
                is_pair = tuple(tokens[index : index + 2]) == merge
                joined.append("".join(merge) if is_pair else tokens[index])
                index += 2 if is_pair else 1
            tokens[:] = joined
    assert new == [name for name in dict.fromkeys(map("".join, merges)) if name not in known]
    assert len(new) == count or max(pair_counts(words).values(), default=0) < 2


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


def test_what_words_cannot_be_added_to():
    tokenizer = tokenizer_training.train(TEXT, TokenizerConfig(model_type="char"), 60)
    with refused("tokenizer.add adds words to a SentencePiece of unigrams or of BPE"):
        extended(tokenizer, DOMAIN, 2)
    prefixed = models.BPE({"a": 0, "##a": 1, **{name: i + 2 for i, name in enumerate(SPECIAL)}}, [])
    inner = tokenizers.Tokenizer(prefixed)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel()
    values = json.loads(inner.to_str())
    values["model"]["continuing_subword_prefix"] = "##"
    files = {"tokenizer.json": json.dumps(values).encode()}
    with refused("tokenizer.add knows no BPE with a continuing_subword_prefix"):
        extended(tokenizer_loading.from_files(files, "here"), DOMAIN, 2)
