"""One training step compiled for devices that are not here, and what it costs each of them."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax.config import ModelConfig, Phase, TrainConfig
from bert_jax.distributed.mesh import jit_step
from bert_jax.planning import synthetic, traffic
from bert_jax.planning.program import Collective, collectives

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device in a step.

    Attributes:
      parameters, moments: its parts of them; the moments are the optimizer's.
      batch: its rows, as they come from the host.
      temporaries: all that is made and dropped in the step: activations, gradients.
      program: the code.
      other: what lies beside: the layout's padding, the step's number, results.
      total: the compiler's own sum.
    """

    parameters: int
    moments: int
    batch: int
    temporaries: int
    program: int
    other: int
    total: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one step asks of each device.

    Attributes:
      num_parameters: of the whole model.
      memory: where the compiler gave the program; None where it found that it does not fit.
      total_memory: bytes, of which the compiler may say more than fit.
      flops: floating-point operations.
      bytes: moved from and to main memory.
      collectives: with what goes over the network.
    """

    num_parameters: int
    memory: Memory | None
    total_memory: int
    flops: float
    bytes: int
    collectives: list[Collective]


def measure(config: TrainConfig, phase: Phase, mesh: Mesh) -> Cost:
    """Compiles the train step of one phase for a mesh, and returns its cost."""
    like, rows, traced = _trace(config, phase, mesh)
    count = sum(x.size for x in jax.tree.leaves(like.params))
    # A CPU's code is made to be read, not run: the pass that takes longest is left out.
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if is_cpu else None
    try:
        compiled = traced.lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        used = _used(str(error), _bytes(like))
        if used is None:
            raise
        return Cost(count, None, used, 0.0, 0, [])
    memory = _memory(compiled.memory_analysis(), like, rows)
    text = compiled.as_text()
    # The compiler counts what is in a loop once.
    repeats = matrix_flops(traced.jaxpr) / matrix_flops(traced.jaxpr, repeats=False)
    return Cost(
        num_parameters=count,
        memory=memory,
        total_memory=memory.total,
        flops=compiled.cost_analysis()["flops"] * repeats,
        bytes=traffic.moved(text),
        collectives=collectives(text, mesh),
    )


def total_memory(stats: Any) -> int:
    """Returns the bytes of each device that `compiled.memory_analysis()` adds up to."""
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.generated_code_size_in_bytes
    )


def model_flops(model: ModelConfig, phase: Phase, *, pairs: bool) -> float:
    """Returns the floating-point operations of a row, forward and backward, as MFU counts them.

    `S (N (24 D² + 12 D F) + 12 N D S) + 6 P (D² + D V) + 6 D²` for N layers, rows of S tokens and
    P predictions: twice a multiplication for each weight that a token meets, three times over.
    Dropout and what is computed again are not counted.
    """
    size, layers, length = model.hidden_size, model.num_hidden_layers, phase.max_length
    layer = 24 * size**2 + 12 * size * model.intermediate_size + 12 * size * length
    head = 6 * phase.max_predictions * (size**2 + size * model.vocab_size)
    return float(length * layers * layer + head + 6 * size**2 * pairs)


def matrix_flops(jaxpr: Any, *, repeats: bool = True) -> float:
    """Returns the operations of a program's matrix products, on one device or on all of them.

    Args:
      jaxpr: the program.
      repeats: whether the passes of a loop count, or one of them. Of a loop of unknown length it is
        one anyway.
    """
    jaxpr, total = getattr(jaxpr, "jaxpr", jaxpr), 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            summed = math.prod(shape[axis] for axis in contracted)
            total += 2.0 * summed * math.prod(equation.outvars[0].aval.shape)
        times = params["length"] if name == "scan" and repeats else 1
        if name == "pallas_call":  # whose steps the compiler's count has too
            times = math.prod(params["grid_mapping"].grid)
        total += times * sum(matrix_flops(each, repeats=repeats) for each in _inner(params))
    return total


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(each, "jaxpr", each), "eqns"):
                yield each


def _trace(config: TrainConfig, phase: Phase, mesh: Mesh) -> tuple[Any, Any, Any]:
    """Returns the abstract state and rows, and the train step traced for them as train.py would."""
    run = synthetic.set_up(config, phase, mesh)
    jitted = jit_step(run.step, run.layout, run.layout.state, ("state", "metrics"))
    batch = synthetic.abstract_rows(config, phase, mesh)
    return run.like, batch, jitted.trace(run.like, batch)


def _memory(stats: Any, like: Any, rows: Any) -> Memory:
    parameters, moments, batch = _bytes(like.params), _bytes(like.opt_state), _bytes(rows)
    total = total_memory(stats)
    known = parameters + moments + batch + stats.temp_size_in_bytes
    return Memory(
        parameters=parameters,
        moments=moments,
        batch=batch,
        temporaries=stats.temp_size_in_bytes,
        program=stats.generated_code_size_in_bytes,
        other=total - known - stats.generated_code_size_in_bytes,
        total=total,
    )


def _bytes(tree: Any) -> int:
    """Returns the bytes of one device's part of a tree of abstract arrays."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _used(message: str, held: int) -> int | None:
    """Returns the bytes that a program asks for, of the TPU compiler's error that there are less.

    Args:
      message: of the error, in one of the compiler's two forms.
      held: bytes of the arguments, which one of the forms leaves out.
    """
    size = r"([\d.]+)([KMGT]?)"
    found = re.search(rf"Used {size} of [\d.]+[KMGT]? hbm", message)
    temporaries = re.search(rf"for HLO temporaries \({size}\) exceeds available HBM", message)
    for match, more in ((found, 0), (temporaries, held)):
        if match:
            return int(float(match[1]) * _UNITS[match[2]]) + more
    return None
