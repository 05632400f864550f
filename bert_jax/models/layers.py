"""Layers of the encoder and the heads: parameters, dense, LayerNorm and dropout.

Shape letters are those of `models.bert`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.experimental.layout import Layout, with_layout_constraint
from jax.lax import optimization_barrier
from jaxtyping import Array, Float, Int, UInt32

from bert_jax.config import ModelConfig
from bert_jax.models.matmul import dense_group
from bert_jax.models.target import target


def _recomputed(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return a function whose derivative is computed anew from the operands.

    By itself the compiler writes what the derivative shares with the function to memory in the
    forward pass, which takes longer than to compute it again. A CPU computes both in float32: in
    bfloat16 it would round the result of each operation.
    """

    def compute(*operands: Array) -> Array:
        if target().platform != "cpu":
            return function(*operands)
        result, dtype = function(*(x.astype(jnp.float32) for x in operands)), operands[0].dtype
        # Rounded by an operation of its own: with the mere conversion the compiler computes this in
        # one kernel with the next matmul, which is slower.
        return _round(result, dtype).astype(dtype)

    again = jax.custom_jvp(compute)

    @again.defjvp
    def _(operands: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
        # The barrier keeps the compiler from finding that both compute the same.
        derivative = jax.jvp(compute, optimization_barrier(operands), tangents)[1]
        return compute(*operands), derivative

    return again


def _gelu(x: Array) -> Array:
    if target().platform != "cpu":
        return jax.nn.gelu(x, approximate=False)
    # As PyTorch has it. JAX's form, by `erfc`, takes twice as long on a CPU.
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


_FUNCTIONS = {
    "gelu": _gelu,
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def _gated(function: Callable[[Array], Array], x: Array, gate: Array) -> Array:
    return function(x) * gate


ACTIVATIONS = {
    name: jax.named_call(_recomputed(function), name="activation")
    for name, function in _FUNCTIONS.items()
}
# Of a product with a gate.
GATED_ACTIVATIONS = {
    name: jax.named_call(_recomputed(partial(_gated, function)), name="activation")
    for name, function in _FUNCTIONS.items()
}

_ODD = 0x9E3779B9  # 2**32 divided by the golden ratio
# The score of a masked key, of google-research/bert `modeling.py`. It is finite: the softmax of a
# sequence of padding alone is no NaN.
MASKED_SCORE = -10000.0


def param(
    module: nn.Module,
    name: str,
    init: nn.initializers.Initializer,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    dtype: str = "float32",
) -> Array:
    """Declare or read a float32 parameter, with a logical name for each axis.

    Every parameter goes through this function; `distributed.fsdp` maps the axes to the mesh. The
    target's `read_parameter` may round the value to `dtype`, in which it is used: a use that does
    not cast the value calls `round_to_dtype`.
    """
    read = target().read_parameter
    if read and not module.is_initializing():
        return read(module.get_variable("params", name), axes, dtype)
    init = nn.with_logical_partitioning(init, axes)
    return module.param(name, init, shape, jnp.float32)


def round_to_dtype(value: Array, dtype: str) -> Array:
    """Return float32 values rounded to another dtype; the gradient is not rounded."""
    if dtype == "float32":
        return value
    # The difference is exact, so the sum is rounded, with the gradient of `value`.
    return value + jax.lax.stop_gradient(_round(value, dtype) - value)


def _round(value: Array, dtype: Any) -> Array:
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(value, kind.nexp, kind.nmant)


def truncated_normal(stddev: float) -> nn.initializers.Initializer:
    """Return BERT's initializer, `create_initializer` in google-research/bert `modeling.py`."""
    return nn.initializers.truncated_normal(stddev, lower=-2.0, upper=2.0)


class Dense(nn.Module):
    """A dense layer over the last axis, computed in `config.dtype`.

    Attributes:
      config: of the model.
      shape: inputs and outputs.
      axes: logical names of the two.
      use_bias: whether it has a bias.
      stddev: of the initial kernel; None for `config.initializer_range`.
    """

    config: ModelConfig
    shape: tuple[int, int]
    axes: tuple[str, str]
    use_bias: bool = True
    stddev: float | None = None

    def setup(self) -> None:
        c, zeros = self.config, nn.initializers.zeros
        init = truncated_normal(self.stddev or c.initializer_range)
        self.kernel = param(self, "kernel", init, self.shape, self.axes, c.dtype)
        if self.use_bias:
            self.bias = param(self, "bias", zeros, self.shape[1:], self.axes[1:], c.dtype)

    def __call__(self, x: Float[Array, "*any I"]) -> Float[Array, "*any O"]:
        """Return `x @ kernel`, plus the bias."""
        return dense_layers(x.astype(self.config.dtype), [self])[0]


def dense_layers(x: Float[Array, "*any I"], layers: Sequence[Dense]) -> tuple[Array, ...]:
    """Return the output of several dense layers, all with a bias or none, for one input."""
    biases = [layer.bias for layer in layers if layer.use_bias]
    return dense_group(x, [layer.kernel for layer in layers], biases)


class LayerNorm(nn.Module):
    """Layer normalization over the last axis, with statistics in float32."""

    config: ModelConfig
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*any D"]) -> Float[Array, "*any D"]:
        """Return `x` normalized, scaled and shifted, in `config.dtype`."""
        scale = param(self, "scale", nn.initializers.ones, x.shape[-1:], ("embed",))
        bias = None
        if self.use_bias:
            bias = param(self, "bias", nn.initializers.zeros, x.shape[-1:], ("embed",))
        normalize = _normalize if target().platform == "cpu" else _normalize_again
        eps, dtype = self.config.layer_norm_eps, self.config.dtype
        return normalize(x, scale, bias, eps).astype(dtype)


def _normalize(x: Array, scale: Array, bias: Array | None, eps: float) -> Array:
    x = x.astype(jnp.float32)
    centered = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centered).mean(-1, keepdims=True)
    normalized = centered * jax.lax.rsqrt(variance + eps) * scale
    return normalized if bias is None else normalized + bias


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _normalize_again(x: Array, scale: Array, bias: Array | None, eps: float) -> Array:
    """Return what `_normalize` does; the derivative computes the statistics anew.

    A GPU's compiler computes those inside of whatever normalizes. The gradient by the scale, a sum
    over all tokens, could not be, so that its terms were written to memory in float32.
    """
    return _normalize(x, scale, bias, eps)


@_normalize_again.defjvp
def _normalize_again_jvp(eps: float, operands: Any, tangents: Any) -> tuple[Array, Array]:
    (x, scale, bias), (by_x, by_scale, by_bias) = operands, tangents
    result, by_x = _normalize(x, scale, bias, eps), by_x.astype(jnp.float32)
    x = optimization_barrier(x).astype(jnp.float32)
    mean, variance = _statistics(x)
    mean, factor = optimization_barrier((mean, jax.lax.rsqrt(variance + eps)))
    normalized = (x - mean) * factor
    centered = by_x - by_x.mean(-1, keepdims=True)
    derivative = factor * (centered - normalized * (normalized * centered).mean(-1, keepdims=True))
    derivative = derivative * scale + normalized * by_scale
    return result, derivative if by_bias is None else derivative + by_bias


def _statistics(x: Float[Array, "*any D"]) -> tuple[Array, Array]:
    """Return the mean and the variance over the last axis, [*any, 1].

    A GPU takes both sums in one pass over memory; for a TPU that form moves more, not less.
    """
    if target().platform != "gpu":
        mean = x.mean(-1, keepdims=True)
        return mean, jnp.square(x - mean).mean(-1, keepdims=True)
    # The difference of two means loses little: the square of what is subtracted, the distance of
    # the first element from the mean, is at most D times the variance.
    first = x[..., :1]
    offset = (x - first).mean(-1, keepdims=True)
    return first + offset, jnp.square(x - first).mean(-1, keepdims=True) - jnp.square(offset)


@struct.dataclass
class DropoutKey:
    """The key of dropout: a PRNG key, and the index of each sequence in the global batch."""

    key: Any
    indices: Any  # [B]

    def fold(self, number: int | Array) -> "DropoutKey":
        """Return the key of one of several uses."""
        return self.replace(key=jax.random.fold_in(self.key, number))  # pyright: ignore


def fold_key(key: DropoutKey | None, number: int | Array) -> DropoutKey | None:
    """Return `DropoutKey.fold`, or None where dropout is off."""
    if key is None:
        return None
    if not isinstance(key, DropoutKey):
        raise TypeError(f"dropout_key is a {type(key).__name__}; give a DropoutKey(key, indices)")
    return key.fold(number)


def apply_dropout(
    x: Float[Array, "B *rest"],
    key: DropoutKey | None,
    rate: float,
    bounds: tuple[int, ...] = (),
    first: int | UInt32[Array, "B"] = 0,
) -> Float[Array, "B *rest"]:
    """Return `x` with a fraction `rate` of its elements zero and the others scaled up.

    Which are dropped is a hash of (key, index of the sequence, position in it): the same on any
    number of devices and in any part of the batch. A key of None turns dropout off.

    Positions are counted in `bounds`, the largest shape of a sequence, or in its own shape. So
    padding does not change what is dropped. The first size of either has no effect. `first` is the
    position, as so counted, of the first element of each part of a sequence.
    """
    if key is None or rate == 0.0:
        return x
    with jax.named_scope("dropout"):
        bits = random_bits(key.key, key.indices, x.shape[1:], bounds, first)
        return jnp.where(bits >= jnp.uint32(round(rate * 2**32)), x / (1.0 - rate), 0.0)


def random_bits(
    key: Array,
    indices: Int[Array, "B"],
    shape: tuple[int, ...],
    bounds: tuple[int, ...] = (),
    first_position: int | UInt32[Array, "B"] = 0,
) -> UInt32[Array, "B *shape"]:
    """Return 32 random bits for each element of each sequence, a hash of key, index and position.

    A second word of the key is added between two passes of the mixer: otherwise two sequences with
    close first words would have shifted copies of the same bits. `bounds` and `first_position` are
    as in `apply_dropout`.
    """
    first, second = random_words(key, indices)
    first += jnp.uint32(first_position)
    counter = jnp.zeros((), jnp.uint32)
    for axis, (size, stride) in enumerate(zip(shape, strides(bounds or shape), strict=True)):
        offset = jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        counter = counter + offset if size > 1 else counter
    expand = (..., *(None,) * len(shape))
    bits = mix_bits(counter, first[expand], second[expand])
    # Not where devices share heads or hidden states: what is laid out would be gathered first.
    if target().platform == "gpu" and not target().splits_outputs:
        # Its compiler would else make sequences the last axis in memory, here and of the hidden
        # states that the bits are for, which it then transposes around each matmul.
        bits = with_layout_constraint(bits, Layout(tuple(range(bits.ndim))))
    return bits


def random_words(key: Array, indices: Int[Array, "B"]) -> tuple[UInt32[Array, "B"], ...]:
    """Return the two words of each sequence that `mix_bits` takes."""
    words = jax.random.key_data(key)
    first = _mix(_mix(indices.astype(jnp.uint32) + words[0]) ^ words[1])
    return first, _mix(first + jnp.uint32(_ODD))


def strides(bounds: tuple[int, ...]) -> list[int]:
    """Return how far apart the positions of neighbors along each axis are."""
    found = []
    for axis, most in enumerate(bounds):
        stride = math.prod(bounds[axis + 1 :])
        if most * stride > 1 << 32:  # it would wrap, and distant elements would share their bits
            stride = _ODD ** (axis + 1) % (1 << 32)
        found.append(stride)
    return found


def mix_bits(position: Array, first: Array, second: Array) -> Array:
    """Return 32 random bits for each position; `first` and `second` are of `random_words`."""
    return _mix(_mix(position + first) ^ second)


def _mix(x: UInt32[Array, "*any"]) -> UInt32[Array, "*any"]:
    """Return a bijection of 32 bits with little bias (C. Wellons' lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
