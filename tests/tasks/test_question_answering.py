"""Question answering: windows by hand, answers against an exhaustive search, and refusals.

The search tries every start with every end, one at a time, as `run_squad.py` describes it.
"""

import dataclasses
import functools
import json
import re
from typing import Any

import numpy as np
import pytest
from helpers import model_config, refused
from hypothesis import given, settings
from hypothesis import strategies as st

import bert_jax
from bert_jax.batches.buckets import NO_LABEL
from bert_jax.config import DataFiles, FinetuneConfig, TokenizerConfig
from bert_jax.runs.task_run import tokenize
from bert_jax.tasks import question_answering
from bert_jax.tasks.datasets import load_datasets, read_examples
from bert_jax.tasks.examples import Example
from bert_jax.tasks.question_answering import (
    Answers,
    Candidate,
    QuestionAnswering,
    QuestionAnsweringConfig,
)
from bert_jax.tasks.readers import Record
from bert_jax.tasks.sequences import central_tokens, max_text_tokens, token_windows
from bert_jax.text import tokenizer_training

CONTEXT = "The fox jumps over the lazy dog."  # 9 tokens: the fox jump ##s over the lazy dog .
QUESTION = "Who jumps?"  # 4 tokens
WORDS = ["The", "fox", "jumps", "jumped", "over", "lazy", "Dog", "dogs", "bird", ".", "fox,"]
MODEL = model_config()


@pytest.fixture
def tokenizer(wordpiece):
    return wordpiece


def task(**fields) -> QuestionAnswering:
    return QuestionAnswering(QuestionAnsweringConfig(**{"max_question": 8, **fields}))


def record(answers, context=CONTEXT, question=QUESTION, *, is_impossible=False) -> Record:
    if answers is not None:
        answers = [{"text": text, "answer_start": start} for text, start in answers]
    fields = {"id": "q", "question": question, "context": context, "answers": answers}
    return Record("dev.json: q", {**fields, "is_impossible": is_impossible})


def example(answers, context=CONTEXT, *, question=QUESTION):
    return task(with_unanswerable=True).make_example(record(answers, context, question))


def answer_all(task, features, logits):
    """Return the prediction of each example from the logits of every feature."""
    predictions: list[Any] = [None] * (max(features.example_indices) + 1)
    for index, values in enumerate(logits):
        example = features.example_indices[index]
        predictions[example] = task.collect(predictions[example], features, index, values)
    return predictions


def random_logits(features, seed):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=(2, len(s))).astype(np.float32) for s in features.sequences]


def texts(context, answers):
    return [candidate.text(context) for candidate in answers.best]


def test_windows_by_hand(tokenizer):
    examples = [example([("lazy dog", 23)]), example([("fox", 4), ("dog", 28)]), example([])]
    features = task(doc_stride=2).features(examples, tokenizer, MODEL, 12)
    assert features.example_indices == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(features) == 9
    assert features.second_starts == [6] * 9
    for first in (0, 3, 6):
        assert [sequence.tolist() for sequence in features.sequences[first : first + 3]] == [
            [2, 14, 7, 8, 16, 3, 5, 6, 7, 8, 10, 3],
            [2, 14, 7, 8, 16, 3, 7, 8, 10, 5, 11, 3],
            [2, 14, 7, 8, 16, 3, 10, 5, 11, 12, 15, 3],
        ]
    labels = np.array(features.labels).tolist()
    assert labels[:3] == [[0, 0], [0, 0], [8, 9]]
    assert labels[3:6] == [[7, 7], [0, 0], [0, 0]]  # the first answer is the label
    assert labels[6:] == [[0, 0]] * 3
    assert [span.is_central.tolist() for span in features.notes[:3]] == [
        [True, True, True, True, False],
        [False, False, True, True, False],
        [False, False, True, True, True],
    ]
    assert features.notes[1].offsets.tolist() == [[8, 12], [12, 13], [14, 18], [19, 22], [23, 27]]
    assert features.truncated == 0
    assert features.skipped == []


def test_an_answer_ends_with_the_token_that_it_ends_in(tokenizer):
    """So does its start: an answer may be a part of a word, or even of a token."""
    answers = [[("jump", 8)], [("jumps over", 8)], [("s", 12)], [("x jum", 6)], [("azy do", 24)]]
    features = task().features([example(a) for a in answers], tokenizer, MODEL, 32)
    positions = [(np.array(label) - 6).tolist() for label in features.labels]
    assert positions == [[2, 2], [2, 4], [3, 3], [1, 2], [6, 7]]


