"""What a layer's attention asks of a TPU, as the plain form and as one kernel.

    python benchmarks/attention.py v5e:2x2 v6e:2x2

Compiles the value and the gradients of the attention of a BERT-base layer, from queries, keys and
values to what is mixed, for one chip of TPUs that need not be here (`pip install libtpu`): rows of
some lengths, 16,384 tokens in all, in bfloat16. Prints a table in Markdown. `--jax` adds JAX's own
kernels, which have no dropout and are given none.
"""

import argparse
from functools import partial

from bert_jax.commands import flags as cli
from bert_jax.planning import targets

TOKENS, HEADS, SIZE = 16384, 12, 64


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topologies", nargs="+", metavar="TOPOLOGY")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 2048])
    parser.add_argument("--jax", action="store_true", help="JAX's own flash and splash attention")
    args = parser.parse_args()
    print("| chip | length | form | dropout | kept, MB | temporaries, MB | moved, GB | GFLOP |")
    print("|---|---|---|---|---|---|---|---|")
    for target in targets.read(",".join(args.topologies)):
        for length in args.lengths:
            forms = [("plain", plain, 0.1), ("fused", fused, 0.1)]
            if args.jax:
                forms += [("plain", plain, 0.0), ("fused", fused, 0.0)]
                forms += [("JAX's flash", flash, 0.0), ("JAX's splash", splash, 0.0)]
            for name, form, rate in forms:
                found = costs(form, rate, length, target.devices[0])
                cells = (target.name.split(":")[0], str(length), name, str(rate), *found)
                print(f"| {' | '.join(cells)} |", flush=True)


def costs(form, rate, length, device) -> list[str]:
    """Returns what JAX keeps for the gradients, and the compiler's temporaries and operations."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, Mesh, SingleDeviceSharding

    from bert_jax.planning import traffic

    place = SingleDeviceSharding(device)
    rows = TOKENS // length
    shape = (rows, length, HEADS * SIZE)
    like = partial(jax.ShapeDtypeStruct, sharding=place)
    x, texts, key = like(shape, jnp.bfloat16), like(shape[:2], jnp.int32), like((2,), jnp.uint32)

    def forward(projected, texts, key):
        return jax.vjp(lambda *projected: form(projected, texts, key, rate), *projected)

    def both(projected, texts, key, cotangent):
        mixed, pull = forward(projected, texts, key)
        return mixed, pull(cotangent)

    mesh = Mesh([device], ("tensor",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        kept = jax.tree.leaves(jax.eval_shape(forward, (x, x, x), texts, key)[1])
        compiled = jax.jit(both).lower((x, x, x), texts, key, x).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes
    of_kept = sum(each.size * each.dtype.itemsize for each in kept)
    moved = traffic.moved(compiled.as_text())
    flops = compiled.cost_analysis()["flops"] / 1e9
    return [f"{of_kept / 1e6:,.0f}", f"{memory / 1e6:,.0f}", f"{moved / 1e9:.2f}", f"{flops:,.0f}"]


def plain(projected, texts, key, rate):
    """Returns the plain form's result."""
    from bert_jax.models.attention import AttentionMask, plain_attention

    mask, key, how = AttentionMask(texts, packed=True), *_how(projected, key, rate)
    return plain_attention(projected, mask, key, **how)[0]


def fused(projected, texts, key, rate):
    """Returns the kernel's."""
    from bert_jax.models.fused_attention import fused_attention

    key, how = _how(projected, key, rate)
    return fused_attention(projected, texts, key, packed=True, **how)


def _how(projected, key, rate):
    import jax.numpy as jnp

    from bert_jax.models.layers import DropoutKey

    rows, length, _ = projected[0].shape
    bounds = (HEADS, length, length)
    return DropoutKey(key, jnp.arange(rows)), {"rate": rate, "bounds": bounds}


def flash(projected, texts, key, rate):
    """Returns that of JAX's flash attention, with segments."""
    from jax.experimental.pallas.ops.tpu import flash_attention as jax_flash

    del key, rate
    segments = jax_flash.SegmentIds(texts, texts)
    mixed = jax_flash.flash_attention(*_heads(projected), segment_ids=segments, sm_scale=SIZE**-0.5)
    return mixed.swapaxes(1, 2).reshape(projected[0].shape)


def splash(projected, texts, key, rate):
    """Returns that of JAX's splash attention, with segments."""
    import jax
    from jax.experimental.pallas.ops.tpu import splash_attention as jax_splash

    del key, rate
    length = texts.shape[1]
    everything = jax_splash.MultiHeadMask([jax_splash.FullMask((length, length))] * HEADS)
    kernel = jax_splash.make_splash_mha_single_device(everything)
    query, keys, values = _heads(projected)
    segments = jax_splash.SegmentIds(texts, texts)
    mixed = jax.vmap(kernel)(query * SIZE**-0.5, keys, values, segments)
    return mixed.swapaxes(1, 2).reshape(projected[0].shape)


def _heads(projected):
    rows, length, _ = projected[0].shape
    return [each.reshape(rows, length, HEADS, SIZE).swapaxes(1, 2) for each in projected]


if __name__ == "__main__":
    cli.run(main)
