"""ELECTRA-small as published: 12 layers of 256, a generator of 64, 1 M steps of batch 128.

    bert-jax pretrain --config=electra_small --config.data.source='text/*.txt' \
        --workdir=runs/electra

Fine-tune it at a rate of 3e-4 with a layer decay of 0.8, for 3 epochs, 2 on SQuAD, or 10 on small
data. In the original most sequences are two segments of one document, with a token type each, and
accents are stripped (`tokenizer.strip_accents`). Here a sequence is a block of text, so the second
token type is untrained until pairs are fine-tuned on.
Published, on Wikipedia and BooksCorpus, four days on a V100: GLUE dev 79.9, of a BERT of that size
75.1 (Clark et al. 2020, tables 1 and 6, and google-research/electra).
"""

from bert_jax.config import DataConfig, OptimizerConfig, TokenizerConfig, TrainConfig
from bert_jax.models.electra import ElectraConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        model=ElectraConfig(
            embedding_size=128,
            hidden_size=256,
            num_attention_heads=4,
            intermediate_size=1024,
            generator_hidden_size=0.25,
            dtype="auto",
        ),
        tokenizer=TokenizerConfig(kind="wordpiece"),
        data=DataConfig(max_length=128, batch_size=128, pairs="none"),
        optimizer=OptimizerConfig(learning_rate=5e-4),
    )
