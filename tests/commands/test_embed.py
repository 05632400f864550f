"""`bert-jax embed`: what it writes, in bounded memory, and its mistakes."""

import json
import tracemalloc

import numpy as np
import pytest
from helpers import refused

from bert_jax.commands.embed import write_arrays
from bert_jax.inference.embeddings import word_spans

TEXTS = ["The river bank.", "A model reads the (small) token.", "the"] * 3 + ["bank " * 100]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


def test_texts_are_written_as_encoded(tiny_run, tiny_bert, file, tmp_path, bert_jax_main):
    output = tmp_path / "mean.npz"
    arguments = tiny_run.checkpoint, file, "--layer=-2", f"--output={output}"
    printed = bert_jax_main("embed", *arguments)
    assert f"{output}: 10 texts" in printed
    assert "truncated 1 text to the model's " in printed
    with pytest.warns(UserWarning, match="1 of 10"):
        expected = tiny_bert.encode(TEXTS, -2)
    np.testing.assert_allclose(np.load(output)["vectors"], expected, atol=2e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mean.npz", "texts.txt"]


def test_a_column_of_records_is_embedded(tiny_run, tiny_bert, tmp_path, bert_jax_main):
    path, output = tmp_path / "a.jsonl", tmp_path / "a.npy"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS[:3]))
    bert_jax_main("embed", tiny_run.checkpoint, path, "--column=body", f"--output={output}")
    np.testing.assert_allclose(np.load(output), tiny_bert.encode(TEXTS[:3]), atol=2e-5)
    with refused("a.jsonl:1 has no column 'text'; set --column to one of body"):
        bert_jax_main("embed", tiny_run.checkpoint, path, f"--output={output}")


def test_a_column_of_plain_text_is_refused(tiny_run, file, bert_jax_main):
    for name in (file, "-"):
        with refused(f"--column has no effect on {name}; leave it out, or give a table"):
            bert_jax_main("embed", tiny_run.checkpoint, name, "--column=body", "--json")


def test_words_are_written_with_their_spans(tiny_run, tiny_bert, file, tmp_path, bert_jax_main):
    output = tmp_path / "words.npz"
    bert_jax_main("embed", tiny_run.checkpoint, file, "--pooling=words", f"--output={output}")
    with pytest.warns(UserWarning, match="1 of 10"):
        expected = tiny_bert.encode(TEXTS, pooling="words")
    with np.load(output) as arrays:
        assert len(arrays["ends"]) == len(TEXTS)
        vectors = np.split(arrays["vectors"], arrays["ends"])
        spans = np.split(arrays["spans"], arrays["ends"])
    for index, value in enumerate(expected):
        np.testing.assert_allclose(vectors[index], value, rtol=0, atol=2e-5)
        np.testing.assert_array_equal(spans[index], word_spans(TEXTS[index]))


def test_they_are_computed_in_the_dtype_asked_for(
    tiny_run, tiny_bert, file, tmp_path, bert_jax_main
):
    tiny_bert.export(tmp_path / "exported")
    for checkpoint in (tiny_run.checkpoint, tmp_path / "exported"):
        found = {}
        for dtype in ("float32", "bfloat16"):
            flags = f"--dtype={dtype}", f"--output={tmp_path}/{dtype}.npy"
            bert_jax_main("embed", checkpoint, file, *flags)
            found[dtype] = np.load(tmp_path / f"{dtype}.npy")
        difference = np.linalg.norm(found["float32"] - found["bfloat16"], axis=1)
        share = difference / np.linalg.norm(found["float32"], axis=1)
        assert (share < 0.02).all()
        assert (share > 1e-4).any()


def test_vectors_alone_and_of_unit_length(tiny_run, tiny_bert, file, tmp_path, bert_jax_main):
    arguments = tiny_run.checkpoint, file
    bert_jax_main("embed", *arguments, f"--output={tmp_path}/x.npy", "--normalize")
    with pytest.warns(UserWarning, match="1 of 10"):
        vectors = tiny_bert.encode(TEXTS)
    unit = np.load(tmp_path / "x.npy")
    assert unit.dtype == np.float32
    np.testing.assert_allclose(unit, vectors / np.linalg.norm(vectors, axis=1)[:, None], atol=1e-6)
    words = *arguments, "--pooling=words", "--normalize", "--json"
    for line in bert_jax_main("embed", *words).splitlines():
        found = [vector for vector in json.loads(line)["vectors"] if vector]
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "key_words"),
    [
        ({"--layer": "9"}, "has layers 0"),
        ({"--layer": "x"}, "is not numbers"),
        ({"file": "empty.txt"}, "empty.txt has no text"),
        ({"--output": "texts.txt"}, "ends in .npz or .npy"),
        ({"--output": "x.npy", "--pooling": "words"}, "which text a vector is of; give an .npz"),
        ({"--output": "no/x.npz"}, "make the folder first"),
    ],
)
def test_mistakes(tiny_run, file, tmp_path, monkeypatch, bert_jax_main, change, key_words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    before = sorted(tmp_path.iterdir())
    options = {"file": "texts.txt", "--output": "x.npz", "--layer": "-1"} | change
    name = options.pop("file")
    with refused(key_words):
        bert_jax_main("embed", tiny_run.checkpoint, name, *(f"{k}={v}" for k, v in options.items()))
    assert sorted(tmp_path.iterdir()) == before


def test_written_in_bounded_memory(tmp_path):
    rows = np.ones((1000, 256), np.float32)
    tracemalloc.start()
    write_arrays(
        tmp_path / "x.npz",
        ({"vectors": rows * number, "ends": np.array([number])} for number in range(150)),
    )
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20e6  # of 154 MB; NumPy writes 16 MiB at a time
    with np.load(tmp_path / "x.npz") as arrays:
        assert arrays["vectors"].shape == (150_000, 256)
        assert (arrays["vectors"][::1000, 0] == np.arange(150)).all()
        assert arrays["ends"].tolist() == list(range(150))


def test_nothing_is_left_behind_on_an_error(tmp_path):
    def parts():
        yield {"vectors": np.ones((10, 4), np.float32)}
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        write_arrays(tmp_path / "x.npz", parts())
    assert not list(tmp_path.iterdir())


def test_texts_without_tokens_have_no_rows(tmp_path):
    part = {"vectors": np.empty((0, 4), np.float32), "spans": np.empty((0, 2), np.int32)}
    write_arrays(tmp_path / "x.npz", [part])
    assert np.load(tmp_path / "x.npz")["vectors"].shape == (0, 4)
