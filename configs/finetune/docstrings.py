"""The area of Python's library that a docstring is from: needs no data, takes about a minute.

    bert-jax pretrain
    bert-jax finetune

Starts from the checkpoint of `bert-jax pretrain`, and prints the accuracy beside that of the same
model from random weights and that of logistic regression on TF-IDF.
"""

from bert_jax.config import DataFiles, FinetuneConfig, OptimizerConfig


def get_config() -> FinetuneConfig:
    return FinetuneConfig(
        epochs=4.0,
        compare=True,
        data=DataFiles(train="builtin@train", eval="builtin@eval", max_length=64, batch_size=32),
        optimizer=OptimizerConfig(name="adamw", learning_rate=5e-4, warmup_fraction=0.1),
    )
