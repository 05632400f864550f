"""Memory and compile times of this host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config.schedule import Stage
from bert_jax.errors import UserError
from bert_jax.planning import machine

PHASE = Stage(512, 256)


def test_a_step_that_needs_more_than_there_is():
    with (
        pytest.raises(UserError, match=r"a batch of 256 × 512 does not fit .* GiB of"),
        machine.out_of_memory_refused(PHASE, jax.devices()[0]),
    ):
        machine.check_memory(1 << 50, jax.devices())
    machine.check_memory(1, jax.devices())


def test_an_allocation_that_fails():
    """On the device or on the host; other failures pass."""

    def step_of_a_cpu():
        raise jax.errors.JaxRuntimeError("INTERNAL: Error: Out of memory allocating 9 bytes.")

    for fail in (lambda: jnp.zeros(1 << 46), lambda: np.ones(1 << 55), step_of_a_cpu):
        with (
            pytest.raises(UserError, match=r"a batch of 256 × 512 does not fit in .* lower"),
            machine.out_of_memory_refused(PHASE, jax.devices()[0]),
        ):
            fail()
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with (
        pytest.raises(jax.errors.JaxRuntimeError),
        machine.out_of_memory_refused(PHASE, jax.devices()[0]),
    ):
        raise error


def test_settings_of_the_cache_are_restored():
    before = [getattr(jax.config, name) for name in machine._CACHE_SETTINGS]
    program, cold, _ = machine.compile_twice(jax.jit(lambda x: x + 1).lower(1.0).compile)
    assert program(1.0) == 2.0
    assert cold > 0
    assert [getattr(jax.config, name) for name in machine._CACHE_SETTINGS] == before
