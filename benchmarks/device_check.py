"""What a device does in the first minute, for device.py, which starts this program.

Versions, the rate of a matmul and of memory, and the attention of one layer, forward and backward,
in each form of `FORMS`: milliseconds, and the largest difference of a gradient from that of plain
attention in float32, as a share of the largest gradient. Each line of JSON is written as soon as it
is measured. That of a form that fails has the first line of the error.
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
from bert_jax.models.attention import AttentionMask, local_attention, plain_attention
from bert_jax.models.fused_attention import fused_attention, unsupported
from bert_jax.models.layers import DropoutKey
from bert_jax.planning import benchmark

# Sequences and tokens, with the kinds of forms that are of interest there: of a minute, each form
# takes some seconds to compile.
_SHAPES = {
    (8, 1024): ("full", "window"),
    (16, 512): ("full", "packed", "dropout"),
    (64, 128): ("full", "dropout"),
    (1, 8192): ("full", "window"),
}
_TINY = {(2, 128): ("full", "packed", "window", "dropout")}
_ROUNDS = 10
_CALLS = 10  # of a round: one alone would also measure how a program is started
_WINDOW = 64  # of ModernBERT
_HEAD_SIZE = 64
_DROPOUT = 0.1


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


def _plain(config: ModelConfig, projected: Any, mask: AttentionMask) -> Any:
    return plain_attention(config, projected, mask, _key(config, mask))[0]


def _key(config: ModelConfig, mask: AttentionMask) -> DropoutKey | None:
    if not config.attention_probs_dropout_prob:
        return None
    return DropoutKey(jax.random.key(0), jnp.arange(len(mask.segment_ids)))


def _windows(config: ModelConfig, projected: Any, mask: AttentionMask) -> Any:
    return local_attention(config, projected, mask, None)


def _kernel(config: ModelConfig, projected: Any, mask: AttentionMask) -> Any:
    return fused_attention(
        config,
        projected,
        mask.segment_ids,
        window=mask.window,
        packed=mask.packed,
        dropout_key=_key(config, mask),
    )


def _full(config: ModelConfig, projected: Any, mask: AttentionMask) -> Any:
    """Return what pretraining on full blocks, which have no padding, takes."""
    return fused_attention(config, projected, None, window=mask.window, packed=False)


# Of each form the function, and its kind: full attention, packed sequences, a window or dropout.
FORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "plain": (_plain, "full"),
    "fused": (_kernel, "full"),
    "fused, without padding": (_full, "full"),
    "packed, plain": (_plain, "packed"),
    "packed, fused": (_kernel, "packed"),
    "window, plain": (_plain, "window"),
    "window, blocks": (_windows, "window"),
    "window, fused": (_kernel, "window"),
    "dropout, plain": (_plain, "dropout"),
    "dropout, fused": (_kernel, "dropout"),
}


def measure_attention(form: str, batch: int, length: int) -> dict[str, Any]:
    """Return the time of an attention of BERT-base's size in bfloat16, and its error."""
    attend, kind = FORMS[form]
    packed, windowed = kind == "packed", kind == "window"
    config = ModelConfig(
        dtype="bfloat16",
        attention_probs_dropout_prob=_DROPOUT if kind == "dropout" else 0.0,
        hidden_size=12 * _HEAD_SIZE,
        max_position_embeddings=length,
    )
    row: dict[str, Any] = {"form": form, "batch": batch, "length": length}
    platform = jax.devices()[0].platform
    window = _WINDOW if windowed else 0
    reason = unsupported(config, platform, length, window=window, packed=packed, training=True)
    if attend not in (_plain, _windows) and reason:
        return row | {"cause": f"fused {reason}"}
    # Packed sequences are of two segments.
    ids = 1 + (jnp.arange(length) >= length // 3) if packed else jnp.ones(length, jnp.int32)
    mask = AttentionMask(jnp.tile(ids, (batch, 1)), packed, window)
    shape = 4, batch, length, config.hidden_size
    random = np.random.default_rng(0).standard_normal(shape, np.float32)

    def run(attend: Callable[..., Any], dtype: str) -> Callable[[], Any]:
        weights, *projected = jnp.asarray(random, dtype)

        def loss(projected: Any) -> Any:
            return (attend(config, projected, mask) * weights).astype(jnp.float32).sum()

        compiled = jax.jit(jax.value_and_grad(loss))
        return lambda: compiled(projected)

    try:
        timed = run(attend, "bfloat16")
        _, gradients = jax.block_until_ready(timed())
        times = []
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            for _ in range(_CALLS - 1):
                timed()
            jax.block_until_ready(timed())
            times.append((time.perf_counter() - started) / _CALLS)
        row["milliseconds"] = 1e3 * statistics.median(times)
        if length <= 1024:  # beyond, the scores in float32 may not fit
            with jax.default_matmul_precision("highest"):
                _, wanted = run(_plain, "float32")()
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
    for (batch, length), kinds in (_TINY if tiny else _SHAPES).items():
        for form, (_, kind) in FORMS.items():
            if kind in kinds:
                write(measure_attention(form, batch, length))


if __name__ == "__main__":
    process.run(main, Path(__file__).name)
