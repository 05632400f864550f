"""Embeddings of texts: against the encoder one text at a time, whatever the batch."""

import dataclasses
from functools import partial
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from helpers import model_config, random_bert, untrained
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from bert_jax import Bert, TokenizerConfig, UserError
from bert_jax.inference import embeddings
from bert_jax.inference.embeddings import POOLINGS, word_spans
from bert_jax.models.bert import BertModel
from bert_jax.text import tokenizer_training

WORDS = ["river", "bank", "money", "sat", "in", "the", "I", "deposit", "deposited", "by"]
TEXTS = [
    "I sat by the river bank.",
    "I deposited money in the bank.",
    "",
    "money",
    "the river, the (bank)!",
    " ".join(WORDS),
]


@pytest.fixture(scope="module")
def bert() -> Bert:
    sentences = [*TEXTS, *WORDS] * 3
    tokenizer = tokenizer_training.train(sentences, TokenizerConfig(kind="wordpiece"), 60)
    return random_bert(model_config(vocab_size=60, max_position_embeddings=64), tokenizer)


@pytest.fixture(scope="module")
def one_by_one(bert) -> list[np.ndarray]:
    """All layers of each text, as a row of its own and without padding."""
    model = BertModel(bert.config, add_pooling_layer=False)
    run = jax.jit(partial(model.apply, output_hidden_states=True))
    found = []
    for ids in bert.tokenizer.encode(TEXTS):
        row = np.array([[bert.tokenizer.cls_id, *ids, bert.tokenizer.sep_id]], np.int32)
        params = {"params": bert.params["bert"]}
        output = run(params, row, np.zeros_like(row), np.ones_like(row))
        found.append(np.stack([state[0] for state in output.hidden_states]))
    return found


@pytest.mark.parametrize("layer", [-1, 0, (1, -1)])
def test_every_pooling_agrees_with_the_encoder(bert, one_by_one, layer):
    layers = (layer,) if isinstance(layer, int) else layer
    found = {pooling: bert.encode(TEXTS, layer, pooling) for pooling in POOLINGS}
    assert found["mean"].dtype == np.float32
    for index, text in enumerate(TEXTS):
        hidden = one_by_one[index][list(layers)].sum(0)
        wanted = {
            "mean": hidden.mean(0),
            "max": hidden.max(0),
            "cls": hidden[0],
            "tokens": hidden[1:-1],
        }
        for pooling, value in wanted.items():
            np.testing.assert_allclose(found[pooling][index], value, rtol=0, atol=2e-5)
        _, offsets = bert.tokenizer.encode_with_offsets(text)
        spans = word_spans(text)
        assert len(found["words"][index]) == len(spans)
        for vector, (begin, end) in zip(found["words"][index], spans, strict=True):
            pieces = [i for i, (b, e) in enumerate(offsets) if b < end and e > begin]
            mean = wanted["tokens"][pieces].mean(0)
            np.testing.assert_allclose(vector, mean, rtol=0, atol=2e-5)


def test_a_text_does_not_depend_on_the_others(bert):
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(WORDS, generator.integers(1, 11))) for _ in range(700)]
    together = bert.encode(texts)
    assert together.shape == (700, 16)
    for index in (0, 350, 699):
        np.testing.assert_allclose(bert.encode(texts[index])[0], together[index], atol=2e-5)
    order = generator.permutation(700)
    shuffled = bert.encode([texts[i] for i in order])
    np.testing.assert_allclose(shuffled, together[order], rtol=0, atol=2e-5)


def test_words_by_their_punctuation():
    text = "I sat (by the)  “river” bank... don't U.S. --\tx हिन्दी ok"
    words = [text[begin:end] for begin, end in word_spans(text)]
    assert words[:10] == ["I", "sat", "(", "by", "the", ")", "“", "river", "”", "bank"]
    assert words[10:] == [".", ".", ".", "don't", "U.S", ".", "-", "-", "x", "हिन्दी", "ok"]
    assert word_spans(" \n").shape == (0, 2)
    text = "I ❤️ a \u00ad fox"  # the heart of two characters, and a hyphen that is not shown
    assert [text[a:b] for a, b in word_spans(text)] == ["I", "❤️", "a", "fox"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("今天天气很好。我们走吧！", "今 天 天 气 很 好 。 我 们 走 吧 ！"),
        ("人類のすべて、またはGDPの「年」", "人 類 のすべて 、 またはGDPの 「 年 」"),
        ("𠀀豈 a字b", "𠀀 豈 a 字 b"),
        ("대한민국의 국민은", "대한민국의 국민은"),
        ("สวัสดีครับ ผมชื่อ", "สวัสดีครับ ผมชื่อ"),
    ],
)
def test_words_of_scripts_without_spaces(text, words):
    assert [text[begin:end] for begin, end in word_spans(text)] == words.split()
    # As BERT's own tokenizer splits them, which also splits at each other mark.
    normalized = BertNormalizer(lowercase=False).normalize_str(text)
    assert [word for word, _ in BertPreTokenizer().pre_tokenize_str(normalized)] == words.split()


