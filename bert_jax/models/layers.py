"""What the encoder and the heads are made of; shape letters are those of `models.bert`."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from bert_jax.config import ModelConfig
from bert_jax.models.matmul import affine

ACTIVATIONS = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


# How a parameter is read: (value, its logical axes, the type that it is used in) -> the value.
Reader = Callable[[Array, tuple[str, ...], str], Array]
_READER: contextvars.ContextVar[Reader | None] = contextvars.ContextVar("reader", default=None)


@contextlib.contextmanager
def parameter_reader(reader: Reader | None) -> Iterator[None]:
    """Within it, modules that are applied get what `reader`, if there is one, makes of each.

    So a parameter of which each device holds a part is put together where it is used, and the
    modules need not know.
    """
    token = _READER.set(reader)
    try:
        yield
    finally:
        _READER.reset(token)


def param(
    module: nn.Module,
    name: str,
    init: nn.initializers.Initializer,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    dtype: str = "float32",
) -> Array:
    """Declares a float32 parameter, with a logical axis for each dimension.

    This is the one place where parameters are made and read. `training.parallel` says how each axis
    is laid over devices.

    Args:
      module: whose it is.
      name: in the module.
      init: its initializer.
      shape: of the whole parameter.
      axes: a name for each dimension.
      dtype: the type that it is used in. The value is float32, and may have the digits of that type
        already: what is not cast to it goes through `round_to_dtype`.
    """
    reader = _READER.get()
    if reader and not module.is_initializing():
        return reader(module.get_variable("params", name), axes, dtype)
    init = nn.with_logical_partitioning(init, axes)
    return module.param(name, init, shape, jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def round_to_dtype(value: Array, dtype: str) -> Any:
    """Returns float32 with the digits of another type; its gradient is not rounded."""
    if dtype == "float32":
        return value
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(value, kind.nexp, kind.nmant)


def _round_forward(value: Array, dtype: str) -> tuple[Array, None]:
    return round_to_dtype(value, dtype), None


def _round_backward(_: str, __: None, gradient: Array) -> tuple[Array]:
    return (gradient,)


round_to_dtype.defvjp(_round_forward, _round_backward)


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

    def setup(self) -> None:
        c = self.config
        init, zeros = truncated_normal(c.initializer_range), nn.initializers.zeros
        self.kernel = param(self, "kernel", init, self.shape, self.axes, c.dtype)
        self.bias = param(self, "bias", zeros, self.shape[1:], self.axes[1:], c.dtype)

    def __call__(self, x: Float[Array, "... N"]) -> Float[Array, "... M"]:
        """Returns `x @ kernel + bias`."""
        return affine(x.astype(self.config.dtype), self.kernel, self.bias)


class LayerNorm(nn.Module):
    """Layer normalization with statistics in float32, returned in `config.dtype`."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns `x` with mean 0 and variance 1 over the last dimension, scaled and shifted."""
        scale = param(self, "scale", nn.initializers.ones, x.shape[-1:], ("embed",))
        bias = param(self, "bias", nn.initializers.zeros, x.shape[-1:], ("embed",))
        found: Any = _normalized(x, scale, bias, self.config.layer_norm_eps)
        return found.astype(self.config.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normalized(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    return _normalized_forward(x, scale, bias, eps)[0]


def _normalized_forward(x: Array, scale: Array, bias: Array, eps: float) -> tuple[Array, Any]:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    centered = wide - mean
    inverse = jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + eps)
    return centered * inverse * scale + bias, (x, mean, inverse, scale)


def _normalized_backward(_: float, saved: Any, gradient: Array) -> tuple[Array, Array, Array]:
    x, mean, inverse, scale = saved
    normal = (x.astype(jnp.float32) - mean) * inverse
    rows = (-1, x.shape[-1])
    of_scale = (gradient * normal).reshape(rows).sum(0)
    of_bias = gradient.reshape(rows).sum(0)
    scaled = gradient * scale
    along = scaled.mean(-1, keepdims=True) + normal * (scaled * normal).mean(-1, keepdims=True)
    return (inverse * (scaled - along)).astype(x.dtype), of_scale, of_bias


_normalized.defvjp(_normalized_forward, _normalized_backward)


@struct.dataclass
class DropoutKey:
    """What dropout is keyed to: a PRNG key, and the place of each row in the global batch.

    Attributes:
      key: of the step, and then of the place in the model.
      indices: [B].
    """

    key: Any
    indices: Any

    def fold(self, place: int | Array) -> "DropoutKey":
        """Returns the key of one of several places."""
        return self.replace(key=jax.random.fold_in(self.key, place))  # pyright: ignore


class Dropout(nn.Module):
    """Dropout keyed by the row of the global batch and the place in it, not by the device.

    The bits are a hash of (key, row, place), so that they are the same for one device and for many,
    for the whole batch and for parts of it; and they are computed where they are used, for about as
    much as the product that they are used in. The key is None outside training: nothing is dropped.

    Attributes:
      rate: the share that is dropped.
      bounds: the largest shape of a row, where it is not the row's own: places are counted by it,
        so that a token's bits do not depend on how far its row is padded. The first is of no use.
    """

    rate: float
    bounds: tuple[int, ...] = ()

    @nn.compact
    def __call__(
        self, x: Float[Array, "B *rest"], key: DropoutKey | None
    ) -> Float[Array, "B *rest"]:
        """Returns `x` with a share of `rate` set to zero and the others scaled to keep the mean."""
        return apply_dropout(x, key, self.rate, self.bounds)


def apply_dropout(
    x: Array, key: DropoutKey | None, rate: float, bounds: tuple[int, ...] = ()
) -> Array:
    """Does what `Dropout` does."""
    if key is None or rate == 0.0:
        return x
    bits = random_bits(key.key, key.indices, x.shape[1:], bounds)
    return jnp.where(keep_mask(bits, rate), x / (1.0 - rate), 0.0)


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
    first, second = sequence_keys(key, rows)
    place = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(shape):
        stride = math.prod((bounds or shape)[axis + 1 :])
        step = jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        place = place + step if size > 1 else place
    lift = (..., *(None,) * len(shape))
    return hash_counter(place, first[lift], second[lift])


def sequence_keys(
    key: Array, rows: Int[Array, "B"]
) -> tuple[UInt32[Array, "B"], UInt32[Array, "B"]]:
    """Returns the two words that each row's bits are made of."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    first = _mix(_mix(rows.astype(jnp.uint32) + key[0]) ^ key[1])
    return first, _mix(first + jnp.uint32(0x9E3779B9))


def hash_counter(place: Array, first: Array, second: Array) -> Array:
    """Returns the bits of a place in a row, of the row's words; all are uint32."""
    return _mix(_mix(place + first) ^ second)


def keep_mask(bits: Array, rate: float) -> Array:
    """Returns whether dropout of this rate keeps the elements that have these bits."""
    return bits >= jnp.uint32(round(rate * 2**32))


def _mix(x: UInt32[Array, "*any"]) -> UInt32[Array, "*any"]:
    """A bijection of 32 bits with little bias (C. Wellons' lowbias32, from a search of mixers)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
