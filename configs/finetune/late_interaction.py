"""Late interaction for search: what functions of Python's library do, and their signatures.

    bert-jax pretrain
    bert-jax finetune --config=finetune/late_interaction

Needs no data, and starts from the checkpoint of `bert-jax pretrain`. Punctuation is scored, as a
signature has much of it. docs/embeddings.md has the recipe for your own queries and passages.
"""

from bert_jax.config import DataFiles, FinetuneConfig, OptimizerConfig
from bert_jax.tasks.late_interaction import LateInteractionConfig


def get_config() -> FinetuneConfig:
    return FinetuneConfig(
        epochs=2.0,
        task=LateInteractionConfig(),
        data=DataFiles(
            train="builtin@train",
            eval="builtin@eval",
            text="query,passage",
            max_length=64,
            batch_size=64,
        ),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-3, warmup_fraction=0.1),
    )