def test_a_token_of_several_words_is_the_vector_of_each():
    """As SentencePiece has tokens of several Chinese characters."""
    spans = [np.array(spans) for spans in ([(0, 1), (1, 3)], [(0, 1), (1, 2), (2, 3)])]
    vectors = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert embeddings._pool_words(vectors, *spans).tolist() == [[1, 2], [3, 4], [3, 4]]
    cut = embeddings._pool_words(vectors[:1], *spans)
    np.testing.assert_array_equal(cut, [[1, 2], [np.nan] * 2, [np.nan] * 2])


@pytest.mark.filterwarnings("ignore:the text is longer")
def test_a_word_that_is_cut_in_the_middle_has_no_vector(bert):
    word = "banks"
    assert len(bert.tokenizer.encode([word])[0]) > 1
    (vectors,) = bert.encode(["bank " * 61 + word], pooling="words")
    assert np.isfinite(vectors[:61]).all()
    assert np.isnan(vectors[61]).all()


def test_long_texts_are_truncated_and_counted(bert):
    long = "bank " * 100
    with pytest.warns(UserWarning, match="1 of 2 texts are longer than the model's 64 tokens"):
        found = bert.encode([long, "bank"], pooling="words")
    assert found[0].shape == (100, 16)
    assert np.isfinite(found[0][:62]).all()
    assert np.isnan(found[0][62:]).all()
    with pytest.warns(UserWarning, match="the text is longer"):
        truncated = bert.encode(long)
    np.testing.assert_allclose(truncated, bert.encode("bank " * 62), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda bert: bert.encode("a", layer=3), r"layers 0 .* to 2"),
        (lambda bert: bert.encode("a", layer=-4), "layer"),
        (lambda bert: bert.encode("a", layer="x"), "layer is 'x'"),
        (lambda bert: bert.encode("a", layer=[]), "layer is empty"),
        (lambda bert: bert.encode("a", layer=1.0), "layer is 1.0"),
        (lambda bert: bert.encode("a", pooling="sum"), "pooling is 'sum'"),
        (lambda bert: bert.encode("a", batch_size="x"), "batch_size is 'x'; give a whole number"),
        (lambda bert: bert.encode("a", prompt="\ud800"), "prompt is"),
        (lambda bert: bert.tokenize("\ud800"), "is not Unicode"),
        (lambda bert: bert.fill_mask("[MASK] \ud800"), "is not Unicode"),
        (lambda bert: untrained(bert, "regression").predict(["\ud800"]), "is not Unicode"),
        (lambda bert: bert.tokenize("a", max_length="x"), "max_length is 'x'"),
        (lambda bert: bert.fill_mask("[MASK]", top_k="x"), "top_k is 'x'"),
        (lambda bert: bert.encode(Mock(columns=["text"])), "texts is a table; give one column"),
        (lambda bert: bert.attention_patterns(Mock(columns=["text"])), "texts is a table"),
        (lambda bert: bert.attention_patterns([1]), r"texts\[0\] is 1; give a text, or two"),
        (lambda bert: bert.attention_patterns([("a", "b", "c")]), "give a text, or two of a pair"),
        (lambda bert: bert.attention_patterns(["\ud800"]), "is not Unicode"),
        (lambda bert: bert.attention_patterns(["a"]).strongest("x"), "the pattern is 'x'; choose"),
        (lambda bert: bert.compare(["a", "a"], 3), "the word is 3; give a str"),
        (lambda bert: untrained(bert, "regression").predict(["a"]).save(""), "a path is empty"),
        (lambda bert: untrained(bert, "regression").predict(["a"]).save("/proc/z"), "be written"),
    ],
)
def test_mistakes(bert, call, message):
    with pytest.raises(UserError, match=message):
        call(bert)


def test_options_of_sentence_transformers(bert, capfd):
    expected = bert.encode(TEXTS)
    options = {"batch_size": 2, "normalize_embeddings": True, "show_progress_bar": True}
    found = bert.encode(TEXTS, **options)
    lengths = np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected / lengths, rtol=0, atol=2e-5)
    assert "6/6" in capfd.readouterr().err


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "call",
    [
        lambda bert: bert.encode("a"),
        lambda bert: bert.fill_mask("[MASK]"),
        lambda bert: bert.attention("a bank"),
    ],
)
def test_parameters_that_are_not_finite(bert, value, call):
    params = jax.tree.map(np.array, bert.params)
    params["bert"]["embeddings"]["word_embeddings"][0, 0] = value
    with pytest.raises(UserError, match=r"word_embeddings.* has NaN or infinite numbers"):
        call(dataclasses.replace(bert, params=params))


def test_bfloat16_gives_float32(bert):
    config = dataclasses.replace(bert.config, dtype="bfloat16")
    rough = dataclasses.replace(bert, config=config).encode(TEXTS)
    assert rough.dtype == np.float32
    assert 0 < np.abs(rough - bert.encode(TEXTS)).max() < 0.2


@pytest.mark.parametrize("pooling", ["tokens", "words"])
def test_spans_are_of_the_text_without_its_prompt(bert, pooling):
    encoder = embeddings.TextEncoder(bert, pooling=pooling, before="the river: ")
    (found,) = encoder.encode_chunk(["the bank"])
    (plain,) = embeddings.TextEncoder(bert, pooling=pooling).encode_chunk(["the bank"])
    np.testing.assert_array_equal(found.spans, plain.spans)
    assert found.vectors.shape == plain.vectors.shape
    assert np.abs(found.vectors - plain.vectors).max() > 1e-3  # but it has seen the prompt