def test_roberta_has_two_separators(tokenizer):
    roberta = model_config(model_type="roberta")
    features = task(doc_stride=2).features([example([("lazy dog", 23)])], tokenizer, roberta, 13)
    assert features.sequences[2].tolist() == [2, 14, 7, 8, 16, 3, 3, 10, 5, 11, 12, 15, 3]
    assert features.second_starts == [7] * 3
    assert features.labels[2].tolist() == [9, 10]


def test_long_questions_are_truncated(tokenizer):
    examples = [example([("fox", 4)], question="who " * 9), example([("fox", 4)])]
    features = task(max_question=4, doc_stride=4).features(examples, tokenizer, MODEL, 12)
    assert features.truncated == 1  # question, of two windows of 5 tokens
    assert features.sequences[0].tolist() == [2, 14, 14, 14, 14, 3, 5, 6, 7, 8, 10, 3]
    with refused("a question of 9 tokens", "12 tokens, the data.max_length", "task.max_question"):
        task(max_question=9).features(examples, tokenizer, MODEL, 12)
    # A model from elsewhere may have a length below the longest question.
    assert len(task(max_question=64).features(examples[1:], tokenizer, MODEL, 12)) == 3
    assert len(task(max_question=8).features(examples, tokenizer, MODEL, 12)) == 9 + 3


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
@pytest.mark.parametrize("length", [*range(8, 24), 64, 96, 128, 129, 192, 384])
def test_windows_of_a_run_overlap(model_type, length):
    """The defaults are accepted, or refused with settings that are."""
    model = model_config(model_type, max_position_embeddings=512)
    data, asked = DataFiles(max_length=length), QuestionAnsweringConfig()
    config = FinetuneConfig(data=data, task=asked, model=model)
    room = max_text_tokens(2, model, length) - asked.max_question
    if length >= 128 and room > asked.doc_stride:
        QuestionAnswering.check(config)
        return
    with pytest.raises(bert_jax.UserError) as error:
        QuestionAnswering.check(config)
    if length >= 128:
        assert f"{length} has room for {room} tokens of a context" in str(error.value)
    advised = re.findall(r"task\.(\w+) to (\d+)", str(error.value).rpartition("; ")[2])
    fields = {name: int(value) for name, value in advised}
    config.task = dataclasses.replace(asked, **fields)
    QuestionAnswering.check(config)
    # The largest stride is one less than the tokens of a context in a window.
    most = max_text_tokens(2, model, length) - config.task.max_question
    config.task = dataclasses.replace(config.task, doc_stride=most)
    with refused("task.doc_stride", "leaves no overlap"):
        QuestionAnswering.check(config)


def test_an_answer_that_no_window_has_is_counted(tokenizer):
    """None of its windows is trained as one without an answer."""
    longer, short = example([("jumps over the lazy", 8)]), example([("fox jumps over", 4)])
    reader = task(doc_stride=3)  # windows of 5 tokens: 0 to 4, 3 to 7, and 6 to 8
    features = reader.features([longer, short], tokenizer, MODEL, 12)
    labels = [label.tolist() for label in features.labels]
    assert labels == [[NO_LABEL] * 2] * 3 + [[7, 10], [0, 0], [0, 0]]
    assert features.skipped == [
        "dev.json: q: the answer at character 8 of the context has 5 tokens, and no window has "
        "them all; lower task.doc_stride, or raise data.max_length"
    ]


def test_windows_overlap_where_a_model_is_shorter_than_the_stride(tokenizer):
    """As those of a model from elsewhere, whose answers at a border are found."""
    features = task(doc_stride=128).features([example([])], tokenizer, MODEL, 12)
    starts = [int(window.offsets[0][0]) for window in features.notes]
    assert starts == [0, 8, 14]


def google_windows(size, room, stride):
    start, spans = 0, []
    while start < size:
        length = min(size - start, room)
        spans.append((start, length))
        if start + length == size:
            break
        start += min(length, stride)
    return spans


def google_is_central(spans, number, position):
    best_score, best_index = None, None
    for index, (start, length) in enumerate(spans):
        end = start + length - 1
        if start <= position <= end:
            score = min(position - start, end - position) + 0.01 * length
            if best_score is None or score > best_score:
                best_score, best_index = score, index
    return number == best_index


