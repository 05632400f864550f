"""BERT-base as published: 12 layers of 768, 1 M steps of batch 256, the last tenth at length 512.

    bert-jax pretrain --config=base --config.data.source='text/*.txt' --workdir=runs/base

The tokenizer keeps accents, which Google's uncased one strips: `tokenizer.strip_accents=True`.

Published, on Wikipedia and BooksCorpus: GLUE 79.6, SQuAD 1.1 88.5 F1 (Devlin et al. 2019, uncased).
"""

from bert_jax.config import DataConfig, ModelConfig, Phase, TokenizerConfig, TrainConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(dtype="auto"),
        tokenizer=TokenizerConfig(kind="wordpiece"),
        data=DataConfig(phases=(Phase(start=0.9, max_length=512, batch_size=256),)),
    )
