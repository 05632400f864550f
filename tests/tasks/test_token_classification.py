"""Token classification: features by hand, every word once, entities against plain BIO."""

import dataclasses
import json
import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from helpers import model_config, refused, untrained, write_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bert_jax.batches.buckets import NO_LABEL
from bert_jax.config import DataFiles, FinetuneConfig, TaskConfig, TokenizerConfig
from bert_jax.tasks import readers
from bert_jax.tasks.datasets import load_datasets, read_examples
from bert_jax.tasks.examples import Example
from bert_jax.tasks.token_classification import TokenClassification
from bert_jax.text import tokenizer_training

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
    return read_examples(task(), str(path), DataFiles(**fields), labelled=False)


def tagged(numbers):
    """Return a prediction in which each word has the tag of a number."""
    return {word: (number, 0.5) for word, number in enumerate(numbers)}


def predict(task, features, tag_of):
    """Predict from logits in which each token has the tag `tag_of(feature, position)`."""
    predictions = [None] * (max(features.example_indices) + 1)
    for index, sequence in enumerate(features.sequences):
        logits = np.zeros((len(sequence), len(task.labels)), np.float32)
        for position in range(len(sequence)):
            logits[position, tag_of(index, position)] = 1
        example = features.example_indices[index]
        predictions[example] = task.collect(predictions[example], features, index, logits)
    return predictions


def test_the_first_token_has_the_label(wordpiece):
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
    assert features.example_indices == [0, 1]
    assert features.truncated == 0


def test_residues_of_a_protein_stand_together_as_in_pretraining():
    config = TokenizerConfig(kind="sentencepiece", model_type="char", lowercase=False)
    tokenizer = tokenizer_training.train(["MKVLAG the fox"] * 9, config, 100)
    residues = sentence("M K V L", "O B-LOC I-LOC O")
    words = sentence("the fox", "O B-LOC")
    features = task(*BIO).features([residues, words], tokenizer, MODEL, 12)
    pretrained = [[*tokenizer.encode([text])[0]] for text in ("MKVL", "the fox")]
    assert [sequence.tolist()[1:-1] for sequence in features.sequences] == pretrained
    n = NO_LABEL  # the space before a word is a token, and has no label
    assert [label.tolist() for label in features.labels] == [
        [n, n, 0, 1, 3, 0, n],
        [n, n, 0, n, n, n, 1, n, n, n],
    ]


def test_long_sentences_have_several_features(wordpiece):
    tags = "B-PER I-PER O B-LOC I-LOC O"
    examples = [sentence("fox jumps dog jumped over the", tags), sentence("fox", "O")]
    features = task(*BIO, stride=4).features(examples, wordpiece, MODEL, 6)
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
    assert features.example_indices == [0, 0, 1]


def test_a_word_longer_than_a_sequence_keeps_its_start(byte_bpe):
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
    stride=st.integers(0, 12),
)
def test_a_word_is_predicted_where_it_has_most_context(wordpiece, sentences, max_length, stride):
    """Each feature and position has its own random tag, so that any other would be noticed."""
    generator = np.random.default_rng(0)
    examples = [sentence(words, ["a"] * len(words)) for words in sentences]
    tagger = task(*"abcdefg", stride=stride)
    features = tagger.features(examples, wordpiece, MODEL, max_length)
    assert features.truncated == 0
    assert features.windowed == sum(n > 1 for n in Counter(features.example_indices).values())
    tags = generator.integers(0, 7, (len(features), max_length))
    predictions = predict(tagger, features, lambda index, position: tags[index, position])
    found = defaultdict(list)  # of each word, its context in each window and what it has there
    for index, sequence in enumerate(features.sequences):
        assert len(sequence) <= max_length
        labelled = [i for i, label in enumerate(features.labels[index]) if label != NO_LABEL]
        assert labelled == [position for _, position, _ in features.notes[index]]
        example = features.example_indices[index]
        for word, position, _ in features.notes[index]:
            context = min(position - 1, len(sequence) - 1 - position)
            found[example, word].append((context, -index, tags[index, position]))
            ids = wordpiece.encode([examples[example].texts[word]])[0]
            assert sequence[position : position + len(ids)].tolist() == list(ids)
    assert {*found} == {
        (number, word)
        for number, words in enumerate(sentences)
        for word, text in enumerate(words)
        if text != "\u200b"
    }
    for (example, word), windows in found.items():
        assert predictions[example][word][0] == max(windows)[-1]


def test_words_without_tokens_are_no_entities(wordpiece):
    example = sentence(["fox", "\u200b", "dog"], ["B-PER", "I-PER", "O"])
    tagger = task(*BIO)
    features = tagger.features([example, sentence(["\u200b"], ["O"])], wordpiece, MODEL, 8)
    assert features.sequences[0].tolist() == [2, 6, 12, 3]
    assert features.sequences[1].tolist() == [2, 3]
    assert len(features.skipped) == 1
    assert features.skipped[0].endswith(": none of its words has a token")
    predictions = predict(tagger, features, lambda index, position: 2)
    assert tagger.files([example], predictions[:1])[".conll"] == (
        "fox\tB-PER\tB-PER\n\u200b\tI-PER\tO\ndog\tO\tB-PER\n\n"
    )
    assert predictions[1] == {}
    probability = pytest.approx(np.e / (np.e + 4), rel=1e-6)
    assert tagger.to_json(example, predictions[0]) == {
        "tokens": ["fox", "\u200b", "dog"],
        "labels": ["B-PER", "O", "B-PER"],
        "probabilities": [probability, None, probability],
    }
    assert tagger.score([sentence(["\u200b"], ["O"])], predictions[1:])["accuracy"] == 1.0


