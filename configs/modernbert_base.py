"""ModernBERT-base as published: 22 layers of 768; 1.7 T tokens of length 1,024, 300 B of 8,192.

    bert-jax pretrain --config=modernbert_base --config.data.source='text/*.txt' \
        --workdir=runs/modernbert

For less text, give fewer steps, phases with steps of their own, and `optimizer.warmup_fraction` and
`optimizer.decay_fraction`, which are steps here; the header of a run lists them. Raise
`optimizer.microbatches`, to at most 24 on 8 devices, and set `model.remat`, until `bert-jax plan`
says that a step fits: the memory of plain attention grows with the square of the length. The result
stays the same.

Batches grow during the first 50 B tokens, each size for as many steps, and the rate falls in the
last 50 B. In the original the output of attention has a dropout of 0.1, and documents of one block
do not attend to each other; here they do.

Published: GLUE 88.4 on its development sets; 194 hours on 8 H100 for the 1.7 T tokens (Warner et
al. 2024, "Smarter, Better, Faster, Longer", with the settings in table 3 and appendix A).
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
    # Sequences a step, with the billions of tokens that have so many.
    sizes = range(768, 4608, 768)
    short = [*((size, 50 * size / sum(sizes)) for size in sizes), (4608, 1669)]
    starts, long = [0], 576
    for size, tokens in short:
        starts.append(starts[-1] + round(tokens * 1e9 / (size * 1024)))
    *starts, first_long = starts
    grown = [Phase(start, 1024, size) for start, (size, _) in zip(starts, short, strict=True)]
    extended = Phase(first_long, 8192, long, learning_rate=3e-4, global_rope_theta=160_000.0)
    stable, decay = (round(tokens * 1e9 / (long * 8192)) for tokens in (250, 50))
    return TrainConfig(
        steps=first_long + stable + decay,
        model=ModernBertConfig(
            vocab_size=50368,
            num_hidden_layers=22,
            intermediate_size=1152,
            max_position_embeddings=8192,
            global_rope_theta=10_000.0,
            classifier_pooling="mean",
            dtype="auto",
        ),
        tokenizer=TokenizerConfig(kind="byte_bpe", lowercase=False),
        data=DataConfig(
            pairs="none",
            max_length=1024,
            batch_size=768,
            mask_fraction=0.3,
            phases=(*grown[1:], extended),
        ),
        optimizer=OptimizerConfig(
            name="stable_adamw",
            learning_rate=8e-4,
            warmup_fraction=round(3e9 / (768 * 1024)),  # 3 B tokens
            schedule="wsd",
            decay_fraction=decay,
            # 1e-5 of a weight in a step at the peak rate, and 3.75e-6 at the rate of length 8,192.
            weight_decay=1e-5 / 8e-4,
            b2=0.98,
            clip_norm=0.0,
        ),
    )
