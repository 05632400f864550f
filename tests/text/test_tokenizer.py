"""Tokenizers: agreement with BERT's published algorithm, and one interface over two libraries."""

import functools
import io
import json
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from helpers import refused
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bert_jax.config import DataConfig, TokenizerConfig
from bert_jax.errors import UserError
from bert_jax.text import (
    sentencepiece_model,
    tokenizer_extension,
    tokenizer_loading,
    tokenizer_training,
)
from bert_jax.text import tokenizer as tokenizer_lib
from bert_jax.text.prepare import prepare
from bert_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer

SENTENCES = [
    "The encoder reads the whole sentence at once, from both sides.",
    "Tokenizers cut rare words into smaller pieces; common words stay whole.",
    "Naïve café owners in Zürich déjà vu, 日本語 テスト, and 3.14 costs $5!",
    "Unaffable players were replaying the unplayable overtures (again).",
] * 50

DIFFICULT = [
    "Déjà VU: naïve façade, Ångström, İstanbul, Straße, ﬁre",
    "日本語のテキスト和English混在 中文，句号。 한국어 텍스트",
    "tabs\tnew\nlines\r\nnbsp\u00a0ideographic\u3000space thin\u2009space",
    "control\x00\x01\x7f\ufffd characters \u200bzero\u200dwidth \u00adsoft",
    "emoji 😀👍🏽 👨‍👩‍👧 flags 🇫🇷 ☃️ ™ ©",
    "e\u0301 combining o\u0308\u0304 and \u0915\u094d\u0937 डेवनागरी العربية עברית",
    "a" * 99 + " " + "b" * 100 + " " + "c" * 101 + " unaffableness" * 3,
    "don't can't U.S.A. e-mail x=y+z [UNKNOWN] <tag> #hash @at ^caret `tick` ~|",
    "“quotes” ‘single’ — dash – en … ellipsis ¿qué? ¡sí! «guillemets»",
    "12,345.67 ½ ² ① Ⅷ ٣ x²+y² 1st 2nd",
    "",
    "   ",
    "ＦＵＬＬＷＩＤＴＨ ｶﾀｶﾅ ǅ Ω µ ſ",
]

SHARED_VOCABULARY = Path(__file__).parents[3] / "shared/data/vocab/bert-base-uncased-vocab.txt"


@pytest.fixture(scope="module")
def wordpiece():
    return tokenizer_training.train(SENTENCES, TokenizerConfig(kind="wordpiece"), 150)


@pytest.fixture(scope="module")
def unigram():
    return tokenizer_training.train(SENTENCES, TokenizerConfig(), 80)


@pytest.fixture(scope="module")
def byte_level():
    return byte_level_of(lowercase=True)


@pytest.fixture(params=["wordpiece", "unigram", "byte_level"])
def any_tokenizer(request):
    return request.getfixturevalue(request.param)


def published_words(text: str) -> list[str]:
    """BERT's uncased words, from the description of its splitter, a character at a time."""
    cleaned = ""
    for char in text:
        kind = unicodedata.category(char)
        if char in "\t\n\r" or kind == "Zs":
            cleaned += " "
        elif char in "\0\ufffd" or kind in ("Cc", "Cf"):
            continue
        elif 0x4E00 <= ord(char) <= 0x9FFF or 0x3400 <= ord(char) <= 0x4DBF:
            cleaned += f" {char} "
        else:
            cleaned += char
    words = []
    for word in cleaned.split():
        stripped = "".join(
            c for c in unicodedata.normalize("NFD", word.lower()) if unicodedata.category(c) != "Mn"
        )
        current = ""
        for char in stripped:
            ascii_sign = ord(char) < 128 and not char.isalnum()
            if ascii_sign or unicodedata.category(char).startswith("P"):
                words += [current, char]
                current = ""
            else:
                current += char
        words.append(current)
    return [word for word in words if word]


def published_tokens(word: str, vocabulary: set[str]) -> list[str]:
    """The longest token that fits, repeatedly; [UNK] for a word that cannot be covered."""
    if len(word) > 100:
        return ["[UNK]"]
    tokens, start = [], 0
    while start < len(word):
        for end in range(len(word), start, -1):
            token = ("##" if start else "") + word[start:end]
            if token in vocabulary:
                tokens.append(token)
                start = end
                break
        else:
            return ["[UNK]"]
    return tokens


def check_agreement(tokenizer, text: str) -> None:
    vocabulary = {tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)}
    expected = [p for w in published_words(text) for p in published_tokens(w, vocabulary)]
    tokens = [tokenizer.id_to_token(i) for i in tokenizer.encode([text])[0]]
    assert tokens == expected


