"""Words by class: features by hand, every word once, entities against a plain reading of BIO."""

import io
import json
import warnings

import numpy as np
import pytest
from helpers import model_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bert_jax.batches.features import NO_LABEL
from bert_jax.config import DataFiles, TaskConfig
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForTokenClassification
from bert_jax.tasks import readers
from bert_jax.tasks.base import Example
from bert_jax.tasks.datasets import read_examples
from bert_jax.tasks.token_classification import TokenClassification

MODEL = model_config()
BIO = ("O", "B-LOC", "B-PER", "I-LOC", "I-PER")
WORDS = ["The", "fox", "jumps", "jumped", "over", "Dog", ".", "bird", "\u200b"]


def task(*labels, **fields) -> TokenClassification:
    return TokenClassification(TaskConfig("token_classification", labels=labels, **fields))


def sentence(words, tags=None) -> Example:
    if isinstance(words, str):
        words, tags = words.split(), tags and tags.split()
    return Example(None, "a.conll:1", tuple(words), tags and tuple(tags))


def read(path, **fields):
    return read_examples(task(), str(path), DataFiles(**fields), labelled=False)[0]


def tagged(numbers):
    """A prediction in which each word has the tag of a number."""
    return {word: (number, 0.5) for word, number in enumerate(numbers)}


def predict(task, features, tag_of):
    """Takes logits by which each piece has the tag that `tag_of` gives for row and place."""
    found = [None] * (int(features.example_indices.max()) + 1)
    for index, sequence in enumerate(features.sequences):
        logits = np.zeros((len(sequence), len(task.labels)), np.float32)
        for place in range(len(sequence)):
            logits[place, tag_of(index, place)] = 1
        example = features.example_indices[index]
        found[example] = task.collect(found[example], features, index, logits)
    return found


def test_the_first_piece_has_the_label(wordpiece):
    examples = [sentence("The fox jumps .", "O B-LOC I-LOC O"), sentence("Dog jumped")]
    features = task(*BIO).features(examples, wordpiece, MODEL, 12)
    assert [sequence.tolist() for sequence in features.sequences] == [
        [2, 5, 6, 7, 8, 15, 3],
        [2, 12, 7, 9, 3],
    ]
    n = NO_LABEL
    assert [label.tolist() for label in features.labels] == [[n, 0, 1, 3, n, 0, n], [n] * 5]
    assert features.per_token
    assert features.choices == 1
    assert features.second_starts == [7, 5]
    assert features.example_indices.tolist() == [0, 1]
    assert features.truncated == 0


def test_long_sentences_are_several_rows(wordpiece):
    tags = "B-PER I-PER O B-LOC I-LOC O"
    examples = [sentence("fox jumps dog jumped over the", tags), sentence("fox", "O")]
    features = task(*BIO).features(examples, wordpiece, MODEL, 6)
    assert [sequence.tolist() for sequence in features.sequences] == [
        [2, 6, 7, 8, 12, 3],
        [2, 7, 9, 10, 5, 3],
        [2, 6, 3],
    ]
    n = NO_LABEL
    assert [label.tolist() for label in features.labels] == [
        [n, 2, 4, n, 0, n],
        [n, 1, n, 3, 0, n],
        [n, 0, n],
    ]
    assert features.example_indices.tolist() == [0, 0, 1]


def test_a_word_longer_than_a_row_keeps_its_beginning(byte_bpe):
    features = task("x", "y").features(
        [sentence(["fox", "ñ" * 20, "dog"], "xyx")], byte_bpe, MODEL, 8
    )
    assert len(features) == 3
    assert [len(sequence) for sequence in features.sequences][1] == 8
    assert [label[1] for label in features.labels] == [0, 1, 0]
    assert features.truncated == 1


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sentences=st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=20), min_size=1),
    max_length=st.integers(8, 20),
)
def test_every_word_is_predicted_once(wordpiece, sentences, max_length):
    """A tag of its own for each row and place, so that any other would be seen."""
    generator = np.random.default_rng(0)
    examples = [sentence(words, ["a"] * len(words)) for words in sentences]
    tagger = task(*"abcdefg")
    features = tagger.features(examples, wordpiece, MODEL, max_length)
    assert features.truncated == 0
    tags = generator.integers(0, 7, (len(features), max_length))
    found = predict(tagger, features, lambda row, place: tags[row, place])
    places = [
        (features.example_indices[row], *pair)
        for row in range(len(features))
        for pair in features.spans[row]
    ]
    assert [place[:2] for place in places] == [
        (number, word)
        for number, words in enumerate(sentences)
        for word, text in enumerate(words)
        if text != "\u200b"
    ]
    for row in range(len(features)):
        assert len(features.sequences[row]) <= max_length
        labelled = [place for place, label in enumerate(features.labels[row]) if label != NO_LABEL]
        assert labelled == [place for _, place in features.spans[row]]
        for word, place in features.spans[row]:
            assert found[features.example_indices[row]][word][0] == tags[row, place]
            text = wordpiece.encode([examples[features.example_indices[row]].texts[word]])[0]
            piece = features.sequences[row][place : place + len(text)]
            assert piece.tolist() == list(text)


