"""A train step of the last Flax BERT, of transformers 4, for peers.py, which starts this program.

As in its own pretraining example: AdamW, dropout, every position scored.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers
from peer_worker import read_spec, run_peer, serve, synthetic


def main() -> None:
    """Builds the model, takes the first steps, and waits to be asked for more."""
    spec = read_spec()
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_act", "vocab_size")
    names += ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    names += ("max_position_embeddings", "type_vocab_size")
    config = transformers.BertConfig(**{name: spec.model[name] for name in names})
    flax_bert: Any = getattr(transformers, "FlaxBertForPreTraining")  # noqa: B009 - 4 has it
    model = flax_bert(config, seed=0, dtype=jnp.dtype(spec.dtype))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01))
    batch = {name: jnp.asarray(value) for name, value in synthetic(spec).items()}
    rows = jnp.arange(spec.batch_size)[:, None]
    weights = jnp.zeros(batch["input_ids"].shape).at[rows, batch["positions"]].set(1.0)

    def loss(params, key):
        scores = model(
            batch["input_ids"],
            batch["attention_mask"],
            batch["token_type_ids"],
            params=params,
            dropout_rng=key,
            train=True,
        )
        entropy = optax.softmax_cross_entropy_with_integer_labels
        of_tokens = entropy(scores.prediction_logits, batch["input_ids"])
        follows = entropy(scores.seq_relationship_logits, batch["next_sentence_label"])
        return (of_tokens * weights).sum() / weights.sum() + follows.mean()

    @jax.jit
    def step(params, moments, key):
        key, own = jax.random.split(key)
        value, gradient = jax.value_and_grad(loss)(params, own)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, key, value

    state = model.params, optimizer.init(model.params), jax.random.key(0)

    def run(steps: int) -> float:
        nonlocal state
        losses = []
        for _ in range(steps):
            *state, value = step(*state)
            losses.append(value)
        return float(np.mean(jax.device_get(losses)))

    serve(run, {"jax": jax.__version__, "transformers": transformers.__version__})


if __name__ == "__main__":
    run_peer(main)
