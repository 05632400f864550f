"""A small encoder on your own text: ModernBERT's architecture, 4 layers of 384, 13 M parameters.

    bert-jax pretrain --config=small --config.data.source='text/*.txt' --workdir=runs/small

docs/encoders.md has what it was chosen from. The rate falls once its warm-up is over: at a
constant one the hidden states grow, and what they share drowns what tells tokens apart.
"""

from bert_jax.config import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)
from bert_jax.models.modernbert import ModernBertConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        steps=50_000,
        eval_every=2000,
        model=ModernBertConfig(
            vocab_size=16_000,
            hidden_size=384,
            num_hidden_layers=4,
            num_attention_heads=6,
            intermediate_size=1024,
            classifier_pooling="mean",
            dtype="auto",
        ),
        tokenizer=TokenizerConfig(kind="wordpiece"),
        data=DataConfig(pairs="none", max_length=128, batch_size=64, mask_fraction=0.3),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=1e-3,
            b2=0.98,
            weight_decay=0.1,
            warmup_fraction=0.02,
        ),
        checkpoint=CheckpointConfig(every=2000),
    )
