"""What version 0.2.0 wrote (at commit 2c028cc) is read, resumed and lengthened by this one."""

import json
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest
from training_runs import records

import bert_jax
from bert_jax import TrainConfig
from bert_jax.config.settings import from_dict
from bert_jax.text.store import open_store

ARCHIVE = Path(__file__).parent / "compatibility/written_by_0.2.0.tar.xz"


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    """A folder with a workdir at step 4 of 6, an export, and stores of one and of three shards."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def expected(old) -> dict:
    return json.loads((old / "expected.json").read_text())


def assert_trained_model(bert: bert_jax.Bert, expected: dict) -> None:
    """Compare a model with that of version 0.2.0 after the lengthened run."""
    embeddings = bert.encode("the bank reads a word.")
    np.testing.assert_allclose(embeddings, expected["encode"], rtol=0, atol=1e-5)
    guesses = bert.fill_mask("the [MASK] reads.")
    assert [guess.token for guess in guesses] == [token for token, _ in expected["fill"]]
    for guess, (_, probability) in zip(guesses, expected["fill"], strict=True):
        assert guess.probability == pytest.approx(probability, rel=1e-5)


def test_a_run_resumes_and_lengthens_with_the_same_losses_and_weights(old, expected):
    values = json.loads((old / "pretrained/config.json").read_text())
    config = from_dict(TrainConfig, values, "config.json")
    assert bert_jax.load("pretrained").config == config.model
    for config.steps, name in ((6, "resumed"), (8, "lengthened")):
        result = bert_jax.pretrain(config, "pretrained", quiet=True)
        logged = records(old / "pretrained")
        assert len(logged) == len(expected[name])
        for record, other in zip(logged, expected[name], strict=True):
            assert record["split"] == other.pop("split")
            for key, value in other.items():
                assert record[key] == pytest.approx(value, rel=1e-5), key
    params = jax.tree.leaves(result.bert.params)
    total = sum(float(np.abs(x).sum()) for x in params)
    assert total == pytest.approx(expected["params_sum"], rel=1e-6)
    assert_trained_model(result.bert, expected)


def test_an_export_is_loaded(old, expected):
    assert_trained_model(bert_jax.load("export"), expected)


@pytest.mark.parametrize("name", ["store", "shards"])
def test_a_store_is_opened_and_trained_on(old, expected, name):
    corpus = open_store(old / name)
    corpus.verify()
    assert {
        "fingerprint": corpus.fingerprint,
        "tokens": len(corpus.train.tokens),
        "documents": corpus.train.num_documents,
        "held_out_tokens": len(corpus.eval.tokens),
    } == expected[name]
    config = TrainConfig(steps=1, model=bert_jax.load("export").config)
    config.data.source, config.data.max_length, config.data.batch_size = name, 32, 8
    result = bert_jax.pretrain(config, "new", quiet=True)
    assert result.bert.tokenizer.vocab_size == config.model.vocab_size
