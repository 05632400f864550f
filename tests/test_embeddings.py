"""Embeddings of texts: against the encoder row by row, whatever the batch, and as written."""

import dataclasses
import tracemalloc
from functools import partial

import jax
import numpy as np
import pytest
from commands.test_main import bert_jax
from flax import linen as nn
from helpers import model_config

from bert_jax import bert as pretrained
from bert_jax import embeddings as features
from bert_jax.config import TokenizerConfig
from bert_jax.errors import UserError
from bert_jax.models.bert import BertModel
from bert_jax.models.heads import BertForPreTraining
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
def bert() -> pretrained.Bert:
    sentences = [*TEXTS, *WORDS] * 3
    tokenizer = tokenizer_training.train(sentences, TokenizerConfig(kind="wordpiece"), 60)
    model = BertForPreTraining(model_config(vocab_size=60, max_position_embeddings=64))
    params = nn.unbox(jax.jit(model.init_params)(jax.random.key(0)))
    keys = iter(jax.random.split(jax.random.key(1), 1000))
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), params)
    return pretrained.Bert(model.config, params, tokenizer, model)


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
    found = {pooling: bert.encode(TEXTS, layer, pooling) for pooling in features.POOLINGS}
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
        spans = features.word_spans(text)
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
    words = [text[begin:end] for begin, end in features.word_spans(text)]
    assert words[:10] == ["I", "sat", "(", "by", "the", ")", "“", "river", "”", "bank"]
    assert words[10:] == [".", ".", ".", "don't", "U.S", ".", "-", "-", "x", "हिन्दी", "ok"]
    assert features.word_spans(" \n").shape == (0, 2)


def test_long_texts_are_cut_and_counted(bert):
    long = "bank " * 100
    with pytest.warns(UserWarning, match="1 of 2 texts are longer than the model's 64"):
        found = bert.encode([long, "bank"], pooling="words")
    assert found[0].shape == (100, 16)
    assert np.isfinite(found[0][:62]).all()
    assert np.isnan(found[0][62:]).all()
    with pytest.warns(UserWarning, match="1 of 1"):
        cut = bert.encode(long)
    np.testing.assert_allclose(cut, bert.encode("bank " * 62), rtol=0, atol=2e-5)


def test_mistakes(bert):
    with pytest.raises(UserError, match=r"layers 0 .* to 2"):
        bert.encode("a", layer=3)
    with pytest.raises(UserError, match="layer"):
        bert.encode("a", layer=-4)
    with pytest.raises(UserError, match="pooling is 'sum'"):
        bert.encode("a", pooling="sum")


def test_bfloat16_gives_float32(bert):
    config = dataclasses.replace(bert.config, dtype="bfloat16")
    rough = dataclasses.replace(bert, config=config).encode(TEXTS)
    assert rough.dtype == np.float32
    assert 0 < np.abs(rough - bert.encode(TEXTS)).max() < 0.2


def test_written_as_encoded(bert, tmp_path):
    pretrained.save(bert, tmp_path / "model")
    texts = [text for text in TEXTS if text] * 2 + ["bank " * 100]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    arguments = ("embed", tmp_path / "model", tmp_path / "texts.txt", "--layer=-2")
    for pooling in ("mean", "words"):
        output = tmp_path / f"{pooling}.npz"
        made = bert_jax(*arguments, f"--output={output}", f"--pooling={pooling}")
        assert made.returncode == 0, made.stderr
        assert "11 texts" in made.stdout
        assert "1 of them are longer" in made.stdout
    with pytest.warns(UserWarning, match="1 of 11"):
        wanted = bert.encode(texts, -2)
    np.testing.assert_allclose(np.load(tmp_path / "mean.npz")["vectors"], wanted, atol=2e-5)
    with pytest.warns(UserWarning, match="1 of 11"):
        words = bert.encode(texts, -2, "words")
    with np.load(tmp_path / "words.npz") as found:
        vectors = np.split(found["vectors"], found["ends"])
        spans = np.split(found["spans"], found["ends"])
        for index, value in enumerate(words):
            np.testing.assert_allclose(vectors[index], value, rtol=0, atol=2e-5)
            np.testing.assert_array_equal(spans[index], features.word_spans(texts[index]))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".npz", ".npz", ".txt"]
    for words, message in (
        ((*arguments[:-1], "--layer=9", f"--output={output}"), "has layers 0"),
        ((*arguments[:-1], "--layer=x", f"--output={output}"), "numbers are wanted"),
        ((*arguments[:2], tmp_path / "none", f"--output={output}"), "is no file"),
        ((*arguments, f"--output={tmp_path / 'texts.txt'}"), "ends in .npz"),
        ((*arguments, f"--output={tmp_path / 'no' / 'x.npz'}"), "make the folder first"),
    ):
        failed = bert_jax(*words)
        assert failed.returncode == 2
        assert message in failed.stderr
        assert "Traceback" not in failed.stderr


def test_written_in_bounded_memory(tmp_path):
    rows = np.ones((1000, 256), np.float32)
    tracemalloc.start()
    with features.NpzWriter(tmp_path / "x.npz") as writer:
        for number in range(50):
            writer.append("vectors", rows * number)
            writer.append("ends", np.array([number]))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8e6  # of 51 MB
    with np.load(tmp_path / "x.npz") as found:
        assert found["vectors"].shape == (50_000, 256)
        assert (found["vectors"][::1000, 0] == np.arange(50)).all()
        assert found["ends"].tolist() == list(range(50))

    def broken():
        yield rows
        raise ValueError("stop")

    with (
        pytest.raises(ValueError, match="stop"),
        features.NpzWriter(tmp_path / "y.npz") as writer,
    ):
        _ = [writer.append("vectors", part) for part in broken()]
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]
