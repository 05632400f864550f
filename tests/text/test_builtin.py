"""The built-in text, and the built-in task: which of the library's areas a docstring is from."""

import collections

from helpers import refused

from bert_jax.config import DataConfig
from bert_jax.text import builtin
from bert_jax.text.sources import open_source


def test_builtin_corpus_is_english_of_a_good_size():
    documents = builtin.documents()
    assert 400 < len(documents) < 2000
    assert 1_500_000 < sum(map(len, documents)) < 4_000_000
    words = " ".join(documents).split()
    assert 0.03 < words.count("the") / len(words) < 0.1
    source = open_source("builtin", DataConfig())
    sentences = [s for d in source.documents() for s in d]
    assert 15_000 < len(sentences) < 60_000
    assert source.identity() == open_source("builtin", DataConfig()).identity()
    assert source.position == source.size


def test_both_splits_have_all_areas_and_no_text_is_in_both():
    train, held_out = builtin.docstring_areas("train"), builtin.docstring_areas("eval")
    assert 4000 < len(train) < 12000
    texts = [text for text, _ in train + held_out]
    assert len(set(texts)) == len(texts)
    assert all(len(text) >= 20 and text == " ".join(text.split()) for text in texts)
    sizes = [collections.Counter(area for _, area in split) for split in (train, held_out)]
    with refused("builtin@test: no such split"):
        builtin.split_of("builtin@test")
    assert [builtin.split_of(f"builtin{split}") for split in ("", "@eval")] == ["train", "eval"]
    assert builtin.split_of("train.tsv") is None
    with refused("there is no text builtin:eval; name it builtin"):
        open_source("builtin:eval", DataConfig())
    assert set(sizes[0]) == set(sizes[1]) == set(builtin._MODULES)
    for area, size in sizes[1].items():
        assert 0.1 < size / (size + sizes[0][area]) <= 0.2, area


def test_pairs_of_what_functions_do_and_their_signatures(monkeypatch):
    """No module is in both splits. Of every fifth file, which are parsed twice."""
    files = builtin._files()
    chosen = [file for i, file in enumerate(files) if i % 5 == 0 or file[0] == "fractions.py"]
    monkeypatch.setattr(builtin, "_files", lambda: chosen)
    train, held_out = builtin.described("train"), builtin.described("eval")
    does = "Converts a finite Decimal instance to a rational number, exactly."
    assert (does, "fractions.Fraction.from_decimal(cls, dec)") in [*train, *held_out]
    assert len(train) > 3 * len(held_out) > 300
    assert not set(train) & set(held_out)


def test_duplicates_and_docstrings_of_two_areas(monkeypatch):
    first, both = "Return the first of the matches.", "Return a list of all of the names."
    library = (
        ("antigravity.py", ("A module that is of no area at all.",)),
        (
            "difflib.py",
            (first, both, "Too short.", *(f"Compare the lines {n} and {n}." for n in "abcdefgh")),
        ),
        ("re/__init__.py", ("Return the first\n  of the matches.", "Compile a pattern to use it.")),
        ("turtle.py", (both, *(f"Draw the picture numbered {n}." for n in range(9)))),
    )
    monkeypatch.setattr(builtin, "_library", lambda: library)
    train, held_out = builtin.docstring_areas("train"), builtin.docstring_areas("eval")
    assert (first, "text") in train
    assert held_out == [("Compile a pattern to use it.", "text")]
    assert len(train) == 1 + 8 + 9  # without `both`, which two areas have, and the short one


def test_docstrings_wherever_a_statement_may_stand():
    code = '''"""Module."""
if debug:
    class A:
        """A."""
        value = lambda: "none of a lambda"
        async def a(self):
            """A.a."""
else:
    try:
        with lock:
            def b(): "B."
    except OSError:
        def c(): "C."
    else:
        def d(): "D."
    finally:
        def e(): "E."
match code:
    case 1:
        def f(): "F."
for name in names:
    "no docstring"
    def g(): 1
'''
    expected = ["Module.", "A.", "A.a.", *(f"{letter}." for letter in "BCDEF")]
    assert builtin._docstrings(code.encode()) == expected
    assert builtin._docstrings(b"not python") == []


def test_the_fingerprint_needs_no_parsing(monkeypatch):
    monkeypatch.setattr(builtin.ast, "parse", None)
    before = builtin.fingerprint()
    assert builtin.fingerprint() == before
    files = builtin._files()
    monkeypatch.setattr(builtin, "_files", lambda: files[1:])
    assert builtin.fingerprint() != before