@settings(deadline=None)
@given(st.integers(1, 80), st.integers(1, 30), st.integers(1, 40))
def test_windows_and_central_tokens_are_those_of_the_original(size, room, stride):
    windows = token_windows(size, room, stride)
    expected = google_windows(size, room, stride)
    assert [(start, end - start) for start, end in windows] == expected
    for number, central in enumerate(central_tokens(windows)):
        start, length = expected[number]
        for position in range(start, start + length):
            assert central[position - start] == google_is_central(expected, number, position)


@functools.cache
def trained(kind):
    lines = ["The fox jumps over the lazy Dog, and jumped. 日本語 naïve dogs bird fox,"] * 20
    size = {"wordpiece": 60, "sentencepiece": 36, "byte_bpe": 300}[kind]
    return tokenizer_training.train(lines, TokenizerConfig(kind=kind), size)


@st.composite
def answered_contexts(draw):
    """Return a context, with odd spaces, and an answer of whole words in it."""
    words = draw(st.lists(st.sampled_from([*WORDS, "日本語", "naïve"]), min_size=1, max_size=40))
    spaces = st.sampled_from([" ", "  ", " \n", "\u00a0"])
    context, spans = draw(st.sampled_from(["", " ", "\n\n"])), []
    for word in words:
        spans.append((len(context), len(context) + len(word)))
        context += word + draw(spaces)
    first = draw(st.integers(0, len(words) - 1))
    last = draw(st.integers(first, min(first + 4, len(words) - 1)))
    begin, end = spans[first][0], spans[last][1]
    return context, (context[begin:end], begin)


@settings(max_examples=150, deadline=None)
@given(
    answered_contexts(),
    st.sampled_from(["wordpiece", "sentencepiece", "byte_bpe"]),
    st.integers(6, 60),
    st.integers(1, 40),
)
def test_every_answer_is_in_a_window_and_read_from_it(case, kind, room, stride):
    context, (answer, begin) = case
    tokenizer = trained(kind)
    of_example = example([(answer, begin)], context, question="fox")
    reader = task(doc_stride=stride, max_answer=100, n_best=3)
    length = 3 + len(tokenizer.encode(["fox"])[0]) + max(room, 8)
    features = reader.features([of_example], tokenizer, MODEL, length)
    assert all(len(sequence) <= length for sequence in features.sequences)
    _, offsets = tokenizer.encode_with_offsets(context)
    inside = [i for i, (b, e) in enumerate(offsets) if b < begin + len(answer) and e > begin]
    room = max(room, 8)
    stride = stride if stride < room else room // 2  # windows always overlap
    windows = google_windows(len(offsets), room, stride)
    has_it = [start <= inside[0] and inside[-1] < start + size for start, size in windows]
    assert [label[0] > 0 for label in features.labels] == has_it
    assert [label[0] == NO_LABEL for label in features.labels] == [not any(has_it)] * len(has_it)
    assert len(features.skipped) == (not any(has_it))
    if len(inside) <= room - stride + 1:
        assert any(has_it)
    for index, label in enumerate(features.labels):
        first = label[0] - features.second_starts[index]
        if label[0] > 0 and features.notes[index].is_central[first]:
            logits = np.zeros((2, len(features.sequences[index])))
            logits[[0, 1], label] = 1
            predictions = reader.collect(None, features, index, logits)
            assert reader.answer(of_example, predictions) == answer


