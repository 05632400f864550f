"""Time opening a store of shards and reading it, beside the same store without shards.

    python benchmarks/shards.py STORE --shards=1000

STORE is one that `bert-jax prepare` wrote without shards. Its tokens are copied to that many
shards, between documents, in a temporary folder beside it. Batches of both are compared, then read
in alternation, in the calling thread.
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import google_crc32c
import numpy as np
import record

from bert_jax.batches import loader
from bert_jax.commands import process
from bert_jax.config import TrainConfig
from bert_jax.config.schedule import make_schedule
from bert_jax.storage import json_files
from bert_jax.text import store

BATCH_SIZE = 256


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("store", type=Path)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9, help="repetitions of each measurement")
    parser.add_argument("--batches", type=int, default=100, help="of a round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.store.absolute().parent) as name:
        divide(args.store, Path(name), args.shards)
        print(record.heading(("numpy",), {}))
        opening = {path: [] for path in (args.store, Path(name))}
        for _ in range(args.rounds):
            for path, seconds in opening.items():
                start = time.perf_counter()
                corpus = store.open_store(path)
                seconds.append(time.perf_counter() - start)
                corpus.verify()  # else it takes time from the next
        stores = [store.open_store(path) for path in opening]
        files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        for path, seconds in opening.items():
            print(f"{path.name}: opened in {np.median(seconds):.2f} s (median)")
        print(f"{len(stores[0].train.tokens):,} tokens; {files} open files\n")
        print("| batches | one file, sequences/s | shards | ratio (quartiles) |\n|---|---|---|---|")
        for pairs, length in (("nsp", 128), ("nsp", 512), ("none", 128), ("none", 512)):
            print(f"| {pairs}, {length} | {compare(stores, pairs, length, args)} |", flush=True)


def divide(source: Path, target: Path, count: int) -> None:
    """Write a store with its tokens in shards."""
    whole = json_files.read_json(source / "store.json", store.REMEDY)
    whole["shards"] = {f"{i:05d}-of-{count:05d}": {} for i in range(count)}
    shutil.copytree(source / "tokenizer", target / "tokenizer")
    corpus = store.open_store(source)
    corpus.verify()
    for split, part in (("train", corpus.train), ("eval", corpus.eval)):
        del whole["checksums"][f"{split}/tokens.bin"]
        (target / split).mkdir()
        for name in store.FILES[1:]:
            shutil.copyfile(source / split / f"{name}.bin", target / split / f"{name}.bin")
        bounds = np.arange(count + 1) * part.num_documents // count
        bounds = part.sentences[part.documents[bounds]]
        for (name, sizes), low, high in zip(
            whole["shards"].items(), bounds[:-1], bounds[1:], strict=True
        ):
            path = target / "shards" / name / split / "tokens.bin"
            path.parent.mkdir(parents=True)
            path.write_bytes(content := part.tokens[low:high].tobytes())
            sizes[split] = len(content)
            key = path.relative_to(target).as_posix()
            whole["checksums"][key] = google_crc32c.value(content)
    json_files.write_record(target / "store.json", whole)


def compare(stores: list[store.Corpus], pairs: str, length: int, args: argparse.Namespace) -> str:
    """Return the rates of two stores and their ratio, after a comparison of their batches."""
    config = TrainConfig(steps=1_000_000)
    config.data.max_length, config.data.batch_size = length, BATCH_SIZE
    config.data.pairs = pairs
    both = [
        loader.TrainBatches(corpus, make_schedule(config).stages, config.data, config.seed)
        for corpus in stores
    ]
    for step in range(args.batches):
        one, other = (batches[step] for batches in both)
        assert all((one[name] == other[name]).all() for name in one)
    seconds: list[list[float]] = [[], []]
    for number in range(args.rounds):
        for batches, times in zip(both, seconds, strict=True):
            start = time.perf_counter()
            for step in range(args.batches):
                batches[number * args.batches + step]
            times.append(time.perf_counter() - start)
    rates = (f"{args.batches * BATCH_SIZE / np.median(times):,.0f}" for times in seconds)
    return " | ".join([*rates, record.ratio(seconds[0], seconds[1])])


if __name__ == "__main__":
    process.run(main, Path(__file__).name)
