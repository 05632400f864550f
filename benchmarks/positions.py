"""Cost of each kind of position embedding: parameters, and the time of a train step.

    python benchmarks/positions.py [LENGTH]

A BERT of 4 layers of 256 in float32, rows of LENGTH (128) tokens, 4,096 tokens a step; the kinds
take turns, so that a change of the machine's speed meets all of them.
"""

import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
from flax import linen as nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from bert_jax.commands.process import keep_host_memory
from bert_jax.config import ModelConfig
from bert_jax.models.heads import BertForPreTraining
from bert_jax.training.masking import Masking
from bert_jax.training.objectives import Pretraining
from bert_jax.training.step import init_state, make_train_step

KINDS = ("absolute", "sinusoidal", "relative_key", "relative_key_query")
ROUNDS, STEPS = 7, 10


def make(kind: str, length: int):
    """Returns a function that takes some steps, and the number of parameters."""
    config = ModelConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        position_embedding_type=kind,
    )
    model = BertForPreTraining(config)
    predictions = max(1, round(0.15 * length))
    counts = np.full(length + 1, predictions, np.int32)
    masking = Masking(counts, predictions, config.vocab_size, (0, 101, 102, 103), 103, None)
    optimizer = optax.adamw(1e-4)
    params = nn.unbox(jax.jit(model.init_params)(jax.random.key(0)))
    state = init_state(params, optimizer, 0)
    step = jax.jit(make_train_step(Pretraining(model, masking), optimizer), donate_argnums=0)
    rows = 4096 // length
    generator = np.random.default_rng(0)
    batch = {
        "input_ids": generator.integers(1000, 30000, (rows, length), dtype=np.int32),
        "token_type_ids": np.zeros((rows, length), np.int32),
        "attention_mask": np.ones((rows, length), np.int32),
        "next_sentence_label": np.zeros(rows, np.int32),
        "index": np.arange(rows, dtype=np.int32),
    }

    def run(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state, _ = step(state, batch)
        jax.block_until_ready(state)

    return run, sum(x.size for x in jax.tree.leaves(params))


def main() -> None:
    """Prints a table."""
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 128
    keep_host_memory()
    made = {kind: make(kind, length) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(ROUNDS + 1):
        for kind, (run, _) in made.items():
            begin = time.perf_counter()
            run(STEPS if number else 2)
            if number:
                times[kind].append((time.perf_counter() - begin) / STEPS)
    device = jax.devices()[0]
    print(f"{device.device_kind} ({device.platform}), length {length}, {4096 // length} rows")
    print(f"{'kind':<20}{'parameters':>12}{'ms a step':>11}{'quartiles':>16}{'ratio':>7}")
    base = times["absolute"]
    for kind in KINDS:
        low, middle, high = (1e3 * q for q in statistics.quantiles(times[kind], n=4))
        ratio = statistics.median(t / b for t, b in zip(times[kind], base, strict=True))
        size = made[kind][1]
        print(f"{kind:<20}{size:>12,}{middle:>11.0f}{low:>9.0f} –{high:>5.0f}{ratio:>7.2f}")


if __name__ == "__main__":
    main()
