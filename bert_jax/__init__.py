"""BERT-style encoders in JAX: pretrain them from your own text, fine-tune them, use them."""

import importlib
from typing import TYPE_CHECKING, Any

from bert_jax.config import (
    CheckpointConfig,
    DataConfig,
    DataFiles,
    FinetuneConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Phase,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
)
from bert_jax.config.recipes import recipe
from bert_jax.errors import Interrupted, TextWarning, TrainingError, UserError

if TYPE_CHECKING:
    from bert_jax.bert import Bert, Index, load
    from bert_jax.inference.index import Hit
    from bert_jax.inference.masked_lm import Guess
    from bert_jax.inference.predictions import Predictions
    from bert_jax.models.electra import ElectraConfig
    from bert_jax.models.modernbert import ModernBertConfig
    from bert_jax.runs.finetune import FinetuningResult, finetune
    from bert_jax.runs.pretrain import PretrainingResult, pretrain
    from bert_jax.viewer.patterns import Patterns
    from bert_jax.viewer.view import AttentionView, WordComparison

__version__ = "0.2.0"

__all__ = [
    "AttentionView",
    "Bert",
    "CheckpointConfig",
    "DataConfig",
    "DataFiles",
    "ElectraConfig",
    "FinetuneConfig",
    "FinetuningResult",
    "Guess",
    "Hit",
    "Index",
    "Interrupted",
    "ModelConfig",
    "ModernBertConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Patterns",
    "Phase",
    "Predictions",
    "PretrainingResult",
    "TaskConfig",
    "TextWarning",
    "TokenizerConfig",
    "TrainConfig",
    "TrainingError",
    "UserError",
    "WordComparison",
    "__version__",
    "finetune",
    "load",
    "pretrain",
    "recipe",
]

# Imported when first used: a command that only prepares text should not wait for JAX.
_MODULES = {
    "bert": ("Bert", "Index", "load"),
    "inference.index": ("Hit",),
    "inference.masked_lm": ("Guess",),
    "inference.predictions": ("Predictions",),
    "models.electra": ("ElectraConfig",),
    "models.modernbert": ("ModernBertConfig",),
    "runs.finetune": ("FinetuningResult", "finetune"),
    "runs.pretrain": ("PretrainingResult", "pretrain"),
    "viewer.patterns": ("Patterns",),
    "viewer.view": ("AttentionView", "WordComparison"),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"bert_jax.{module}"), name)
    raise AttributeError(f"module 'bert_jax' has no attribute {name!r}")
