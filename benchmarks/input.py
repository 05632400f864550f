"""From text to rows: preparing it beside Hugging Face's `datasets`, and the loader's rows a second.

    python benchmarks/input.py --text=corpus.txt --wordpiece=vocab.txt \\
        --datasets_python=PYTHON --output=input.json

PYTHON is that of an environment with `datasets` and `transformers`. Both prepare the same files of
plain text with the same tokenizers, in turns: `bert-jax prepare` to a store, whose time is that of
the whole command; the peer by `load_dataset("text")`, its fast tokenizer and blocks of 128, in as
many processes as there are cores, whose time is that after its imports. A tokenizer that is not
given is trained on the text beforehand; how long that took is said.

The loader is that of train.py with the store of the first tokenizer, without a step.
"""

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record
from absl import flags

from bert_jax.batches import loader
from bert_jax.commands import flags as cli
from bert_jax.config import DataConfig, ModelConfig, TokenizerConfig, TrainConfig
from bert_jax.convert import tokenizer_files
from bert_jax.errors import UserError
from bert_jax.text import sources as text_lib
from bert_jax.text import tokenizer as tokenizer_lib
from bert_jax.text import tokenizer_training
from bert_jax.text.store import open_store
from bert_jax.text.tokenizer import Tokenizer

KINDS = {"wordpiece": 30522, "sentencepiece": 32000}  # pieces of one that is trained here
LENGTHS, BATCH_SIZE = (128, 512), 256
OURS, PEER = "bert-jax", "datasets"

TEXT = flags.DEFINE_string("text", "", "Files of plain text or globs, comma separated.")
PATHS = {kind: flags.DEFINE_string(kind, "", f"A {kind} tokenizer, given.") for kind in KINDS}
DATASETS_PYTHON = flags.DEFINE_string("datasets_python", "", "A Python that has datasets.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each has its turn.")
SECONDS = flags.DEFINE_float("seconds", 5.0, "Of a turn of the loader.")
OUTPUT = flags.DEFINE_string("output", "", "A JSON file for every figure.")


def main() -> None:
    """Measures, and prints tables."""
    try:
        rest = flags.FLAGS(sys.argv)[1:]
    except flags.Error as error:
        raise UserError(" ".join(str(error).split())) from error
    if rest:
        raise UserError(f"{rest[0]!r} is not a flag")
    versions = check()
    found: dict[str, Any] = {"command": sys.argv, "seconds": {}, "rows_per_second": {}}
    with tempfile.TemporaryDirectory(prefix="bert-jax-input-") as name:
        folder = Path(name)
        files, size = text_files()
        for kind in KINDS:
            save(kind, tokenizer(kind), folder)
        turns = [(who, kind) for kind in KINDS for who in (OURS, PEER)]
        times: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
        for number in range(ROUNDS.value):
            for who, kind in turns:
                print(f"round {number + 1}: {who}, {kind}", file=sys.stderr, flush=True)
                times[who, kind].append((ours if who == OURS else peer)(kind, folder, files))
        print(record.heading(("jax", "grain", "numpy", "sentencepiece", "tokenizers"), versions))
        print(
            f"{size / 1e6:.1f} MB of text, medians of {ROUNDS.value} rounds (least to most); ratios"
        )
        print("of each round (quartiles)\n")
        print_preparation(times, size)
        rates = loader_rates(folder / f"store-{next(iter(KINDS))}")
    print(f"\nThe loader, batches of {BATCH_SIZE}:\n\n| length | rows/s | least | most |")
    print("|---|---|---|---|")
    for length, rows in rates.items():
        values = (statistics.median(rows), min(rows), max(rows))
        print(f"| {length} | {' | '.join(f'{value:,.0f}' for value in values)} |")
    if OUTPUT.value:
        found["seconds"] = {f"{who}, {kind}": values for (who, kind), values in times.items()}
        found["rows_per_second"] = rates
        Path(OUTPUT.value).write_text(json.dumps(found, indent=1) + "\n")


def check() -> dict[str, str]:
    """Returns the peer's versions; refuses what would fail later.

    Raises:
      UserError: something is missing.
    """
    if ROUNDS.value < 1 or SECONDS.value <= 0:
        raise UserError("--rounds and --seconds must be positive")
    if OUTPUT.value and not os.access(Path(OUTPUT.value).absolute().parent, os.W_OK):
        raise UserError(f"--output {OUTPUT.value} cannot be written there; make the folder first")
    python = DATASETS_PYTHON.value
    if not shutil.which(python):
        raise UserError(
            f"--datasets_python {python!r} is no program; give the Python of an environment with "
            "datasets and transformers"
        )
    code = (
        "import datasets, json, tokenizers, transformers\n"
        "found = (datasets, transformers, tokenizers)\n"
        "print(json.dumps({f'{m.__name__} (peer)': m.__version__ for m in found}))"
    )
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if asked.returncode:
        raise UserError(f"{python} cannot run the peer: {_last_line(asked.stderr)}")
    return json.loads(asked.stdout)


