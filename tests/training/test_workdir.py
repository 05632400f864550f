"""The workdir of a run: what it resumes with."""

import pytest

from bert_jax import settings
from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.training.workdir import resume_settings


@pytest.mark.parametrize("saved", ["float32", "bfloat16"])
def test_auto_resumes_with_the_dtype_that_the_run_began_with(tmp_path, saved):
    """Whatever the processor on which it resumes prefers."""
    auto, fixed = (TrainConfig(model=ModelConfig(dtype=d)) for d in ("auto", "float32"))
    resume_settings(auto, tmp_path)
    assert auto.model.dtype == "auto"
    began = TrainConfig(model=ModelConfig(dtype=saved))
    (tmp_path / "config.json").write_text(settings.to_json(began))
    for config, expected in ((auto, saved), (fixed, "float32")):
        resume_settings(config, tmp_path)
        assert config.model.dtype == expected


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        resume_settings(TrainConfig(), tmp_path)
