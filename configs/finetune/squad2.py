"""SQuAD 2.0: like 1.1, with questions that the text does not answer.

    bert-jax finetune --config=finetune/squad2 --init=hf:google-bert/bert-large-uncased \
        --config.data.train=train-v2.0.json --config.data.eval=dev-v2.0.json

The threshold of "no answer" is tuned on the development set and saved in the checkpoint. Published
there, EM and F1: BERT-large 78.7 and 81.9 (Devlin et al. 2019, table 3).
"""

from bert_jax.config import DataFiles, FinetuneConfig, OptimizerConfig
from bert_jax.tasks.question_answering import QuestionAnsweringConfig


def get_config() -> FinetuneConfig:
    return FinetuneConfig(
        epochs=2.0,
        task=QuestionAnsweringConfig(with_unanswerable=True),
        data=DataFiles(
            train="tfds:squad/v2.0@train",
            eval="tfds:squad/v2.0@validation",
            max_length=384,
            batch_size=48,
        ),
        optimizer=OptimizerConfig(learning_rate=5e-5, warmup_fraction=0.1),
    )
