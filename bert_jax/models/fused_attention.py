"""Attention in one kernel, whose memory grows with the length of a row and not with its square.

It computes what `attention.plain_attention` does, dropout included, whose bits are a hash of their
place: it needs none of the scores that the plain form keeps for the gradient. The kernels, in
Pallas, are those of `attention_tpu` and `attention_gpu`.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from bert_jax.models import attention_gpu, attention_tpu
from bert_jax.models.attention_tile import Form, Kernels
from bert_jax.models.layers import DropoutKey, sequence_keys

_KERNELS = {"tpu": attention_tpu.KERNELS, "gpu": attention_gpu.KERNELS}

_INTERPRETED: contextvars.ContextVar[str] = contextvars.ContextVar("interpreted", default="")


@contextlib.contextmanager
def interpreted(platform: str = "tpu") -> Iterator[None]:
    """Within it, a CPU stands in for a platform: its kernels are run by Pallas's interpreter."""
    token = _INTERPRETED.set(platform)
    try:
        yield
    finally:
        _INTERPRETED.reset(token)


def platform() -> str:
    """Returns what the program is traced for: the devices of the mesh at hand, or JAX's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return _INTERPRETED.get() or (device.platform if device else jax.default_backend())


def serves(length: int, size: int) -> bool:
    """Returns whether there are kernels here that take rows of a length, and heads of a size."""
    return platform() in _KERNELS and _KERNELS[platform()].serves(length, size)


def fused_attention(
    projected: Sequence[Array],
    texts: Int[Array, "B L"],
    dropout_key: DropoutKey | None,
    *,
    packed: bool,
    rate: float,
    bounds: tuple[int, int, int],
) -> Float[Array, "B L D"]:
    """Returns the values that each place attends to, the heads side by side.

    Args:
      projected: queries, keys and values, each [B, L, D], float32 or bfloat16; the products are
        computed in that type, the softmax in float32.
      texts: as in `AttentionMask`.
      dropout_key: as in `Dropout`.
      packed: as in `AttentionMask`.
      rate: of dropout.
      bounds: as in `Dropout`: heads, queries and keys.
    """
    (batch, _, size), heads = projected[0].shape, bounds[0]
    words = jnp.zeros((batch, heads, 2), jnp.uint32)
    if dropout_key is None:
        rate = 0.0
    elif rate > 0:
        first, second = sequence_keys(dropout_key.key, dropout_key.indices)
        # The bits of a head are those of a row whose first word is as much further on.
        before = jnp.arange(heads, dtype=jnp.uint32) * jnp.uint32(bounds[1] * bounds[2])
        words = jnp.stack(jnp.broadcast_arrays(first[:, None] + before, second[:, None]), axis=-1)
    form = Form(size // heads, packed, rate, bounds[2], bool(_INTERPRETED.get()))
    return _attend(_KERNELS[platform()], form, *projected, texts, words)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kernels: Kernels, form: Form, *operands: Array) -> Array:
    """Returns what is mixed; see `Kernels` for the operands."""
    return _attend_forward(kernels, form, *operands)[0]


def _attend_forward(kernels: Kernels, form: Form, *operands: Array) -> tuple[Array, Any]:
    mixed, *saved = _of_each_part(
        partial(kernels.forward, form), _OPERANDS, (2, *kernels.saved), operands
    )
    return mixed, (*operands, *saved)


def _attend_backward(
    kernels: Kernels, form: Form, saved: tuple[Array, ...], gradient: Array
) -> Any:
    taken = (*_OPERANDS, *kernels.saved, 2)
    found = _of_each_part(partial(kernels.backward, form), taken, (2, 2, 2), (*saved, gradient))
    return *found, None, None


_attend.defvjp(_attend_forward, _attend_backward)

_OPERANDS = (2, 2, 2, None, 1)  # the axes that their heads lie along


def _of_each_part(
    kernel: Callable[..., Any],
    taken: Sequence[int | None],
    given: Sequence[int | None],
    operands: Sequence[Array],
) -> Any:
    """Runs a kernel, on each device for its own heads where they are split over some.

    The compiler cannot split a kernel, nor takes one where it might have to.

    Args:
      kernel: what to run.
      taken: the axis of each operand that heads lie along, if any.
      given: that of each result.
      operands: of the kernel.
    """
    axes = jax.sharding.get_abstract_mesh().auto_axes
    if not axes:
        return kernel(*operands)

    def specs(heads: Sequence[int | None]) -> tuple[P, ...]:
        return tuple(P() if axis is None else P(*[None] * axis, axes) for axis in heads)

    return jax.shard_map(
        kernel,
        in_specs=specs(taken),
        out_specs=specs(given),
        axis_names=set(axes),
        check_vma=False,
    )(*operands)