def test_words_without_pieces_are_no_entities(wordpiece):
    example = sentence(["fox", "\u200b", "dog"], ["B-PER", "I-PER", "O"])
    tagger = task(*BIO)
    features = tagger.features([example, sentence(["\u200b"], ["O"])], wordpiece, MODEL, 8)
    assert features.sequences[0].tolist() == [2, 6, 12, 3]
    assert features.sequences[1].tolist() == [2, 3]
    found = predict(tagger, features, lambda row, place: 2)
    file = io.StringIO()
    tagger.write(file, [example], found[:1])
    assert file.getvalue() == "fox\tB-PER\tB-PER\n\u200b\tI-PER\tO\ndog\tO\tB-PER\n\n"
    assert found[1] == {}
    probability = pytest.approx(np.e / (np.e + 4), rel=1e-6)
    assert tagger.to_json(example, found[0]) == {
        "tokens": ["fox", "\u200b", "dog"],
        "labels": ["B-PER", "O", "B-PER"],
        "probabilities": [probability, None, probability],
    }
    assert tagger.score([sentence(["\u200b"], ["O"])], found[1:])["accuracy"] == 1.0


def test_byte_level_pieces_begin_with_the_space(byte_bpe):
    words = ["The", "fox", "jumps"]
    features = task("x").features([sentence(words, "xxx")], byte_bpe, MODEL, 32)
    assert features.sequences[0].tolist()[1:-1] == list(byte_bpe.encode([" The fox jumps"])[0])
    assert [byte_bpe.id_to_token(int(piece)) for piece in features.sequences[0][1:5]] == [
        *("ĠTh", "e", "Ġfox", "Ġ"),
    ]


def entities(tags):
    """An I- after O, or after another type, begins an entity."""
    found, current = set(), None
    for place, tag in enumerate([*tags, "O"]):
        kind, _, name = tag.partition("-")
        if current and not (kind == "I" and name == current[0]):
            found.add((*current, place))
            current = None
        if kind != "O" and current is None:
            current = (name, place)
    return found


def test_the_plain_reading_by_hand():
    tags = ["I-PER", "I-PER", "B-PER", "I-LOC", "O", "B-LOC", "I-LOC"]
    assert entities(tags) == {("PER", 0, 2), ("PER", 2, 3), ("LOC", 3, 4), ("LOC", 5, 7)}


