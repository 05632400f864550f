"""Small runs for the campaign of faults: their inputs, their commands, and what they leave."""

import contextlib
import hashlib
import json
import multiprocessing
import random
import re
import resource
import string
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fuzzing
import jax
import numpy as np
import orbax.checkpoint as ocp
import sentencepiece

import bert_jax
from bert_jax import DataConfig, DataFiles, FinetuneConfig, ModelConfig, TokenizerConfig, console
from bert_jax.commands import process
from bert_jax.errors import Interrupted
from bert_jax.runs import finetune as finetuning
from bert_jax.runs import pretrain as pretraining
from bert_jax.text import prepare
from bert_jax.training import checkpoint

CONTEXT = multiprocessing.get_context("forkserver")
ROOT = Path(__file__).parents[1]
WORDS = ["the", "a", "river", "bank", "token", "model", "layer", "reads", "sees", "of", "with"]


def in_a_child(function: Callable[..., Any], *arguments: Any, seconds: float = 600) -> Any:
    """Return what a function returns in a process of its own; raise what it raises."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=_send, args=(sender, function, arguments))
    child.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise TimeoutError(f"no result after {seconds:.0f} s")
        result = receiver.recv()
    except EOFError:
        child.join()
        raise ChildProcessError(f"the process ended with {child.exitcode}") from None
    finally:
        child.kill()
        child.join()
    if isinstance(result, BaseException):
        raise result
    return result


def _send(sender: Any, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    process.quiet_libraries()
    try:
        result = function(*arguments)
    except Exception as error:
        result = error
    sender.send(result)


def write_text(path: Path, documents: int, words: Sequence[str] = WORDS) -> None:
    """Write documents of short sentences."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(documents):
            for _ in range(6):
                file.write(f"The {' '.join(draw.choices(words, k=draw.randint(3, 12)))}.\n")
            file.write("\n")


def pretraining_config(text: Path) -> bert_jax.TrainConfig:
    """Return the config of six steps of pretraining, with checkpoints and evaluations."""
    config = bert_jax.TrainConfig(steps=6, log_every=1, eval_every=3)
    config.checkpoint.every = 2
    config.model = ModelConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    config.tokenizer = TokenizerConfig(kind="wordpiece")
    config.data = DataConfig(source=str(text), eval_fraction=0.1, max_length=32, batch_size=8)
    return config


def finetuning_config(table: Path) -> FinetuneConfig:
    """Return the config of fine-tuning with two seeds, and of a test set."""
    files = DataFiles(train=str(table), test=str(table), max_length=32, batch_size=8)
    return FinetuneConfig(epochs=2.0, seeds=2, log_every=1, data=files)


def make_samples(folder: Path) -> None:
    """Write a text, a table, a workdir of pretraining, one of fine-tuning, an unfinished store."""
    folder.mkdir(parents=True)
    write_text(folder / "text.txt", 60)
    rows = ["The river bank.\tfirst", "A model reads the token.\tsecond"] * 14
    (folder / "train.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    pretrained, finetuned = folder / "pretrained", folder / "finetuned"
    config = pretraining_config(folder / "text.txt")
    bert_jax.pretrain(config, pretrained, quiet=True)
    task = finetuning_config(folder / "train.tsv")
    bert_jax.finetune(task, pretrained, finetuned, quiet=True)
    make_unfinished_store(folder / "unfinished")
    with console.quiet():
        run = pretraining.start(config, folder / "half-pretrained")
        _stop_after(3, partial(pretraining.train_run, run))
        run = finetuning.start(task, pretrained, folder / "half-finetuned")
        _stop_after(13, partial(finetuning.train_run, run))  # in the second seed


def _stop_after(steps: int, train: Callable[[Callable[[], str]], Any]) -> None:
    """Stop a run as a signal does."""
    reasons = iter([""] * (steps - 1) + ["SIGTERM"])
    with contextlib.suppress(Interrupted):
        train(lambda: next(reasons))


def make_unfinished_store(folder: Path) -> None:
    """Write a text, and a store of it that a full disk interrupted; and a SentencePiece model."""
    (folder / "sentencepiece").mkdir(parents=True)
    write_text(folder / "text.txt", 50)
    data = DataConfig(source=str(folder / "text.txt"), eval_fraction=0.4)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
    with mock.patch.object(prepare, "_BATCH_CHARACTERS", 2000), contextlib.suppress(Exception):
        prepare.prepare(data, fuzzing.wordpiece(), 0, folder / "store")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "sentencepiece/a"),
        vocab_size=60,
        hard_vocab_limit=False,
        normalization_rule_name="identity",  # whose model has 3 kB, and not 240
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
        minloglevel=2,
    )


