"""The examples in docstrings: every public name has one, and all of them are true."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import bert_jax

PACKAGE = Path(bert_jax.__file__).parent
MODULES = sorted(
    ".".join(["bert_jax", *path.relative_to(PACKAGE).with_suffix("").parts])
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, request):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    output: list[str] = []
    for test in doctest.DocTestFinder().find(module):
        test.globs["getfixture"] = request.getfixturevalue
        runner.run(test, out=output.append)
    assert not runner.failures, "".join(output)
    assert runner.tries


@pytest.mark.parametrize("name", sorted(set(bert_jax.__all__) - {"__version__"}))
def test_every_public_name_has_an_example(name):
    value = getattr(bert_jax, name)
    assert ">>> " in inspect.getdoc(value)
    if name in ("Bert", "Predictions"):
        inherited = ("count", "index")
        for method, function in inspect.getmembers(value, inspect.isfunction):
            if not method.startswith("_") and method not in inherited:
                assert ">>> " in inspect.getdoc(function), method
