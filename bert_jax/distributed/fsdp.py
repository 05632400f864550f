"""What devices say to each other in a step, by hand: as little as can be.

Each device computes the gradient of its own rows. Of a parameter that is split over "fsdp", the
parts are put together where it is used, and each device gets its own part of the gradient's sum.
What is split over "tensor" is left to the compiler.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.models.layers import parameter_reader

BATCH_AXES = ("data", "fsdp")  # the axes of the mesh over which the rows of a batch are shared

# The mesh axis over which each logical axis of a parameter is split; None: it is not.
RULES: dict[str, str | None] = {
    "vocab": "tensor",
    "position": None,
    "type": None,
    "embed": "fsdp",
    "heads": "tensor",
    "feed_forward": "tensor",
    "hidden": None,
    "label": None,
}


@dataclasses.dataclass(frozen=True)
class Collectives:
    """How a step meets the devices that share its rows; by default, there is one.

    Attributes:
      run: makes of `of_rows(params, draws, batch)`, which takes some rows, a function of all
        that runs on each device. The names of its results are given too: "gradients",
        "per_example" (an array with one entry for each row) or "metrics".
      add: adds up over devices, inside of it.
      add_gradients: the same, of gradients, of which each device may get a part.
      share: makes of new parameters, of which each device may have made a part, those of a state.
    """

    run: Callable[[Callable[..., Any], tuple[str, ...]], Callable[..., Any]] = lambda of_rows, _: (
        of_rows
    )
    add: Callable[[Any], Any] = lambda x: x
    add_gradients: Callable[[Any], Any] = lambda x: x
    share: Callable[[Any], Any] = lambda x: x


SINGLE_DEVICE = Collectives()


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How parameters are put together over "fsdp", and gradients added up and split.

    Attributes:
      rings: groups of places along the axis, in each of several phases.
      tile: elements that the compiler does not split between devices; 0 where it is any.
    """

    rings: tuple[tuple[tuple[int, ...], ...], ...]
    tile: int


def results(of: Mapping[str, Any], outputs: tuple[str, ...]) -> Any:
    """Returns what a step gives, by name, as it gives it: one alone is no tuple."""
    each: list[Any] = [of[name] for name in outputs]
    return tuple(each) if len(each) > 1 else each[0]


def across(mesh: Mesh, params: Any, gradients: Any) -> Collectives:
    """Returns how a step runs on a mesh: by hand over the axes of its rows.

    Args:
      mesh: of data × fsdp × tensor.
      params: the sharding of each parameter, or one for all.
      gradients: of their gradients.
    """
    if math.prod(mesh.shape[axis] for axis in BATCH_AXES) == 1:
        return Collectives(run=lambda of_rows, _: _on(mesh, of_rows))
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    exchange = Exchange(_rings(mesh), math.prod(_TILE) if is_tpu else 0)
    of_params, of_gradients = (_by_hand(tree) for tree in (params, gradients))
    specs = {"gradients": of_gradients, "per_example": P(BATCH_AXES), "metrics": P()}
    has_parts = mesh.shape["fsdp"] > 1 and any(
        "fsdp" in spec for spec in jax.tree.leaves(of_params)
    )

    def read(value: jax.Array, axes: tuple[str, ...], dtype: str) -> jax.Array:
        split = tuple(RULES[axis] for axis in axes)
        return _gathered(value, split, dtype, exchange) if "fsdp" in split else value

    def add_gradient(of_param: P, where: NamedSharding, gradient: jax.Array) -> jax.Array:
        if "fsdp" in of_param:  # `_gathered` has added up over it
            return jax.lax.psum(gradient, "data")
        if "fsdp" in where.spec:
            return jax.lax.psum(_add_and_split(gradient, where.spec, exchange), "data")
        return jax.lax.psum(gradient, BATCH_AXES)

    def run(of_rows: Callable[..., Any], outputs: tuple[str, ...]) -> Callable[..., Any]:
        def of_device(*arguments: Any) -> Any:
            with parameter_reader(read if has_parts else None):
                return of_rows(*arguments)

        return jax.shard_map(
            of_device,
            mesh=mesh,
            in_specs=(of_params, P(), P(BATCH_AXES)),
            out_specs=results(specs, outputs),
            axis_names=set(BATCH_AXES),
            check_vma=False,  # with it, gradients would be added up already
        )

    def share(params: Any) -> Any:
        """Puts together, under ZeRO-1, what each device has made of the parameters."""
        if has_parts or mesh.shape["fsdp"] == 1:
            return params

        def gather(part: jax.Array, where: NamedSharding) -> jax.Array:
            is_split = "fsdp" in where.spec
            return _gathered(part, tuple(where.spec), "float32", exchange) if is_split else part

        return jax.shard_map(
            lambda parts: jax.tree.map(gather, parts, gradients),
            mesh=mesh,
            in_specs=(of_gradients,),
            out_specs=of_params,
            axis_names=set(BATCH_AXES),
            check_vma=False,
        )(params)

    return Collectives(
        run=run,
        share=share,
        add=partial(jax.lax.psum, axis_name=BATCH_AXES),
        add_gradients=lambda tree: jax.tree.map(add_gradient, of_params, gradients, tree),
    )


