"""The memory of this host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config.schedule import Stage
from bert_jax.distributed import devices
from bert_jax.errors import UserError

PHASE = Stage(512, 256)


def test_a_step_that_needs_more_than_there_is():
    with (
        pytest.raises(UserError, match=r"a batch of 256 × 512 does not fit .* GiB of"),
        devices.out_of_memory_refused(PHASE, jax.devices()[0]),
    ):
        devices.check_memory(1 << 50, jax.devices())
    devices.check_memory(1, jax.devices())


def test_an_allocation_that_fails():
    """On the device or on the host; other failures pass."""

    def step_of_a_cpu():
        raise jax.errors.JaxRuntimeError("INTERNAL: Error: Out of memory allocating 9 bytes.")

    for fail in (lambda: jnp.zeros(1 << 46), lambda: np.ones(1 << 55), step_of_a_cpu):
        with (
            pytest.raises(UserError, match=r"a batch of 256 × 512 does not fit in .* lower"),
            devices.out_of_memory_refused(PHASE, jax.devices()[0]),
        ):
            fail()
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with (
        pytest.raises(jax.errors.JaxRuntimeError),
        devices.out_of_memory_refused(PHASE, jax.devices()[0]),
    ):
        raise error
