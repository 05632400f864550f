"""What windows cost, computed by blocks of the window and as a mask of all scores.

    python benchmarks/windows.py            # time and memory of a step on this CPU
    python benchmarks/windows.py v5e:2x2    # memory of one layer's attention, compiled for a TPU

A ModernBERT of 7 layers of 256 (3 global, 4 of a window of 128) and 2,048 tokens a step; of a TPU,
a layer of ModernBERT-base and 16,384 tokens in bfloat16. The forms take turns. A step is
forward and backward, without an optimizer.
"""

import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import record

from bert_jax.models import attention
from bert_jax.models.attention import AttentionMask
from bert_jax.models.fused_attention import fused_attention
from bert_jax.models.modernbert import ModernBertConfig
from bert_jax.objectives.masked_lm import BertForMaskedLM
from bert_jax.planning.topology import read_topologies

ROUNDS = 11


def masked(config, projected, mask, key):
    """Returns the context by all scores."""
    return attention.plain_attention(config, projected, mask, key)[0]


def fused(config, projected, mask, key):
    """Returns the context by the device's kernel."""
    return fused_attention(
        config, projected, mask.segment_ids, window=mask.window, packed=mask.packed
    )


FORMS = {"blocks": attention.local_attention, "masked": masked}


def compile_step(form: str, length: int):
    """Returns the compiled loss and gradient by the parameters, and the parameters."""
    config = ModernBertConfig(
        vocab_size=4096,
        hidden_size=256,
        num_attention_heads=4,
        num_hidden_layers=7,
        intermediate_size=384,
        max_position_embeddings=length,
    )
    model = BertForMaskedLM(config)
    params = nn.unbox(model.init_params(jax.random.key(0)))
    ids = jax.random.randint(jax.random.key(1), (2048 // length, length), 5, config.vocab_size)
    positions = jnp.tile(jnp.arange(0, length, 4), (len(ids), 1))

    def loss(params):
        inputs = ids, jnp.zeros_like(ids), jnp.ones_like(ids), positions
        output: Any = model.apply({"params": params}, *inputs)
        logits = output.mlm_logits
        return (jax.nn.logsumexp(logits, -1) - logits[..., 0]).mean()

    attention.local_attention = FORMS[form]
    return jax.jit(jax.value_and_grad(loss)).lower(params).compile(), params


def _temporaries(compiled: jax.stages.Compiled) -> float:
    """Returns the MB of a program's temporary arrays."""
    stats = compiled.memory_analysis()
    assert stats
    return stats.temp_size_in_bytes / 1e6


def on_this_cpu() -> None:
    """Prints the time of a step by all scores, and what blocks save."""
    print("| length | masked, ms | times as fast by blocks | temporaries, MB |\n|---|---|---|---|")
    for length in (512, 1024, 2048):
        steps = {form: compile_step(form, length) for form in FORMS}
        times = {form: [] for form in FORMS}
        for number in range(ROUNDS + 1):
            for form in list(FORMS)[:: 1 if number % 2 else -1]:
                step, params = steps[form]
                start = time.perf_counter()
                jax.block_until_ready(step(params))
                times[form].append(time.perf_counter() - start)
        faster = record.ratio(times["masked"][1:], times["blocks"][1:])
        sizes = [_temporaries(step) for step, _ in steps.values()]
        memory = f"{sizes[0]:.0f} of {sizes[1]:.0f}"
        print(f"| {length} | {np.median(times['masked']) * 1e3:.0f} | {faster} | {memory} |")


def on_a_tpu(name: str) -> None:
    """Prints the temporary memory of forward and backward pass, without a TPU."""
    (topology,) = read_topologies(name, compiles=True)
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    print("| length | layer | form | temporaries, MB |\n|---|---|---|---|")
    for length in (1024, 8192):
        config = ModernBertConfig(max_position_embeddings=length)
        shape = (16384 // length, length)
        ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
        x = jax.ShapeDtypeStruct((*shape, 768), jnp.bfloat16, sharding=sharding)
        for window in (0, 64):
            forms = {"fused": fused, "masked": masked}
            for form, function in (forms | FORMS if window else forms).items():

                def pull(ids, *x, function=function, window=window, config=config):
                    mask = AttentionMask(ids, packed=True, window=window)
                    return jax.vjp(lambda *x: function(config, x, mask, None), *x[:3])[1](x[3])

                try:
                    with jax.set_mesh(mesh):
                        compiled = jax.jit(pull).lower(ids, x, x, x, x).compile()
                    memory = f"{_temporaries(compiled):,.0f}"
                except jax.errors.JaxRuntimeError as error:
                    memory = "does not fit" if "RESOURCE_EXHAUSTED" in str(error) else str(error)
                print(f"| {length} | {'local' if window else 'global'} | {form} | {memory} |")


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv[1:]}:
        sys.exit(__doc__)
    print(record.heading(("jax", "jaxlib")))
    on_a_tpu(sys.argv[1]) if sys.argv[1:] else on_this_cpu()
