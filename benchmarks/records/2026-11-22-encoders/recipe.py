"""The shared settings of the runs of 700 steps."""

from bert_jax.config import CheckpointConfig, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config() -> TrainConfig:
    """Return the config."""
    return TrainConfig(
        steps=700,
        log_every=50,
        eval_every=100_000,
        eval_rows=512,
        model=ModelConfig(
            vocab_size=0,
            hidden_size=384,
            num_hidden_layers=4,
            num_attention_heads=6,
            intermediate_size=1536,
            max_position_embeddings=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            hidden_act="gelu",
            dtype="bfloat16",
        ),
        data=DataConfig(source="stores/wiki", pairs="none", max_length=128, batch_size=32),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-3, b2=0.98, warmup_fraction=0.1),
        checkpoint=CheckpointConfig(every=100_000),
    )
