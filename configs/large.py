"""BERT-large as published: 24 layers of 1024, otherwise like BERT-base.

    bert-jax pretrain --config=large --config.data.source='text/*.txt' --workdir=runs/large

Published, on Wikipedia and BooksCorpus: GLUE 82.1, SQuAD 1.1 90.9 F1 (Devlin et al. 2019, uncased).
"""

from bert_jax.config import DataConfig, ModelConfig, Phase, TokenizerConfig, TrainConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            dtype="auto",
        ),
        tokenizer=TokenizerConfig(kind="wordpiece"),
        data=DataConfig(phases=(Phase(start=0.9, max_length=512, batch_size=256),)),
    )
