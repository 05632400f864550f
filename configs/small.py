"""A small BERT on your own text: 4 layers of 256, 13 M parameters with 30,522 tokens.

    bert-jax pretrain --config=small --config.data.source=text/*.txt --workdir=runs/small

About 80 sequences a second on two CPU cores, a day for a useful encoder.
"""

from bert_jax.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)


def get_config() -> TrainConfig:
    return TrainConfig(
        steps=100_000,
        eval_every=2000,
        model=ModelConfig(
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
            dtype="auto",
        ),
        tokenizer=TokenizerConfig(kind="wordpiece"),
        data=DataConfig(max_length=128, batch_size=64),
        optimizer=OptimizerConfig(learning_rate=5e-4),
        checkpoint=CheckpointConfig(every=2000),
    )
