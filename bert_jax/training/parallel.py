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


def everywhere(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array of which each device has a copy."""
    return NamedSharding(mesh, P())


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
    whole, rows = everywhere(mesh), NamedSharding(mesh, P("data"))
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
