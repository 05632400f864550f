"""A run on gs:// is that of a disk; another machine resumes it. The bucket is on this machine."""

import copy
import importlib.util
import os
from unittest import mock

import fake_bucket
import jax
import numpy as np
import pytest
from training_runs import stop_after, without_speeds

from bert_jax import UserError, load, pretrain
from bert_jax.config import TrainConfig
from bert_jax.errors import TrainingError
from bert_jax.runs import forks
from bert_jax.runs import pretrain as pretraining
from bert_jax.runs import workdir as workdirs
from bert_jax.storage import mirror, paths
from bert_jax.text import mixture
from bert_jax.text.store import open_store
from bert_jax.training import checkpoint
from bert_jax.training.metrics import read_records

pytestmark = [
    pytest.mark.remote,
    pytest.mark.skipif(
        importlib.util.find_spec("gcsfs") is None, reason="needs pip install 'bert-jax[remote]'"
    ),
]


@pytest.fixture(scope="module")
def served():
    bucket = fake_bucket.Bucket()
    with fake_bucket.serving(bucket) as environment, mock.patch.dict(os.environ, environment):
        yield bucket


@pytest.fixture
def bucket(served, tmp_path, monkeypatch):
    """An empty bucket; `machine` is one that has no part of a run."""
    served.objects.clear()
    served.fails = ""

    def machine(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    served.machine = machine
    machine("first")
    return served


def assert_same(one, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_run_is_that_of_a_disk_and_resumes_on_another_machine(bucket, tiny_config, tmp_path):
    config = copy.deepcopy(tiny_config)
    config.steps, config.eval_every, config.model.num_hidden_layers = 8, 8, 1
    config.checkpoint.every, config.checkpoint.keep = 2, 1
    expected = pretrain(config, tmp_path / "run", quiet=True)
    stop_after(5, config, paths.as_path("gs://bucket/run"))
    kept = "config.json", "metrics.jsonl", "text.sha256", "tokenizer/tokenizer.json"
    assert {f"run/{name}" for name in kept} <= {*bucket.objects}
    assert not [name for name in bucket.objects if "/store/" in name or name.endswith(".lock")]

    # A checkpoint that was not complete when the machine was lost does not count.
    state = {n: x for n, x in bucket.objects.items() if n.startswith("run/checkpoints/5/state/")}
    assert state
    bucket.objects |= {name.replace("/5/", "/6/"): value for name, value in state.items()}
    bucket.machine("second")
    folder = mirror.open_workdir(paths.as_path("gs://bucket/run/"))
    assert workdirs.read(folder, TrainConfig).steps == (5,)
    result = pretrain(config, "gs://bucket/run", quiet=True)
    assert str(result.checkpoint) == "gs://bucket/run/checkpoints/8"
    assert_same(result.bert.params, expected.bert.params)
    assert without_speeds(folder) == without_speeds(tmp_path / "run")
    written = {name.split("/")[2] for name in bucket.objects if "/checkpoints/" in name}
    assert written == {"8"}  # as checkpoint.keep says

    bucket.machine("third")
    assert_same(load("gs://bucket/run").params, expected.bert.params)
    assert_same(load("gs://bucket/run/checkpoints/8").params, expected.bert.params)


def test_what_is_refused(bucket, tiny_config):
    for url in ("s3://bucket/run", "https://host/run", "gs://bucket/../run", "gs:///run"):
        with pytest.raises(UserError, match=f"{url} is no folder of gs://; give a folder"):
            pretrain(tiny_config, url, quiet=True)
    with pytest.raises(UserError, match="gs://bucket/none does not exist"):
        load("gs://bucket/none")
    with pytest.raises(UserError, match="gs://bucket/none is no workdir with checkpoints"):
        forks.find("gs://bucket/none@4")


# Of a failed write, Orbax closes the event loop before the other writes end.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", ["config.json", "checkpoints/2/state"])
def test_a_bucket_that_cannot_be_written(bucket, tiny_config, what, tmp_path):
    bucket.fails = what
    error = UserError if what == "config.json" else TrainingError
    with pytest.raises(error, match=r"cannot be written .*(Forbidden|no permission)") as raised:
        pretrain(tiny_config, f"gs://bucket/{tmp_path.name}", quiet=True)
    assert "\n" not in str(raised.value)


def test_runs_beside_and_within_each_other(bucket, tiny_config):
    """The folder of one on the disk is not that of another, and other files stay where they are."""
    bucket.objects["outer/notes.txt"] = (1, b"of somebody")
    for name in ("outer/inner", "outer"):
        pretrain(tiny_config, f"gs://bucket/{name}", quiet=True)
    inner = mirror.open_workdir(paths.as_path("gs://bucket/outer/inner"))
    assert workdirs.read(inner, TrainConfig).config
    outer = mirror.open_workdir(paths.as_path("gs://bucket/outer"))
    assert {path.name for path in outer.iterdir()} <= {*mirror._READ, ".bucket", ".lock", "store"}
    assert not [name for name in bucket.objects if "store" in name]
    folders = (
        mirror.open_workdir(paths.as_path("gs://b/run"), 1),
        mirror.open_workdir(paths.as_path("gs://b/run-1")),
    )
    assert folders[0] != folders[1]


def test_a_fork_resumes_on_another_machine(bucket, tiny_config, tiny_run, tmp_path):
    """With the tokenizer that it was given, and not one that it trains; and is forked itself."""
    config = copy.deepcopy(tiny_config)
    for config.steps, fork in ((3, tiny_run.checkpoint), (4, None)):
        bucket.machine(str(fork is None))
        result = pretrain(config, "gs://bucket/fork", fork=fork, quiet=True)
    assert workdirs.read(paths.as_path("gs://bucket/fork"), TrainConfig).steps == (3, 4)
    config.steps = 5
    run = pretraining.start(config, tmp_path / "run", fork="gs://bucket/fork@4")
    state = checkpoint.read_state(run.origin.fork, run.setup.abstract_state)
    assert_same(state.params, result.bert.params)


def test_texts_from_memory_are_given_to_another_machine_again(bucket, tiny_config):
    texts = ["The river bank reads a token. The model sees."] * 40
    config = copy.deepcopy(tiny_config)
    for config.steps, machine in ((2, "first"), (4, "second")):
        bucket.machine(machine)
        result = pretrain(config, "gs://bucket/texts", texts=texts, quiet=True)
    assert result.checkpoint.name == "4"
    bucket.machine("third")
    config.steps = 6
    with pytest.raises(UserError, match="other text"):
        pretrain(config, "gs://bucket/texts", texts=texts[1:], quiet=True)


def test_small_files_that_cannot_be_copied_do_not_end_a_run(bucket, tiny_config, capsys):
    bucket.fails = "metrics.jsonl"
    with pytest.raises(TrainingError, match=r"metrics\.jsonl cannot be written"):  # at the end
        pretrain(tiny_config, "gs://bucket/small")
    assert "the run continues, and copies it with the next checkpoint" in capsys.readouterr().out
    bucket.fails = ""
    pretrain(tiny_config, "gs://bucket/small", quiet=True)
    assert "small/metrics.jsonl" in bucket.objects


def test_records_that_could_not_be_copied_are_kept(bucket, tiny_config):
    """By the machine that has them, unless the run of the bucket is another."""
    steps = []
    for is_other in (False, True):
        bucket.objects.clear()
        bucket.fails = "metrics.jsonl"
        with pytest.raises(TrainingError, match=r"metrics\.jsonl cannot be written"):
            pretrain(tiny_config, "gs://bucket/kept", quiet=True)
        bucket.fails = ""
        if is_other:  # of the same recipe
            record = b'{"split": "train", "step": 1}\n'
            bucket.objects["kept/metrics.jsonl"] = (1, record)
        folder = mirror.open_workdir(paths.as_path("gs://bucket/kept"))
        steps.append(read_records(folder / "metrics.jsonl")[-1]["step"])
    assert steps == [tiny_config.steps, 1]


def test_a_model_on_a_server_that_cannot_be_reached_is_named(
    bucket, tiny_config, tmp_path, monkeypatch
):
    error = mock.Mock(side_effect=ConnectionError("no network"))
    monkeypatch.setattr(type(paths.as_path("gs://bucket")), "exists", error)
    with pytest.raises(UserError, match=r"gs://bucket/none cannot be read \(no network\); check"):
        pretrain(tiny_config, tmp_path / "run", init="gs://bucket/none")


def test_text_that_is_a_store_in_the_bucket(bucket, tiny_config, tiny_run, tmp_path):
    store = tiny_run.checkpoint.parents[1] / "store"
    for path in store.rglob("*.*"):
        name = f"text/mine/{path.relative_to(store).as_posix()}"
        bucket.objects[name] = (1, path.read_bytes())
    config = copy.deepcopy(tiny_config)
    config.data.source, config.model.vocab_size = "gs://bucket/text/mine", 0
    parts = mixture.find(config.data.source)
    corpus = mixture.read(config, parts, None, tmp_path / "store")
    corpus.verify()
    assert corpus.fingerprint == open_store(store).fingerprint
    assert not (tmp_path / "store").exists()  # but in the cache
