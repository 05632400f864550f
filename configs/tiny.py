"""A tiny BERT on the documentation of Python's library: no download, one and a half to six minutes.

    python train.py

Expect a held-out MLM loss two nats below the unigram entropy of the text. So small a model, on so
short a run, learns faster with Muon, short sequences first, a wider initializer and no dropout.
"""

from bert_jax.config import CheckpointConfig, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        steps=2000,
        log_every=250,
        eval_every=500,
        model=ModelConfig(
            vocab_size=4096,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.05,
            dtype="auto",
        ),
        data=DataConfig(
            source="builtin",
            eval_fraction=0.1,
            max_length=64,
            batch_size=32,
            length_warmup_fraction=0.2,
        ),
        optimizer=OptimizerConfig(
            name="muon", learning_rate=4e-3, b2=0.98, weight_decay=0.1, warmup_fraction=0.1
        ),
        checkpoint=CheckpointConfig(every=500),
    )
