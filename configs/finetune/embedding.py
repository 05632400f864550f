"""Embeddings for search: what functions of Python's library do, and their signatures.

    bert-jax pretrain
    bert-jax finetune --config=finetune/embedding

Needs no data, and starts from the checkpoint of `bert-jax pretrain`. It prints how well the
signatures of held-out modules are found, beside BM25, TF-IDF and the encoder before training.
docs/embeddings.md has the recipe for your own pairs, scored pairs and plain text.
"""

from bert_jax.config import DataFiles, FinetuneConfig, OptimizerConfig
from bert_jax.tasks.embedding import EmbeddingTaskConfig


def get_config() -> FinetuneConfig:
    return FinetuneConfig(
        epochs=2.0,
        task=EmbeddingTaskConfig(),
        data=DataFiles(
            train="builtin@train",
            eval="builtin@eval",
            text="query,passage",
            max_length=64,
            batch_size=256,
        ),
        optimizer=OptimizerConfig(name="adamw", learning_rate=4e-3, warmup_fraction=0.1),
    )
