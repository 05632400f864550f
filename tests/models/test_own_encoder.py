"""The encoder of docs/extending.md, in a file of its own: what the others do, it does."""

import dataclasses
import importlib
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import UserError
from bert_jax.config import ModelConfig
from bert_jax.config.fields import MODEL_TYPES
from bert_jax.config.validation import validate_model

PAGE = Path(__file__).parents[2] / "docs/extending.md"


@pytest.fixture
def parallel(tmp_path, monkeypatch):
    """The file of the page, which is not yet imported."""
    section = PAGE.read_text(encoding="utf-8").split("## An encoder\n")[1]
    code = re.search(r"```python\n(.*?)```", section, re.S)[1]
    (tmp_path / "parallel_encoder.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    MODEL_TYPES.pop("parallel", None)  # of the test that runs the page
    yield
    MODEL_TYPES.pop("parallel", None)


@pytest.mark.usefixtures("parallel")
def test_it_trains_and_is_read_again(tiny_config, tiny_finetuning_config, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"is 'parallel'; .*import the file of your own"):
        validate_model(ModelConfig(model_type="parallel"), "config")
    importlib.import_module("parallel_encoder")
    first = jax.devices()[:1]  # a program for one device compiles in half the time
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda: first)
    model = dataclasses.replace(tiny_config.model, model_type="parallel", num_hidden_layers=1)
    config = dataclasses.replace(tiny_config, model=model)
    with pytest.raises(UserError, match="model_type parallel does not have"):
        bert_jax.pretrain(config, tmp_path / "run", quiet=True)
    config.data = dataclasses.replace(config.data, pairs="none")
    run = bert_jax.pretrain(config, tmp_path / "run", quiet=True)
    assert {*run.bert.params["bert"]["layer_0"]} == {"attention", "down", "layer_norm", "up"}
    run.bert.save(tmp_path / "saved")
    bert = bert_jax.load(tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, bert.params, run.bert.params)
    with pytest.raises(UserError, match="a parallel cannot be exported"):
        bert.export(tmp_path / "exported")
    data = dataclasses.replace(tiny_finetuning_config.data, max_length=8)
    config = dataclasses.replace(tiny_finetuning_config, data=data)
    bert_jax.finetune(config, tmp_path / "saved", tmp_path / "task", quiet=True)
    assert bert_jax.load(tmp_path / "task").task.labels == ("first", "second")
