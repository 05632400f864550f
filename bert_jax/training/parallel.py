"""Devices: what lies where, and how one step function runs on all of them."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.linen import spmd
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.errors import UserError

# The mesh axis over which each logical axis of a parameter is split; None: a copy on each device.
RULES: dict[str, str | None] = {
    "vocab": None,
    "position": None,
    "type": None,
    "embed": None,
    "heads": None,
    "feed_forward": None,
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


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh over all devices, or those given, with one axis for the rows of a batch."""
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def check_divides(batch_size: int, microbatches: int, devices: int) -> None:
    """Refuses a batch that the devices cannot share evenly.

    Raises:
      UserError: it does not divide.
    """
    parts = devices * microbatches
    if batch_size % parts:
        each = f" times {microbatches} microbatches" if microbatches > 1 else ""
        raise UserError(
            f"data.batch_size {batch_size} is not a multiple of the {devices} devices{each}; "
            f"use {max(1, round(batch_size / parts)) * parts}"
        )


def state_shardings(boxed: Any, mesh: Mesh) -> Any:
    """Returns the sharding of every array of an abstract state, annotated by `layers.param`."""
    specs = nn.get_partition_spec(boxed)
    return spmd.logical_to_mesh_sharding(specs, mesh, list(RULES.items()))


def compile_step(
    step: Callable[..., Any], mode: str, mesh: Mesh, shardings: Any, *, updates_state: bool
) -> Callable[[Any, Mapping[str, np.ndarray]], Any]:
    """Compiles `step(state, batch, reduce)` for the devices of a mesh: here alone do modes differ.

    Args:
      step: gives its results for all rows, whichever device they are on, given `reduce` that adds
        up over devices.
      mode: "mesh", one program that the compiler splits; or "pmap", a copy of it on each device.
      mesh: the devices.
      shardings: of the state, for "mesh".
      updates_state: True for a step that gives (state, sums), in the memory of the state that it is
        given; False for one that gives sums.

    Returns:
      A function of the state and of this process's rows in host memory.
    """
    donated = (0,) if updates_state else ()
    if mode == "pmap":
        mapped = jax.pmap(
            partial(step, reduce=partial(jax.lax.psum, axis_name="data")),
            axis_name="data",
            in_axes=(None, 0),  # pyright: ignore[reportArgumentType]
            out_axes=None,  # pyright: ignore[reportArgumentType]
            donate_argnums=donated,
            devices=list(mesh.devices.flat),
        )
        count = mesh.local_mesh.size
        return lambda state, batch: mapped(
            state, {k: v.reshape(count, -1, *v.shape[1:]) for k, v in batch.items()}
        )
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    compiled = jax.jit(
        step,
        in_shardings=(shardings, rows),
        out_shardings=(shardings, whole) if updates_state else whole,
        donate_argnums=donated,
    )
    return lambda state, batch: compiled(
        state, {k: jax.make_array_from_process_local_data(rows, v) for k, v in batch.items()}
    )
