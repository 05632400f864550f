"""The device mesh: the sharding of each parameter and batch, and steps jitted for it.

`compile_step` is the one place where `parallel.mode` "mesh" and "pmap" differ.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.linen import spmd
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax import console
from bert_jax.config import ModelConfig, ParallelConfig
from bert_jax.distributed import fsdp, hosts
from bert_jax.distributed.devices import describe_memory, step_memory
from bert_jax.errors import UserError, refuse
from bert_jax.models.architecture import architecture
from bert_jax.models.attention import attention_route
from bert_jax.models.fused_attention import check_attention

AXES = ("data", "fsdp", "tensor")

# On a GPU, matmuls by cuBLAS alone: it adds biases, residuals and GELU to the products that it
# writes. Those of Triton are as fast, but around them each is a pass over memory of its own.
_COMPILER_OPTIONS = {"gpu": {"xla_gpu_enable_triton_gemm": False}}


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Trace and call programs with settings of JAX that the host program does not choose.

    With another value of the first, a seed has other random numbers, and of the second, other
    rounding. The others would refuse the models' broadcasting and numbers of several dtypes, a step
    that is compiled before it is called, and arrays from the host. How exact products of float32
    are, `jax_default_matmul_precision`, is the user's choice.
    """
    with (
        jax.threefry_partitionable(True),
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
    ):
        yield


