"""Proteins, DNA or other sequences of letters, each letter a token.

    bert-jax pretrain --config=letters --config.data.source=proteins.fasta --workdir=runs/letters

The text is FASTA (.fasta, .fa, .faa or .fna), or plain with one sequence a line. The tokenizer is a
SentencePiece of single characters (`model_type="char"`), with case kept. Each sequence is a
document and starts with a token for a space, as does each part of 10,000 letters of a longer one.

Examples of a batch are full blocks (`pairs="none"`): 254 consecutive tokens of the text, between
[CLS] and [SEP]. So a long sequence continues in another block, and a block can hold several short
ones with [SEP] between them. Sequences of one block attend to each other.

The encoder is a ModernBERT of 3 M parameters. Compare the held-out MLM loss with its baseline, the
entropy of the letters.
"""

from bert_jax.config import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)
from bert_jax.models.modernbert import ModernBertConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        steps=20_000,
        eval_every=2000,
        model=ModernBertConfig(
            vocab_size=0,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=704,
            dtype="auto",
        ),
        tokenizer=TokenizerConfig(model_type="char", lowercase=False),
        data=DataConfig(sentences="documents", pairs="none", max_length=256, batch_size=64),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-3, b2=0.98, warmup_fraction=0.025),
        checkpoint=CheckpointConfig(every=2000),
    )
