"""Eight fake CPU devices, and shapes checked at run time in every module of the package.

Programs here are compiled more often than they are run, so they are compiled with little
optimization, and once: the processes of a test run, those that tests start among them, share them.
"""

import os
import shutil
import tempfile

_SHARED = "JAX_COMPILATION_CACHE_DIR"
_made = None if _SHARED in os.environ else tempfile.mkdtemp(prefix="bert-jax-tests-")
os.environ.setdefault(_SHARED, _made or "")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
    ]
)

import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

install_import_hook(
    ["bert_jax.models", "bert_jax.training", "bert_jax.distributed", "bert_jax.planning"],
    "beartype.beartype",
)


def pytest_unconfigure():
    """Removes the programs, in the process that made the folder."""
    if _made:
        shutil.rmtree(_made, ignore_errors=True)


@pytest.fixture
def bert_jax_main(monkeypatch, capsys):
    """`bert-jax` in this process: returns what it prints, and raises its errors."""
    from bert_jax.commands import main, process

    def run(*words) -> str:
        monkeypatch.setattr(process, "run", lambda command, name: command())
        monkeypatch.setattr(process, "_mallopt", lambda options: None)
        monkeypatch.setattr("sys.argv", ["bert-jax", *map(str, words)])
        capsys.readouterr()
        main.main()
        return capsys.readouterr().out

    return run