def make_mesh(config: ParallelConfig | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """Return the mesh of data × fsdp × tensor over `devices`, by default all."""
    config = config or ParallelConfig()
    devices = jax.devices() if devices is None else devices
    sizes = {"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor}
    known = math.prod(size for size in sizes.values() if size != -1)
    shape = tuple(len(devices) // known if n == -1 else n for n in sizes.values())
    if math.prod(shape) != len(devices):
        axes = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(
            f"parallel asks for {axes}, which does not make {len(devices)} devices; "
            "change one, or set it to -1 for all that the others leave"
        )
    here = [each for each in devices if each.process_index == jax.process_index()]
    tensor, on_host = shape[-1], len(here or devices)
    refuse(
        tensor > 1 and tensor % on_host and on_host % tensor,
        f"parallel.tensor {tensor} and the {on_host} devices of a host do not divide one another",
        fix="change it, so that each part of a batch is on whole hosts or within one",
    )
    try:
        ordered = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (ValueError, RuntimeError) as error:  # of shapes that JAX does not place
        axes = " × ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True))
        raise UserError(
            f"the devices are not connected as parallel needs them for {axes}; change one"
        ) from error
    return Mesh(ordered, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_model(
    model: ModelConfig,
    mesh: Mesh,
    lengths: Sequence[int],
    *,
    packed: bool = False,
    owner: str = "model.",
) -> None:
    """Refuse a model that the mesh does not divide, or whose attention cannot take the lengths.

    `owner` is what the names of its sizes begin with in messages.
    """
    platform, windows = mesh.devices.flat[0].platform, {*architecture(model).windows(model)}
    for window, length in itertools.product(windows, lengths):
        check_attention(model, platform, length, window=window, packed=packed)
    if hosts.count() > 1:  # each tries the kernels on its own device
        route = partial(attention_route, model, platform, packed=packed)
        hosts.check_same(
            {
                f"the attention of {length} tokens": [
                    route(length, window=window, training=training).name
                    for window, training in itertools.product(sorted(windows), (True, False))
                ]
                for length in lengths
            },
            "set model.attention to plain, or repair the host on which a kernel fails",
        )
    split = dict.fromkeys(("num_attention_heads", "intermediate_size", "vocab_size"), "tensor")
    split |= dict.fromkeys(("hidden_size", "embedding_size"), "fsdp")
    for name, axis in split.items():
        size, parts = getattr(model, name, 0), mesh.shape[axis]
        if size % parts:
            fix = f"set parallel.{axis} to {math.gcd(size, parts)}"
            if name == "vocab_size":
                fix += f", or, in a new model, the size to {-(-size // parts) * parts}"
            raise UserError(
                f"{owner}{name} {size} is not a multiple of parallel.{axis} {parts}; {fix}"
            )


def process_indices(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Return the indices of a batch that this process's devices hold, rising; where needed, all."""
    sharding = NamedSharding(mesh, P(fsdp.BATCH_AXES))
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    slices = {index[0].indices(batch_size)[:2] for index in indices if index}
    return np.concatenate([np.arange(first, end) for first, end in sorted(slices)])


def check_divides(batch_size: int, microbatches: int, mesh: Mesh, per_sequence: int = 1) -> None:
    """Refuse a batch that the devices, and the microbatches, do not divide evenly.

    A sequence, which may hold several of its examples, is not divided.
    """
    devices = fsdp.num_batch_shards(mesh)
    parts = devices * microbatches * per_sequence
    if batch_size % parts:
        each = f" times {microbatches} microbatches" if microbatches > 1 else ""
        each += f" times {per_sequence} examples a sequence" if per_sequence > 1 else ""
        raise UserError(
            f"data.batch_size {batch_size}, or that of a phase, is not a multiple of the {devices} "
            f"devices of parallel's data × fsdp{each}; use "
            f"{max(1, round(batch_size / parts)) * parts}"
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shardings of a train state, its parameters and their gradients: trees, or one for all."""

    mesh: Mesh
    state: Any
    params: Any
    gradients: Any  # as those of the optimizer's moments


def replicated_layout(mesh: Mesh) -> Layout:
    """Return the layout in which every device has a copy of everything."""
    copied = NamedSharding(mesh, P())
    return Layout(mesh, copied, copied, copied)


def make_layout(
    new_state: Callable[[jax.Array], Any], key: jax.Array, mesh: Mesh, config: ParallelConfig
) -> tuple[Any, Layout]:
    """Return shapes and shardings of the state that `new_state(key)` returns, and its layout.

    It is traced once: `init_sharded` of the same function, with a key of this kind, finds it.
    """
    with _init_settings():
        boxed = jax.jit(new_state).eval_shape(key)
    specs = nn.get_partition_spec(boxed)
    split = spmd.logical_to_mesh_sharding(specs, mesh, list(fsdp.RULES.items()))
    params = split.params
    if config.zero == 1:
        rules = [(name, axis if axis == "tensor" else None) for name, axis in fsdp.RULES.items()]
        params = spmd.logical_to_mesh_sharding(specs.params, mesh, rules)
    state = split.replace(params=params)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), nn.unbox(boxed), state
    )
    return abstract, Layout(mesh, state, params, split.params)


def init_sharded(new_state: Callable[[jax.Array], Any], shardings: Any, key: jax.Array) -> Any:
    """Return a new state, each shard of which its device computes."""
    with _init_settings():
        return nn.unbox(jax.jit(new_state, out_shardings=shardings)(key))


@contextlib.contextmanager
def _init_settings() -> Iterator[None]:
    """Trace and compile what makes random parameters with settings of its own.

    On a GPU the same bits come from a kernel of JAX's. Compiled anew for each parameter, they took
    a minute for BERT-large, more than its train step.
    """
    before = jax.config.jax_threefry_gpu_kernel_lowering  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_threefry_gpu_kernel_lowering", True)
    try:
        with own_settings():
            yield
    finally:
        jax.config.update("jax_threefry_gpu_kernel_lowering", before)


def shard_batch(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Return the global batch on the devices, from this process's slices of it."""
    sharding = NamedSharding(mesh, P(fsdp.BATCH_AXES))
    return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}


def compile_step(
    step: Callable[..., Any], mode: str, layout: Layout, outputs: Any
) -> Callable[[Any, Mapping[str, np.ndarray]], Any]:
    """Compile a step of `training.step`; its outputs are "state", "metrics" or "per_example".

    The last is for a mesh alone. A training step there prints the memory that it takes, once it is
    compiled.
    """
    updates, mesh = "state" in outputs, layout.mesh
    name = "the training step" if updates else "the forward pass"
    is_pmap = mode == "pmap"
    prepare: Any = _pmap_step(step, mesh, outputs) if is_pmap else jit_step(step, layout, outputs)
    put: Callable[[Mapping[str, np.ndarray]], Any] = dict if is_pmap else partial(shard_batch, mesh)
    programs, most = {}, 0

    @own_settings()
    def run(state: Any, batch: Mapping[str, np.ndarray]) -> Any:
        nonlocal most
        shapes, placed = tuple(x.shape for x in batch.values()), put(batch)
        if program := programs.get(shapes):
            return program(state, placed)
        jax.block_until_ready(state)  # the time of the steps before is not that of compilation
        with console.working(f"compiling {name}") as work:
            work.note = " × ".join(map(str, shapes[0]))
            program = prepare
            if updates and not is_pmap:
                program = prepare.lower(state, placed).compile()
                needed = step_memory(program.memory_analysis(), mesh.local_devices)
                if needed > most:
                    hosts.print_on_main(f"memory     {describe_memory(needed, mesh)}")
                    most = needed
            programs[shapes] = program
            return program(state, placed)

    return run


def jit_step(step: Callable[..., Any], layout: Layout, outputs: Any) -> Any:
    """Return `step` jitted for the mesh; the arguments are those of `compile_step`."""
    mesh, updates = layout.mesh, "state" in outputs
    batch, copied = NamedSharding(mesh, P(fsdp.BATCH_AXES)), NamedSharding(mesh, P())
    shardings = {"state": layout.state, "per_example": batch, "metrics": copied}
    axes = fsdp.BATCH_AXES if fsdp.num_batch_shards(mesh) > 1 else ()
    collectives = fsdp.MeshCollectives(axes, mesh, layout.params, layout.gradients)
    return jax.jit(
        partial(step, collectives=collectives),
        in_shardings=(layout.state if updates else layout.params, batch),
        out_shardings=jax.tree.map(lambda kind: shardings[kind], outputs),
        donate_argnums=(0,) if updates else (),
        compiler_options=_COMPILER_OPTIONS.get(mesh.devices.flat[0].platform),
    )


def _pmap_step(
    step: Callable[..., Any], mesh: Mesh, outputs: Any
) -> Callable[[Any, Mapping[str, np.ndarray]], Any]:
    assert "per_example" not in outputs  # of which each device would have a part
    mapped = jax.pmap(
        partial(step, collectives=fsdp.Collectives(("data",))),
        axis_name="data",
        in_axes=(None, 0),  # pyright: ignore[reportArgumentType]
        out_axes=None,  # pyright: ignore[reportArgumentType]
        donate_argnums=(0,) if "state" in outputs else (),
        devices=list(mesh.devices.flat),
    )
    devices = mesh.local_mesh.size

    def run(state: Any, batch: Mapping[str, np.ndarray]) -> Any:
        shards = {k: v.reshape(devices, -1, *v.shape[1:]) for k, v in batch.items()}
        return mapped(state, shards)

    return run
