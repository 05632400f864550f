"""What the version of commit 239187a wrote is read and resumed by this one."""

import json
import shutil
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

ARCHIVE = Path(__file__).parent / "compatibility/written_by_239187a.tar.xz"


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    """A folder with a store, a workdir at step 4 of 6, a classifier, and what to expect."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def expected(old) -> dict:
    return json.loads((old / "expected.json").read_text())


def sum_of_sizes(bert: bert_jax.Bert) -> float:
    return sum(float(np.abs(x).sum()) for x in jax.tree.leaves(bert.params))


def test_a_run_resumes_with_the_same_losses_and_weights(old, expected):
    values = json.loads((old / "pretrained/config.json").read_text())
    config = from_dict(TrainConfig, values, "config.json")
    assert bert_jax.load("pretrained").config == config.model
    bert_jax.pretrain(config, "pretrained", quiet=True)
    logged = records(old / "pretrained")
    assert [record["step"] for record in logged] == [2, 4, 6, 6]
    for record, other in zip(logged, expected["records"], strict=True):
        for name in ("loss", "mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"):
            assert record[name] == pytest.approx(other[name], rel=1e-5), name
    bert = bert_jax.load("pretrained")
    assert sum_of_sizes(bert) == pytest.approx(expected["params_sum"], rel=1e-6)
    embeddings = bert.encode("the bank writes a word.")
    np.testing.assert_allclose(embeddings, expected["encode"], rtol=0, atol=1e-5)
    guesses = bert.fill_mask("the [MASK] reads.")
    assert [guess.token for guess in guesses] == [token for token, _ in expected["fill"]]
    for guess, (_, probability) in zip(guesses, expected["fill"], strict=True):
        assert guess.probability == pytest.approx(probability, rel=1e-5)


def test_a_store_is_opened_and_trained_on(old):
    corpus = open_store(old / "store")
    assert (len(corpus.train.tokens), corpus.train.num_documents) == (7460, 54)
    assert (len(corpus.eval.tokens), corpus.eval.num_documents) == (833, 6)
    shutil.rmtree(old / "pretrained")
    config = bert_jax.load("classifier").config
    run = TrainConfig(steps=1, model=config)
    run.data.source, run.data.max_length, run.data.batch_size = "store", 32, 8
    result = bert_jax.pretrain(run, "new", quiet=True)
    assert result.bert.tokenizer.vocab_size == 64


def test_a_classifier_predicts(old, expected):
    bert = bert_jax.load("classifier")
    assert sum_of_sizes(bert) == pytest.approx(expected["classifier_sum"], rel=1e-6)
    assert list(bert.task.labels) == expected["labels"]
    (prediction,) = bert.predict(["the bank writes a word."])
    assert prediction["label"] in expected["labels"]
    assert sum(prediction["probabilities"].values()) == pytest.approx(1)
