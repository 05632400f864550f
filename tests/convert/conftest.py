"""Golden models, and their parameter shapes traced once: they take most of the time of a load."""

import functools

import pytest
from make_golden import GOLDEN

import bert_jax
from bert_jax.convert import names


@pytest.fixture(autouse=True, scope="session")
def shapes_traced_once():
    trace, models = names.param_shapes, {}

    @functools.cache
    def traced(description):
        return trace(models[description])

    def cached(model):
        models[repr(model)] = model
        return traced(repr(model))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "param_shapes", cached)
        yield


@pytest.fixture(scope="session")
def golden():
    """The golden BERT, which no test changes."""
    return bert_jax.load(GOLDEN / "bert")
