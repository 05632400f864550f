"""The campaign of benchmarks/faults.py, shortly: damaged files are refused, or change nothing."""

import shutil
from pathlib import Path

import damaging
import fault_samples
import fuzzing
import pytest

# A failed read of a damaged checkpoint closes Orbax's event loop before other reads end.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("ends_reads"),
]


@pytest.fixture(scope="module")
def samples(tiny_text, tiny_run, tiny_finetuning, tmp_path_factory) -> Path:
    """The folder of `fault_samples.make_samples`, of models that other tests have too."""
    folder = tmp_path_factory.mktemp("samples")
    shutil.copy(tiny_text, folder / "text.txt")
    shutil.copytree(tiny_run.checkpoint.parents[1], folder / "pretrained")
    shutil.copytree(tiny_finetuning.checkpoint.parent, folder / "finetuned")
    fault_samples.make_unfinished_store(folder / "unfinished")
    return folder


def test_a_reader_succeeds_or_refuses(samples, tmp_path):
    names = ("pretrained", "finetuned", "unfinished")
    for name, reader in fuzzing.readers(*(samples / name for name in names)).items():
        fuzzer = fuzzing.Fuzzer(name, reader, tmp_path / "x", 1, None)
        reader.read(fuzzer.folder)
        fuzzer.restore()
        for _ in range(3 if name.endswith(("directory", "checkpoint", "JSON")) else 20):
            _, fault = fuzzer.step()
            assert not fault, "\n".join(fault.values())


@pytest.mark.parametrize("target", ["checkpoint", "store", "unfinished store"])
def test_damage_is_refused_or_changes_nothing(samples, target):
    expected = damaging.numbers(samples, target)
    folder = samples / damaging.TARGETS[target][0]
    names = [str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file()]
    for number, name in enumerate(names):
        ways = list(damaging.DAMAGES)
        way = ways[number % len(ways)]
        kind, text = damaging.attempt(samples, target, name, way, expected, 0)
        assert kind in ("refused", "same"), f"{name}, {way}: {text}"
