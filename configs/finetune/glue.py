"""One of GLUE's tasks: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli.

    bert-jax finetune --config=finetune/glue:mrpc --init=hf:google-bert/bert-base-uncased

The data is read from TensorFlow Datasets or, with --config.data.train=glue/MRPC, from a folder with
GLUE's own TSV files. The paper chose the best learning rate of 5e-5, 4e-5, 3e-5 and 2e-5 on the
development set: --config.optimizer.learning_rate.

Published, BERT-base and -large on the test sets (Devlin et al. 2019, table 1): MNLI 84.6/83.4 and
86.7/85.9, QQP 71.2 and 72.1 F1, QNLI 90.5 and 92.7, SST-2 93.5 and 94.9, CoLA 52.1 and 60.5, STS-B
85.8 and 86.5, MRPC 88.9 and 89.3 F1, RTE 66.4 and 70.1.
"""

from bert_jax.config import DataFiles, FinetuneConfig, OptimizerConfig
from bert_jax.tasks import glue


def get_config(name: str = "mrpc") -> FinetuneConfig:
    return FinetuneConfig(
        epochs=3.0,
        task=glue.task(name),
        data=DataFiles(max_length=128, batch_size=32),
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_fraction=0.1),
    )
