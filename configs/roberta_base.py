"""RoBERTa-base as published: MLM only, full sequences of 512, byte-level BPE, 500 k steps of 8,192.

    bert-jax pretrain --config=roberta_base --config.data.source='text/*.txt' \
        --workdir=runs/roberta

Raise `optimizer.microbatches` until a step's sequences fit into memory; the result stays the same.
After the warm-up the rate is on Google's line, which falls from the first step on. That is 5% below
fairseq's, which falls from the end of the warm-up.

Published, on 160 GB of text: MNLI 87.6, SST-2 94.8 (fairseq's release; the settings: Liu et al.
2019, table 9).
"""

from bert_jax.config import DataConfig, ModelConfig, OptimizerConfig, TokenizerConfig, TrainConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        steps=500_000,
        model=ModelConfig(
            model_type="roberta",
            vocab_size=50265,
            hidden_act="gelu",
            type_vocab_size=1,
            layer_norm_eps=1e-5,
            dtype="auto",
        ),
        tokenizer=TokenizerConfig(kind="byte_bpe", lowercase=False),
        data=DataConfig(pairs="none", max_length=512, batch_size=8192),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=6e-4,
            warmup_fraction=0.048,  # 24,000 steps
            b2=0.98,
            clip_norm=0.0,
        ),
    )
