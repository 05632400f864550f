"""What Triton makes of a GPU's attention kernels, which takes no GPU.

    pip install triton
    python benchmarks/attention_gpu.py --capabilities 80 90

Lowers the value and the gradients of attention, as `model.attention` "fused" has it on GPUs, and
compiles each kernel for NVIDIA's GPUs of some compute capabilities (8.0 is the A100's, 9.0 the
H100's). Prints a table in Markdown: registers of a thread, bytes that a thread has no register for,
and shared memory of a step.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from bert_jax.commands import flags as cli
from bert_jax.errors import UserError

HEADS = 12


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64], help="of a head")
    args = parser.parse_args()
    print("| capability | length | size | type | kernel | registers | spilled | shared, KB |")
    print("|---|---|---|---|---|---|---|---|")
    for length in args.lengths:
        for size in args.sizes:
            for dtype in ("bfloat16", "float32"):
                for name, text in kernels(length, size, dtype):
                    for capability in args.capabilities:
                        cells = (capability, length, size, dtype, name, *made(text, capability))
                        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def kernels(length: int, size: int, dtype: str) -> Iterator[tuple[str, str]]:
    """Yields the name of each kernel, and what Triton is given."""
    import jax
    import jax.numpy as jnp
    from jax._src.pallas.triton import lowering  # JAX shows what it lowers to nowhere else

    from bert_jax.models.fused_attention import fused_attention, serves
    from bert_jax.models.layers import DropoutKey

    lower, found = lowering.lower_jaxpr_to_triton_module, []

    def keep(jaxpr, *args, **how):
        result = lower(jaxpr, *args, **how)
        text = result.module.operation.get_asm(enable_debug_info=False)
        found.append((jaxpr.debug_info.func_name.strip("_"), text))
        return result

    x = jax.ShapeDtypeStruct((2, length, HEADS * size), dtype)
    texts, key = jnp.ones((2, length), jnp.int32), DropoutKey(jax.random.key(0), jnp.arange(2))

    def total(*projected):
        how = {"packed": True, "rate": 0.1, "bounds": (HEADS, length, length)}
        return fused_attention(projected, texts, key, **how).sum()

    mesh = jax.sharding.AbstractMesh(
        (1,),
        ("tensor",),
        (jax.sharding.AxisType.Auto,),
        abstract_device=jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu"),
    )
    with (
        jax.sharding.use_abstract_mesh(mesh),
        mock.patch.object(lowering, "lower_jaxpr_to_triton_module", keep),
    ):
        if not serves(length, size):
            raise UserError(f"the kernels take no rows of {length} with heads of {size}")
        traced = jax.jit(jax.value_and_grad(total, (0, 1, 2))).trace(x, x, x)
        traced.lower(lowering_platforms=("cuda",))
    return iter(found)


def made(text: str, capability: int) -> tuple[int, int, str]:
    """Returns registers, bytes spilled and KB of shared memory of a compiled kernel."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
    except ImportError:
        raise UserError("this needs Triton: pip install triton") from None

    from bert_jax.models import attention_gpu

    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ttir"), Path(folder, "kernel.cubin")
        source.write_text(text)
        compiled = triton.compile(
            str(source),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": attention_gpu.WARPS, "num_stages": attention_gpu.STAGES},
        )
        binary.write_bytes(compiled.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run(
            [tool, "--dump-resource-usage", str(binary)], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if not found:
        raise UserError(f"cuobjdump says of no registers: {usage}")
    return int(found[1]), int(found[2]), f"{compiled.metadata.shared / 1e3:.1f}"


if __name__ == "__main__":
    cli.run(main)
