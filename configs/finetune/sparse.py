"""Sparse vectors for search: what functions of Python's library do, and their signatures.

    bert-jax pretrain
    bert-jax finetune --config=finetune/sparse

Needs no data, and starts from the checkpoint of `bert-jax pretrain`, with its masked LM head, which
says what words a text is about. docs/embeddings.md says how to train on your own queries and
passages.
"""

from bert_jax.config import DataFiles, FinetuneConfig, OptimizerConfig
from bert_jax.tasks.sparse import SparseConfig


def get_config() -> FinetuneConfig:
    return FinetuneConfig(
        epochs=0.3,
        # For so small a model; the defaults are for one of the size of BERT-base.
        task=SparseConfig(query_penalty=0.03, passage_penalty=0.03),
        data=DataFiles(
            train="builtin@train",
            eval="builtin@eval",
            text="query,passage",
            max_length=64,
            batch_size=64,
        ),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-3, warmup_fraction=0.1),
    )
