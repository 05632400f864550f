"""Devices: what lies where, and how one step function runs on all of them."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.linen import spmd
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.config import ModelConfig, ParallelConfig
from bert_jax.distributed.fsdp import BATCH_AXES, RULES, Collectives, across, results
from bert_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")


def make_mesh(config: ParallelConfig | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh of data × fsdp × tensor over all devices, or those given.

    Raises:
      UserError: the axes do not multiply to the number of devices.
    """
    config = config or ParallelConfig()
    devices = jax.devices() if devices is None else devices
    sizes = {"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor}
    set_by_hand = math.prod(size for size in sizes.values() if size != -1)
    shape = tuple(len(devices) // set_by_hand if n == -1 else n for n in sizes.values())
    if math.prod(shape) != len(devices):
        axes = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(
            f"parallel asks for {axes}, which {len(devices)} devices cannot be; change one, or "
            "set it to -1 for the rest"
        )
    # By how a TPU's chips are wired; along "fsdp" by their places, as `collectives` wants them.
    placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if placed.flat[0].platform == "tpu":
        for line in (placed[i, :, j] for i in range(shape[0]) for j in range(shape[2])):
            line[:] = sorted(line, key=lambda device: tuple(device.coords))
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_model(model: ModelConfig, mesh: Mesh) -> None:
    """Refuses a model whose sizes the axes of the mesh do not divide, or that they cannot compute.

    Raises:
      UserError: one is not divided, or a fused attention is asked for where there is none.
    """
    platform = mesh.devices.flat[0].platform
    if model.attention == "fused" and platform not in ("tpu", "gpu"):
        raise UserError(
            f"model.attention fused is for a TPU or a GPU, not for a {platform}; set it to auto"
        )
    split = {
        "num_attention_heads": "tensor",
        "intermediate_size": "tensor",
        "vocab_size": "tensor",
        "hidden_size": "fsdp",
    }
    for name, axis in split.items():
        size, parts = getattr(model, name), mesh.shape[axis]
        if size % parts:
            raise UserError(
                f"model.{name} {size} is not a multiple of parallel.{axis} {parts}; "
                + (
                    f"set it to {-(-size // parts) * parts}"
                    if name == "vocab_size"
                    else f"set parallel.{axis} to {math.gcd(size, parts)}"
                )
            )


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array of which each device has a copy."""
    return NamedSharding(mesh, P())


def num_batch_shards(mesh: Mesh) -> int:
    """Returns in how many parts the devices share the rows of a batch."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def process_slices(mesh: Mesh, batch_size: int) -> list[tuple[int, int]]:
    """Returns which rows of a batch this process's devices hold, each run as (first, end).

    It is all of them where the process's devices are parts of one copy of the model only.
    """
    sharding = NamedSharding(mesh, P(BATCH_AXES))
    places = sharding.addressable_devices_indices_map((batch_size,)).values()
    runs: list[tuple[int, int]] = []
    for low, high in sorted({place[0].indices(batch_size)[:2] for place in places if place}):
        if runs and runs[-1][1] == low:
            low = runs.pop()[0]
        runs.append((low, high))
    return runs


def check_divides(batch_size: int, microbatches: int, mesh: Mesh) -> None:
    """Refuses a batch that the devices cannot share evenly.

    Raises:
      UserError: it does not divide.
    """
    devices = num_batch_shards(mesh)
    parts = devices * microbatches
    if batch_size % parts:
        each = f" times {microbatches} microbatches" if microbatches > 1 else ""
        raise UserError(
            f"data.batch_size {batch_size} is not a multiple of the {devices} devices of "
            f"parallel's data × fsdp{each}; use {max(1, round(batch_size / parts)) * parts}"
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything lies: trees of shardings, or one sharding for all of a tree.

    Attributes:
      mesh: the devices.
      state: of a `TrainState`.
      params: of its parameters.
      gradients: of their gradients, which are split as the optimizer's moments are.
    """

    mesh: Mesh
    state: Any
    params: Any
    gradients: Any


def replicated_layout(mesh: Mesh) -> Layout:
    """Returns the layout of which each device has a copy of everything."""
    return Layout(mesh, replicated(mesh), replicated(mesh), replicated(mesh))


def make_layout(
    new_state: Callable[[jax.Array], Any], mesh: Mesh, config: ParallelConfig | None = None
) -> tuple[Any, Layout]:
    """Returns the abstract state, with the sharding of every array, and its layout.

    Args:
      new_state: makes a state from a key, with parameters that `layers.param` annotated.
      mesh: the devices.
      config: whose ZeRO stage it is.
    """
    boxed = jax.eval_shape(new_state, jax.random.key(0))
    specs = nn.get_partition_spec(boxed)
    split = spmd.logical_to_mesh_sharding(specs, mesh, list(RULES.items()))
    params = split.params
    if config and config.zero == 1:
        rules = [(name, axis if axis == "tensor" else None) for name, axis in RULES.items()]
        params = spmd.logical_to_mesh_sharding(specs.params, mesh, rules)
    state = split.replace(params=params)
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), nn.unbox(boxed), state
    )
    return like, Layout(mesh, state, params, split.params)


def init_sharded(new_state: Callable[[jax.Array], Any], shardings: Any, key: jax.Array) -> Any:
    """Returns a new state, made where it is to lie."""
    return jax.jit(lambda k: nn.unbox(new_state(k)), out_shardings=shardings)(key)


def shard_batch(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns a batch on the devices, of which this process gives its rows."""
    rows = NamedSharding(mesh, P(BATCH_AXES))
    return {k: jax.make_array_from_process_local_data(rows, v) for k, v in batch.items()}


def compile_step(
    step: Callable[..., Any],
    mode: str,
    layout: Layout,
    in_sharding: Any,
    outputs: tuple[str, ...],
) -> Callable[[Any, Mapping[str, np.ndarray]], Any]:
    """Compiles `step(state, batch, across)` for the devices of a mesh: here alone do modes differ.

    Args:
      step: as `training.step` makes them; its first argument may be another than a `TrainState`.
      mode: "mesh" or "pmap", which is a copy of the step on each device.
      layout: where everything lies.
      in_sharding: of the first argument.
      outputs: the kind of each result: "state", the next first argument, which reuses its memory;
        "per_example", an array with one entry for each sequence; "metrics". A single result is not
        wrapped in a tuple.

    Returns:
      A function of the state and of this process's rows in host memory.
    """
    if mode == "pmap":
        return _pmapped(step, layout.mesh, outputs)
    compiled = jit_step(step, layout, in_sharding, outputs)
    return lambda state, batch: compiled(state, shard_batch(layout.mesh, batch))


def jit_step(
    step: Callable[..., Any], layout: Layout, in_sharding: Any, outputs: tuple[str, ...]
) -> Any:
    """Returns `step` as one program for the mesh; the arguments are those of `compile_step`.

    The gradient is computed as `collectives` says; the update of the parameters is left to the
    compiler.
    """
    rows = NamedSharding(layout.mesh, P(BATCH_AXES))
    places = {"state": in_sharding, "per_example": rows, "metrics": replicated(layout.mesh)}
    return jax.jit(
        partial(step, across=across(layout.mesh, layout.params, layout.gradients)),
        in_shardings=(in_sharding, rows),
        out_shardings=results(places, outputs),
        donate_argnums=(0,) if "state" in outputs else (),
    )


def _pmapped(
    step: Callable[..., Any], mesh: Mesh, outputs: tuple[str, ...]
) -> Callable[[Any, Mapping[str, np.ndarray]], Any]:
    add = partial(jax.lax.psum, axis_name="data")
    mapped = jax.pmap(
        partial(step, across=Collectives(add=add, add_gradients=add)),
        axis_name="data",
        in_axes=(None, 0),  # pyright: ignore[reportArgumentType]
        out_axes=results({"state": None, "per_example": 0, "metrics": None}, outputs),
        donate_argnums=(0,) if "state" in outputs else (),
        devices=list(mesh.devices.flat),
    )
    count = mesh.local_mesh.size

    def run(state: Any, batch: Mapping[str, np.ndarray]) -> Any:
        split = {k: v.reshape(count, -1, *v.shape[1:]) for k, v in batch.items()}
        found = mapped(state, split)
        if outputs[0] == "per_example":
            return found[0].reshape(-1, *found[0].shape[2:]), *found[1:]
        return found

    return run