def exhaustive_answers(task, features, logits, context):
    """Return the best answers of all windows of one example: every start and end, one at a time."""
    config, candidates = task.config, []
    for index, (start_logits, end_logits) in enumerate(logits):
        window, second = features.notes[index], features.second_starts[index]
        tokens = range(len(window.offsets))
        starts = sorted(
            (i for i in tokens if window.is_central[i]), key=lambda i: -start_logits[second + i]
        )
        ends = sorted(tokens, key=lambda i: -end_logits[second + i])
        for start in starts[: config.n_best]:
            for end in ends[: config.n_best]:
                if end < start or end - start + 1 > config.max_answer:
                    continue
                score = float(start_logits[second + start]) + float(end_logits[second + end])
                begin, stop = int(window.offsets[start][0]), int(window.offsets[end][1])
                candidates.append((-score, begin, stop))
    best, seen = [], set()
    for score, begin, stop in sorted(candidates):
        if context[begin:stop] not in seen and len(best) < config.n_best:
            seen.add(context[begin:stop])
            best.append(Candidate(-score, begin, stop))
    null = min(float(values[0, 0]) + float(values[1, 0]) for values in logits)
    return Answers(tuple(best), null)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=30),
    st.integers(14, 40),
    st.integers(1, 12),
    st.integers(1, 6),
    st.sampled_from([1, 2, 5, 20, 50]),
    st.integers(0, 1000),
)
def test_answers_are_those_of_an_exhaustive_search(words, length, stride, max_answer, n_best, seed):
    tokenizer, context = trained("wordpiece"), " ".join(words)
    reader = task(doc_stride=stride, max_answer=max_answer, n_best=n_best)
    features = reader.features([example(None, context, question="fox")], tokenizer, MODEL, length)
    logits = random_logits(features, seed)
    predictions = answer_all(reader, features, logits)[0]
    assert predictions == exhaustive_answers(reader, features, logits, context)
    assert len(predictions.best) <= n_best
    assert len(set(texts(context, predictions))) == len(predictions.best)
    backwards = None
    for index in reversed(range(len(features))):
        backwards = reader.collect(backwards, features, index, logits[index])
    assert backwards == predictions


def test_no_answer_and_its_threshold(tokenizer):
    fox, none = example([("fox", 4)]), example([])
    features = task().features([fox, none], tokenizer, MODEL, 32)
    logits = [np.zeros((2, len(sequence))) for sequence in features.sequences]
    logits[0][[0, 1], [7, 7]] = 3  # "fox" with 6, and "no answer" with 4
    logits[0][:, 0] = 2
    logits[1][[0, 1], [8, 9]] = 1  # "jumps" with 2, and "no answer" with 3
    logits[1][:, 0] = 1.5
    for threshold, expected in ((0.0, ["fox", ""]), (1.0, ["fox", "jumps"]), (-3.0, ["", ""])):
        reader = task(with_unanswerable=True, null_threshold=threshold)
        predictions = answer_all(reader, features, logits)
        answers = [reader.answer(e, f) for e, f in zip([fox, none], predictions, strict=True)]
        assert answers == expected
        scores = reader.score([fox, none], predictions)
        right = [expected[0] == "fox", expected[1] == ""]
        assert scores == {
            "exact_match": np.mean(right),
            "f1": np.mean(right),
            **{"HasAns_exact": right[0], "HasAns_f1": right[0]},
            **{"NoAns_exact": right[1], "NoAns_f1": right[1]},
            **{"best_exact": 1.0, "best_f1": 1.0, "best_f1_threshold": -0.5},
        }
        reader.tune([fox, none], predictions, scores)
        assert reader.config.null_threshold == (threshold or -0.5)  # that of the user is kept
    reader = task()  # of SQuAD 1.1, which always answers
    assert [reader.answer(e, f) for e, f in zip([fox, none], predictions, strict=True)] == [
        "fox",
        "jumps",
    ]
    assert reader.score([fox], predictions[:1]) == {"exact_match": 1.0, "f1": 1.0}
    assert reader.constant_score([fox, none, none]) == pytest.approx(2 / 3)


def test_a_threshold_of_no_answer_is_of_questions_that_may_have_none():
    config = FinetuneConfig(data=DataFiles(max_length=384), task=task(null_threshold=1.0).config)
    with refused("task.null_threshold 1.0 is for questions that may", "with_unanswerable=True"):
        QuestionAnswering.check(config)
    config.task = task(null_threshold=1.0, with_unanswerable=True).config
    QuestionAnswering.check(config)


