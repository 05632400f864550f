"""FSDP collectives of a train step, written with shard_map.

Each device computes the gradient of its own sequences, in a `shard_map` over "data" and "fsdp". A
parameter that is split over "fsdp" is all-gathered where it is used, and its gradient is
reduce-scattered. What is split over "tensor" is left to XLA's partitioner.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.models.target import Kernel, Target, traced_for

BATCH_AXES = ("data", "fsdp")  # the mesh axes over which the sequences of a batch are split

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


def num_batch_shards(mesh: Mesh) -> int:
    """Return the number of shards that a batch is split into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


@dataclasses.dataclass(frozen=True)
class Collectives:
    """The collectives of a step that each device runs by itself, as by `jax.pmap`.

    Without `axes` there is one device, and they do nothing.
    """

    axes: tuple[str, ...]  # over which the sequences of a batch are split

    def run(self, function: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
        """Return `function(params, rng, batch)` mapped over the shards of the batch."""
        return function

    def psum(self, tree: Any) -> Any:
        """Return the sum over the shards of the batch."""
        return jax.lax.psum(tree, self.axes) if self.axes else tree

    def all_gather(self, tree: Any) -> Any:
        """Return the arrays of every shard of the batch, one after the other."""
        return jax.lax.all_gather(tree, self.axes, tiled=True) if self.axes else tree

    def psum_scatter(self, tree: Any) -> Any:
        """Return this shard's part of the sum over the shards, as `all_gather` orders them."""
        return jax.lax.psum_scatter(tree, self.axes, tiled=True) if self.axes else tree

    def reduce_gradients(self, gradients: Any) -> Any:
        """Return the sum of gradients, of which a device may keep only its shard."""
        return self.psum(gradients)

    def gather_params(self, params: Any) -> Any:
        """Return updated parameters in the sharding of the train state."""
        return params


SINGLE_DEVICE = Collectives(())


@dataclasses.dataclass(frozen=True)
class MeshCollectives(Collectives):
    """The collectives of a step on a mesh, with the sharding of each parameter and gradient."""

    mesh: Mesh
    params: Any
    gradients: Any  # split over "fsdp" under ZeRO-1 too

    def run(self, function: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
        specs = {  # of each kind of output
            "gradients": _batch_specs(self.gradients),
            "per_example": P(BATCH_AXES),
            "metrics": P(),
        }
        out_specs = jax.tree.map(lambda kind: specs[kind], outputs)

        target = Target(
            platform=self.mesh.devices.flat[0].platform,
            map_over_heads=_map_over_heads,
            splits_outputs=self.mesh.shape["tensor"] > 1,
        )

        def run_unsplit(params: Any, rng: Any, batch: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh), traced_for(target):
                return function(params, rng, batch)

        def run_shard(params: Any, rng: Any, batch: Any) -> Any:
            read = _read_parameter if self._params_are_split else None
            with traced_for(dataclasses.replace(target, read_parameter=read)):
                return function(params, rng, batch)

        if not self.axes:
            return run_unsplit
        in_specs = (_batch_specs(self.params), P(), P(BATCH_AXES))
        return self._shard_map(run_shard, in_specs, out_specs)

    def reduce_gradients(self, gradients: Any) -> Any:
        if not self.axes:
            return gradients

        def reduce(param: NamedSharding, target: NamedSharding, gradient: jax.Array) -> jax.Array:
            if "fsdp" in param.spec:  # the gradient of its all-gather has summed over "fsdp"
                return jax.lax.psum(gradient, "data")
            if "fsdp" in target.spec:
                return jax.lax.psum(_psum_scatter(gradient, tuple(target.spec)), "data")
            return jax.lax.psum(gradient, BATCH_AXES)

        return jax.tree.map(reduce, self.params, self.gradients, gradients)

    def gather_params(self, params: Any) -> Any:
        if self._params_are_split or self.mesh.shape["fsdp"] == 1:
            return params

        def gather(shard: jax.Array, sharding: NamedSharding) -> jax.Array:
            is_split = "fsdp" in sharding.spec
            return _all_gather(shard, tuple(sharding.spec), "float32") if is_split else shard

        gather_all = self._shard_map(
            lambda shards: jax.tree.map(gather, shards, self.gradients),
            (_batch_specs(self.gradients),),
            _batch_specs(self.params),
        )
        return gather_all(params)

    @property
    def _params_are_split(self) -> bool:
        shardings = jax.tree.leaves(self.params)
        return self.mesh.shape["fsdp"] > 1 and any("fsdp" in s.spec for s in shardings)

    def _shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(BATCH_AXES),
            check_vma=False,  # checked, JAX would itself sum the gradients of replicated parameters
        )


def _batch_specs(shardings: Any) -> Any:
    """Return the specs of shardings without "tensor", which is the partitioner's."""

    def spec(sharding: NamedSharding) -> P:
        return P(*(axis if axis in BATCH_AXES else None for axis in sharding.spec))

    return jax.tree.map(spec, shardings)


def _read_parameter(value: jax.Array, logical_axes: tuple[str, ...], dtype: str) -> jax.Array:
    axes = tuple(RULES[axis] for axis in logical_axes)
    return _all_gather(value, axes, dtype) if "fsdp" in axes else value


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather(shard: jax.Array, axes: tuple[str | None, ...], dtype: str) -> jax.Array:
    """Return the parameter as float32, sent as `dtype`; its gradient is sent as float32."""
    gather = partial(jax.lax.all_gather, axis_name="fsdp", axis=axes.index("fsdp"), tiled=True)
    return _map_over_tensor(gather, axes)(shard.astype(dtype)).astype(jnp.float32)


_all_gather.defvjp(
    lambda shard, axes, dtype: (_all_gather(shard, axes, dtype), None),
    lambda axes, dtype, residuals, gradient: (_psum_scatter(gradient, axes),),
)


def _psum_scatter(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """Return this device's shard of the sum over "fsdp"."""
    scatter = partial(jax.lax.psum_scatter, axis_name="fsdp", tiled=True)
    scatter = partial(scatter, scatter_dimension=axes.index("fsdp"))
    return _map_over_tensor(scatter, axes)(x)


def _map_over_tensor(
    function: Callable[[jax.Array], jax.Array], axes: tuple[str | None, ...]
) -> Callable[[jax.Array], jax.Array]:
    """Return `function` on the shards along "tensor", else all-gathered by the partitioner."""
    if "tensor" not in axes:
        return function
    spec = P(*(axis if axis == "tensor" else None for axis in axes))
    return jax.shard_map(
        function, in_specs=spec, out_specs=spec, axis_names={"tensor"}, check_vma=False
    )


def _map_over_heads(kernel: Kernel) -> Kernel:
    """Return a kernel that each device runs for its own heads, since XLA cannot split one."""
    axes = jax.sharding.get_abstract_mesh().auto_axes
    if not axes:
        return kernel
    heads = P(None, None, axes)

    def run(*operands: jax.Array | None) -> jax.Array:
        specs = tuple(heads if x is not None and x.ndim == 3 else P() for x in operands)
        mapped = jax.shard_map(
            kernel, in_specs=specs, out_specs=heads, axis_names=set(axes), check_vma=False
        )
        return mapped(*operands)

    return run
