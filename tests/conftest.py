"""Fake CPU devices, and shapes checked at run time in modules that compute.

Programs here are compiled more often than they are run, so they are compiled with little
optimization, and once: the processes of a test run, those that tests start among them, share them.
"""

import gc
import importlib.metadata
import os
import shutil
import tempfile

_SHARED = "JAX_COMPILATION_CACHE_DIR"
_made = None if _SHARED in os.environ else tempfile.mkdtemp(prefix="bert-jax-tests-")
os.environ.setdefault(_SHARED, _made or "")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A program does not say which lines of Python made its operations: finding them takes time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# XLA's threads. With as many as fake devices, all can wait for a device that has none: a deadlock.
os.environ.setdefault("NPROC", "32")
_flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
_on_cpu = os.environ["JAX_PLATFORMS"] == "cpu"
if _on_cpu:  # an accelerator compiles as in training
    _flags.append("--xla_backend_optimization_level=0")
    _flags.append("--xla_cpu_parallel_codegen_split_count=1")
if importlib.metadata.version("jax").startswith("0.10."):  # later ones do not know it
    _flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(_flags)

import pytest  # noqa: E402
from visible_devices import visible_devices  # noqa: E402

if _on_cpu:
    from jaxtyping import install_import_hook

    install_import_hook(
        ["bert_jax.models", "bert_jax.training", "bert_jax.distributed", "bert_jax.planning"],
        "beartype.beartype",
    )


# Programs are traced into millions of small objects, most of which live on: looking through them as
# often as Python does by itself takes a tenth of the time.
gc.set_threshold(20_000, 10, 10)


# Files that take longest, first: at the end of a run no worker waits for another's.
_LONG = ("bucket", "costs", "finetuning", "hosts", "mesh", "pretraining", "wheel")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in _LONG)


def pytest_collection_finish():
    """Leaves the modules and tests to themselves, which live to the end."""
    gc.freeze()


def pytest_unconfigure():
    """Removes the programs, in the process that made the folder."""
    if _made:
        shutil.rmtree(_made, ignore_errors=True)


@pytest.fixture
def ends_reads():
    """Ends what a failed read of a checkpoint left, so that no later test has its errors."""
    yield
    gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Shows a test, and the fixtures made for it, as many devices as its mark says, or one."""
    mark = item.get_closest_marker("devices")
    with visible_devices(mark.args[0] if mark else 1):
        return (yield)


@pytest.fixture
def bert_jax_main(monkeypatch, capsys):
    """`bert-jax` in this process: returns what it prints, and raises its errors."""
    from bert_jax.commands import main, memory, process

    def run(*words) -> str:
        monkeypatch.setattr(process, "run", lambda command, name: command())
        monkeypatch.setattr(memory, "_configure_malloc", lambda *options: None)
        monkeypatch.setattr("sys.argv", ["bert-jax", *map(str, words)])
        capsys.readouterr()
        main.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A server of models that `hf:OWNER/NAME` is downloaded from and uploaded to."""
    from fake_hub import FakeHub
    from huggingface_hub import constants

    server = FakeHub()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    patches = {  # the module has read the environment
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_TOKEN_PATH": str(tmp_path / "token"),
        "HF_HUB_DISABLE_XET": True,
    }
    for name, value in patches.items():
        monkeypatch.setattr(constants, name, value)
    yield server
    server.close()


@pytest.fixture(scope="session")
def tokenizer():
    """A tokenizer of three words, for what is written beside one."""
    from bert_jax import TokenizerConfig
    from bert_jax.text import tokenizer_training

    return tokenizer_training.train(["a few words"] * 9, TokenizerConfig(kind="wordpiece"), 25)


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory):
    """A file of documents of short sentences."""
    import numpy as np

    words = ["the", "a", "river", "bank", "token", "model", "layer", "head", "reads", "sees"]
    words += ["of", "with", "small", "large"]
    generator = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("tiny_text") / "text.txt"
    with path.open("w") as file:
        for _ in range(60):
            for _ in range(6):
                sentence = " ".join(generator.choice(words, generator.integers(3, 12)))
                file.write(f"The {sentence}.\n")
            file.write("\n")
    return path


@pytest.fixture(scope="session")
def tiny_config(tiny_text):
    """The config of two steps of pretraining."""
    from bert_jax import DataConfig, ModelConfig, OptimizerConfig, TokenizerConfig, TrainConfig

    return TrainConfig(
        steps=2,
        model=ModelConfig(
            vocab_size=64,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=32,
        ),
        tokenizer=TokenizerConfig(kind="wordpiece"),
        data=DataConfig(source=str(tiny_text), eval_fraction=0.1, max_length=32, batch_size=8),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-3),
    )


@pytest.fixture(scope="session")
def tiny_run(tiny_config, tmp_path_factory):
    """The result of `bert_jax.pretrain`, on one device."""
    import bert_jax

    with visible_devices(1):
        return bert_jax.pretrain(tiny_config, tmp_path_factory.mktemp("tiny_run"), quiet=True)


@pytest.fixture(scope="session")
def tiny_bert(tiny_run):
    """A pretrained model, loaded from its checkpoint."""
    import bert_jax

    return bert_jax.load(tiny_run.checkpoint)


@pytest.fixture(scope="session")
def shallow_bert(tiny_bert):
    """The same model without its second layer: fine-tuning it compiles in less time."""
    import dataclasses

    import bert_jax
    from bert_jax.objectives import pretraining_model

    config = dataclasses.replace(tiny_bert.config, num_hidden_layers=1)
    params = {**tiny_bert.params, "bert": dict(tiny_bert.params["bert"])}
    del params["bert"]["layer_1"]
    return bert_jax.Bert(config, params, tiny_bert.tokenizer, pretraining_model(config, pairs=True))


@pytest.fixture(scope="session")
def tiny_finetuning_config(tmp_path_factory):
    """The config of three steps of fine-tuning."""
    from bert_jax import DataFiles, FinetuneConfig

    path = tmp_path_factory.mktemp("tiny_task") / "train.tsv"
    examples = ["The river bank.\tfirst", "A model reads the token.\tsecond"] * 14
    path.write_text("\n".join(["sentence\tlabel", *examples]) + "\n")
    return FinetuneConfig(epochs=1.0, data=DataFiles(train=str(path), max_length=32, batch_size=8))


@pytest.fixture(scope="session")
def tiny_finetuning(tiny_finetuning_config, tiny_run, tmp_path_factory):
    """The result of `bert_jax.finetune`, on one device."""
    import bert_jax

    workdir = tmp_path_factory.mktemp("tiny_finetuning")
    with visible_devices(1):
        return bert_jax.finetune(tiny_finetuning_config, tiny_run.checkpoint, workdir, quiet=True)


@pytest.fixture(scope="session")
def tiny_classifier(tiny_finetuning):
    """A fine-tuned model."""
    return tiny_finetuning.bert
