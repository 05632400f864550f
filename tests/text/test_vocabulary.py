"""Another vocabulary: how tokens are spelled by those of another tokenizer."""

import pytest

from bert_jax.config import TokenizerConfig
from bert_jax.text import tokenizer_training
from bert_jax.text.tokenizer import WordPieceTokenizer
from bert_jax.text.vocabulary import spellings, summary

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
OLD = WordPieceTokenizer.from_vocabulary(
    [*SPECIAL, "the", "fox", "jump", "##s", "##ed", "##e", "d", "o"], lowercase=True
)
SENTENCES = [
    "The encoder reads the whole sentence at once, from both sides.",
    "Naïve café owners in Zürich déjà vu, and 3.14 costs $5!",
    "Unaffable players were replaying the unplayable overtures (again).",
] * 30
KINDS = {
    "wordpiece": (TokenizerConfig(kind="wordpiece"), 150),
    "cased": (TokenizerConfig(kind="wordpiece", lowercase=False), 170),
    "unigram": (TokenizerConfig(), 80),
    "byte_bpe": (TokenizerConfig(kind="byte_bpe"), 330),
}
TRAINED = {
    name: tokenizer_training.train(SENTENCES, config, size)
    for name, (config, size) in KINDS.items()
}


def named(new: WordPieceTokenizer) -> dict[str, list[str]]:
    found = spellings(new, OLD)
    return {
        new.id_to_token(index): [OLD.id_to_token(i) for i in ids] for index, ids in enumerate(found)
    }


def test_spellings_by_hand():
    tokens = [
        *SPECIAL[::-1],
        "jumps",
        "fox",
        "##sed",
        "##es",
        "##the",
        "zebra",
        "##zz",
        "THE",
        "do",
    ]
    new = WordPieceTokenizer.from_vocabulary(tokens, lowercase=False)
    assert named(new) == {
        **{name: [name] for name in SPECIAL},
        "jumps": ["jump", "##s"],
        "fox": ["fox"],
        "##sed": ["##s", "##ed"],
        "##es": ["##e", "##s"],
        "##the": ["the"],
        "zebra": [],
        "##zz": [],
        "THE": ["the"],
        "do": [],  # there is no ##o
    }
    assert summary(spellings(new, OLD)) == (8, 3, 3)


def test_number_signs_are_text_but_in_wordpiece():
    new = TRAINED["byte_bpe"]
    (index,) = new.encode(["#"])[0][-1:]
    (found,) = spellings(new, TRAINED["byte_bpe"])[index : index + 1]
    assert found == [index]


@pytest.mark.parametrize("old", KINDS)
@pytest.mark.parametrize("new", KINDS)
def test_what_spells_a_token_is_its_text(new, old):
    new, old = TRAINED[new], TRAINED[old]
    found = spellings(new, old)
    assert len(found) == new.vocab_size
    special = {*new.special_ids, new.unk_id}
    known = 0
    for index, ids in enumerate(found):
        if index in special or not ids:
            continue
        text = new.decode([index]).removeprefix("##").strip()
        tokens = [old.decode([i]).removeprefix("##").strip() for i in ids]
        if "\ufffd" not in "".join(tokens):  # parts of a character
            spelled = "".join(tokens)
            assert spelled.lower() == text.lower() or set(text) - set("".join(SENTENCES))
            known += 1
    # Of bytes, most are no text.
    assert known > (60 if new.kind == "byte_bpe" else 0.9 * (new.vocab_size - 5))
    for a, b in zip((*new.special_ids, new.unk_id), (*old.special_ids, old.unk_id), strict=True):
        assert found[a] == [b]


def test_a_mark_is_spelled_by_the_token_of_its_own():
    """And not by the mark of a space, and itself."""
    new, old = TRAINED["wordpiece"], TRAINED["unigram"]
    ids = {new.id_to_token(index): index for index in range(new.vocab_size)}
    assert [old.id_to_token(i) for i in spellings(new, old)[ids[","]]] == [","]


def test_the_rest_of_a_word_is_looked_up_in_lower_case():
    new = WordPieceTokenizer.from_vocabulary([*SPECIAL, "##ED", "##S"], lowercase=False)
    assert named(new)["##ED"] == ["##ed"]
    assert named(new)["##S"] == ["##s"]
