"""Time text preparation beside Hugging Face's `datasets`, and the loader's sequences a second.

    python benchmarks/input.py --text=corpus.txt --wordpiece=vocab.txt \\
        --datasets_python=PYTHON --output=input.json

PYTHON is that of an environment with `datasets` and `transformers`. Both prepare the same files of
plain text with the same tokenizers, in alternation. `bert-jax prepare` writes a store; its time is
that of the whole command. The peer runs `load_dataset("text")`, its fast tokenizer and blocks of
128, in as many processes as there are cores; its time starts after its imports. A tokenizer that is
not passed is trained on the text first; that time is printed.

The loader is that of pretraining with the store of the first tokenizer, without a train step.
"""

import argparse
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

import record

from bert_jax.batches import loader
from bert_jax.commands import process
from bert_jax.config import DataConfig, ModelConfig, TokenizerConfig, TrainConfig
from bert_jax.config.schedule import make_schedule
from bert_jax.convert import tokenizer_files
from bert_jax.errors import UserError
from bert_jax.text import tokenizer_loading, tokenizer_training
from bert_jax.text.sources import FileSource, open_source
from bert_jax.text.store import open_store
from bert_jax.text.tokenizer import Tokenizer

VOCAB_SIZES = {"wordpiece": 30522, "sentencepiece": 32000}  # of tokenizers that are trained
LENGTHS, BATCH_SIZE = (128, 512), 256
OURS, PEER = "bert-jax", "datasets"


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--text", default="", help="files of plain text or globs, comma separated")
    for kind in VOCAB_SIZES:
        parser.add_argument(f"--{kind}", default="", help=f"a {kind} tokenizer")
    parser.add_argument("--datasets_python", default="", help="a Python that has datasets")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each measurement")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a round of the loader")
    parser.add_argument("--output", default="", help="a JSON file for all figures")
    args = parser.parse_args()
    versions = check(args)
    source = open_source(args.text, DataConfig())
    if not isinstance(source, FileSource):
        raise UserError("--text must be files of plain text")
    if next(source.documents(), None) is None:
        raise UserError(f"--text {args.text} has no text; add some")
    files = [str(path.absolute()) for path in source.paths]
    with tempfile.TemporaryDirectory(prefix="bert-jax-input-") as name:
        folder = Path(name)
        for kind in VOCAB_SIZES:
            save(kind, load_or_train(kind, getattr(args, kind), source), folder)
        times: dict[tuple[str, str], list[float]] = {
            (who, kind): [] for kind in VOCAB_SIZES for who in (OURS, PEER)
        }
        for number in range(args.rounds):
            for (who, kind), seconds in times.items():
                print(f"round {number + 1}: {who}, {kind}", file=sys.stderr, flush=True)
                seconds.append(
                    time_ours(kind, folder, files)
                    if who == OURS
                    else time_peer(kind, folder, files, args.datasets_python)
                )
        print(record.heading(("jax", "grain", "numpy", "sentencepiece", "tokenizers"), versions))
        print(
            f"{source.size / 1e6:.1f} MB of text, medians of {args.rounds} rounds (least to most)"
        )
        print("and ratios of each round (quartiles)\n")
        print_preparation(times, source.size)
        rates = loader_rates(folder / f"store-{next(iter(VOCAB_SIZES))}", args)
    print(f"\nThe loader, batches of {BATCH_SIZE}:\n\n| length | sequences/s | least | most |")
    print("|---|---|---|---|")
    for length, rate in rates.items():
        values = (statistics.median(rate), min(rate), max(rate))
        print(f"| {length} | {' | '.join(f'{value:,.0f}' for value in values)} |")
    if args.output:
        seconds = {f"{who}, {kind}": values for (who, kind), values in times.items()}
        figures = {"command": sys.argv, "seconds": seconds, "sequences_per_second": rates}
        Path(args.output).write_text(json.dumps(figures, indent=1) + "\n")


def check(args: argparse.Namespace) -> dict[str, str]:
    """Return the versions of the peer; refuse what would fail after the first measurement."""
    if args.rounds < 1 or args.seconds <= 0:
        raise UserError("--rounds and --seconds must be positive")
    if args.output and not os.access(Path(args.output).absolute().parent, os.W_OK):
        raise UserError(f"--output {args.output} cannot be written there; make the folder first")
    python = args.datasets_python
    if not shutil.which(python):
        raise UserError(
            f"--datasets_python {python!r} is no program; pass the Python of an environment with "
            "datasets and transformers"
        )
    code = (
        "import datasets, json, tokenizers, transformers\n"
        "modules = (datasets, transformers, tokenizers)\n"
        "print(json.dumps({f'{m.__name__} (peer)': m.__version__ for m in modules}))"
    )
    versions = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if versions.returncode:
        raise UserError(f"{python} cannot run the peer: {last_line(versions.stderr)}")
    return json.loads(versions.stdout)


