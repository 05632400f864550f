"""The devices that a model is traced for: what a step on a mesh tells the modules that it calls."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator

import jax
from jaxtyping import Array

Kernel = Callable[..., Array]
# (value, logical axes, dtype of use) -> value
Reader = Callable[[Array, tuple[str, ...], str], Array]


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices that a model is traced for.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      map_over_heads: from a kernel, the one that each device runs for its own heads. Arrays of
        three axes, such as queries [B, L, D], have heads side by side in the last one; those of two
        axes are for all heads.
      splits_outputs: whether devices share the outputs of a dense layer, by tensor parallelism.
      read_parameter: what every parameter is passed through that a module reads, by which FSDP
        all-gathers it.
    """

    platform: str
    map_over_heads: Callable[[Kernel], Kernel] = lambda kernel: kernel
    splits_outputs: bool = False
    read_parameter: Reader | None = None


_TARGET: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def traced_for(target: Target) -> Iterator[None]:
    """Trace what is called for these devices."""
    token = _TARGET.set(target)
    try:
        yield
    finally:
        _TARGET.reset(token)


def target() -> Target:
    """Return the devices that the model is traced for, by default one of JAX's own."""
    return _TARGET.get() or Target(jax.default_backend())