def test_predictions_as_files_and_as_plain_values(tokenizer):
    reader = task(n_best=3, with_unanswerable=True)
    of_example = example([("fox", 4)])
    features = reader.features([of_example], tokenizer, MODEL, 32)
    logits = np.zeros((2, 16))
    logits[0, 0], logits[[0, 1], [7, 7]] = 1, 2
    predictions = answer_all(reader, features, [logits])
    files = reader.files([of_example], predictions)
    assert json.loads(files[".json"]) == {"q": "fox"}
    (listed,) = json.loads(files[".nbest.json"]).values()
    assert [(item["text"], item["score"]) for item in listed] == [
        ("fox", 4.0),
        ("The fox", 2.0),
        ("fox jump", 2.0),
        ("", 1.0),
    ]
    weights = np.exp([4, 2, 2, 1])
    np.testing.assert_allclose([item["probability"] for item in listed], weights / weights.sum())
    assert reader.to_json(of_example, predictions[0]) == {
        "answer": "fox",
        "probability": pytest.approx(weights[0] / weights.sum()),
        "start": 4,
        "end": 7,
    }
    withheld = task(n_best=3, with_unanswerable=True, null_threshold=-4.0)
    assert withheld.to_json(of_example, predictions[0]) == {
        "answer": "",
        "probability": pytest.approx(weights[3] / weights.sum()),
        "start": None,
        "end": None,
    }
    plain = task(n_best=3).files([of_example], predictions)[".nbest.json"]
    assert [item["text"] for item in json.loads(plain)["q"]] == ["fox", "The fox", "fox jump"]


def test_a_context_without_tokens_has_no_answer(tokenizer):
    """It has a feature all the same."""
    silent = example(None, "\x01\u200b\x02")
    reader = task(with_unanswerable=True, null_threshold=5.0)
    features = reader.features([silent], tokenizer, MODEL, 32)
    assert features.sequences[0].tolist() == [2, 14, 7, 8, 16, 3, 3]
    assert features.labels[0].tolist() == [NO_LABEL, NO_LABEL]
    predictions = answer_all(reader, features, random_logits(features, 0))
    assert predictions[0].best == ()
    assert reader.answer(silent, predictions[0]) == ""
    for content in reader.files([silent], predictions).values():
        assert "NaN" not in content
        assert "Infinity" not in content
    assert reader.score([example([])], predictions)["f1"] == 1.0
    nothing = reader.features([], tokenizer, MODEL, 32)
    assert (len(nothing), nothing.sequences, nothing.example_indices) == (0, [], [])


def test_logits_that_are_no_numbers(tokenizer):
    reader = task(with_unanswerable=True)
    of_example = example([("fox", 4)])
    features = reader.features([of_example], tokenizer, MODEL, 32)
    for value in (np.nan, np.inf, -np.inf, 3e38, -1e9):
        logits = np.full((2, 16), value, np.float32)
        predictions = answer_all(reader, features, [logits])
        assert all(map(np.isfinite, reader.score([of_example], predictions).values()))
        assert "NaN" not in reader.files([of_example], predictions)[".nbest.json"]
    logits = np.full((2, 16), np.nan)
    logits[[0, 1], [12, 13]] = -4
    assert reader.answer(of_example, answer_all(reader, features, [logits])[0]) == "lazy dog"


def test_an_answer_that_is_not_at_its_position_is_counted(tokenizer):
    misplaced = [[("fox", 5)], [("dog", 900)], [("wolf", 4)]]
    examples = [example(a) for a in misplaced]
    silent = example([("\u200b", 3)], "fox\u200b over")
    spaced = example([("fox jumps", 4)], "The fox\u00a0jumps")
    unknown = example(None)
    reader = task()
    features = reader.features([*examples, silent, spaced, unknown], tokenizer, MODEL, 32)
    assert [label.tolist() for label in features.labels] == [[NO_LABEL] * 2] * 4 + [
        [7, 9],
        [NO_LABEL] * 2,
    ]
    assert len(features.skipped) == 4
    assert (
        features.skipped[0] == "dev.json: q: the answer 'fox' is not at character 5 of the context"
    )
    assert features.skipped[3] == "dev.json: q: the answer '\\u200b' has no tokens"
    logits = np.zeros((2, 16))
    logits[[0, 1], 7] = 1
    predictions = answer_all(reader, features, [logits])
    assert reader.score(examples[:1], predictions[:1])["f1"] == 1.0  # by its text


ASKED = {"question": "Who?", "context": CONTEXT}


def test_questions_in_memory_have_ids_of_their_own():
    rows = [{**ASKED, "id": name, "is_impossible": None, "answers": None} for name in ("a", None)]
    found = read_examples(task(), rows, DataFiles(), labelled=False, name="train")
    assert [each.id for each in found] == ["a", None]  # its number is written
    named = [rows[1], {**rows[0], "id": "None"}]
    assert len(read_examples(task(), named, DataFiles(), labelled=False, name="train")) == 2
    with refused("train[1]: the id a occurs twice; give each question its own"):
        read_examples(task(), [rows[0], rows[0]], DataFiles(), labelled=False, name="train")


