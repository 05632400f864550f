"""How fast matrix products alone are here: the ceiling under which a train step stays."""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.config import ModelConfig, Phase
from bert_jax.distributed.mesh import num_batch_shards

_ROUNDS = 7
_SECONDS = 0.1  # of a round
_LARGE = {"cpu": (1024,), "gpu": (4096, 8192), "tpu": (4096, 8192)}
_MOST_ROWS = 4096  # of the model's own; more are no faster and take long


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """The fastest product that was found.

    Attributes:
      flops: operations a second, of all devices together.
      shape: [m, k] times [k, n] on each of them, as (m, k, n).
    """

    flops: float
    shape: tuple[int, int, int]


def measure(model: ModelConfig, phase: Phase, mesh: Mesh) -> Ceiling:
    """Returns the fastest of square products and of the model's largest, in the model's type.

    All devices run them at once, with nothing to send. Of each shape it is the median of rounds.
    """
    rows = phase.batch_size * phase.max_length // num_batch_shards(mesh)
    rows, wide, wider = min(rows, _MOST_ROWS), model.hidden_size, model.intermediate_size
    shapes = [(size, size, size) for size in _LARGE[mesh.devices.flat[0].platform]]
    shapes += [(rows, wide, wider), (rows, wider, wide)]
    found = [Ceiling(_flops(shape, model.dtype, mesh), shape) for shape in shapes]
    return max(found, key=lambda each: each.flops)


def _flops(shape: tuple[int, int, int], dtype: str, mesh: Mesh) -> float:
    m, k, n = shape
    split, same = NamedSharding(mesh, P(mesh.axis_names)), NamedSharding(mesh, P())
    # A CPU has instructions for bfloat16 where the result is float32; others add up in it anyway.
    given = jnp.float32 if mesh.devices.flat[0].platform == "cpu" else dtype
    random = np.random.default_rng(0)
    x = jax.device_put(random.standard_normal((mesh.size * m, k), np.float32).astype(dtype), split)
    y = jax.device_put(random.standard_normal((k, n), np.float32).astype(dtype), same)
    product = jax.jit(lambda x, y: jnp.dot(x, y, preferred_element_type=given), out_shardings=split)
    jax.block_until_ready(product(x, y))

    def seconds(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times - 1):
            product(x, y)
        jax.block_until_ready(product(x, y))
        return (time.perf_counter() - started) / times

    times = max(1, round(_SECONDS / seconds(2)))
    return 2.0 * m * k * n * mesh.size / statistics.median(seconds(times) for _ in range(_ROUNDS))
