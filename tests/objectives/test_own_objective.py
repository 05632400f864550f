"""The objective of docs/extending.md, in a file of its own: what the others do, it does."""

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import pytest

import bert_jax
from bert_jax import UserError
from bert_jax.config import ParallelConfig
from bert_jax.config.schedule import make_schedule
from bert_jax.objectives import (
    OBJECTIVES,
    make_objective,
    objective_name,
    pretraining_model,
)
from bert_jax.planning.costs import model_flops
from bert_jax.training.metrics import read_records

pytestmark = pytest.mark.devices(8)

PAGE = Path(__file__).parents[2] / "docs/extending.md"


@pytest.fixture
def config(tmp_path, monkeypatch, tiny_config):
    """A run on eight devices by the file of the page: packed, in microbatches."""
    section = PAGE.read_text(encoding="utf-8").split("## An objective\n")[1]
    code = re.search(r"```python\n(.*?)```", section, re.S)[1]
    (tmp_path / "moved_tokens.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    OBJECTIVES.pop("moved_tokens", None)  # of the test that runs the page
    monkeypatch.delitem(sys.modules, "moved_tokens", raising=False)
    config = dataclasses.replace(
        tiny_config,
        objective="moved_tokens",
        log_every=1,
        eval_every=2,
        parallel=ParallelConfig(data=2, fsdp=2, tensor=2),
    )
    with pytest.raises(UserError, match=r"objective is 'moved_tokens'; .*import the file"):
        make_objective(config)
    importlib.import_module("moved_tokens")
    config.model = dataclasses.replace(config.model, num_hidden_layers=1)
    config.data = dataclasses.replace(config.data, packing=True, batch_size=16)
    config.optimizer = dataclasses.replace(config.optimizer, microbatches=2)
    yield config
    OBJECTIVES.pop("moved_tokens")


def test_it_trains_reports_and_resumes(config, tmp_path, capsys, monkeypatch):
    progress = []
    kind = OBJECTIVES["moved_tokens"]
    monkeypatch.setattr(kind, "at_progress", lambda self, done: progress.append(done) or self)
    run = bert_jax.pretrain(config, tmp_path / "run")
    printed = capsys.readouterr().out
    assert re.search(r"step 2/2 .* moved \S+ \(entropy of moved or not 0\.42, accuracy", printed)
    assert re.search(r"Moved accuracy +\S+% +85\.0%  no token has moved", printed)
    assert "bert-jax embed" in printed  # it fills no masks
    assert run.baselines["moved_accuracy"] == 0.85
    assert progress  # an objective may change on its way
    assert {"loss", "moved_loss", "moved_accuracy"} <= run.scores.keys()
    assert (tmp_path / "run/curves.png").exists()
    config.steps = 4
    run = bert_jax.pretrain(config, tmp_path / "run", quiet=True)
    steps = [r["step"] for r in read_records(tmp_path / "run/metrics.jsonl")]
    assert steps == [1, 2, 2, 3, 4, 4]
    other = dataclasses.replace(config, objective="auto", steps=6)
    with pytest.raises(UserError, match="its objective is moved_tokens"):
        bert_jax.pretrain(other, tmp_path / "fork", fork=tmp_path / "run")
    config.steps = 6
    run = bert_jax.pretrain(config, tmp_path / "fork", fork=tmp_path / "run", quiet=True)
    assert run.checkpoint.name == "6"
    bert = bert_jax.load(tmp_path / "fork")
    bert.save(tmp_path / "saved")
    for each in (run.bert, bert, bert_jax.load(tmp_path / "saved")):
        assert {*each.params} == {"bert", "moved_head"}
    monkeypatch.setattr(kind, "is_default", classmethod(lambda cls, config: True))
    theirs = pretraining_model(config.model, pairs=True)  # of another checkpoint
    assert type(theirs).__name__ == "BertForPreTraining"
    assert bert.encode(["The river bank."]).shape == (1, 16)
    with pytest.raises(UserError, match="no masked LM head"):
        bert.fill_mask("The [MASK] bank.")


def test_it_warns_of_a_run_that_learns_nothing(config):
    config.steps = 5000
    objective = make_objective(config)
    baselines = objective.baselines(None, None)
    text = objective.warning(2000, {"moved_loss": 0.43}, baselines, warmup=10)
    assert "the Moved loss of 0.43 is no better than its baseline" in text
    text = objective.warning(2000, {"moved_loss": 0.35}, baselines, warmup=10)
    assert "the Moved loss of 0.35 is hardly better than its baseline" in text
    assert not objective.warning(2000, {"moved_loss": 0.2}, baselines, warmup=10)
    assert not objective.warning(500, {"moved_loss": 0.42}, baselines, warmup=10)


def test_it_is_asked_first_whether_it_is_the_default(config, monkeypatch):
    auto = dataclasses.replace(config, objective="auto")
    assert objective_name(auto) == "sentence_pairs"
    is_default = classmethod(lambda cls, config: config.steps == auto.steps)
    monkeypatch.setattr(OBJECTIVES["moved_tokens"], "is_default", is_default)
    assert objective_name(auto) == "moved_tokens"
    assert objective_name(dataclasses.replace(auto, steps=auto.steps + 1)) == "sentence_pairs"


def test_its_operations_are_those_of_the_encoder(config):
    (stage,) = make_schedule(config).stages
    masked_lm = dataclasses.replace(config, objective="masked_lm")
    assert 0 < model_flops(config, stage) < model_flops(masked_lm, stage)
