"""What a run is told: its settings, their ranges, how they fit each other, and the recipes."""

from bert_jax.config.fields import (
    CheckpointConfig,
    DataConfig,
    DataFiles,
    EmbeddingConfig,
    FinetuneConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Phase,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DataFiles",
    "EmbeddingConfig",
    "FinetuneConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Phase",
    "TaskConfig",
    "TokenizerConfig",
    "TrainConfig",
]
