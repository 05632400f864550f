"""Parameter shapes of the small models are traced once: most of the time of a load is theirs."""

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
