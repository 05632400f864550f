"""ELECTRA-base as published: BERT-base with a generator of a third, 766,000 steps of batch 256.

    bert-jax pretrain --config=electra_base --config.data.source='text/*.txt' --workdir=runs/electra

Fine-tune it at a rate of 1e-4 with a layer decay of 0.8, for 3 epochs, 2 on SQuAD, or 10 on small
data. In the original most sequences are two segments of one document, with a token type each, and
accents are stripped (`tokenizer.strip_accents`). Here a sequence is a block of text, so the second
token type is untrained until pairs are fine-tuned on.
Published, on Wikipedia and BooksCorpus, four days on 16 TPU v3 chips: GLUE dev 85.1, of BERT-base
82.2 (Clark et al. 2020, tables 1 and 6).
"""

from bert_jax.config import DataConfig, OptimizerConfig, TokenizerConfig, TrainConfig
from bert_jax.models.electra import ElectraConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        steps=766_000,
        model=ElectraConfig(generator_hidden_size=1 / 3, dtype="auto"),
        tokenizer=TokenizerConfig(kind="wordpiece"),
        data=DataConfig(max_length=512, batch_size=256, pairs="none"),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_fraction=10_000 / 766_000),
    )
