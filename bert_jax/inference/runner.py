"""The engine of inference: batches of sequences of similar lengths, on all local devices."""

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from bert_jax.batches import Batch
from bert_jax.batches.buckets import Batcher
from bert_jax.batches.token_sequences import FILL, TokenSequences
from bert_jax.distributed.fsdp import Collectives
from bert_jax.distributed.mesh import compile_step, make_mesh, replicated_layout
from bert_jax.errors import UserError, refuse

# The lengths that sequences are padded to, then multiples of the last: each compiles a program.
_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_LONG_MULTIPLE = 256
_BATCH_TOKENS = 4096

# Runs a batch, and returns outputs on the devices.
Step = Callable[[Batch], Any]
Arrays = Mapping[str, jax.Array]  # a batch within a step


class Sequences:
    """The sequences of a user's texts.

    Attributes:
      lengths: the number of tokens of each, [n].
      max_length: what a sequence is padded to at most.
    """

    def __init__(self, sequences: TokenSequences, max_length: int, **columns: np.ndarray):
        """`columns` are further arrays of a batch, [n, ...]."""
        self._sequences, self._columns = sequences, columns
        self.lengths, self.max_length = sequences.lengths, max_length

    def batch(self, indices: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Return `input_ids`, `token_type_ids` and `attention_mask`, [B, length], and columns."""
        columns = {name: column[indices] for name, column in self._columns.items()}
        return self._sequences.padded(indices, length) | columns

    def all(self, length: int | None = None) -> dict[str, np.ndarray]:
        """Return all sequences in one batch, by default of a length that others share."""
        length = length or padded_length(int(self.lengths.max()), self.max_length)
        return self.batch(np.arange(len(self.lengths)), length)


Inputs = Sequences | Batcher  # sequences that can be batched


class Runner:
    """The parameters of a model on all local devices, and the functions that are compiled there."""

    def __init__(self, params: Any):
        refuse(not params, "the model has no parameters", fix="give params that are not empty")
        _check_finite(params)
        mesh = make_mesh(devices=jax.local_devices())
        self.num_devices = mesh.size
        self._layout = replicated_layout(mesh)
        self._params = jax.device_put(params, self._layout.params)
        self._steps: dict[Hashable, Step] = {}

    def compile(self, name: Hashable, function: Callable[[Any, Any], Any]) -> Step:
        """Compile `function(params, batch)`, whose outputs have an entry for each sequence.

        A function with the same name is compiled once.
        """

        def step(params: Any, batch: Batch, collectives: Collectives) -> Any:
            def run_shard(params: Any, _: Any, batch: Batch) -> Any:
                return function(params, batch)

            return collectives.run(run_shard, "per_example")(params, (), batch)

        return self.compile_step(name, step, "per_example")

    def compile_step(self, name: Hashable, step: Callable[..., Any], outputs: Any) -> Step:
        """Compile `step(params, batch, collectives)` of `training.step`, once for each name."""
        if name not in self._steps:
            compiled = compile_step(step, "mesh", self._layout, outputs)
            self._steps[name] = functools.partial(compiled, self._params)
        return self._steps[name]

    def run(
        self, step: Step, inputs: Inputs, batch_size: int | None = None
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield the indices of some sequences and the outputs for them; see `run_batches`.

        A batch has `batch_size` sequences at most.
        """
        return _run(step, inputs, _batches_of_tokens(inputs, self.num_devices, batch_size))

    def call(self, step: Step, batch: Mapping[str, np.ndarray]) -> Any:
        """Return the outputs of one batch, of any size, as NumPy arrays."""
        size = len(next(iter(batch.values())))
        padding = -size % self.num_devices
        padded = {
            name: np.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1))
            for name, array in batch.items()
        }
        return jax.tree.map(lambda array: np.asarray(array)[:size], step(padded))


def _check_finite(params: Any) -> None:
    """Refuse parameters of which a model computes no numbers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        # The sum is as fast as a copy, and finite of finite numbers that do not overflow.
        with np.errstate(all="ignore"):
            is_finite = np.isfinite(np.sum(leaf)) or np.isfinite(leaf).all()
        if not is_finite:
            raise UserError(
                f"the parameter {jax.tree_util.keystr(path)} has NaN or infinite numbers; take "
                "another checkpoint, or train again with a lower learning rate"
            )


def apply(module: nn.Module, params: Any, batch: Mapping[str, Any], **options: Any) -> Any:
    """Return the output of a module for the arrays of a batch, by their names."""
    function: Any = module.apply
    return function({"params": params}, **batch, **options)


def run_batches(step: Step, inputs: Inputs, batch_size: int) -> Iterator[tuple[np.ndarray, Any]]:
    """Yield the indices of some sequences, and the step's outputs for them.

    The longest come first. Every batch has `batch_size` sequences: outputs that have an entry for
    each have those of padding at the end. Outputs are on the devices, which run the next batch
    while the caller reads them.
    """
    order = np.argsort(-inputs.lengths, kind="stable")
    batches = (
        (order[start : start + batch_size], batch_size)
        for start in range(0, len(order), batch_size)
    )
    return _run(step, inputs, batches)


def _batches_of_tokens(
    inputs: Inputs, multiple: int, batch_size: int | None
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the indices of batches of about as many tokens each, and their padded sizes."""
    order, start = np.argsort(-inputs.lengths, kind="stable"), 0
    while start < len(order):
        length = padded_length(int(inputs.lengths[order[start]]), inputs.max_length)
        most = max(1, _BATCH_TOKENS // length)
        indices = order[start : start + min(most, batch_size or most)]
        start += len(indices)
        # All batches of a length have one size, but for the very last.
        size = len(indices) if start < len(order) else 1 << (len(indices) - 1).bit_length()
        yield indices, -(-size // multiple) * multiple


def _run(
    step: Step, inputs: Inputs, batches: Iterable[tuple[np.ndarray, int]]
) -> Iterator[tuple[np.ndarray, Any]]:
    running = None
    for indices, size in batches:
        length = padded_length(int(inputs.lengths[indices].max()), inputs.max_length)
        padded = np.pad(indices, (0, size - len(indices)), constant_values=FILL)
        started = indices, step(inputs.batch(padded, length))
        if running:  # the device computes this batch while the caller reads the one before
            yield running
        running = started
    if running:
        yield running


def padded_length(length: int, max_length: int) -> int:
    """Return what to pad sequences of a length to: one of few, as each compiles a program.

    >>> padded_length(20, max_length=512), padded_length(20, max_length=22)
    (24, 22)
    """
    rounded_up = -(-length // _LONG_MULTIPLE) * _LONG_MULTIPLE
    return min(next((each for each in _LENGTHS if each >= length), rounded_up), max_length)
