"""What the encoder and the heads are made of; shape letters are those of `models.bert`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int, UInt32

from bert_jax.config import ModelConfig

ACTIVATIONS = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def param(
    module: nn.Module,
    name: str,
    init: nn.initializers.Initializer,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
) -> Array:
    """Declares a float32 parameter, with a logical axis for each dimension.

    This is the one place where parameters are made. `training.parallel` says how each axis is laid
    over devices.
    """
    init = nn.with_logical_partitioning(init, axes)
    return module.param(name, init, shape, jnp.float32)


def truncated_normal(stddev: float) -> nn.initializers.Initializer:
    """BERT's initializer: a normal cut at two `stddev`, which is its own before the cut.

    Source: `create_initializer` in google-research/bert `modeling.py`. Flax's initializer of the
    same name takes the stddev after the cut.
    """

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype)

    return init


class Dense(nn.Module):
    """A matrix product over the last dimension, plus a bias, in `config.dtype`."""

    config: ModelConfig
    shape: tuple[int, int]
    axes: tuple[str, str]

    @nn.compact
    def __call__(self, x: Float[Array, "... N"]) -> Float[Array, "... M"]:
        """Returns `x @ kernel + bias`."""
        dtype, init = jnp.dtype(self.config.dtype), truncated_normal(self.config.initializer_range)
        kernel = param(self, "kernel", init, self.shape, self.axes)
        bias = param(self, "bias", nn.initializers.zeros, self.shape[1:], self.axes[1:])
        return x.astype(dtype) @ kernel.astype(dtype) + bias.astype(dtype)


class LayerNorm(nn.Module):
    """Layer normalization with statistics in float32, returned in `config.dtype`."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns `x` with mean 0 and variance 1 over the last dimension, scaled and shifted."""
        scale = param(self, "scale", nn.initializers.ones, x.shape[-1:], ("embed",))
        bias = param(self, "bias", nn.initializers.zeros, x.shape[-1:], ("embed",))
        x = x.astype(jnp.float32)
        centered = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centered).mean(-1, keepdims=True)
        normal = centered * jax.lax.rsqrt(variance + self.config.layer_norm_eps)
        return (normal * scale + bias).astype(self.config.dtype)


class Dropout(nn.Module):
    """Dropout keyed by the row of the global batch and the place in it, not by the device.

    The bits are a hash of (key, row, place), so that they are the same for one device and for many,
    for the whole batch and for parts of it; and they are computed where they are used, for about as
    much as the product that they are used in. `rows` is None outside training: nothing is dropped.

    Attributes:
      rate: the share that is dropped.
      bounds: the largest shape of a row, where it is not the row's own: places are counted by it,
        so that a token's bits do not depend on how far its row is padded. The first is of no use.
    """

    rate: float
    bounds: tuple[int, ...] = ()

    @nn.compact
    def __call__(
        self, x: Float[Array, "B *rest"], rows: Int[Array, "B"] | None
    ) -> Float[Array, "B *rest"]:
        """Returns `x` with a share of `rate` set to zero and the others scaled to keep the mean."""
        if rows is None or self.rate == 0.0:
            return x
        bits = random_bits(self.make_rng("dropout"), rows, x.shape[1:], self.bounds)
        keep = bits >= jnp.uint32(round(self.rate * 2**32))
        return jnp.where(keep, x / (1.0 - self.rate), 0.0)


def random_bits(
    key: Array, rows: Int[Array, "B"], shape: tuple[int, ...], bounds: tuple[int, ...] = ()
) -> UInt32[Array, "B *shape"]:
    """Returns 32 random bits for each element of each row, a function of key, row and element.

    Two passes of a 32-bit mixer, between which a second word of the row's key is added: two rows
    whose first words lie close together do not get shifted copies of the same bits.

    Args:
      key: a PRNG key.
      rows: which row of the global batch each is.
      shape: of a row; at most 2**32 elements.
      bounds: the largest shape, by which elements are counted; `shape` where there is none.
    """
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    first = _mix(_mix(rows.astype(jnp.uint32) + key[0]) ^ key[1])
    second = _mix(first + jnp.uint32(0x9E3779B9))
    place = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(shape):
        stride = math.prod((bounds or shape)[axis + 1 :])
        step = jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        place = place + step if size > 1 else place
    lift = (..., *(None,) * len(shape))
    return _mix(_mix(place + first[lift]) ^ second[lift])


def _mix(x: UInt32[Array, "*any"]) -> UInt32[Array, "*any"]:
    """A bijection of 32 bits with little bias (C. Wellons' lowbias32, from a search of mixers)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
