"""Named entities, as in CoNLL 2003: a file with a word and its tag on each line.

    bert-jax finetune --config=finetune/ner --init=hf:google-bert/bert-base-cased \
        --config.data.train=train.conll --config.data.eval=dev.conll --config.data.test=test.conll

The same recipe serves parts of speech and any other tags of words. Published F1 on CoNLL 2003's
test set: BERT-base 92.4, BERT-large 92.8 (Devlin et al. 2019, table 7; cased, with the whole
document as context, which this recipe does not use).
"""

from bert_jax.config import DataFiles, FinetuneConfig, OptimizerConfig, TaskConfig


def get_config() -> FinetuneConfig:
    return FinetuneConfig(
        epochs=3.0,
        task=TaskConfig(kind="token_classification"),
        data=DataFiles(text="tokens", label="ner_tags", max_length=128, batch_size=32),
        optimizer=OptimizerConfig(name="adamw", learning_rate=5e-5, warmup_fraction=0.1),
    )
