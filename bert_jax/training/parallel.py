"""Devices: what lies where, and how one step function runs on all of them."""

import ctypes
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
from bert_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")
_ROWS = ("data", "fsdp")  # over which the rows of a batch are shared

# The mesh axis over which each logical axis is split, of parameters and of what is computed with
# them; None: it is whole on each device.
RULES: dict[str, Any] = {
    "batch": _ROWS,
    "vocab": "tensor",
    "position": None,
    "type": None,
    "embed": "fsdp",
    "heads": "tensor",
    "feed_forward": "tensor",
    "hidden": None,
    "label": None,
}


def keep_host_memory() -> None:
    """Keeps memory that XLA frees on a CPU, so that the next step need not ask for it again.

    A step's temporaries are freed at its end. With the C library's defaults they go back to the
    system, and every page of the next step's is cleared and mapped anew: a third of the time of a
    step of the default config. Does nothing without glibc.
    """
    # From malloc.h: M_ARENA_MAX, M_MMAP_MAX and M_TRIM_THRESHOLD.
    _mallopt({-8: 1, -4: 0, -1: 2**31 - 1})


def return_host_memory() -> None:
    """Gives back the memory of every large array when it is freed: for a command that runs once.

    By default the C library keeps much of it, which is half as much again as a checkpoint takes.
    Does nothing without glibc.
    """
    _mallopt({-3: 1 << 16})  # M_MMAP_THRESHOLD


def _mallopt(options: Mapping[int, int]) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in options.items():
        mallopt(option, value)


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
            f"parallel asks for {axes}, which {len(devices)} devices are not; set one of them "
            "to -1, for the rest"
        )
    # In the order in which a TPU's chips are wired.
    placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_model(model: ModelConfig, mesh: Mesh) -> None:
    """Refuses a model whose sizes the axes of the mesh do not divide.

    Raises:
      UserError: one is not divided.
    """
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


def everywhere(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array of which each device has a copy."""
    return NamedSharding(mesh, P())


def row_parts(mesh: Mesh) -> int:
    """Returns in how many parts the devices share the rows of a batch."""
    return math.prod(mesh.shape[axis] for axis in _ROWS)


def process_rows(mesh: Mesh, batch_size: int) -> list[tuple[int, int]]:
    """Returns which rows of a batch this process's devices hold, each run as (first, end).

    It is all of them where the process's devices are parts of one copy of the model only.
    """
    sharding = NamedSharding(mesh, P(_ROWS))
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
    devices = row_parts(mesh)
    parts = devices * microbatches
    if batch_size % parts:
        each = f" times {microbatches} microbatches" if microbatches > 1 else ""
        raise UserError(
            f"data.batch_size {batch_size} is not a multiple of the {devices} devices of "
            f"parallel's data × fsdp{each}; use {max(1, round(batch_size / parts)) * parts}"
        )


def layout(new_state: Callable[[jax.Array], Any], mesh: Mesh) -> tuple[Any, Any]:
    """Returns the abstract state, with the sharding of every array, and these shardings alone.

    Args:
      new_state: makes a state from a key, with parameters that `layers.param` annotated.
      mesh: the devices.
    """
    boxed = jax.eval_shape(new_state, jax.random.key(0))
    specs = nn.get_partition_spec(boxed)
    shardings = spmd.logical_to_mesh_sharding(specs, mesh, list(RULES.items()))
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), nn.unbox(boxed), shardings
    )
    return like, shardings


def place(new_state: Callable[[jax.Array], Any], shardings: Any, key: jax.Array) -> Any:
    """Returns a new state, made where it is to lie."""
    return jax.jit(lambda k: nn.unbox(new_state(k)), out_shardings=shardings)(key)


def compile_step(
    step: Callable[..., Any],
    mode: str,
    mesh: Mesh,
    shardings: Any,
    gives: tuple[str, ...],
) -> Callable[[Any, Mapping[str, np.ndarray]], Any]:
    """Compiles `step(state, batch, reduce)` for the devices of a mesh: here alone do modes differ.

    Args:
      step: gives its results for all rows, whichever device they are on, given `reduce` that adds
        up over devices.
      mode: "mesh", one program that the compiler splits; or "pmap", a copy of it on each device.
      mesh: the devices.
      shardings: of the state, for "mesh".
      gives: what its results are: "state", the next one, in the memory of the one that it is given;
        "rows", an array with one for each row of the batch; "sums". One alone is no tuple.

    Returns:
      A function of the state and of this process's rows in host memory.
    """
    whole, rows = everywhere(mesh), NamedSharding(mesh, P(_ROWS))
    donated = (0,) if "state" in gives else ()

    def outputs(state: Any, rows: Any, sums: Any) -> Any:
        each = [{"state": state, "rows": rows, "sums": sums}[name] for name in gives]
        return tuple(each) if len(each) > 1 else each[0]

    if mode == "pmap":
        mapped = jax.pmap(
            partial(step, reduce=partial(jax.lax.psum, axis_name="data")),
            axis_name="data",
            in_axes=(None, 0),  # pyright: ignore[reportArgumentType]
            out_axes=outputs(None, 0, None),
            donate_argnums=donated,
            devices=list(mesh.devices.flat),
        )
        count = mesh.local_mesh.size

        def run(state: Any, batch: Mapping[str, np.ndarray]) -> Any:
            split = {k: v.reshape(count, -1, *v.shape[1:]) for k, v in batch.items()}
            found = mapped(state, split)
            if gives[0] == "rows":
                return found[0].reshape(-1, *found[0].shape[2:]), *found[1:]
            return found

        return run
    compiled = jax.jit(
        step,
        in_shardings=(shardings, rows),
        out_shardings=outputs(shardings, rows, whole),
        donate_argnums=donated,
    )
    return lambda state, batch: compiled(
        state, {k: jax.make_array_from_process_local_data(rows, v) for k, v in batch.items()}
    )


def compile_update(
    step: Callable[..., Any], mode: str, taken: tuple[Any, ...], given: Any
) -> Callable[..., Any]:
    """Compiles a function of states alone, which reuses the memory of the first.

    Args:
      step: the function.
      mode: as in `compile_step`.
      taken: the sharding of each of its arguments, for "mesh".
      given: of its results.
    """
    if mode == "pmap":
        return jax.jit(step, donate_argnums=0)
    return jax.jit(step, in_shardings=taken, out_shardings=given, donate_argnums=0)