@pytest.mark.parametrize("text", DIFFICULT)
def test_wordpiece_is_the_published_algorithm(text):
    check_agreement(_published(), text)


ALPHABET = st.sampled_from(
    "abcdefghijklmnopqrstuvwxyzABCXYZ0189 \t\n.,;:!?'\"()[]{}<>#@$%^&*-_=+/\\|~`"
    "éèüñçÅØßÉÜ日本語中文一ñō\u0301\u0308\u00a0\u200b\x01—–“”…¿€£½²😀👍テスト한국Ωжדع"
)


@settings(max_examples=100, deadline=None)
@given(st.text(ALPHABET, max_size=60))
def test_wordpiece_is_the_published_algorithm_on_random_text(text):
    check_agreement(_published(), text)


@functools.cache
def _published():
    """BERT's tokenizer, with the vocabulary of one that was trained here."""
    config = TokenizerConfig(kind="wordpiece", strip_accents=True)
    trained = tokenizer_training.train(SENTENCES, config, 150)
    tokens = [trained.id_to_token(index) for index in range(trained.vocab_size)]
    return tokenizer_lib.WordPieceTokenizer.from_vocabulary(tokens, lowercase=True)


@pytest.mark.parity
@pytest.mark.skipif(not SHARED_VOCABULARY.exists(), reason="the published vocabulary is not here")
@pytest.mark.parametrize("text", DIFFICULT)
def test_wordpiece_agrees_with_hugging_face(text):
    """Token for token over the 30,522 entries of BERT uncased."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.BertTokenizer(str(SHARED_VOCABULARY))
    ours = tokenizer_loading.load(SHARED_VOCABULARY)
    assert ours.vocab_size == 30522
    expected = reference.encode(text, add_special_tokens=False)
    assert list(ours.encode([text])[0]) == expected
    check_agreement(ours, text)


def test_special_tokens(any_tokenizer):
    special = any_tokenizer.special_ids
    assert len({*special, any_tokenizer.unk_id}) == 5
    assert max(special) < any_tokenizer.vocab_size
    assert not any_tokenizer.is_continuation[list(special)].any()
    padding = any_tokenizer.vocab_size  # an embedding that only fills the table
    assert any_tokenizer.id_to_token(padding) == f"<{padding}>"
    ids = any_tokenizer.encode_with_masks("The [MASK] reads the [MASK]")
    assert ids.count(any_tokenizer.mask_id) == 2
    assert any_tokenizer.decode([any_tokenizer.cls_id, *ids]).lower().split()[0] == "the"


def test_continuation_tokens_make_words(any_tokenizer):
    """Tokens joined where they continue a word are the words of the text."""
    text = "unaffable overtures replaying tokenizers"
    words: list[str] = []
    for index in any_tokenizer.encode([text])[0]:
        token = any_tokenizer.id_to_token(index).removeprefix("##").lstrip("▁Ġ")
        if any_tokenizer.is_continuation[index]:
            words[-1] += token
        else:
            words.append(token)
    assert " ".join(words) == text


def test_offsets_are_those_of_the_tokens(any_tokenizer):
    text = "The encoder  reads Overtures, whole pieces"
    ids, offsets = any_tokenizer.encode_with_offsets(text)
    np.testing.assert_array_equal(ids, any_tokenizer.encode([text])[0])
    for index, (start, end) in zip(ids, offsets, strict=True):
        token = any_tokenizer.id_to_token(index).removeprefix("##").lstrip("▁Ġ")
        assert text[start:end].lower() == token
    assert [b for b, _ in offsets] == sorted(b for b, _ in offsets)


def test_survives_disk_and_json(any_tokenizer, tmp_path):
    any_tokenizer.save(tmp_path)
    for again in (
        tokenizer_loading.load(tmp_path),
        tokenizer_loading.from_json(any_tokenizer.to_json(), "here"),
    ):
        assert again.fingerprint == any_tokenizer.fingerprint
        for ours, theirs in zip(
            again.encode(DIFFICULT), any_tokenizer.encode(DIFFICULT), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)


def test_training_is_reproducible():
    for kind, size in (("wordpiece", 80), ("sentencepiece", 80), ("byte_bpe", 320)):
        config = TokenizerConfig(kind=kind)
        first, *others = (tokenizer_training.train(SENTENCES, config, size) for _ in range(2))
        assert {other.fingerprint for other in others} == {first.fingerprint}


@functools.cache
def byte_level_of(*, lowercase: bool):
    config = TokenizerConfig(kind="byte_bpe", lowercase=lowercase)
    return tokenizer_training.train(SENTENCES, config, 300)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60) | st.text(ALPHABET, max_size=60))
def test_byte_level_gives_any_text_back(text):
    """With the space before the first word that it adds."""
    tokenizer = byte_level_of(lowercase=False)
    assume(not any(name in text for name in tokenizer.special))  # which are read as special tokens
    ids = tokenizer.encode([text])[0]
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids) == (text if text[:1] in ("", " ") else f" {text}")


def test_byte_level_words():
    """As in RoBERTa, a token with a space before it starts a word, and all others continue one."""
    tokenizer = byte_level_of(lowercase=False)
    names = [tokenizer.id_to_token(index) for index in range(tokenizer.vocab_size)]
    assert names[:5] == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    starts = {name for name, more in zip(names, tokenizer.is_continuation, strict=True) if not more}
    assert starts == {*names[:5], *(name for name in names if name[0] == "Ġ")}
    ids = tokenizer.encode(["whole words, whole"])[0]
    word = tokenizer.encode(["whole"])[0]
    assert ids[: len(word)] == word == ids[-len(word) :]  # the first word as any other
    assert not tokenizer.is_continuation[word[0]]


def test_byte_level_offsets_are_of_characters():
    text = "Naïve  日本 😀x"
    tokenizer = byte_level_of(lowercase=False)
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode([text])[0]
    positions = {i for start, end in offsets for i in range(start, end)}
    assert positions == {i for i, char in enumerate(text) if char != " "}
    for start, end in offsets:
        # A token of some bytes of a character has the offsets of the character.
        character = [i for i, span in zip(ids, offsets, strict=True) if span == (start, end)]
        if start < end:
            assert tokenizer.decode(character).strip() == text[start:end]


def test_byte_level_vocabulary_holds_all_bytes():
    for size in (0, 260):
        with pytest.raises(UserError, match=f"vocab_size {size} is too small.* 261 tokens"):
            tokenizer_training.train(SENTENCES, TokenizerConfig(kind="byte_bpe"), size)
    least = tokenizer_training.train(SENTENCES, TokenizerConfig(kind="byte_bpe"), 261)
    ids = least.encode(["\x00日😀"])[0]
    assert len(ids) == 1 + 1 + 3 + 4


def test_special_tokens_are_added_to_a_sentencepiece_model(tmp_path):
    path = tmp_path / "plain.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES), model_writer=file, vocab_size=80, minloglevel=2
        )
    tokenizer = tokenizer_loading.load(path)
    assert tokenizer.vocab_size == 82  # <s> and </s> serve as [CLS] and [SEP]
    assert tokenizer.id_to_token(tokenizer.cls_id) == "<s>"
    assert tokenizer.pad_id >= 80
    assert (
        tokenizer.decode([tokenizer.pad_id, *tokenizer.encode(["the encoder"])[0]]) == "the encoder"
    )
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 80}')
    assert tokenizer_loading.load(tmp_path).fingerprint == tokenizer.fingerprint
    for listed in ('{"[MASK]": 80}', '{"<e>": 82}'):
        (tmp_path / "added_tokens.json").write_text(listed)
        with pytest.raises(UserError, match=r"added token '.*' is not token 8\d of the \.model"):
            tokenizer_loading.load(tmp_path)


def test_fields_of_a_sentencepiece_model_are_those_of_its_package(unigram):
    content = unigram.files()["sentencepiece.model"]
    try:
        from sentencepiece import sentencepiece_model_pb2
    except Exception as error:  # by the generated code, of a type of its own
        pytest.skip(str(error))
    ours = sentencepiece_model.Model.FromString(content)
    theirs = sentencepiece_model_pb2.ModelProto.FromString(content)
    assert sentencepiece_model_pb2.ModelProto.FromString(ours.SerializeToString()) == theirs

    def compare(one, other):
        for field in one.DESCRIPTOR.fields:
            value, expected = getattr(one, field.name), getattr(other, field.name)
            if field.name == "pieces":
                for pair in zip(value, expected, strict=True):
                    compare(*pair)
            elif field.message_type:
                compare(value, expected)
            else:
                assert value == expected
                assert (
                    field.default_value == other.DESCRIPTOR.fields_by_name[field.name].default_value
                )

    compare(ours, theirs)
    compare(sentencepiece_model.Model(), sentencepiece_model_pb2.ModelProto())


def test_long_sentences_are_trained_on():
    """SentencePiece skips those over 4,192 bytes by default."""
    for kind, size in (("wordpiece", 13), ("sentencepiece", 11)):
        lines = ["acgt" * 1100, *["tgca" * 1100] * 10]
        tokenizer = tokenizer_training.train(lines, TokenizerConfig(kind=kind), size)
        assert set("acgt") <= {tokenizer.id_to_token(i) for i in range(size)}


def test_a_vocabulary_with_a_line_separator_in_a_token(tmp_path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "##\u2028", "b"]
    (tmp_path / "vocab.txt").write_bytes("\r\n".join(tokens).encode())
    tokenizer = tokenizer_loading.load(tmp_path)
    assert [tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)] == tokens


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n", r"no \[MASK\]"),
        ("twice.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\na\n", "twice"),
        ("tokenizer.json", b'{"model": ', "no readable tokenizer"),
        ("cut.model", b"\x0a\x0e\x0a", "no readable tokenizer"),
        ("empty.model", b"", "no readable tokenizer"),
        ("nowhere", None, r"has no sentencepiece|does not exist"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        tokenizer_loading.load(tmp_path / name)


def test_damage_that_shows_when_a_text_is_encoded(tmp_path):
    """The library reads such a file without an error."""
    files = tokenizer_training.train(SENTENCES, TokenizerConfig(kind="wordpiece"), 80).files()
    content = json.loads(files["tokenizer.json"])
    content["model"]["vocab"]["x"] = content["model"]["vocab"].pop("[UNK]")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"no readable tokenizer .*UNK.*; fetch it again"):
        tokenizer_loading.load(tmp_path)


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece", "byte_bpe"])
def test_a_vocabulary_larger_than_the_text_can_fill_shrinks(kind):
    tokenizer = tokenizer_training.train(SENTENCES, TokenizerConfig(kind=kind), 100_000)
    assert 70 < tokenizer.vocab_size < 500
    assert all(tokenizer.unk_id not in ids for ids in tokenizer.encode(SENTENCES[:4]))
    with pytest.raises(UserError, match="no text"):
        tokenizer_training.train([], TokenizerConfig(kind=kind), 100)


def test_the_sample_is_uniform():
    counts = np.zeros(50)
    items = [str(i) for i in range(50)]
    for repeat in range(400):
        for item in tokenizer_training.sample(items[repeat % 50 :] + items[: repeat % 50], 10):
            counts[int(item)] += 1
    assert counts.sum() == 4000
    assert counts.std() < 3 * np.sqrt(80)


def test_the_sample_has_a_bounded_number_of_characters(monkeypatch):
    monkeypatch.setattr(tokenizer_training, "_MAX_CHARACTERS", 500)
    counts = np.zeros(50)
    items = [f"{i:<{10 + i}}" for i in range(50)]
    for repeat in range(400):
        chosen = tokenizer_training.sample(items[repeat % 50 :] + items[: repeat % 50], 30)
        assert 250 < sum(map(len, chosen)) <= 500
        for item in chosen:
            counts[int(item)] += 1
    # Long or short, each is chosen as often as any other.
    assert counts.std() < 0.25 * counts.mean()


LANGUAGES = [
    "सभी मनुष्यों को नमस्ते",
    "Tất cả mọi người sinh ra đều được tự do",
    "Die Universität ist für alle da",
    "همهٔ افراد بشر آزاد به دنیا می\u200cآیند",  # with a zero-width non-joiner
    "എല്ലാ മനുഷ്യരും സ്വതന്ത്രരായി അവന്\u200d",  # with a zero-width joiner
    "人人生而自由，在尊严和权利上一律平等。",
    "มนุษย์ทั้งหลายเกิดมามีอิสระ",
]


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece", "byte_bpe"])
def test_text_of_any_language_comes_back(kind):
    config = TokenizerConfig(kind=kind, lowercase=False)
    tokenizer = tokenizer_training.train(LANGUAGES * 3, config, 2000)
    for text in LANGUAGES:
        ids = tokenizer.encode([text])[0]
        assert tokenizer.unk_id not in ids
        if kind == "sentencepiece":  # NFKC, and a space for a non-joiner
            text = unicodedata.normalize("NFKC", text).replace("\u200c", " ")
        assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("kind", ["wordpiece", "byte_bpe"])
def test_accents_are_stripped_only_where_it_is_asked_for(kind):
    for strip, expected in ((False, "tiếng việt नमस्ते"), (True, "tieng viet नमसत")):
        config = TokenizerConfig(kind=kind, strip_accents=strip)
        tokenizer = tokenizer_training.train(["TIẾNG Việt नमस्ते"] * 3, config, 2000)
        (first, second) = tokenizer.encode(["TIẾNG Việt नमस्ते", "tiếng việt नमस्ते"])
        assert list(first) == list(second)
        assert tokenizer.decode(first).strip() == expected


def test_letters_and_their_marks_apart_are_the_same_text():
    config = TokenizerConfig(kind="wordpiece")
    tokenizer = tokenizer_training.train(["Tiếng Việt"] * 3, config, 100)
    together, apart = tokenizer.encode(["Việt", unicodedata.normalize("NFD", "Việt")])
    assert list(together) == list(apart)
    assert tokenizer.unk_id not in together


def test_an_unknown_symbol_leaves_the_word_beside_it():
    config = TokenizerConfig(kind="wordpiece")
    tokenizer = tokenizer_training.train(["a great phone ☃ party"] * 3, config, 200)
    great, phone, snowman = (tokenizer.encode([word])[0] for word in ("great", "phone", "☃"))
    assert tokenizer.encode(["great phone☃"])[0] == [*great, *phone, *snowman]
    unknown = tokenizer.unk_id
    assert tokenizer.encode(["great phone🎉❤️"])[0] == [*great, *phone, unknown, unknown]
    for symbol in ("👍🏽", "👨‍👩‍👧", "🇫🇷", "☃️"):
        assert tokenizer.encode([f"great{symbol}phone"])[0] == [*great, unknown, *phone]


def test_the_last_character_has_its_mark_where_accents_are_stripped():
    tokens = [*tokenizer_lib.WordPieceTokenizer.special, "द", "##ल", "म"]
    tokenizer = tokenizer_lib.WordPieceTokenizer.from_vocabulary(tokens, lowercase=True)
    _, offsets = tokenizer.encode_with_offsets("दल में।")
    assert offsets[:3] == [(0, 1), (1, 2), (3, 6)]  # with its vowel and its nasal


def test_words_of_any_length_are_tokens():
    random = np.random.default_rng(0)
    proteins = ["".join(random.choice(list("ACDEFGHIKL"), 250)) for _ in range(20)]
    config = TokenizerConfig(kind="wordpiece", lowercase=False)
    tokenizer = tokenizer_training.train(proteins, config, 200)
    ids, offsets = tokenizer.encode_with_offsets(proteins[0])
    assert tokenizer.unk_id not in ids
    assert {100, 200} <= {start for start, _ in offsets}  # where a word is cut
    assert "".join(proteins[0][start:end] for start, end in offsets) == proteins[0]
    assert tokenizer.encode([proteins[0]])[0] == ids


def test_rare_characters_of_a_large_alphabet():
    """They become bytes in a SentencePiece, where these leave room, and [UNK] otherwise."""
    common = "".join(chr(0x4E00 + i) for i in range(600))
    sentences = [*([common] * 20), "龍"]
    for size, fallback in ((1500, True), (800, False)):
        tokenizer = tokenizer_training.train(sentences, TokenizerConfig(), size)
        assert (tokenizer.unk_id not in tokenizer.encode(["龍"])[0]) == fallback
        assert tokenizer.unk_id not in tokenizer.encode([common])[0]
    wordpiece = tokenizer_training.train(sentences, TokenizerConfig(kind="wordpiece"), 800)
    assert wordpiece.vocab_size == 605  # no Chinese character continues a word
    for kind in ("wordpiece", "sentencepiece"):
        with pytest.raises(UserError, match=r"vocab_size 300 is too small for .* 60\d char"):
            tokenizer_training.train(sentences, TokenizerConfig(kind=kind), 300)


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_bytes_have_room_beside_the_characters(model_type):
    """The characters alone would leave room for fewer than 256 tokens."""
    characters = "".join(chr(0x4E00 + i) for i in range(1000))
    sentences = [*([characters[:700]] * 40), characters[700:]]
    config = TokenizerConfig(model_type=model_type)
    for size in (1100, 1260):
        tokenizer = tokenizer_training.train(sentences, config, size)
        assert tokenizer.vocab_size <= size
        ids = tokenizer.encode([characters])[0]
        assert tokenizer.unk_id not in ids
        assert tokenizer.decode(ids) == characters


LATIN = "the encoder reads unaffable Überall für Größe tiếng Việt"
OTHERS = """
свобода حرية חירות नमस्ते मनुष्य 人人 有权享有 今天 天气 自由 มนุษย์ทั้งหลาย 한국어 1948 42 አንቀጽ
"""
SCRIPTS = [*LATIN.split(), *OTHERS.split()]
SIGNS = [",", ".", "。", "，", "!", "፡"]


@functools.cache
def trained_on_scripts(kind: str, model_type: str):
    sentences = [" ".join(SCRIPTS[i:] + SCRIPTS[:i]) + "".join(SIGNS) for i in range(len(SCRIPTS))]
    config = TokenizerConfig(kind=kind, model_type=model_type)
    return tokenizer_training.train(sentences, config, 400)


def tokens_by_characters(offsets: list[tuple[int, int]]) -> list[tuple[list[int], int, int]]:
    """The indices of tokens that stand for the same characters, as bytes and a lone "▁" do."""
    groups: list[tuple[list[int], int, int]] = []
    for index, (start, end) in enumerate(offsets):
        indices, first, last = groups[-1] if groups else ([], 0, 1)
        if groups and (first == last or start < last):
            groups[-1] = [*indices, index], min(first, start), max(last, end)
        else:
            groups.append(([index], start, end))
    return groups


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [("sentencepiece", "unigram"), ("sentencepiece", "bpe"), ("byte_bpe", "")],
)
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(SCRIPTS), st.sampled_from(["", *SIGNS])), min_size=1),
    st.randoms(use_true_random=False),
)
def test_the_tokens_around_a_mask_are_those_of_the_text(kind, model_type, words, random):
    """Mask any token by its characters."""
    tokenizer = trained_on_scripts(kind, model_type or "unigram")
    text = "".join(word + sign + random.choice(["", " "]) for word, sign in words).strip()
    ids, offsets = tokenizer.encode_with_offsets(text)
    indices, start, end = random.choice(tokens_by_characters(offsets))
    expected = [*ids[: indices[0]], tokenizer.mask_id, *ids[indices[-1] + 1 :]]
    assert tokenizer.encode_with_masks(f"{text[:start]}[MASK]{text[end:]}") == expected


@pytest.mark.parametrize("removes_spaces", [True, False])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_sentencepiece_of_others_has_the_same_tokens_around_a_mask(removes_spaces, has_prefix):
    trained = trained_on_scripts("sentencepiece", "unigram")
    model = sentencepiece_model.Model.FromString(*trained.files().values())
    model.normalizer_spec.remove_extra_whitespaces = removes_spaces
    model.normalizer_spec.add_dummy_prefix = has_prefix
    tokenizer, words = SentencePieceTokenizer(model.SerializeToString()), SCRIPTS[:5]
    (ids,) = map(list, tokenizer.encode([" ".join(words)]))
    for index in range(1, len(words)):
        before, after = (tokenizer.encode([" ".join(words[:i])])[0] for i in (index, index + 1))
        masked = " ".join([*words[:index], "[MASK]", *words[index + 1 :]])
        expected = [*ids[: len(before)], tokenizer.mask_id, *ids[len(after) :]]
        assert tokenizer.encode_with_masks(masked) == expected
    in_text = [[*ids] for ids in tokenizer.encode_words(words)]
    (first,) = tokenizer.encode(words[:1])
    assert [token for each in in_text[1:] for token in each] == ids[len(first) :]


def test_a_mask_among_letters_is_one_letter():
    tokenizer = trained_on_scripts("sentencepiece", "char")
    for text in (" ".join(SCRIPTS[:3]), "天气"):
        (ids,) = tokenizer.encode([text])
        for index, letter in enumerate(text):
            masked = f"{text[:index]}[MASK]{text[index + 1 :]}"
            found = tokenizer.encode_with_masks(masked)
            expected = [*ids[: index + 1], tokenizer.mask_id, *ids[index + 2 :]]
            if letter != " ":
                assert found == expected
                assert tokenizer.decode_with_masks(found) == masked
    assert tokenizer.encode_with_masks("[MASK][MASK]")[1:] == [tokenizer.mask_id] * 2
    assert tokenizer.decode_with_masks([tokenizer.mask_id]) == "[MASK]"
    config = TokenizerConfig(kind="sentencepiece", model_type="char")
    pairs = tokenizer_training.train(["((..))", ".(.)."] * 9, config, 50)  # no letter nor digit
    assert pairs.decode_with_masks(pairs.encode_with_masks("((.[MASK].))")) == "((.[MASK].))"


def test_masks_beside_each_other_and_spaces():
    for kind in ("sentencepiece", "wordpiece", "byte_bpe"):
        tokenizer = trained_on_scripts(kind, "unigram")
        mask, (the,) = tokenizer.mask_id, tokenizer.encode(["the"])
        for text in ("[MASK] [MASK] the", "[MASK][MASK] the"):
            assert tokenizer.encode_with_masks(text) == [mask, mask, *the]
        assert tokenizer.encode_with_masks("the [MASK]") == [*the, mask]
        assert tokenizer.encode_with_masks("the \t\n [MASK]") == [*the, mask]
        assert tokenizer.encode_with_masks("the [MASK] ")[:-1] in ([*the, mask], list(the))
    chinese = trained_on_scripts("sentencepiece", "unigram")
    assert not chinese.decode(chinese.encode_with_masks("[MASK]天气")[1:]).startswith(" ")


def test_signs_that_are_written_are_kept():
    """The sign of an Arabic year is a format character, as are those that are removed."""
    config = TokenizerConfig(kind="wordpiece")
    tokenizer = tokenizer_training.train(["\u0601ء \u06dd"], config, 50)
    assert tokenizer.decode(tokenizer.encode(["\u0601ء\u00ad \u06dd"])[0]) == "\u0601ء \u06dd"


def test_a_tokenizer_json_with_other_ids_than_its_model(unigram):
    """As XLM-RoBERTa has: its .model was read, and each token was another."""
    model = unigram.files()["sentencepiece.model"]
    proto = sentencepiece_model.Model.FromString(model)
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [(p.piece, p.score) for p in proto.pieces if p.type == sentencepiece_model.NORMAL]
    vocabulary = [*((name, 0.0) for name in names), *pieces, ("<mask>", 0.0)]
    inner = tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, 3))
    inner.normalizer = tokenizers.normalizers.Lowercase()
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Metaspace()
    inner.add_special_tokens([*names, "<mask>"])
    files = {"tokenizer.json": inner.to_str().encode(), "sentencepiece.bpe.model": model}
    for own in (files, {"tokenizer.json": files["tokenizer.json"]}):
        tokenizer = tokenizer_loading.from_files(own, "here")
        text = "the encoder reads the whole sentence"
        assert list(tokenizer.encode([text])[0]) == inner.encode(text).ids
        assert tokenizer.kind == "unigram"
    ids, offsets = tokenizer.encode_with_offsets(text)
    for index, (start, end) in zip(ids, offsets, strict=True):
        name = tokenizer.id_to_token(index).lstrip("▁")
        assert text[start:end] == name or not name  # of the space alone
    assert tokenizer.decode(ids) == text
    assert not {*tokenizer.encode_literally(["a <s>b</s> <mask>"])[0]} & {*tokenizer.special_ids}
    again = tokenizer_loading.from_json(tokenizer.to_json(), "here")
    assert again.fingerprint == tokenizer.fingerprint
    with pytest.raises(UserError, match=r"are not those of sentencepiece\.bpe\.model; put the"):
        tokenizer_loading.from_files({"sentencepiece.bpe.model": model}, "here")
    with pytest.raises(UserError, match="holds no readable tokenizer"):
        tokenizer_loading.from_files({**files, "tokenizer.json": b""}, "here")
    for has_bytes, key_words in (
        (True, "a BPE tokenizer.json is not read, only its .model is; put its own .model beside"),
        (False, "a tokenizer.json of a BPE without bytes is not read; take or train a WordPiece"),
    ):
        bpe = tokenizers.models.BPE({"a": 0}, [], byte_fallback=has_bytes)
        with refused(key_words):
            content = tokenizers.Tokenizer(bpe).to_str().encode()
            tokenizer_loading.from_files({"tokenizer.json": content}, "here")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({"▁the": 0}, [])).to_str().encode()
    with pytest.raises(UserError, match="and the one beside it has other tokens or ids; put its"):
        tokenizer_loading.from_files({"tokenizer.json": bpe, "a.model": model}, "here")
    with pytest.raises(UserError, match=r"tokenizer\.add knows no Unigram"):
        tokenizer_extension.extended(tokenizer, ["a b"], 1)


def test_the_names_of_special_tokens_in_a_text_are_text(any_tokenizer):
    """HTML strikes out by <s>, and a page on BERT says [MASK]."""
    text = "a [SEP] b <s>c</s> [MASK] <mask> <pad> [PAD] [CLS] d"
    ids = [int(token) for token in any_tokenizer.encode_literally([text])[0]]
    assert not set(ids) & set(any_tokenizer.special_ids)
    assert [int(i) for i in any_tokenizer.encode_literally(["fox dog"])[0]] == [
        int(i) for i in any_tokenizer.encode(["fox dog"])[0]
    ]
    masked = any_tokenizer.encode_with_masks("a [MASK] b")
    assert masked.count(any_tokenizer.mask_id) == 1


def _with_names_as_words(kind: str) -> tokenizer_lib.Tokenizer:
    """A tokenizer of another library that takes the names of special tokens for words."""
    lines, names = ["the fox and the dog of the river"] * 20, ["[CLS]", "[SEP]", "[MASK]", "[PAD]"]
    if kind == "sentencepiece":
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=40,
            hard_vocab_limit=False,
            user_defined_symbols=names,
            minloglevel=2,
        )
        return tokenizer_loading.from_files({"a.model": model.getvalue()}, "here")
    tokens = [*names, "[UNK]", *dict.fromkeys(lines[0].split())]
    model = tokenizers.models.WordPiece({name: i for i, name in enumerate(tokens)})
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return tokenizer_loading.from_files({"tokenizer.json": inner.to_str().encode()}, "here")


@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece"])
def test_a_special_token_that_a_text_can_only_name_is_unknown(kind, tmp_path):
    tokenizer = _with_names_as_words(kind)
    text = "the [SEP] fox [MASK] and [PAD] the [CLS] dog"
    ids = np.array(tokenizer.encode_literally([text, "the river"])[0])
    assert not np.isin(ids, tokenizer.special_ids).any()
    assert (ids == tokenizer.unk_id).sum() == 4
    (tmp_path / "a.txt").write_text(
        "\n".join([text, *["the fox and the dog of the river"] * 2] * 20)
    )
    data = DataConfig(source=str(tmp_path / "a.txt"), eval_fraction=0.1, sentences="documents")
    corpus = prepare(data, tokenizer, 0, tmp_path / "store")
    assert corpus.unknown == pytest.approx(21 / (len(text) + 2 * 32))
    assert not np.isin(corpus.train.tokens, tokenizer.special_ids).any()


def test_a_wordpiece_has_as_many_tokens_as_are_asked_for():
    """A Chinese character that starts a word is one token, and takes the place of no other."""
    random_words = random.Random(0)
    chinese = ["".join(map(chr, random_words.choices(range(0x4E00, 0x4E40), k=8)))] * 3
    words = ["".join(random_words.choices("abcdefgh", k=6)) for _ in range(300)]
    text = [f"{' '.join(words[i : i + 5])} {chinese[0]}" for i in range(295)]
    tokenizer = tokenizer_training.train(text, TokenizerConfig(kind="wordpiece"), 400)
    assert tokenizer.vocab_size == 400


@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece"])
def test_a_text_with_the_character_that_sentencepiece_reserves(kind):
    """A sentence with it is trained on, without it."""
    text = ["temp \u2585\u2586 now"] * 20 + ["a river bank"] * 20
    tokenizer = tokenizer_training.train(text, TokenizerConfig(kind=kind), 60)
    assert tokenizer.unk_id not in tokenizer.encode(["now \u2586"])[0]


def test_a_wordpiece_has_the_mark_of_words_where_it_is_a_character_of_the_text():
    """U+2581, which SentencePiece puts before each word while it is trained."""
    text = ["temp \u2581\u2582 now"] * 20 + ["a river bank"] * 20
    tokenizer = tokenizer_training.train(text, TokenizerConfig(kind="wordpiece"), 60)
    (ids,) = tokenizer.encode(["\u2581 bank"])
    assert [tokenizer.id_to_token(index) for index in ids] == ["\u2581", "bank"]


def test_tokens_of_one_character_have_its_offsets():
    """SentencePiece says of all but the last that they are empty."""
    config = TokenizerConfig(kind="sentencepiece")
    many = "".join(map(chr, range(0x4E00, 0x4E00 + 300)))
    # Characters that are rare among so many become bytes.
    sentences = [f"the river and the bank in {many}"] * 300 + ["鑫ø"]
    tokenizer = tokenizer_training.train(sentences, config, 1100)
    for text in ("a 🎻 b", "鑫鑫", "½m", "in ﷺ.", "㎏ … ¨", "ø"):
        ids, offsets = tokenizer.encode_with_offsets(text)
        starts, ends = zip(*offsets, strict=True)
        assert list(starts) == sorted(starts)
        assert list(ends) == sorted(ends)
        for index, (start, end) in zip(ids, offsets, strict=True):
            assert end > start or tokenizer.id_to_token(index) == "▁"
    ids, offsets = tokenizer.encode_with_offsets("a 🎻 b")
    assert offsets.count((2, 3)) == 4  # bytes of UTF-8
    assert (
        tokenizer.decode([i for i, span in zip(ids, offsets, strict=True) if span == (2, 3)])
        == "🎻"
    )


@pytest.mark.parametrize("name", ["", "vocab.json", "merges.txt"])
def test_a_byte_bpe_is_read_from_either_of_its_files(name, tmp_path):
    made = tokenizer_training.train(SENTENCES, TokenizerConfig(kind="byte_bpe"), 280)
    model = json.loads(made.files()["tokenizer.json"])["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    assert tokenizer_loading.load(tmp_path / name).vocab_size == made.vocab_size
