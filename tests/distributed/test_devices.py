"""The memory of this host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refused

from bert_jax.config.schedule import Stage
from bert_jax.distributed import devices

PHASE = Stage(512, 256)


def test_a_step_that_needs_more_than_there_is():
    """Before it is taken, or by an allocation that fails on the device or on the host."""

    def step_of_a_cpu():
        raise jax.errors.JaxRuntimeError("INTERNAL: Error: Out of memory allocating 9 bytes.")

    for fail in (
        lambda: devices.check_memory(1 << 50, jax.devices()),
        lambda: jnp.zeros(1 << 46),
        lambda: np.ones(1 << 55),
        step_of_a_cpu,
    ):
        with (
            refused("a batch of 256 × 512 does not fit"),
            devices.out_of_memory_refused(PHASE, jax.devices()[0]),
        ):
            fail()
    devices.check_memory(1, jax.devices())


def test_another_failure_of_a_step_passes():
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with (
        pytest.raises(jax.errors.JaxRuntimeError),
        devices.out_of_memory_refused(PHASE, jax.devices()[0]),
    ):
        raise error
