"""Cost of one attention layer on a TPU by XLA's own estimate: plain and fused.

    pip install libtpu
    python benchmarks/attention.py v5e:2x2 v6e:2x2

Compiles value and gradients of the attention of a BERT-base layer for one chip of each topology,
which need not be present: 16,384 tokens in packed sequences, bfloat16. Prints a Markdown table of
what JAX saves for the gradients, the compiler's temporaries, and the bytes and operations it
counts. `--jax` adds JAX's own kernels, which have no dropout.
"""

import argparse
from functools import partial
from pathlib import Path

from bert_jax.commands import process
from bert_jax.planning.topology import read_topologies

TOKENS, HEADS, HEAD_SIZE = 16384, 12, 64


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topologies", nargs="+", metavar="TOPOLOGY")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 2048])
    parser.add_argument("--jax", action="store_true", help="JAX's own flash and splash attention")
    args = parser.parse_args()
    print("| chip | length | form | dropout | saved, MB | temporaries, MB | moved, GB | GFLOP |")
    print("|---|---|---|---|---|---|---|---|")
    for topology in read_topologies(",".join(args.topologies)):
        for length in args.lengths:
            forms = [("plain", plain, 0.1), ("fused", fused, 0.1)]
            if args.jax:
                forms += [("plain", plain, 0.0), ("fused", fused, 0.0)]
                forms += [("JAX's flash", flash, 0.0), ("JAX's splash", splash, 0.0)]
            for name, attend, rate in forms:
                row = costs(partial(attend, rate), length, topology.devices[0])
                cells = (topology.name.split(":")[0], str(length), name, str(rate), *row)
                print(f"| {' | '.join(cells)} |", flush=True)


def costs(attend, length, device) -> list[str]:
    """Return saved and temporary megabytes, moved gigabytes and operations in billions."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, Mesh, SingleDeviceSharding

    shape = (TOKENS // length, length, HEADS * HEAD_SIZE)
    like = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    x, segment_ids = like(shape, jnp.bfloat16), like(shape[:2], jnp.int32)
    key = like((2,), jnp.uint32)

    def forward(projected, segment_ids, key):
        return jax.vjp(lambda *projected: attend(projected, segment_ids, key), *projected)

    def both(projected, segment_ids, key, cotangent):
        context, pull = forward(projected, segment_ids, key)
        return context, pull(cotangent)

    mesh = Mesh([device], ("tensor",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        saved = jax.tree.leaves(jax.eval_shape(forward, (x, x, x), segment_ids, key)[1])
        compiled = jax.jit(both).lower((x, x, x), segment_ids, key, x).compile()
    counts = compiled.cost_analysis()
    values = (
        sum(each.size * each.dtype.itemsize for each in saved) / 1e6,
        compiled.memory_analysis().temp_size_in_bytes / 1e6,
        counts["bytes accessed"] / 1e9,
        counts["flops"] / 1e9,
    )
    return [f"{value:,.{digits}f}" for value, digits in zip(values, (0, 0, 2, 0), strict=True)]


def plain(rate, projected, segment_ids, key):
    """Return the context by the plain form."""
    from bert_jax.models.attention import plain_attention

    return plain_attention(*_arguments(rate, projected, segment_ids, key))[0]


def fused(rate, projected, segment_ids, key):
    """Return the context by our kernel."""
    from bert_jax.models.attention import fused_attention

    return fused_attention(*_arguments(rate, projected, segment_ids, key))


def _arguments(rate, projected, segment_ids, key):
    import jax.numpy as jnp

    from bert_jax.config import ModelConfig
    from bert_jax.models.attention import AttentionMask
    from bert_jax.models.layers import DropoutKey

    batch, length, _ = projected[0].shape
    config = ModelConfig(max_position_embeddings=length, attention_probs_dropout_prob=rate)
    mask = AttentionMask(segment_ids, packed=True)
    return config, projected, mask, DropoutKey(key, jnp.arange(batch))


def flash(rate, projected, segment_ids, key):
    """Return the context by JAX's flash attention."""
    from jax.experimental.pallas.ops.tpu import flash_attention as jax_flash

    del rate, key
    ids = jax_flash.SegmentIds(segment_ids, segment_ids)
    context = jax_flash.flash_attention(
        *_heads(projected), segment_ids=ids, sm_scale=HEAD_SIZE**-0.5
    )
    return context.swapaxes(1, 2).reshape(projected[0].shape)


def splash(rate, projected, segment_ids, key):
    """Return the context by JAX's splash attention."""
    import jax
    from jax.experimental.pallas.ops.tpu import splash_attention as jax_splash

    del rate, key
    length = segment_ids.shape[1]
    full = jax_splash.MultiHeadMask([jax_splash.FullMask((length, length))] * HEADS)
    kernel = jax_splash.make_splash_mha_single_device(full)
    query, keys, values = _heads(projected)
    ids = jax_splash.SegmentIds(segment_ids, segment_ids)
    context = jax.vmap(kernel)(query * HEAD_SIZE**-0.5, keys, values, ids)
    return context.swapaxes(1, 2).reshape(projected[0].shape)


def _heads(projected):
    batch, length, _ = projected[0].shape
    return [x.reshape(batch, length, HEADS, HEAD_SIZE).swapaxes(1, 2) for x in projected]


if __name__ == "__main__":
    process.run(main, Path(__file__).name)
