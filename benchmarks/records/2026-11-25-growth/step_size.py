"""What one step of AdamW at 3e-4 changes of the hidden states that a head reads.

    python step_size.py HELD_OUT CHECKPOINT …

The gradient is that of a random linear head for tags that are a function of the token.
"""

import random
import sys

import jax
import jax.numpy as jnp
import numpy as np

import bert_jax

RATE, TAGS = 3e-4, 13
path, *checkpoints = sys.argv[1:]
with open(path, encoding="utf-8") as file:
    texts = [line for line in file.read().split("\n") if 60 < len(line) < 200]
random.Random(0).shuffle(texts)
for checkpoint in checkpoints:
    bert = bert_jax.load(checkpoint, dtype="float32")
    tokens = bert.tokenize(texts[:32], max_length=64)
    head = np.random.default_rng(0).normal(size=(bert.config.hidden_size, TAGS)) / 20
    labels = jax.nn.one_hot(tokens["input_ids"] * 7919 % TAGS, TAGS)
    is_token = tokens["attention_mask"] > 0

    def _hidden(encoder, bert=bert, tokens=tokens):
        return bert.model.apply(
            {"params": {**bert.params, "bert": encoder}},
            *tokens.values(),
            method=lambda model, *inputs: model.bert(*inputs).last_hidden_state,
        )

    def _loss(encoder, head=head, labels=labels, is_token=is_token):
        scores = jax.nn.log_softmax(_hidden(encoder) @ head)
        return -(scores * labels).sum(-1)[is_token].mean()

    encoder = bert.params["bert"]
    gradient = jax.grad(_loss)(encoder)
    # The first step of AdamW has the size of the rate, and the sign of the gradient.
    stepped = jax.tree.map(lambda p, g: p - RATE * g / (jnp.abs(g) + 1e-8), encoder, gradient)
    before, after = (np.asarray(_hidden(each))[is_token] for each in (encoder, stepped))
    rest, change = before - before.mean(0), after - before
    own = np.linalg.norm(change - change.mean(0), axis=1).mean()
    norm = np.linalg.norm(rest, axis=1).mean()
    print(f"{checkpoint}: {own / norm:.3f} of a norm of {norm:.1f} without the mean")
