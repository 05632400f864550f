"""How many of the fake devices JAX shows: a program for one compiles in half the time."""

import contextlib
import functools

import pytest


@functools.cache
def _every_device_of(name):
    import jax

    return getattr(jax, name)


@contextlib.contextmanager
def visible_devices(count):
    """Has `jax.devices` and `jax.local_devices` return the first `count`."""
    import jax

    with pytest.MonkeyPatch.context() as patch:
        for name in ("devices", "local_devices"):
            every = _every_device_of(name)
            patch.setattr(jax, name, lambda *args, every=every: every(*args)[:count])
        yield
