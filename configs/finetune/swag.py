"""SWAG: which of four endings follows a sentence.

    bert-jax finetune --config=finetune/swag --init=hf:google-bert/bert-base-uncased \
        --config.data.train=train.csv --config.data.eval=val.csv

Published accuracy: BERT-base 81.6 on the development set, BERT-large 86.6 and 86.3 on the test set
(Devlin et al. 2019, table 4).
"""

from bert_jax.config import DataFiles, FinetuneConfig, OptimizerConfig, TaskConfig


def get_config() -> FinetuneConfig:
    return FinetuneConfig(
        epochs=3.0,
        task=TaskConfig(kind="multiple_choice"),
        data=DataFiles(
            text="sent1,sent2,ending0,ending1,ending2,ending3", max_length=128, batch_size=16
        ),
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_fraction=0.1),
    )