def commands(folder: Path) -> dict[str, list[str]]:
    """Write the inputs of the two scripts, and return their flags."""
    draw = random.Random(0)
    words = [
        "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(999)
    ]
    write_text(folder / "text.txt", 1500, words)
    rows = [f"{' '.join(draw.choices(WORDS, k=6))}\t{draw.choice('ab')}" for _ in range(240)]
    (folder / "train.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    of_pretraining = {
        "steps": 40,
        "log_every": 4,
        "eval_every": 10,
        "checkpoint.every": 5,
        "data.source": folder / "text.txt",
        "data.batch_size": 8,
        "data.max_length": 32,
    }
    sizes = {"vocab_size": 200, "hidden_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32}
    of_pretraining |= {f"model.{name}": size for name, size in sizes.items()}
    of_finetuning = {
        "seeds": 3,
        "epochs": 2,
        "evaluations": 2,
        "log_every": 5,
        "data.train": folder / "train.tsv",
        "data.test": folder / "train.tsv",
        "data.max_length": 32,
        "data.batch_size": 16,
    }
    init = [f"--init={folder / 'samples/pretrained'}", "--config=finetune/classification"]
    return {
        "train.py": [f"--config.{name}={value}" for name, value in of_pretraining.items()],
        "finetune.py": [*init, *(f"--config.{name}={v}" for name, v in of_finetuning.items())],
    }


def digest(tree: Any) -> str:
    """Return a hash of arrays in dictionaries."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        value = np.ascontiguousarray(leaf)
        found.update(f"{path} {value.dtype} {value.shape}".encode() + value.tobytes())
    return found.hexdigest()


def scores(values: Any) -> dict[str, float]:
    """Return metrics without the speeds."""
    return {name: value for name, value in values.items() if "per_second" not in name}


def result(script: str, workdir: Path) -> dict[str, Any]:
    """Return the parameters, evaluations and predictions that a run has left."""
    found: dict[str, Any] = {"parameters": digest(bert_jax.load(workdir).params)}
    for path in sorted(workdir.rglob("metrics.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for split in ("eval", "train"):
            values = [scores(r) for r in records if r["split"] == split]
            found[f"{path.relative_to(workdir)}, {split}"] = values
    for path in sorted(workdir.glob("predictions*")):
        found[path.name] = path.read_text()
    if script == "finetune.py":
        results = json.loads((workdir / "results.json").read_text())
        for each in results["seeds"]:
            del each["seconds"], each["sequences_per_second"], each["best"]["sequences_per_second"]
        return {**found, "results.json": results}
    state = checkpoint.find(workdir) / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.metadata(state).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        arrays = reader.restore(state, args=ocp.args.PyTreeRestore(restore_args=kinds))
    return {**found, "state": digest(arrays)}


def differences(script: str, workdir: Path, expected: dict[str, Any]) -> str:
    """Return in words what a run has left that an undisturbed one has not."""
    found = result(script, workdir)
    names = [n for n in {**found, **expected} if found.get(n) != expected.get(n)]
    return f"other {', '.join(names)}" if names else ""


def by_kind(paths: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of paths that differ in numbers and hashes alone."""
    kinds: dict[str, list[int]] = {}
    for index, path in enumerate(paths):
        kinds.setdefault(re.sub(r"[0-9a-f]{32}|\d+", "#", path), []).append(index)
    return kinds


def row(name: str, *values: float) -> str:
    """Return a line of a table."""
    cells = (f"{v:.2f}" if isinstance(v, float) else f"{v:,}" for v in values)
    return f"| {name} | {' | '.join(cells)} |"