def text_files() -> tuple[list[str], int]:
    """Returns the files, and their size in bytes.

    Raises:
      UserError: they are missing, or without text.
    """
    source = text_lib.open_source(TEXT.value, DataConfig())
    if not isinstance(source, text_lib.FileSource):
        raise UserError("--text must be files of plain text")
    if next(source.documents(), None) is None:
        raise UserError(f"--text {TEXT.value} has no text; give some")
    return [str(path.absolute()) for path in source.paths], source.size


def tokenizer(kind: str) -> Tokenizer:
    """Returns the tokenizer that was given, or one that is trained on the text."""
    if PATHS[kind].value:
        found = tokenizer_lib.load(PATHS[kind].value)
        if found.kind != kind:
            raise UserError(f"--{kind} {PATHS[kind].value} is a {found.kind} tokenizer")
        return found
    print(f"training {kind}", file=sys.stderr, flush=True)
    started = time.perf_counter()
    documents = text_lib.open_source(TEXT.value, DataConfig()).documents()
    sentences = (sentence for document in documents for sentence in document)
    made = tokenizer_training.train(sentences, TokenizerConfig(kind=kind), KINDS[kind])
    seconds = time.perf_counter() - started
    print(f"{kind}: {made.vocab_size:,} pieces, trained in {seconds:.1f} s\n", flush=True)
    return made


def save(kind: str, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a tokenizer for us, and the same one for the peer."""
    tokenizer.save(folder / f"{OURS}-{kind}")
    (folder / f"{PEER}-{kind}").mkdir()
    config = ModelConfig(vocab_size=tokenizer.vocab_size)
    for name, content in tokenizer_files.files(tokenizer, config).items():
        (folder / f"{PEER}-{kind}" / name).write_bytes(content)


def ours(kind: str, folder: Path, files: list[str]) -> float:
    """Returns the seconds of `bert-jax prepare`."""
    store = folder / f"store-{kind}"
    shutil.rmtree(store, ignore_errors=True)
    (given,) = (folder / f"{OURS}-{kind}").iterdir()
    words = ["prepare", ",".join(files), str(store), f"--tokenizer={given}"]
    started = time.perf_counter()
    _run(
        [sys.executable, "-m", "bert_jax", *words],
        PYTHONPATH=os.pathsep.join(sys.path[1:]),
    )
    return time.perf_counter() - started


def peer(kind: str, folder: Path, files: list[str]) -> float:
    """Returns the seconds of the peer."""
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    script = str(Path(__file__).with_name("input_peer.py"))
    cores = str(len(os.sched_getaffinity(0)))
    words = [json.dumps(files), str(folder / f"{PEER}-{kind}"), str(cache), cores]
    # As many processes as there are cores, so a thread each.
    printed = _run(
        [DATASETS_PYTHON.value, script, *words], TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1"
    )
    return json.loads(printed.splitlines()[-1])["seconds"]


def _run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise UserError(f"{shlex.join(command[1:4])} has failed: {_last_line(done.stderr)}")
    return done.stdout


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["without a word"])[-1]


def print_preparation(times: dict[tuple[str, str], list[float]], size: int) -> None:
    """Prints how fast each was, and how much faster ours."""
    head = ["", "tokenizer", "seconds", "MB/s", *(f"ours, {kind}, is faster by" for kind in KINDS)]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for (who, kind), seconds in times.items():
        median = statistics.median(seconds)
        spread = f"{median:.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
        ratios = [record.ratio(seconds, times[OURS, kind]) for kind in KINDS]
        print(f"| {' | '.join([who, kind, spread, f'{size / 1e6 / median:.2f}', *ratios])} |")


def loader_rates(store: Path) -> dict[int, list[float]]:
    """Returns the rows a second of each round, by length."""
    batches = {}
    for length in LENGTHS:
        config = TrainConfig(steps=1_000_000)
        config.data.max_length, config.data.batch_size = length, BATCH_SIZE
        steps = loader.TrainBatches(open_store(store), config)
        batches[length] = loader.prefetch(steps, 0)
        for _ in range(20):  # the walk through the text, and what is prepared ahead
            next(batches[length])
    rates: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(ROUNDS.value):
        for length, rows in rates.items():
            count, started = 0, time.perf_counter()
            while time.perf_counter() - started < SECONDS.value:
                next(batches[length])
                count += BATCH_SIZE
            rows.append(count / (time.perf_counter() - started))
    return rates


if __name__ == "__main__":
    cli.run(main)
