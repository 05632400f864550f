"""The norms of a ModernBERT's hidden states after each layer, and how much all tokens share.

python hidden_states.py HELD_OUT CHECKPOINT …
"""

import random
import sys

import numpy as np

import bert_jax

path, *checkpoints = sys.argv[1:]
with open(path, encoding="utf-8") as file:
    texts = [line for line in file.read().split("\n") if 60 < len(line) < 300]
random.Random(0).shuffle(texts)
texts = texts[:64]
for checkpoint in checkpoints:
    print(checkpoint)
    bert = bert_jax.load(checkpoint, dtype="float32")
    tokens = bert.tokenize(texts)
    special = np.isin(tokens["input_ids"], [bert.tokenizer.cls_id, bert.tokenizer.sep_id])
    is_word = (tokens["attention_mask"] > 0) & ~special
    for layer, hidden in enumerate(bert(texts, output_hidden_states=True).hidden_states):
        states = np.asarray(hidden, np.float32)[is_word]
        norms, mean = np.linalg.norm(states, axis=1), states.mean(0)
        centered = np.sqrt(np.square(states - mean).sum(1).mean())
        cosine = np.square((states / norms[:, None]).mean(0)).sum()
        share = np.sort(np.square(states).sum(0))[::-1] / np.square(states).sum()
        print(
            f"  layer {layer}: norm {norms.mean():.1f}, of the mean {np.linalg.norm(mean):.1f}, "
            f"of the rest {centered:.1f}; mean cosine of two tokens {cosine:.2f}; share of the two "
            f"largest dimensions {share[:2].sum():.2f}"
        )
