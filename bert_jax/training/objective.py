"""What a train step needs of an objective: its loss and its metrics, as weighted sums.

The sums of microbatches and of devices may be summed further; their means may not, where the
weights differ. `bert_jax.objectives` has one file for each objective.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float

from bert_jax.distributed.fsdp import SINGLE_DEVICE, Collectives
from bert_jax.models.layers import DropoutKey


@struct.dataclass
class WeightedSum:
    """A sum over examples, and the sum of their weights; the mean is `total / weight`."""

    total: Any
    weight: Any


# The metric whose total is the number of tokens without padding, and whose mean is their share.
TOKENS = "token_share"


def token_share(is_token: Bool[Array | np.ndarray, "B L"]) -> dict[str, WeightedSum]:
    """Return the metric `TOKENS`, without the sequences that complete a held-out batch."""
    count = is_token.any(axis=1).sum(dtype=jnp.float32)
    share = WeightedSum(is_token.sum(dtype=jnp.float32), count * is_token.shape[1])
    return {TOKENS: share}


# The arrays of a batch that a model takes. Only packed sequences have the positions and the starts,
# and only tasks whose tokens have roles have these.
_MODEL_INPUTS = ("input_ids", "token_type_ids", "attention_mask")
_MODEL_INPUTS += ("position_ids", "segment_starts", "token_roles")

Batch = Mapping[str, Any]
Metrics = Mapping[str, WeightedSum]
Weights = Mapping[str, Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure that an objective reports in its log, its tables and its curves.

    Attributes:
      name: of the metric. The name of a loss ends with "_loss", and the figures that are logged
        beside it begin as it does.
      title: in tables and curves, without the unit.
      form: the format of its number.
      baseline: what its baseline is; "" without one. Figures with a baseline are in the table at
        the end of a run.
      unit: of its number; "" without one.
    """

    name: str
    title: str
    form: str
    baseline: str = ""
    unit: str = ""

    @property
    def heading(self) -> str:
        """The title with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


@dataclasses.dataclass(frozen=True, eq=False)
class Objective(abc.ABC):
    """What a train step minimizes, for a model."""

    model: nn.Module

    @property
    def figures(self) -> Sequence[Figure]:
        """What a run reports of the metrics."""
        return ()

    @property
    def loss_weights(self) -> Mapping[str, float]:
        """The weight of each loss in the sum that is minimized, where it is not 1."""
        return {}

    def apply(self, params: Any, batch: Batch, dropout_key: Array | None, **arguments: Any) -> Any:
        """Return the model's output for a batch; without a key, without dropout.

        `arguments` are those that the model takes beside the inputs of an encoder.
        """
        inputs = {name: batch[name] for name in _MODEL_INPUTS if name in batch}
        key = None if dropout_key is None else DropoutKey(dropout_key, batch["index"])
        return self.model.apply({"params": params}, dropout_key=key, **{**inputs, **arguments})

    def apply_in_microbatches(
        self, params: Any, batch: Batch, dropout_key: Array | None, microbatches: int
    ) -> Any:
        """Return what `apply` does, in the memory of a microbatch."""
        if microbatches == 1:
            return self.apply(params, batch, dropout_key)
        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), dict(batch))
        outputs = jax.lax.map(lambda part: self.apply(params, part, dropout_key), parts)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)

    def at_progress(self, done: Array) -> "Objective":
        """Return the objective for a step, by the share of all steps before it."""
        return self

    def prepare(self, key: Array, batch: Batch) -> Batch:
        """Return the loader's batch as `loss` takes it, with everything random drawn."""
        return batch

    def gradient(
        self,
        params: Any,
        batch: Batch,
        dropout_key: Array | None,
        collectives: Collectives,
        microbatches: int,
    ) -> tuple[Any, Metrics]:
        """Return these sequences' share of the gradient, and their metrics, in microbatches."""
        # Of the global batch: any devices and microbatches give the same gradient.
        weights = collectives.psum(self.weights(batch))
        # Neighbours go to different microbatches, which run one after the other.
        size = len(batch["index"]) // microbatches if microbatches > 1 else None
        gradient = jax.grad(self.loss, has_aux=True)
        summed = optax.microbatch(gradient, argnums=1, microbatch_size=size)
        return summed(params, batch, weights, dropout_key)

    @abc.abstractmethod
    def weights(self, batch: Batch) -> Weights:
        """Return the divisor of each term of the loss; `loss` has that of the global batch."""

    @abc.abstractmethod
    def loss(
        self, params: Any, batch: Batch, weights: Weights, dropout_key: Array | None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Return these sequences' share of the loss, and their metrics; no key, no dropout."""


class PredictionObjective(Objective):
    """An objective of a fine-tuning task, whose metrics follow from the model's output."""

    @abc.abstractmethod
    def metrics(
        self, output: Array, labels: Array, collectives: Collectives = SINGLE_DEVICE, /
    ) -> Metrics:
        """Return these examples' share of the loss and of the accuracy."""
