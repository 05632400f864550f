"""Mixtures of texts: what `data.source` says, one tokenizer for all, and what is refused."""

from pathlib import Path

import pytest
from texts import TOKENIZER

from bert_jax.config import DataConfig, ModelConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.text import mixture, tokenizer_training
from bert_jax.text.mixture import parse
from bert_jax.text.prepare import prepare
from bert_jax.text.store import open_store


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Texts of words of their own, one of them with an @ and a comma in its name."""
    monkeypatch.chdir(tmp_path)
    texts = (("a.txt", "apple or berry or cat", 400), ("b.txt", "berry", 40), ("c@2", "cat", 40))
    for name, words, number in texts:
        documents = (f"The {words} is {i}.\nIt is {words}.\n" for i in range(number))
        (tmp_path / name).write_text("\n".join(documents))
    (tmp_path / "one,two@3.txt").write_bytes((tmp_path / "a.txt").read_bytes())
    return tmp_path


def config(source: str, **data) -> TrainConfig:
    return TrainConfig(
        data=DataConfig(source=source, eval_fraction=0.1, **data),
        model=ModelConfig(vocab_size=80),
        tokenizer=TOKENIZER,
    )


def read(source: str, name: str = "run", tokenizer=None):
    return mixture.read(config(source), mixture.find(source), tokenizer, Path(name))


def store(source: str, name: str, tokenizer=TOKENIZER) -> str:
    prepare(DataConfig(source=source, eval_fraction=0.1), tokenizer, 80, Path(name))
    return name


def test_what_a_source_says(folder):
    stores = store("a.txt", "x"), store("b.txt", "y@0.5")
    (folder / "d[1]@2").touch()
    for source, expected in {
        "wiki@0.7,books@0.3": {"wiki": 0.7, "books": 0.3},
        " wiki@3 , books@1 ,": {"wiki": 0.75, "books": 0.25},
        "tfds:imdb@train@1,builtin@1e0": {"tfds:imdb@train": 0.5, "builtin": 0.5},
        "a.txt@2": {"a.txt": 1.0},
        "c@2@1,one?two@3.txt@3": {"c@2": 0.25, "one?two@3.txt": 0.75},
        "x@1,y@0.5@3": {"x": 0.25, "y@0.5": 0.75},
        "d[1]@2@1,c@2@3": {"d[1]@2": 0.25, "c@2": 0.75},
        "memory://b/mail@2": {"memory://b/mail": 1.0},
        "x,y@0.5": {"x": 0.0, "y@0.5": 0.0},  # what is there under its whole name
    }.items():
        assert parse(source) == pytest.approx(expected), source
        assert list(parse(source)) == list(expected)
    as_ever = ("builtin", "a.txt,b.txt", "c@2", "a.txt,c@*", "d[1]@2,c@2", *stores)
    for source in (*as_ever, "tfds:imdb@train", "none.txt", "wiki@half", "one?two@3.txt"):
        assert parse(source) == {}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a.txt@0.5,b.txt", "b.txt has no weight, and another text has; write b.txt@NUMBER"),
        ("a.txt@0.5,b.txt@half", "b.txt@half has no weight"),
        ("a.txt@0,7,b.txt@0,3", "a.txt has the weight 0; give a number from 1e-09 to"),
        ("a.txt@nan,b.txt@1", "a.txt has the weight nan"),
        ("a.txt@0.5,a.txt@0.5", "a.txt is there twice; name each text once"),
        ("a.txt@0.5,./a.txt@0.5", "a.txt is there twice"),
        ("a.txt@0.5,wiki@0.5", "data source wiki does not exist"),
        ("a.txt@\u0663", "data source a.txt@\u0663 does not exist"),
        ("", "'' names no text"),
    ],
)
def test_sources_that_are_refused(folder, source, message):
    with pytest.raises(UserError, match=message):
        read(source)
    assert not (folder / "run").exists()


def test_other_refusals(folder):
    source = "a.txt@1,b.txt@1"
    mixed = config(source, eval_source="b.txt")
    with pytest.raises(UserError, match="eval_source is not for a mixture"):
        mixture.read(mixed, mixture.find(source), None, folder / "run")
    first, second = store("a.txt", "stores/first"), store("b.txt", "stores/second")
    with pytest.raises(UserError, match=f"{second} has another tokenizer than {first}; .* --token"):
        read(f"{first}@1,c@2@1,{second}@1")
    with pytest.raises(UserError, match=f"is not the one that {first} was prepared with"):
        read(f"{first}@1,b.txt@1", tokenizer=open_store(folder / second).tokenizer)
    with pytest.raises(UserError, match=f"tokenizer.kind has no effect on {first}, whose text is"):
        mixture.check_settings(mixture.find(first), ["data.batch_size", "tokenizer.kind"])
    with_text = mixture.find(f"{first}@1,b.txt@1")  # of which one is no store
    with pytest.raises(UserError, match=f"tokenizer.kind has .*, whose texts .* of {first}; leave"):
        mixture.check_settings(with_text, ["data.sentences", "tokenizer.kind"])
    mixture.check_settings(with_text, ["data.sentences", "tokenizer.path"])  # of its plain text
    mixture.check_settings(mixture.find("a.txt@1,b.txt@1"), ["tokenizer.kind"])
    mixture.check_settings(mixture.find(first), ["data.batch_size", "tokenizer.path"])


def test_one_text_under_two_names_is_refused(folder):
    """If one holds out other documents, on which the other would be trained."""
    first = store("a.txt", "x")
    tokenizer = open_store(folder / first).tokenizer
    prepare(DataConfig(source="a.txt", eval_fraction=0.3), tokenizer, 80, Path("y"))
    for source in ("x@1,y@1", "y@1,a.txt@2"):
        with pytest.raises(UserError, match=r"data.source: .* has the same text as . and holds"):
            read(source)
    assert read("x@1,a.txt@2").parts


def test_texts_have_the_tokenizer_of_the_stores(folder):
    """Weights are those given, or without any the sizes of stores."""
    tokenizer = open_store(folder / store("a.txt", "stores/a")).tokenizer
    store("b.txt", "stores/b", tokenizer)
    corpus = read("b.txt@1,stores/a@3,c@2@4")
    assert {part.tokenizer.fingerprint for part in corpus.parts} == {tokenizer.fingerprint}
    weights = {part.name: part.weight for part in corpus.parts}
    assert weights == {"b.txt": 0.125, "a": 0.375, "c_2": 0.5}
    assert corpus.parts[0].fingerprint == open_store(folder / "stores/b").fingerprint
    a, b = read("stores/a,stores/b").parts
    assert a.weight / b.weight == pytest.approx(len(a.train.tokens) / len(b.train.tokens))
    assert a.weight + b.weight == pytest.approx(1)
    assert mixture.resolve_vocab_size(config("a.txt@1"), mixture.find("a.txt@1"), None) == 80
    source = "b.txt@1,stores/a@3"
    open_size = TrainConfig(data=DataConfig(source=source))
    open_size.model.vocab_size = 0
    expected = tokenizer.vocab_size
    assert mixture.resolve_vocab_size(open_size, mixture.find(source), None) == expected


def test_a_tokenizer_is_trained_on_each_text_by_its_weight(folder, samples, monkeypatch):
    """Of a sample of 100 sentences a text has its weight of them, or all that it has."""
    monkeypatch.setattr(tokenizer_training, "MAX_SENTENCES", 100)
    source = "a.txt@0.25,b.txt@0.75"
    corpus = read(source)
    assert [sum(word in s for s in samples[0]) for word in ("apple", "")] == [25, 25 + 72]
    assert len({part.tokenizer.fingerprint for part in corpus.parts}) == 1
    again = read(source)  # as a run does that resumes
    assert len(samples) == 1
    assert again.fingerprint == corpus.fingerprint
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert read(source, tokenizer=corpus.tokenizer).fingerprint == corpus.fingerprint
    # Other weights, or another text: another mixture.
    other = read("a.txt@0.5,b.txt@0.5", tokenizer=corpus.tokenizer)
    assert other.fingerprint != corpus.fingerprint
    larger = config(source)
    larger.model.vocab_size = 90
    with pytest.raises(UserError, match="on other texts or with other settings"):
        mixture.read(larger, mixture.find(source), None, Path("run"))
    (folder / "b.txt").write_text("Other text.\n\nOf documents.\n")
    with pytest.raises(
        UserError, match="run has a tokenizer that was trained on other texts or with"
    ):
        read(source)


@pytest.mark.parametrize("source", ["c@2", "a.txt@1,c@2@3", "b.txt@1,stores/a@3"])
def test_other_hosts_need_no_plain_text(folder, monkeypatch, source):
    """They open what the first host has prepared, and the stores of which they have a copy."""
    tokenizer = open_store(folder / store("a.txt", "stores/a")).tokenizer
    corpus, parts = read(source, tokenizer=tokenizer), mixture.find(source)
    other = folder / "other"
    (other / "stores").mkdir(parents=True)
    monkeypatch.chdir(other)
    if parts.stores:
        with pytest.raises(UserError, match="data source stores/a does not exist"):
            mixture.open_prepared(parts, folder / "run")
        (other / "stores/a").symlink_to(folder / "stores/a")
    opened = mixture.open_prepared(parts, folder / "run")
    assert opened.fingerprint == corpus.fingerprint


def test_names_tell_texts_apart():
    for names, short in (
        (["stores/wiki", "stores/books/"], ["wiki", "books"]),
        (["en/text.txt", "de/text.txt"], ["en/text.txt", "de/text.txt"]),
        (["../a/en/*.txt", "../a/de/*.txt"], ["en/_.txt", "de/_.txt"]),
        (["tfds:imdb@train", "données"], ["tfds_imdb_train", "donn_es"]),
        (["a*", "a?"], ["0_a_", "1_a_"]),
    ):
        assert mixture._short_names(names) == short
