"""ModernBERT-large as published: 28 layers of 1,024; 1.7 T tokens of length 1,024, 300 B of 8,192.

    bert-jax pretrain --config=modernbert_large --config.data.source='text/*.txt' \
        --workdir=runs/modernbert-large

What `modernbert_base` says of fewer steps, memory and blocks holds here too. On 8 devices every
batch divides into 7 microbatches at most, which fit 8 H100 with `model.remat` alone. Batches grow
during the first 10 B tokens, each size for as many steps, and the rate falls in the last 50 B. In
the original, the weights begin as copies of those of the base model, and the last 50 B tokens have
batches of 624.

Published: GLUE 90.4 on its development sets (Warner et al. 2024, "Smarter, Better, Faster, Longer",
with the settings in table 3 and appendix A).
"""

from bert_jax.config import (
    DataConfig,
    OptimizerConfig,
    Phase,
    TokenizerConfig,
    TrainConfig,
)
from bert_jax.models.modernbert import ModernBertConfig


def get_config() -> TrainConfig:
    # Sequences a step, with the billions of tokens that have so many, and the rate of these.
    sizes = range(448, 4928, 448)
    short = [(size, 10 * size / sum(sizes), 5e-4) for size in sizes]
    short += [(4928, 890, 5e-4), (4928, 800, 5e-5)]
    starts, long = [0], 616
    for size, tokens, _ in short:
        starts.append(starts[-1] + round(tokens * 1e9 / (size * 1024)))
    *starts, first_long = starts
    # The warm-up is of 2 B tokens: those of four sizes, and some of the fifth.
    rest = 2 - sum(tokens for _, tokens, _ in short[:4])
    warmup = starts[4] + round(rest * 1e9 / (sizes[4] * 1024))
    grown = [
        Phase(start, 1024, size, learning_rate=rate)
        for start, (size, _, rate) in zip(starts, short, strict=True)
    ]
    extended = Phase(first_long, 8192, long, learning_rate=5e-5, global_rope_theta=160_000.0)
    stable, decay = (round(tokens * 1e9 / (long * 8192)) for tokens in (250, 50))
    return TrainConfig(
        steps=first_long + stable + decay,
        model=ModernBertConfig(
            vocab_size=50368,
            hidden_size=1024,
            num_hidden_layers=28,
            num_attention_heads=16,
            intermediate_size=2624,
            max_position_embeddings=8192,
            global_rope_theta=10_000.0,
            classifier_pooling="mean",
            dtype="auto",
        ),
        tokenizer=TokenizerConfig(kind="byte_bpe", lowercase=False),
        data=DataConfig(
            pairs="none",
            max_length=1024,
            batch_size=448,
            mask_fraction=0.3,
            phases=(*grown[1:], extended),
        ),
        optimizer=OptimizerConfig(
            name="stable_adamw",
            learning_rate=5e-4,
            warmup_fraction=warmup,
            schedule="wsd",
            decay_fraction=decay,
            # 1e-5 of a weight in a step at the peak rate, and 1e-6 after 900 B tokens.
            weight_decay=1e-5 / 5e-4,
            b2=0.98,
            clip_norm=0.0,
        ),
    )