def _on(mesh: Mesh, of_rows: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is traced knowing the mesh, as it is where axes are run by hand."""

    def run(*arguments: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return of_rows(*arguments)

    return run


def _by_hand(shardings: Any) -> Any:
    """Returns the part of each sharding that is not the compiler's."""

    def spec(sharding: NamedSharding) -> P:
        return P(*(axis if axis in BATCH_AXES else None for axis in sharding.spec))

    return jax.tree.map(spec, shardings)


def _of_each_part(function: Callable[[jax.Array], jax.Array], split: Any) -> Any:
    """Returns a function of an array that runs on each part of it along "tensor", if it has any.

    Or the compiler would put the parts together first.
    """
    if "tensor" not in split:
        return function
    spec = P(*(axis if axis == "tensor" else None for axis in split))
    return jax.shard_map(
        function, in_specs=spec, out_specs=spec, axis_names={"tensor"}, check_vma=False
    )


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(part: jax.Array, split: Any, dtype: str, exchange: Exchange) -> jax.Array:
    """Puts a parameter together, float32 with the values that it has in the type of its use.

    In that type it is sent; its gradient is sent, and added up, in float32.
    """
    dimension = list(split).index("fsdp")

    def gather(x: jax.Array) -> jax.Array:
        if not x.size >= exchange.tile > 0:
            return jax.lax.all_gather(x, "fsdp", axis=dimension, tiled=True)
        x = jnp.moveaxis(x, dimension, 0)
        size, rest = x.size, x.shape[1:]
        x = jnp.pad(x.reshape(-1), (0, -size % exchange.tile)).reshape(-1, _TILE[1])
        padded, keep = x.size, jax.lax.optimization_barrier
        x = keep(x)
        for groups in reversed(exchange.rings):
            x = jax.lax.all_gather(x, "fsdp", axis=0, axis_index_groups=groups, tiled=True)
        x = keep(x).reshape(-1, padded)[:, :size].reshape(-1, *rest)
        return jnp.moveaxis(x, 0, dimension)

    return _of_each_part(gather, split)(part.astype(dtype)).astype(jnp.float32)


def _gathered_forward(part: jax.Array, *options: Any) -> tuple[jax.Array, None]:
    return _gathered(part, *options), None


def _gathered_backward(
    split: Any, _: str, exchange: Exchange, __: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (_add_and_split(gradient, split, exchange),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def _rings(mesh: Mesh) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns the groups of places along "fsdp" that add up, one phase after the other.

    Along one axis of the torus of chips, a TPU's compiler gives a device its part of a sum at the
    price of a part, and so it puts parts together. Along two, it adds everything up everywhere, at
    twice that.
    """
    size = mesh.shape["fsdp"]
    everyone = ((tuple(range(size)),),)
    line = mesh.devices[0, :, 0]
    if line[0].platform != "tpu":
        return everyone
    coords = np.array([device.coords for device in line])
    axes = [axis for axis in range(coords.shape[1]) if len(set(coords[:, axis])) > 1]
    # The axis on which the last change is furthest apart comes first, as in the mesh's order.
    axes.sort(key=lambda axis: -int(np.argmax(coords[:, axis] != coords[0, axis])))
    lengths = [len(set(coords[:, axis])) for axis in axes]
    if math.prod(lengths) != size:
        return everyone
    places, phases = np.arange(size).reshape(lengths), []
    for number, axis in enumerate(axes):
        groups = np.moveaxis(places, number, -1).reshape(-1, lengths[number])
        others = np.delete(coords, axis, axis=1)[groups]
        if (others != others[:, :1]).any():
            return everyone
        phases.append(tuple(map(tuple, groups.tolist())))
    return tuple(phases) or everyone


_TILE = (8, 128)  # a TPU's, of float32; half of one of bfloat16


def _add_and_split(x: jax.Array, split: Any, exchange: Exchange) -> jax.Array:
    """Adds up over "fsdp"; each device gets its part of the sum, along what `split` names so."""
    dimension = list(split).index("fsdp")

    def run(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, dimension, 0)
        for groups in exchange.rings:
            add = partial(
                jax.lax.psum_scatter,
                axis_name="fsdp",
                scatter_dimension=0,
                axis_index_groups=groups,
                tiled=True,
            )
            parts = len(groups[0])
            shape = (x.shape[0] // parts, *x.shape[1:])
            size = math.prod(shape)
            if size >= exchange.tile > 0:  # what is less is not worth it
                x = jnp.pad(x.reshape(parts, size), ((0, 0), (0, -size % exchange.tile)))
                # Without barriers the compiler leaves the padding out, and adds up everything.
                x, keep = x.reshape(-1, _TILE[1]), jax.lax.optimization_barrier
                x = keep(add(keep(x))).reshape(-1)[:size].reshape(shape)
            else:
                x = add(x)
        return jnp.moveaxis(x, 0, dimension)

    return _of_each_part(run, split)(x)
