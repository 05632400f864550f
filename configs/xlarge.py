"""A BERT of 1.3 billion parameters: 24 layers of 2048, as Megatron's, for hundreds of chips.

    bert-jax pretrain --config=xlarge --config.data.source=stores/mine \
        --workdir=runs/xlarge

Parameters and moments are sharded over all devices; `bert-jax plan --config=xlarge
--topology=v5p:8x8x8` says what a step takes. Sizes, batch and schedule are those of Shoeybi et al.
2019 (table 4 and section 5.3). They moved layer normalization, since so large a BERT trained badly
with post-normalization: watch the loss, and lower the learning rate if it diverges.
"""

from bert_jax.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TokenizerConfig,
    TrainConfig,
)


def get_config() -> TrainConfig:
    return TrainConfig(
        steps=2_000_000,
        model=ModelConfig(
            hidden_size=2048,
            num_hidden_layers=24,
            num_attention_heads=32,
            intermediate_size=8192,
            dtype="auto",
            remat=True,
            scan_layers=True,
        ),
        tokenizer=TokenizerConfig(kind="wordpiece"),
        data=DataConfig(max_length=512, batch_size=1024),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_fraction=0.005),
        parallel=ParallelConfig(data=1, fsdp=-1),
    )
