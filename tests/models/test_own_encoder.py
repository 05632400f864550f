"""The encoder of docs/extending.md, in a file of its own: what the others do, it does."""

import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import linen as nn

import bert_jax
from bert_jax import UserError
from bert_jax.config import ModelConfig
from bert_jax.config.fields import MODEL_TYPES
from bert_jax.config.schedule import make_schedule
from bert_jax.config.validation import validate_model
from bert_jax.convert import huggingface
from bert_jax.objectives import pretraining_model
from bert_jax.planning import costs

pytestmark = pytest.mark.devices(8)

PAGE = Path(__file__).parents[2] / "docs/extending.md"


@pytest.fixture
def parallel(tmp_path, monkeypatch):
    """The file of the page, which is not yet imported."""
    section = PAGE.read_text(encoding="utf-8").split("## An encoder\n")[1]
    code = re.search(r"```python\n(.*?)```", section, re.S)[1]
    (tmp_path / "parallel_encoder.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    MODEL_TYPES.pop("parallel", None)  # of the test that runs the page
    sys.modules.pop("parallel_encoder", None)
    yield
    MODEL_TYPES.pop("parallel", None)


@pytest.fixture
def config(parallel, tiny_config):
    with pytest.raises(UserError, match=r"is 'parallel'; .*import the file of your own"):
        validate_model(ModelConfig(model_type="parallel"), "config")
    importlib.import_module("parallel_encoder")
    model = dataclasses.replace(tiny_config.model, model_type="parallel", num_hidden_layers=1)
    return dataclasses.replace(
        tiny_config, model=model, data=dataclasses.replace(tiny_config.data, pairs="none")
    )


def same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_it_is_used_as_the_others(config, tiny_finetuning_config, tmp_path):
    """On eight devices: pretrained, resumed, exported and read again, fine-tuned, predicts."""
    pairs = dataclasses.replace(config, data=dataclasses.replace(config.data, pairs="nsp"))
    with pytest.raises(UserError, match="model_type parallel does not have"):
        bert_jax.pretrain(pairs, tmp_path / "run", quiet=True)
    bert_jax.pretrain(config, tmp_path / "run", quiet=True)
    config = dataclasses.replace(config, steps=3)
    bert = bert_jax.pretrain(config, tmp_path / "run", quiet=True).bert
    assert {*bert.params["bert"]["layer_0"]} == {"attention", "down", "layer_norm", "up"}
    bert.save(tmp_path / "saved")
    same(bert_jax.load(tmp_path / "saved").params, bert.params)

    assert bert.export(tmp_path / "exported").architecture == "ParallelForMaskedLM"
    values = json.loads((tmp_path / "exported/config.json").read_text())
    assert values["model_type"] == "parallel"
    assert "`parallel`" in (tmp_path / "exported/README.md").read_text()
    imported = bert_jax.load(tmp_path / "exported")
    assert not imported.unused
    same(imported.params, bert.params)
    text = "the [MASK] bank"
    assert imported.fill_mask(text) == bert.fill_mask(text)

    data = dataclasses.replace(tiny_finetuning_config.data, max_length=8)
    task = dataclasses.replace(tiny_finetuning_config, data=data)
    bert_jax.finetune(task, tmp_path / "exported", tmp_path / "task", quiet=True)
    tuned = bert_jax.load(tmp_path / "task")
    assert tuned.task.labels == ("first", "second")
    tuned.export(tmp_path / "tuned")
    examples = ["The river bank."]
    again = bert_jax.load(tmp_path / "tuned").predict(examples)
    assert again[0]["label"] == tuned.predict(examples)[0]["label"]


def test_without_an_exchange_it_is_not_exported(config, tmp_path, monkeypatch):
    monkeypatch.setattr(type(MODEL_TYPES["parallel"]), "exchange", None)
    model = pretraining_model(config.model, pairs=False)
    params = nn.unbox(jax.jit(model.init_params)(jax.random.key(0)))
    with pytest.raises(UserError, match="a parallel cannot be exported"):
        huggingface.save(config.model, params, None, tmp_path)


def test_its_operations_are_its_own_or_unknown(config, monkeypatch):
    stage = make_schedule(config).largest
    bert = dataclasses.replace(config, model=dataclasses.replace(config.model, model_type="bert"))
    assert costs.model_flops(config, stage) == costs.model_flops(bert, stage)
    monkeypatch.delattr(type(MODEL_TYPES["parallel"]), "encoder_flops")
    assert costs.model_flops(config, stage) is None
