"""SQuAD 1.1: the span of a text that answers a question.

    bert-jax finetune --config=finetune/squad --init=hf:google-bert/bert-base-uncased \
        --config.data.train=train-v1.1.json --config.data.eval=dev-v1.1.json

Published on the development set, EM and F1: BERT-base 80.8 and 88.5, BERT-large 84.1 and 90.9
(Devlin et al. 2019, table 2).
"""

from bert_jax.config import DataFiles, FinetuneConfig, OptimizerConfig
from bert_jax.tasks.question_answering import QuestionAnsweringConfig


def get_config() -> FinetuneConfig:
    return FinetuneConfig(
        epochs=3.0,
        task=QuestionAnsweringConfig(),
        data=DataFiles(
            train="tfds:squad/v1.1@train",
            eval="tfds:squad/v1.1@validation",
            max_length=384,
            batch_size=32,
        ),
        optimizer=OptimizerConfig(learning_rate=5e-5, warmup_fraction=0.1),
    )
