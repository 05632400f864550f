"""Trace the parameter shapes of the small models once: they take most of the time of a load."""

import functools

import pytest

from bert_jax.convert import names


@pytest.fixture(autouse=True, scope="session")
def shapes_traced_once():
    trace, models = names._param_shapes, {}

    @functools.cache
    def traced(description):
        return trace(models[description])

    def cached(model):
        models[repr(model)] = model
        return traced(repr(model))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "_param_shapes", cached)
        yield
