"""Texts, or pairs of texts, by class: your own file.

    python finetune.py --config=configs/finetune/classification.py --init=bert-base-uncased \\
        --config.data.train=train.tsv --config.data.eval=dev.tsv

The columns are `sentence` and `label`, or what data.text and data.label name. Published, for SST-2,
movie reviews by mood: BERT-base 93.5 (Devlin et al. 2019, table 1).
"""

from bert_jax.config import DataFiles, FinetuneConfig, OptimizerConfig


def get_config() -> FinetuneConfig:
    return FinetuneConfig(
        epochs=3.0,
        data=DataFiles(max_length=128, batch_size=32),
        optimizer=OptimizerConfig(learning_rate=3e-5, warmup_fraction=0.1),
    )
