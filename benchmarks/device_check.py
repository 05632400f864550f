"""What a device does in the first minute, for device.py, which starts this program.

Versions, the rate of a matmul and of memory, and the attention of one layer, forward and backward,
by each kernel beside plain attention: milliseconds, and the largest difference from plain attention
in float32. Each line of JSON is written when it was measured. A kernel that fails has the first
line of its cause.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

from bert_jax.commands import process
from bert_jax.config import ModelConfig
from bert_jax.config.schedule import Stage
from bert_jax.distributed.mesh import make_mesh
from bert_jax.errors import first_line
from bert_jax.models.attention import AttentionMask, plain_attention
from bert_jax.models.fused_attention import fused_attention, unsupported
from bert_jax.planning import benchmark

_SHAPES = [(64, 128), (16, 512), (8, 1024), (1, 8192)]  # sequences and tokens
_TINY = [(2, 128)]
_ROUNDS = 10


def measure_rates() -> dict[str, Any]:
    """Return versions and rates."""
    mesh, model = make_mesh(devices=jax.devices()[:1]), ModelConfig(dtype="bfloat16")
    speed, shape = benchmark.measure_matmul(model, Stage(max_length=512, batch_size=64), mesh)
    return {
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__},
        "platform_version": " ".join(jax.devices()[0].client.platform_version.split()),
        "matmul_tflops": speed / 1e12,
        "matmul_shape": shape,
        "memory_gb_per_second": benchmark.measure_memory(mesh) / 1e9,
    }


def measure_attention(form: str, batch: int, length: int) -> dict[str, Any]:
    """Return the time of an attention of BERT-base's size in bfloat16, and its error."""
    config = ModelConfig(
        dtype="bfloat16", attention=form, attention_probs_dropout_prob=0.0, hidden_size=768
    )
    row: dict[str, Any] = {"form": form, "batch": batch, "length": length}
    platform = jax.devices()[0].platform
    reason = unsupported(config, platform, length, packed=False, training=True)
    if form == "fused" and reason:
        return row | {"cause": f"fused {reason}"}
    ids = jnp.ones((batch, length), jnp.int32)
    random = np.random.default_rng(0).standard_normal((4, batch, length, 768), np.float32)

    def attend(form: str, projected: Any) -> Any:
        if form == "fused":
            return fused_attention(config, projected, ids, 0)
        return plain_attention(config, projected, AttentionMask(ids), None)[0]

    def run(form: str, dtype: str) -> Callable[[], Any]:
        weights, *projected = jnp.asarray(random, dtype)

        def loss(projected: Any) -> Any:
            return (attend(form, projected) * weights).astype(jnp.float32).sum()

        compiled = jax.jit(jax.value_and_grad(loss))
        return lambda: jax.block_until_ready(compiled(projected))

    try:
        timed = run(form, "bfloat16")
        _, gradients = timed()
        times = []
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            timed()
            times.append(time.perf_counter() - started)
        row["milliseconds"] = 1e3 * statistics.median(times)
        if length <= 1024:  # beyond, the scores in float32 may not fit
            _, wanted = run("plain", "float32")()
            pairs = zip(gradients, wanted, strict=True)
            row["error"] = max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in pairs)
    except Exception as error:  # of a driver, a kernel or a compiler; the others are measured
        row["cause"] = first_line(error)[:300]
    return row


def main() -> None:
    """Measure, and write a line at a time to the file that device.py names."""
    output, tiny = Path(sys.argv[1]), sys.argv[2:] == ["tiny"]
    output.write_text("")

    def write(row: dict[str, Any]) -> None:
        with output.open("a") as file:
            file.write(json.dumps(row) + "\n")

    write(measure_rates())
    for batch, length in _TINY if tiny else _SHAPES:
        for form in ("plain", "fused"):
            write(measure_attention(form, batch, length))


if __name__ == "__main__":
    process.run(main, Path(__file__).name)
