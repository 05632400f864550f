"""What the direction that all tokens share is used for: the MLM loss without it.

    python common_direction.py HELD_OUT CHECKPOINT

It is the mean of the output of the first layer in the two dimensions where that is largest.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import bert_jax

path, checkpoint = sys.argv[1:]
bert = bert_jax.load(checkpoint, dtype="float32")
tokenizer, generator = bert.tokenizer, np.random.default_rng(0)
with open(path, encoding="utf-8") as file:
    texts = [line for line in file.read().split("\n") if line][:1500]
ids = np.concatenate([np.array(each) for each in tokenizer.encode(texts)])
count, length, masked = 48, 126, 38
ends = np.full((count, 1), tokenizer.cls_id), np.full((count, 1), tokenizer.sep_id)
sequences = np.concatenate(
    [ends[0], ids[: count * length].reshape(count, length), ends[1]], axis=1
).astype(np.int32)
positions = np.stack([generator.permutation(length)[:masked] + 1 for _ in range(count)])
positions = positions.astype(np.int32)
labels = np.take_along_axis(sequences, positions, 1)
inputs = sequences.copy()
np.put_along_axis(inputs, positions, tokenizer.mask_id, 1)


def loss(change):
    """Return the MLM loss where `change(module, output)` replaces the output of each module."""

    def intercept(call, arguments, options, context):
        output = call(*arguments, **options)
        is_call = context.method_name == "__call__"
        return change("/".join(context.module.path), output) if is_call else output

    with nn.intercept_methods(intercept):
        output = bert.model.apply(
            {"params": bert.params}, inputs, 0 * inputs, np.ones_like(inputs), positions
        )
    logits = output.mlm_logits[..., : tokenizer.vocab_size]
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -float(scores.mean())


outputs = {}


def _remember(name, output):
    if name == "bert/layer_0":
        outputs[name] = np.asarray(output[0]).reshape(-1, output[0].shape[-1])
    return output


usual = loss(_remember)
mean = outputs["bert/layer_0"].mean(0)
largest = np.argsort(-np.abs(mean))[:2]
direction = np.zeros_like(mean)
direction[largest] = mean[largest]
print(f"MLM loss {usual:.3f}; dimensions {largest}, {mean[largest]}")
for factor in (0.0, 0.5, 0.75, 1.5):

    def _scale(name, output, factor=factor):
        if name != "bert/layer_0":
            return output
        return (output[0] + (factor - 1) * direction, *output[1:])

    print(f"times {factor} after the first layer: {loss(_scale):.3f}")
for factor in (0.5, 0.75, 1.5, 2.0):

    def _scale_rest(name, output, factor=factor):
        if name != "bert/layer_0":
            return output
        return (direction + factor * (output[0] - direction), *output[1:])

    print(f"all else times {factor} after the first layer: {loss(_scale_rest):.3f}")
norms = [f"layer_{i}/{part}" for i in range(1, 4) for part in ("attention", "feed_forward")]
for reader in (f"bert/{name}_layer_norm" for name in ["layer_0/feed_forward", *norms, "final"]):

    def _remove(name, output, reader=reader):
        if name != reader:
            return output
        own = np.asarray(output).reshape(-1, output.shape[-1]).mean(0)
        return output - np.where(np.isin(np.arange(len(own)), largest), own, 0)

    print(f"removed from what {reader} returns: {loss(_remove) - usual:+.3f}")