def test_an_id_that_is_the_number_of_another_question_is_refused_before_the_training():
    answers = [{"text": "fox", "answer_start": CONTEXT.index("fox")}]
    rows = [{**ASKED, "id": name, "answers": answers} for name in ("q", None, "1")]
    config = FinetuneConfig(task=QuestionAnsweringConfig())
    load_datasets(config, train=rows, held_out=rows[:2])
    with refused("two questions have the id '1'", "give each an id of its own"):
        load_datasets(config, train=rows, held_out=rows)


@pytest.mark.parametrize(
    ("value", "key_words"),
    [
        ({**ASKED, "question": " \n"}, "has no question; "),
        ({**ASKED, "context": " \n"}, "has no context; "),
        (
            {**ASKED, "question": 2.5},
            "the number 2.5 is where a text is expected; put it in quotes",
        ),
        ({**ASKED, "answers": {"text": [""], "answer_start": [0]}}, "an answer is '' at 0; give"),
    ],
)
def test_values_that_are_refused(value, key_words):
    with refused("examples[3]", key_words):
        task().example_from(value, 3, DataFiles())


def test_questions_have_no_columns_to_name():
    """Their files have those of SQuAD."""
    for data in (DataFiles(text="question"), DataFiles(label="answer")):
        with refused("names a column, and question_answering reads those of SQuAD; leave it out"):
            QuestionAnswering.check(FinetuneConfig(data=data, task=QuestionAnsweringConfig()))


@pytest.mark.parametrize("fields", [{"answers": []}, {"is_impossible": True}])
def test_a_question_without_an_answer(fields):
    """It is refused where it is trained on or scored, and predicted like one of no label."""
    assert task().example_from({**ASKED, **fields}, 3, DataFiles()).label is None
    of_file = task().make_example(Record("a.json", {**ASKED, **fields}))
    with refused("the question has no answer; set task.with_unanswerable=True"):
        task().complete(of_file, DataFiles(), labelled=True)
    allowed = task(with_unanswerable=True)
    assert allowed.complete(of_file, DataFiles(), labelled=True).label == ()


def test_answers_of_questions_with_one_id_are_not_written_over_each_other():
    task = question_answering.QuestionAnswering(QuestionAnsweringConfig("question_answering"))
    examples = [Example(name, "x", ("Who?", "A fox."), None) for name in (1, "1")]
    with refused("two questions have the id '1'"):
        task.files(examples, [None, None])


def test_answers_that_are_all_elsewhere_are_refused(tokenizer):
    """Nothing could be learned from them, and their loss would be 0."""
    examples = [example([("fox", 5)]), example([("fox", 4)])]
    config = FinetuneConfig(data=DataFiles(max_length=32), model=MODEL)
    reader = task()
    tokenized = functools.partial(tokenize, config, reader, tokenizer)
    assert len(tokenized(examples, is_training=True).features.skipped) == 1
    with refused("none of 1 example has a label that can be used; the first: dev.json: q: the ans"):
        tokenized(examples[:1], is_training=True)


def test_held_out_answers_need_not_be_where_their_files_say(shallow_bert, tmp_path):
    """They are scored as texts, in which case does not count."""
    rows = [
        {
            "question": "Who reads?",
            "context": "The model reads.",
            "answers": {"text": [text], "answer_start": [4]},
        }
        for text in ("model", "Model")
    ]
    data = DataFiles(max_length=32, batch_size=1)
    config = FinetuneConfig(epochs=2.0, data=data, task=task(doc_stride=8).config)
    train, held_out = rows[:1], rows[1:]
    result = bert_jax.finetune(
        config, shallow_bert, tmp_path / "run", train=train, eval=held_out, quiet=True
    )
    assert {"exact_match", "f1"} <= {*result.scores["eval"]}
    assert "loss" not in result.scores["eval"]


@pytest.mark.parametrize(("given", "name"), [(1.0, "1"), ("q1", "q1"), (7, "7"), (None, None)])
def test_a_number_is_an_id_as_it_is_written(given, name):
    """As pandas has whole numbers beside a missing one."""
    fields = {"id": given, "question": QUESTION, "context": CONTEXT, "answers": []}
    assert task().make_example(Record("a:1", fields)).id == name
