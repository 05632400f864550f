"""Classification of texts, or of pairs of texts, from your own files.

    bert-jax finetune --config=finetune/classification --init=hf:google-bert/bert-base-uncased \
        --config.data.train=train.tsv --config.data.eval=dev.tsv

The columns are `sentence` and `label`, or those that data.text and data.label name. Published, for
SST-2 (sentiment of movie reviews): BERT-base 93.5 (Devlin et al. 2019, table 1).
"""

from bert_jax.config import DataFiles, FinetuneConfig, OptimizerConfig


def get_config() -> FinetuneConfig:
    return FinetuneConfig(
        epochs=3.0,
        data=DataFiles(max_length=128, batch_size=32),
        optimizer=OptimizerConfig(name="adamw", learning_rate=3e-5, warmup_fraction=0.1),
    )
