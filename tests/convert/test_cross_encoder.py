"""Rerankers as `CrossEncoder` of sentence-transformers has them, both ways."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import refused, untrained

import bert_jax

pytestmark = [
    pytest.mark.parity,
    # Of the other packages' own making.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
torch = pytest.importorskip("torch")
sentence_transformers = pytest.importorskip("sentence_transformers")
PAIRS = [
    ("river", "The river bank."),
    ("a token", "The model reads a small token."),
    ("the bank", "reads " * 40),  # truncated
    ("river", "river"),
]


@pytest.mark.parametrize("activation", ["sigmoid", "identity"])
def test_scores_are_those_of_a_cross_encoder(tiny_bert, tmp_path, activation):
    bert = untrained(tiny_bert, "reranker")
    task = dataclasses.replace(bert.task, activation=activation)
    # Shorter than the model has positions.
    data = dataclasses.replace(bert.data, max_length=24)
    bert = dataclasses.replace(bert, task=task, data=data)
    bert.export(tmp_path / "ours")
    theirs = sentence_transformers.CrossEncoder(str(tmp_path / "ours"), device="cpu")
    expected = theirs.predict(PAIRS, show_progress_bar=False)
    actual = np.array([each["score"] for each in bert.predict(PAIRS)])
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(actual, expected, atol=1e-5)

    theirs.save_pretrained(str(tmp_path / "theirs"))
    file = tmp_path / "theirs" / "config.json"
    values = json.loads(file.read_text())
    # As of a model that was trained there.
    for name in ("bert_jax_task", "sentence_transformers"):
        values.pop(name, None)
    file.write_text(json.dumps(values))
    again = bert_jax.load(tmp_path / "theirs")
    assert (again.task.kind, again.task.activation) == ("reranker", activation)
    assert again.data.max_length == 24
    scores = [each["score"] for each in again.predict(PAIRS)]
    np.testing.assert_allclose(scores, expected, atol=1e-5)

    file = tmp_path / "theirs" / "sentence_bert_config.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | {"processor_kwargs": {"model_max_length": 9}}))
    with refused("has processor_kwargs, which are not supported"):
        bert_jax.load(tmp_path / "theirs")
    file.write_text(before)
    file = tmp_path / "theirs" / "config_sentence_transformers.json"
    values = json.loads(file.read_text()) | {
        "prompts": {"query": "ask: "},
        "default_prompt_name": "query",
    }
    file.write_text(json.dumps(values))
    with refused("the model puts a prompt before its texts, which is not supported"):
        bert_jax.load(tmp_path / "theirs")
    kinds = ("Transformer", "Pooling", "Dense")
    modules = [{"type": f"sentence_transformers.base.modules.{kind}"} for kind in kinds]
    (tmp_path / "theirs" / "modules.json").write_text(json.dumps(modules))
    with refused("has Transformer, Pooling, Dense, and of the modules of a CrossEncoder only"):
        bert_jax.load(tmp_path / "theirs")
