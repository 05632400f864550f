"""What one train step costs each device: memory, operations, and bytes sent."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bert_jax.config import ModelConfig, ParallelConfig, TrainConfig
from bert_jax.config.schedule import Stage
from bert_jax.distributed.devices import kept_activations, shard_bytes, total_memory
from bert_jax.distributed.fsdp import num_batch_shards
from bert_jax.models.architecture import architecture
from bert_jax.objectives import make_objective
from bert_jax.planning.synthetic import abstract_batch, train_step
from bert_jax.training.setup import Setup

_FLOAT32 = 4  # bytes


def estimate_cost(config: TrainConfig, stage: Stage, setup: Setup) -> dict[str, Any]:
    """Return what `compile_cost` does, by formula, for devices of which only the names are known.

    The temporaries are the gradients and the activations that are kept for them; with microbatches
    also the gradients' sum; the logits; and of ZeRO 3 the gathered parameters, which the gradients
    need again unless a layer is recomputed. They lack what the compiler adds. The total of
    sixteen steps was 0.91 to 1.01 of that on an H200 (benchmarks/records/2026-11-28-h200).
    """
    state, mesh = setup.abstract_state, setup.layout.mesh
    microbatches = config.optimizer.microbatches
    shapes = [x.shape for x in jax.tree.leaves(state.params)]
    # With ZeRO 1 the sum of the gradients is scattered, and not those of each microbatch.
    is_whole = config.parallel.zero == 1
    layout = setup.layout.params if is_whole else setup.layout.gradients
    gradients = sum(
        _FLOAT32 * math.prod(sharding.shard_shape(shape))
        for shape, sharding in zip(shapes, jax.tree.leaves(layout), strict=True)
    )
    kept = sum(
        kept_activations(encoder, stage, microbatches, mesh, recomputes=encoder.remat)
        + _kept_inputs(encoder, stage, microbatches, mesh)
        for encoder in make_objective(config).encoders.values()
    )
    sequences = stage.batch_size / (microbatches * num_batch_shards(mesh))
    # The logits of the masked positions and, in the dtype of the matmuls, their gradients.
    logits = sequences * stage.max_predictions * config.model.vocab_size / mesh.shape["tensor"]
    width = jnp.dtype(config.model.dtype).itemsize
    kept += logits * (_FLOAT32 + width)
    if config.parallel.zero == 3 and mesh.shape["fsdp"] > 1 and not config.model.remat:
        kept += width * sum(map(math.prod, shapes)) / mesh.shape["tensor"]
    memory = {
        "parameters": shard_bytes(state.params),
        "moments": shard_bytes(state.opt_state),
        "batch": shard_bytes(abstract_batch(config, stage, mesh)),
        "temporaries": int(gradients * (1 + (microbatches > 1)) + kept),
    }
    memory["total"] = sum(memory.values())
    return {
        "parameters": sum(map(math.prod, shapes)),
        "memory": memory,
        "error": "",
        "flops": None,  # only the compiler counts those of a device
    }


def _kept_inputs(model: ModelConfig, stage: Stage, microbatches: int, mesh: Mesh) -> float:
    """Return the bytes that a device keeps of an encoder beside the operands of its matmuls.

    They are the inputs of norms and activations, with a gate, and which elements were dropped.
    """
    if model.remat:
        return 0.0
    gates = architecture(model).feed_forward_inputs
    inner = gates * model.intermediate_size / mesh.shape["tensor"]
    dropped = 2 * model.hidden_size * (model.hidden_dropout_prob > 0)  # a byte each
    tokens = stage.batch_size * stage.max_length / (microbatches * num_batch_shards(mesh))
    width = (2 * model.hidden_size + inner) * jnp.dtype(model.dtype).itemsize + dropped
    return tokens * model.num_hidden_layers * width


def compile_cost(config: TrainConfig, stage: Stage, setup: Setup) -> dict[str, Any]:
    """Return the compiler's "memory" (None if it does not fit), "error" and "flops" of a device."""
    mesh = setup.layout.mesh
    batch = abstract_batch(config, stage, mesh)
    step = train_step(setup, config, stage)
    state = setup.abstract_state
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    cost: dict[str, Any] = {"parameters": parameters, "memory": None, "error": "", "flops": 0.0}
    # A CPU's program is measured, not run, so the slowest pass of its compiler is skipped.
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if is_cpu else None
    try:
        compiled = step.lower(state, batch).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return cost | {"error": " ".join(str(error).split())[:300]}
    stats = compiled.memory_analysis()
    memory = {
        "parameters": shard_bytes(state.params),
        "moments": shard_bytes(state.opt_state),
        "batch": shard_bytes(batch),
        "temporaries": stats.temp_size_in_bytes,
        "program": stats.generated_code_size_in_bytes,
    }
    total = total_memory(stats)
    memory |= {"other": total - sum(memory.values()), "total": total}
    return cost | {"memory": memory, "flops": compiled.cost_analysis()["flops"]}


