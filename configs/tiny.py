"""A tiny BERT on English that Python carries: no download, minutes on two CPU cores.

python train.py
"""

from bert_jax.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def get_config() -> TrainConfig:
    return TrainConfig(
        steps=1500,
        log_every=100,
        eval_every=500,
        model=ModelConfig(
            vocab_size=4096,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=512,
            max_position_embeddings=128,
        ),
        data=DataConfig(source="builtin", eval_fraction=0.1, max_length=128, batch_size=64),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_fraction=0.1),
        checkpoint=CheckpointConfig(every=500),
    )
