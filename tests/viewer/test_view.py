"""What `Bert.attention` and `Bert.compare` return, and their mistakes."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import model_config, random_bert, untrained
from scipy.special import softmax

from bert_jax import Bert, UserError
from bert_jax.viewer.view import find_word, outstanding_head, special_indices


@pytest.fixture(scope="module", params=["absolute", "relative_key", "relative_key_query", "rotary"])
def bert(request, tiny_bert) -> Bert:
    """A model of random weights, large enough that maps are uneven."""
    config = model_config(vocab_size=64, position_embedding_type=request.param)
    if request.param == "rotary":
        config = model_config(model_type="modernbert", vocab_size=64, local_attention=4)
    return random_bert(config, tiny_bert.tokenizer, pairs=request.param != "rotary")


@pytest.mark.parametrize("texts", [["The river bank."], ["A model.", "The river, the bank."]])
def test_a_view_follows_from_its_own_numbers(bert, texts):
    view = bert.attention(*texts)
    arrays = bert.tokenize(*([text] for text in texts))
    np.testing.assert_array_equal(view.input_ids, arrays["input_ids"][0])
    separators = np.flatnonzero(view.input_ids == bert.tokenizer.sep_id)
    assert len(separators) == len(texts)
    assert view.second_start == separators[0] + 1  # of one text, the number of its tokens
    if bert.config.type_vocab_size > 1:
        is_second = arrays["token_type_ids"][0] == 1
        np.testing.assert_array_equal(is_second, np.arange(len(is_second)) >= view.second_start)
    output = bert(*texts, output_hidden_states=True, output_attentions=True)
    for index, layer in enumerate(output.attentions):
        np.testing.assert_allclose(view.maps[index], layer[0], rtol=0, atol=1e-6)
    for index, state in enumerate(output.hidden_states):
        np.testing.assert_allclose(view.hidden_states[index], state[0], rtol=0, atol=1e-5)
    assert view.maps.std() > 0.05
    scores = view.queries.astype(float) @ view.keys.astype(float).swapaxes(2, 3)
    if bert.config.position_embedding_type == "absolute":
        assert view.position_scores is None
    else:
        assert np.abs(view.position_scores).mean() > 0.1
        scores += view.position_scores
    maps = softmax(scores / np.sqrt(view.queries.shape[-1]), -1)
    np.testing.assert_allclose(view.maps, maps, rtol=0, atol=1e-6)
    vectors = view.hidden_states[1].astype(float)
    norms = np.sqrt((vectors**2).sum(-1))
    expected = vectors @ vectors.T / norms / norms[:, None]
    np.testing.assert_allclose(view.similarities()[1], expected, rtol=0, atol=1e-6)


def test_guesses_of_the_last_layer_are_those_of_fill_mask(bert):
    text = "The [MASK] bank of the [MASK]."
    view, guesses = bert.attention(text), bert.fill_mask(text)
    assert sorted(view.guesses) == sorted({guess.position for guess in guesses})
    for position, layers in view.guesses.items():
        assert len(layers) == 3
        expected = [guess for guess in guesses if guess.position == position]
        assert [token for token, _ in layers[-1]] == [guess.token for guess in expected]
        probabilities = [probability for _, probability in layers[-1]]
        np.testing.assert_allclose(probabilities, [g.probability for g in expected], rtol=1e-4)
        assert layers[0] != layers[-1]
    assert bert.attention("The bank.").guesses == {}


@pytest.mark.parametrize(
    ("kind", "labels", "texts", "example"),
    [
        ("classification", ("no", "yes"), ["The river."], "The river."),
        ("classification", ("no", "yes"), ["The river.", "A bank."], ("The river.", "A bank.")),
        ("regression", (), ["The river."], "The river."),
        ("token_classification", ("X", "O"), ["The river bank"], ["The", "river", "bank"]),
        (
            "question_answering",
            (),
            ["What?", "The river bank."],
            {"question": "What?", "context": "The river bank."},
        ),
    ],
)
def test_the_prediction_is_that_of_predict(tiny_bert, kind, labels, texts, example):
    bert = untrained(tiny_bert, kind, labels)
    view = bert.attention(*texts)
    assert view.prediction == bert.predict([example])[0]
    assert view.maps.shape[:2] == (2, 2)
    with pytest.raises(UserError, match="no masked LM head"):
        bert.attention("The [MASK] bank.")


def test_a_prediction_of_fewer_tokens_than_are_shown_says_so(tiny_classifier):
    data = dataclasses.replace(tiny_classifier.data, max_length=8)
    short = dataclasses.replace(tiny_classifier, data=data)
    assert short.attention("The river.").prediction_length == 0
    assert short.attention("The river bank of the river bank.").prediction_length == 8
    assert tiny_classifier.attention("The river bank of the river bank.").prediction_length == 0


def test_numbers_that_are_not_finite_are_refused(tiny_bert):
    params = jax.tree.map(lambda each: each * 1e30, tiny_bert.params)
    with pytest.raises(UserError, match="numbers for this text that are not finite"):
        dataclasses.replace(tiny_bert, params=params).attention("The river bank.")


def test_models_without_a_prediction(tiny_bert):
    assert tiny_bert.attention("The bank.").prediction is None
    bert = untrained(tiny_bert, "question_answering")
    assert bert.attention("A single text.").prediction is None


def test_texts_of_another_number_than_those_of_the_task_have_no_prediction(tiny_classifier):
    assert tiny_classifier.attention("The river bank.").prediction
    assert tiny_classifier.attention("The river bank.", "A model.").prediction is None
    data = dataclasses.replace(tiny_classifier.data, text="premise,hypothesis")
    of_pairs = dataclasses.replace(tiny_classifier, data=data)
    assert of_pairs.attention("The river bank.", "A model.").prediction
    assert of_pairs.compare(["A river bank.", "The bank."], "bank").cosines.shape == (3, 2, 2)


def test_long_texts_are_truncated(tiny_bert):
    with pytest.warns(UserWarning, match="the text is longer than the model's 32 tokens"):
        view = tiny_bert.attention("the " * 80)
    assert view.is_truncated
    assert len(view.tokens) == 32
    with pytest.warns(UserWarning, match="the text is longer"):
        view = tiny_bert.attention("the " * 80, "the bank")
    assert view.tokens[-2:-1] == tiny_bert.attention("bank").tokens[-2:-1]
    assert not tiny_bert.attention("the", "the").is_truncated
    # Of a classifier that reads single texts in windows, too: a pair is truncated.
    classifier = untrained(tiny_bert, "classification", ("a", "b"))
    data = dataclasses.replace(classifier.data, text="a,b", max_length=64)
    classifier = dataclasses.replace(classifier, data=data)
    with pytest.warns(UserWarning, match="the text is longer"):
        assert classifier.attention("the " * 80, "the bank").prediction["label"] in "ab"


@pytest.mark.parametrize(
    ("text", "word", "span"),
    [
        ("वह करेगा यह कर", "कर", (12, 14)),  # not within a word, whose vowel signs are marks
        ("A riverbank, a Bank.", "bank", (15, 19)),
        ("riverbank", "bank", (5, 9)),
        ("C and C++", "c++", (6, 9)),
    ],
)
def test_a_word_is_found_as_a_whole_one_if_it_can(text, word, span):
    assert find_word(text, word) == span


def test_a_word_is_compared_where_it_is(tiny_bert):
    texts = ["A river bank.", "The BANK reads the bank.", "the bankbank"]
    found = tiny_bert.compare(texts, "bank")
    assert found.cosines.shape == (3, 3, 3)
    np.testing.assert_allclose(found.cosines, found.cosines.swapaxes(1, 2), rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.cosines[:, range(3), range(3)], 1, rtol=1e-6)
    spelled = [tiny_bert.tokenizer.encode([word])[0] for word in ("bank", "BANK")]
    for view, indices, ids in zip(found.views[:2], found.indices[:2], spelled, strict=True):
        assert view.input_ids[indices].tolist() == list(ids)
    vectors = [
        view.hidden_states[2, indices].mean(0)
        for view, indices in zip(found.views, found.indices, strict=True)
    ]
    a, b = vectors[:2]
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert found.cosines[2, 0, 1] == pytest.approx(cosine, abs=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda bert: bert.attention(""), "a text is empty; give one with words"),
        (lambda bert: bert.attention(" \n"), "a text is empty"),
        (lambda bert: bert.attention("The bank.", ""), "a text is empty"),
        (lambda bert: bert.compare(["The bank."], "bank"), "two texts or more"),
        (lambda bert: bert.compare("The bank.", "bank"), "two texts or more"),
        (lambda bert: bert.compare(["A bank.", "The bank."], " "), "give a word"),
        (lambda bert: bert.compare(["A bank.", "A river."], "bank"), "'A river.' has no 'bank'"),
        (lambda bert: bert.compare(["A bank.", "A [MASK] bank."], "bank"), "texts without"),
    ],
)
def test_mistakes(tiny_bert, call, message):
    with pytest.raises(UserError, match=message):
        call(tiny_bert)


@pytest.mark.filterwarnings("ignore:the text is longer")
def test_a_word_that_was_truncated(tiny_bert):
    with pytest.raises(UserError, match="'bank' is not in what the model reads"):
        tiny_bert.compare(["the " * 40 + "bank", "A bank."], "bank")


def test_a_page_that_would_be_too_large(tiny_bert, monkeypatch):
    count = len(tiny_bert.attention("the bank").tokens)
    size = 2 * (4 * count**2 + 4 * 16 * count)
    monkeypatch.setattr("bert_jax.viewer.page.MAX_BYTES", size)
    tiny_bert.attention("the bank")
    with pytest.raises(
        UserError,
        match=f"page of texts of up to {count} tokens would .*; shorten them, or give",
    ):
        tiny_bert.compare(["the bank"] * 2, "bank")
    monkeypatch.setattr("bert_jax.viewer.page.MAX_BYTES", size - 1)
    with pytest.raises(UserError, match=f"page of {count} tokens would"):
        tiny_bert.attention("the bank")


def test_the_head_that_stands_out():
    """Looks from each word at one other word; looking at special tokens or at itself is common."""
    maps = np.full((3, 2, 6, 6), 0.1, np.float32)
    maps[0, 0, :, 0] = maps[0, 1, :, 2] = maps[1, 0, :, 5] = 1.0  # [CLS], and two [SEP]
    maps[1, 1] = np.eye(6)
    maps[2, 0, 1, 3] = maps[2, 0, 3, 4] = maps[2, 0, 4, 1] = 0.5
    assert outstanding_head(maps, [0, 2, 5]) == (2, 0)
    assert outstanding_head(np.ones((2, 2, 2, 2)), [0, 1]) == (0, 0)  # no words


def test_both_separators_of_a_roberta_are_special():
    pair = np.array([0, 7, 2, 2, 8, 9, 2])
    assert special_indices(pair, 4, sep_id=2) == [0, 2, 3, 6]
    assert special_indices(np.array([0, 7, 2, 8, 2]), 3, sep_id=2) == [0, 2, 4]
    assert special_indices(np.array([0, 7, 8, 2]), 4, sep_id=2) == [0, 3]