def load_or_train(kind: str, path: str, source: FileSource) -> Tokenizer:
    """Return the tokenizer at `path`, or one that is trained on the text."""
    if path:
        tokenizer = tokenizer_loading.load(path)
        if tokenizer.kind != kind:
            raise UserError(f"--{kind} {path} is a {tokenizer.kind} tokenizer")
        return tokenizer
    print(f"training {kind}", file=sys.stderr, flush=True)
    start = time.perf_counter()
    sentences = (sentence for document in source.documents() for sentence in document)
    config = TokenizerConfig(kind=kind)
    tokenizer = tokenizer_training.train(sentences, config, VOCAB_SIZES[kind])
    seconds = time.perf_counter() - start
    print(f"{kind}: {tokenizer.vocab_size:,} tokens, trained in {seconds:.1f} s\n", flush=True)
    return tokenizer


def save(kind: str, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer for us, and the same one for the peer."""
    tokenizer.save(folder / f"{OURS}-{kind}")
    (folder / f"{PEER}-{kind}").mkdir()
    config = ModelConfig(vocab_size=tokenizer.vocab_size)
    for name, content in tokenizer_files.files(tokenizer, config).items():
        (folder / f"{PEER}-{kind}" / name).write_bytes(content)


def time_ours(kind: str, folder: Path, files: list[str]) -> float:
    """Return the seconds of `bert-jax prepare`."""
    store = folder / f"store-{kind}"
    shutil.rmtree(store, ignore_errors=True)
    (tokenizer,) = (folder / f"{OURS}-{kind}").iterdir()
    words = ["prepare", ",".join(files), str(store), f"--tokenizer={tokenizer}"]
    start = time.perf_counter()
    run(
        [sys.executable, "-m", "bert_jax.commands", *words],
        PYTHONPATH=os.pathsep.join(sys.path[1:]),
    )
    return time.perf_counter() - start


def time_peer(kind: str, folder: Path, files: list[str], python: str) -> float:
    """Return the seconds of the peer."""
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    script = str(Path(__file__).with_name("input_peer.py"))
    cores = str(len(os.sched_getaffinity(0)))
    words = [script, json.dumps(files), str(folder / f"{PEER}-{kind}"), str(cache), cores]
    # One thread a process, since there are as many processes as cores.
    printed = run([python, *words], TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    return json.loads(printed.splitlines()[-1])["seconds"]


def run(command: list[str], **environment: str) -> str:
    """Return the output of a program."""
    env = {**os.environ, **environment}
    program = subprocess.run(command, env=env, capture_output=True, text=True)
    if program.returncode:
        raise UserError(f"{shlex.join(command[1:4])} has failed: {last_line(program.stderr)}")
    return program.stdout


def last_line(text: str) -> str:
    """Return the reason that a program printed."""
    return (text.strip().splitlines() or ["no message"])[-1]


def print_preparation(times: dict[tuple[str, str], list[float]], size: int) -> None:
    """Print how fast each was, and how much faster ours."""
    ratios = [f"ours, {kind}, is faster by" for kind in VOCAB_SIZES]
    head = ["", "tokenizer", "seconds", "MB/s", *ratios]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for (who, kind), seconds in times.items():
        median = statistics.median(seconds)
        spread = f"{median:.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
        ratios = [record.ratio(seconds, times[OURS, kind]) for kind in VOCAB_SIZES]
        print(f"| {' | '.join([who, kind, spread, f'{size / 1e6 / median:.2f}', *ratios])} |")


def loader_rates(store: Path, args: argparse.Namespace) -> dict[int, list[float]]:
    """Return the sequences a second of each round, by length."""
    batches = {}
    for length in LENGTHS:
        config = TrainConfig(steps=1_000_000)
        config.data.max_length, config.data.batch_size = length, BATCH_SIZE
        batches[length] = loader.prefetch(
            loader.TrainBatches(
                open_store(store), make_schedule(config).stages, config.data, config.seed
            ),
            0,
        )
        for _ in range(20):  # reads the index of the text, and fills the buffer
            next(batches[length])
    rates: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(args.rounds):
        for length, rate in rates.items():
            count, start = 0, time.perf_counter()
            while time.perf_counter() - start < args.seconds:
                next(batches[length])
                count += BATCH_SIZE
            rate.append(count / (time.perf_counter() - start))
    return rates


if __name__ == "__main__":
    process.run(main, Path(__file__).name)