def model_flops(config: TrainConfig, stage: Stage) -> float | None:
    """Return the operations of a sequence, forward and backward, by docs/speed.md's formula.

    None for an architecture that does not say what its encoder computes.
    """
    objective, length = make_objective(config), stage.max_length
    counted = [
        architecture(each).encoder_flops(each, length) for each in objective.encoders.values()
    ]
    if None in counted:
        return None
    return sum(filter(None, counted)) + objective.head_flops(stage)


def sent_bytes(
    config: TrainConfig, stage: Stage, parallel: ParallelConfig, setup: Setup
) -> list[dict[str, Any]]:
    """Return "collective", "axes" and "bytes" that a device sends in a step (docs/devices.md).

    The sizes of the mesh are those of `parallel`; `setup` has the shapes of the parameters, and
    says along which axes of a mesh they can be divided.
    """
    model, data, fsdp, tensor = config.model, parallel.data, parallel.fsdp, parallel.tensor
    width = jnp.dtype(model.dtype).itemsize
    # With ZeRO stage 3, each microbatch gathers the parameters and scatters its gradients.
    passes = config.optimizer.microbatches if parallel.zero == 3 else 1
    gathered = sharded = replicated = 0.0  # bytes
    parameters = jax.tree.leaves_with_path(setup.abstract_state.params)
    shardings = jax.tree.leaves(setup.layout.gradients)
    for (path, leaf), sharding in zip(parameters, shardings, strict=True):
        axes = sharding.spec
        size = leaf.size / (tensor if "tensor" in axes else 1)
        if "fsdp" in axes and fsdp > 1:
            again = model.remat and "layer_" in jax.tree_util.keystr(path[:2])
            gathered += size * (_FLOAT32 if parallel.zero == 1 else width * (1 + again))
            sharded += size * _FLOAT32
        else:
            replicated += size * _FLOAT32
    sequences = stage.batch_size / (data * fsdp)
    tokens, encoders = sequences * stage.max_length, make_objective(config).encoders.values()
    # Recomputing a layer repeats those whose sums it needs: the last only for a normalization.
    repeated = 1 if architecture(model).normalizes_inputs else 2
    sums = 4 + repeated * model.remat  # of a layer
    summed = sum(sums * c.num_hidden_layers * tokens * c.hidden_size * width for c in encoders)
    embedded = architecture(model).embedding_size(model)
    summed += len(encoders) * tokens * embedded * _FLOAT32
    summed += sequences * stage.max_predictions * embedded * width

    def ring(devices: int) -> float:
        return (devices - 1) / devices  # an all-reduce is a reduce-scatter and an all-gather

    batch_axes = tuple(axis for axis, n in (("data", data), ("fsdp", fsdp)) if n > 1)
    sent = [
        ("all-gather of parameters", ("fsdp",), passes * gathered * ring(fsdp)),
        ("reduce-scatter of gradients", ("fsdp",), passes * sharded * ring(fsdp)),
        ("all-reduce of gradient shards", ("data",), 2 * sharded / fsdp * ring(data)),
        ("all-reduce of gradients", batch_axes, 2 * replicated * ring(data * fsdp)),
        ("all-reduce of activations", ("tensor",), 2 * summed * ring(tensor)),
    ]
    return [{"collective": name, "axes": axes, "bytes": n} for name, axes, n in sent if n]
