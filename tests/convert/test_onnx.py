"""The way to ONNX of docs/checkpoints.md: the same logits in onnxruntime."""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from make_golden import GOLDEN
from model_folders import TASKS, fine_tuned

import bert_jax
from bert_jax.objectives.sentence_pairs import BertForPreTraining

pytestmark = [
    pytest.mark.parity,
    # Of the other packages' own making.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:# The axis name:UserWarning"),
]
pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
PAGE = Path(__file__).parents[2] / "docs/checkpoints.md"


def one_layer(bert):
    """A model's first layer, since the time of an export is that of its layers."""
    config = dataclasses.replace(bert.config, num_hidden_layers=1)
    encoder = {k: v for k, v in bert.params["bert"].items() if k != "layer_1"}
    params = {**bert.params, "bert": encoder}
    return dataclasses.replace(bert, config=config, params=params, model=BertForPreTraining(config))


@pytest.mark.parametrize("kind", ["pretrained", "classifier"])
def test_the_same_logits(kind, tmp_path, monkeypatch, capfd):
    bert = one_layer(bert_jax.load(GOLDEN / "bert"))
    bert = fine_tuned(bert, TASKS[0]) if kind == "classifier" else bert
    bert.export(tmp_path / "exported")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(import onnx.*?)```", PAGE.read_text(), re.S)
    names: dict = {}
    exec(code, names)
    assert [tuple(x.shape) for x in names["session"].get_inputs()] == [("batch", "length")] * 3
    apply, rng = jax.jit(bert.model.apply), np.random.default_rng(0)
    for rows, length in ((1, 20), (3, 7)):
        lengths = rng.integers(1, length + 1, (rows, 1))
        mask = (np.arange(length) < lengths).astype(np.int32)
        ids = rng.integers(5, bert.config.vocab_size, (rows, length), np.int32)
        types = rng.integers(0, 2, (rows, length), np.int32)
        inputs = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
        outputs = names["session"].run(None, {k: v.astype(np.int64) for k, v in inputs.items()})
        if kind == "classifier":
            expected = [apply({"params": bert.params}, ids, types, mask)]
        else:
            positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
            heads = apply({"params": bert.params}, ids, types, mask, positions)
            real = mask.astype(bool)  # outputs at padding have no meaning
            outputs[0] = outputs[0][real]
            expected = [np.asarray(heads.mlm_logits)[real], heads.nsp_logits]
        for actual, value in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(actual, value, rtol=0, atol=1e-5)
            assert np.abs(value).mean() > 0.1