def test_byte_level_tokens_start_with_the_space(byte_bpe):
    words = ["The", "fox", "jumps"]
    features = task("x").features([sentence(words, "xxx")], byte_bpe, MODEL, 32)
    assert features.sequences[0].tolist()[1:-1] == list(byte_bpe.encode([" The fox jumps"])[0])
    assert [byte_bpe.id_to_token(int(token)) for token in features.sequences[0][1:5]] == [
        *("ĠTh", "e", "Ġfox", "Ġ"),
    ]


def entities(tags):
    """Return the entities of tags; an I- after O, or after another type, starts one."""
    spans, current = set(), None
    for position, tag in enumerate([*tags, "O"]):
        kind, _, name = tag.partition("-")
        if current and not (kind == "I" and name == current[0]):
            spans.add((*current, position))
            current = None
        if kind != "O" and current is None:
            current = (name, position)
    return spans


TAGGED = st.lists(
    st.lists(st.tuples(st.sampled_from(BIO), st.sampled_from(BIO)), min_size=1, max_size=10),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(TAGGED)
def test_scores_of_entities(sentences):
    examples, predictions, correct, total, guessed, hits = [], [], 0, 0, 0, []
    for pairs in sentences:
        actual, predicted = zip(*pairs, strict=True)
        examples.append(sentence(["fox"] * len(pairs), actual))
        predictions.append(tagged(BIO.index(tag) for tag in predicted))
        correct += len(entities(actual) & entities(predicted))
        total += len(entities(actual))
        guessed += len(entities(predicted))
        hits += [a == p for a, p in pairs]
    assert task(*BIO).score(examples, predictions) == pytest.approx(
        {
            "accuracy": np.mean(hits),
            "precision": correct / guessed if guessed else 0.0,
            "recall": correct / total if total else 0.0,
            "f1": 2 * correct / (total + guessed) if total + guessed else 0.0,
        }
    )


@settings(deadline=None, max_examples=20)
@given(TAGGED)
def test_the_best_constant_prediction(sentences):
    examples = [sentence(["fox"] * len(pairs), [a for a, _ in pairs]) for pairs in sentences]
    scores = []
    for tag in BIO:
        correct = total = guessed = 0
        for example in examples:
            constant = entities([tag] * len(example.texts))
            correct += len(constant & entities(example.label))
            total += len(entities(example.label))
            guessed += len(constant)
        scores.append(2 * correct / (total + guessed) if total + guessed else 0.0)
    assert task(*BIO).constant_score(examples) == pytest.approx(max(scores))


def test_tags_that_are_no_entities_have_an_accuracy():
    for names in (("NOUN", "VERB"), ("$", "-LRB-", "O"), ("O", "U-PER", "L-PER"), ("0", "1")):
        tagger = task(*names)
        example = sentence(["a", "b", "c"], [names[0], names[1], names[1]])
        assert tagger.score([example], [tagged([0, 0, 1])]) == {"accuracy": pytest.approx(2 / 3)}
        assert tagger.constant_score([example]) == pytest.approx(2 / 3)
    assert list(task("O", "S-PER", "E-PER").metrics) == ["f1"]
    sentences = [sentence("a b c", "B-PER O B-LOC"), sentence("a")]
    assert task().label_names(sentences) == ("O", "B-LOC", "B-PER")


def test_a_line_of_column_names_is_refused(tmp_path):
    path = write_file(tmp_path / "a.tsv", "word\ttag\nAnn\tB-PER\nis\tO\n\nfox\tO\n")
    with refused(f"{path}:1, word 1", "'word'", "its tag 'tag' is the only one", "remove the line"):
        task().label_names(read(path))
    for tags in (("tag", "B-PER", "tag"), ("O", "B-PER", "tag"), ("X", "O", "O"), ("X", "Y", "O")):
        examples = [sentence("Ann", tags[0]), sentence("is here", " ".join(tags[1:]))]
        assert {*task().label_names(examples)} == {*tags}


def test_files_of_columns(tmp_path):
    path = tmp_path / "a.conll"
    path.write_text("-DOCSTART- -X- O\n\nThe DT O\nfox NN B-PER\n\n# NN O\n")
    assert read(path) == [
        Example(None, f"{path}:3", ("The", "fox"), ("O", "B-PER")),
        Example(None, f"{path}:6", ("#",), ("O",)),
    ]
    path.write_text("The\nfox\n")
    assert read(path) == [Example(None, f"{path}:1", ("The", "fox"), None)]


@pytest.mark.parametrize("name", ["a.csv", "a.CSV.gz", "a.csv.xz"])
def test_a_table_with_commas_is_refused(tmp_path, name):
    path = write_file(tmp_path / name, "word,tag\nfox,O\n")
    with refused(f"{path} is a table with commas", "a tab or a space between", ".jsonl"):
        read(path)
    with refused("no.csv does not exist"):
        read(tmp_path / "no.csv")
    with refused("old.conll: line 1 ends in CR alone"):
        read(write_file(tmp_path / "old.conll", "John B\rSmith I\r"))


@pytest.mark.parametrize("name", ["text", "label"])
def test_columns_without_names_are_not_named(tmp_path, tiny_bert, name):
    """A setting that names one had no effect."""
    columns = write_file(tmp_path / "a.conll", "The O\nfox B-PER\n\nDog B-PER\n")
    row = {"w": ["The", "fox"], "t": ["O", "B-PER"]}
    lines = write_file(tmp_path / "a.jsonl", json.dumps(row))
    key_words = f"data.{name} names a column", "the last its tag; leave it out"

    def load(train, named, held_out=None, **data):
        data = DataFiles(train=train, **named, **data)
        config = FinetuneConfig(task=TaskConfig("token_classification"), data=data)
        load_datasets(config, held_out=held_out)

    with refused(*key_words):
        load(columns, {name: "pos"}, eval=columns)
    for named in ({}, {"text": "tokens", "label": "ner_tags"}):  # those of the recipe
        load(columns, named)
    own = {"text": "w", "label": "t"}
    load(lines, own, eval=columns)
    load(columns, own, eval=columns, test=lines)
    load(columns, own, [row])

    bert = untrained(tiny_bert, "token_classification", BIO)
    with refused(key_words[0].removeprefix("data."), key_words[1]):
        bert.predict(Path(columns), **{name: "pos"})
    bert = dataclasses.replace(bert, data=DataFiles(**own))
    assert bert.predict(Path(columns), **{name: own[name]}).scores
    assert bert.predict(Path(lines), **own).scores


def test_round_trip_of_predictions(tmp_path):
    path, tagger = tmp_path / "a.conll", task(*BIO)
    examples = [sentence("The fox", "O B-PER"), sentence(["#", "New\u00a0York"], ["O", "B-LOC"])]
    predictions = [tagged([0, 1]), tagged([2, 1])]
    path.write_text(tagger.files(examples, predictions)[".conll"])
    assert [record.fields for record in readers.conll(str(path))] == [
        {"tokens": ["The", "fox"], "tags": ["O", "B-LOC"]},
        {"tokens": ["#", "New\u00a0York"], "tags": ["B-PER", "B-LOC"]},
    ]
    assert path.read_text().startswith("The\tO\tO\nfox\tB-PER\tB-LOC\n\n#")
    odd = sentence(["a\tb", "c\nd", " "])
    path.write_text(tagger.files([odd], [tagged([0, 1, 2])])[".conll"])
    (record,) = readers.conll(str(path))
    assert record.fields["tokens"] == ["a_b", "c_d", "_"]
    files = tagger.files([sentence("The fox")], predictions[:1])
    assert files == {".conll": "The\tO\nfox\tB-LOC\n\n"}


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "json"])
def test_files_of_json_lines(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    features = [{"w": ["The", "fox"], "t": ["O", "B-PER"]}, {"w": ["a"], "t": [3]}, {"w": ["a"]}]
    path.write_text("\n".join(map(json.dumps, features)))
    assert [(example.texts, example.label) for example in read(path, text="w", label="t")] == [
        (("The", "fox"), ("O", "B-PER")),
        (("a",), ("3",)),
        (("a",), None),
    ]
    with refused(f"a.{ending}:1 has no column 'x'"):
        read(path, text="x")
    with refused(f"a.{ending}:3 has no column 't'; set data.label to one of w"):
        read_examples(task(), str(path), DataFiles(text="w", label="t"), labelled=True)


@pytest.mark.parametrize(
    ("words", "tags", "key_words"),
    [
        ("The fox", ["O"], "a list of words is expected"),
        (["fox", ""], ["O", "O"], "a list of words is expected, none of them empty"),
        ([["fox"]], ["O"], "a list of words is expected, none of them empty"),
        (["fox", 0], ["O", ["O"]], "the tags are ['O', ['O']]; give each as a text"),
        (["The", "fox"], ["O"], "2 words have the tags ['O']"),
        (["The", "fox"], "OB", "2 words have the tags 'OB'"),
        (["The", "fox"], ["O", None], "some words have a tag and others none"),
        (["The", "fox"], ["O", math.nan], "some words have a tag and others none"),
        (["The", math.nan], ["O", "O"], "a list of words is expected, none of them empty or NaN"),
        (["The", "fox"], ["O", True], "the tags are ['O', True]; give each as a text"),
    ],
)
def test_words_and_tags_that_are_refused(tmp_path, words, tags, key_words):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"w": words, "t": tags}))
    with refused(f"{path}:1", key_words):
        read(path, text="w", label="t")