TAGGED = st.lists(
    st.lists(st.tuples(st.sampled_from(BIO), st.sampled_from(BIO)), min_size=1, max_size=10),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(TAGGED)
def test_scores_of_entities(sentences):
    examples, found, right, there, taken, hits = [], [], 0, 0, 0, []
    for pairs in sentences:
        actual, predicted = zip(*pairs, strict=True)
        examples.append(sentence(["fox"] * len(pairs), actual))
        found.append(tagged(BIO.index(tag) for tag in predicted))
        right += len(entities(actual) & entities(predicted))
        there += len(entities(actual))
        taken += len(entities(predicted))
        hits += [a == p for a, p in pairs]
    assert task(*BIO).score(examples, found) == pytest.approx(
        {
            "accuracy": np.mean(hits),
            "precision": right / taken if taken else 0.0,
            "recall": right / there if there else 0.0,
            "f1": 2 * right / (there + taken) if there + taken else 0.0,
        }
    )


@settings(deadline=None, max_examples=20)
@given(TAGGED)
def test_the_best_constant_prediction(sentences):
    examples = [sentence(["fox"] * len(pairs), [a for a, _ in pairs]) for pairs in sentences]
    scores = []
    for tag in BIO:
        right = there = taken = 0
        for example in examples:
            constant = entities([tag] * len(example.texts))
            right += len(constant & entities(example.label))
            there += len(entities(example.label))
            taken += len(constant)
        scores.append(2 * right / (there + taken) if there + taken else 0.0)
    assert task(*BIO).constant_score(examples) == pytest.approx(max(scores))


def test_tags_that_are_no_entities_have_an_accuracy():
    for names in (("NOUN", "VERB"), ("$", "-LRB-", "O"), ("O", "U-PER", "L-PER"), ("0", "1")):
        tagger = task(*names)
        assert list(tagger.metrics) == ["accuracy"]
        example = sentence(["a", "b", "c"], [names[0], names[1], names[1]])
        assert tagger.score([example], [tagged([0, 0, 1])]) == {"accuracy": pytest.approx(2 / 3)}
        assert tagger.constant_score([example]) == pytest.approx(2 / 3)
        with pytest.raises(UserError, match=r"task\.metrics has 'f1'; this task has accuracy$"):
            _ = task(*names, metrics=("f1",)).metrics
    assert list(task(*BIO).metrics) == ["f1"]
    assert list(task("O", "S-PER", "E-PER").metrics) == ["f1"]


def test_labels_and_head():
    examples = [sentence("a b c", "B-PER O B-LOC"), sentence("a")]
    assert task().label_names(examples) == ("O", "B-LOC", "B-PER")
    head = task(*BIO).model(MODEL, "mix")
    assert isinstance(head, BertForTokenClassification)
    assert (head.num_labels, head.probe) == (5, "mix")


def test_files_of_columns(tmp_path):
    path = tmp_path / "a.conll"
    path.write_text("-DOCSTART- -X- O\n\nThe DT O\nfox NN B-PER\n\n# NN O\n")
    assert read(path) == [
        Example(None, f"{path}:3", ("The", "fox"), ("O", "B-PER")),
        Example(None, f"{path}:6", ("#",), ("O",)),
    ]
    path.write_text("The\nfox\n")
    assert read(path) == [Example(None, f"{path}:1", ("The", "fox"), None)]


def test_what_is_written_is_read_back(tmp_path):
    path, tagger = tmp_path / "a.conll", task(*BIO)
    examples = [sentence("The fox", "O B-PER"), sentence(["#", "New\u00a0York"], ["O", "B-LOC"])]
    found = [tagged([0, 1]), tagged([2, 1])]
    with path.open("w") as file:
        tagger.write(file, examples, found)
    assert [record.fields for record in readers.conll(str(path))] == [
        {"tokens": ["The", "fox"], "tags": ["O", "B-LOC"]},
        {"tokens": ["#", "New\u00a0York"], "tags": ["B-PER", "B-LOC"]},
    ]
    assert path.read_text().startswith("The\tO\tO\nfox\tB-PER\tB-LOC\n\n#")
    with path.open("w") as file:
        tagger.write(file, [sentence("The fox")], found[:1])
    assert path.read_text() == "The\tO\nfox\tB-LOC\n\n"
    assert tagger.suffix == ".conll"


def test_files_of_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    features = [{"w": ["The", "fox"], "t": ["O", "B-PER"]}, {"w": ["a"], "t": [3]}, {"w": ["a"]}]
    path.write_text("\n".join(map(json.dumps, features)))
    assert [(example.texts, example.label) for example in read(path, text="w", label="t")] == [
        (("The", "fox"), ("O", "B-PER")),
        (("a",), ("3",)),
        (("a",), None),
    ]
    for words, tags, message in (
        ("The fox", ["O"], "a list of words is wanted"),
        (["fox", ""], ["O", "O"], "a list of words is wanted, none of them empty"),
        (None, ["O"], "a list of words is wanted"),
        (["The", "fox"], ["O"], "2 words have 1 tags"),
        (["The", "fox"], [], "2 words have 0 tags"),
        (["The", "fox"], 3, "a list of tags is wanted"),
        (["The", "fox"], "OB", "a list of tags is wanted"),
    ):
        path.write_text(json.dumps({"w": words, "t": tags}))
        with pytest.raises(UserError, match=f"a.jsonl:1: {message}") as error:
            read(path, text="w", label="t")
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"a\.jsonl:1 has no column 'x'; set data\.text"):
        read(path, text="x")


def test_no_entities_at_all():
    with warnings.catch_warnings(action="error"):
        scores = task(*BIO).score([sentence("a b", "O O")], [tagged([0, 0])])
    assert scores == {"accuracy": 1.0, "precision": 0.0, "recall": 0.0, "f1": 0.0}


def test_examples_of_plain_values():
    tagger = task(*BIO)
    for value in (["The", "fox"], ("The", "fox"), {"sentence": ["The", "fox"]}):
        example = tagger.example_from(value, 1)
        assert (example.where, example.texts, example.label) == (
            "examples[1]",
            ("The", "fox"),
            None,
        )
    data = DataFiles(text="tokens", label="ner_tags")
    assert tagger.example_from({"tokens": ["a"], "ner_tags": ["O"]}, 0, data).label == ("O",)
    for value in ("The fox", 3, [], ["fox", ""], {}, {"tokens": "The fox"}):
        with pytest.raises(UserError, match=r"^examples\[2\]"):
            tagger.example_from(value, 2, data)
