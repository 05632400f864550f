"""Reranking for search: which signature of Python's library does what a sentence says.

    bert-jax pretrain
    bert-jax finetune --config=finetune/reranker

Needs no data, and starts from the checkpoint of `bert-jax pretrain`; about five minutes on two
cores. It prints how well the best passages of BM25 are ranked, beside their order by BM25, which so
small a model does not reach. docs/embeddings.md has the recipe for your own queries and passages.
"""

from bert_jax.config import DataFiles, FinetuneConfig, OptimizerConfig
from bert_jax.tasks.reranker import RerankerConfig


def get_config() -> FinetuneConfig:
    return FinetuneConfig(
        epochs=0.4,
        task=RerankerConfig(),
        data=DataFiles(
            train="builtin@train",
            eval="builtin@eval",
            text="query,passage",
            max_length=64,
            batch_size=32,
        ),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-3, warmup_fraction=0.1),
    )
