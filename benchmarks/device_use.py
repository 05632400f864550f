"""What people do with a small encoder, for device.py, which starts this program.

    python benchmarks/device_use.py FOLDER FIGURES [tiny]

An encoder of MiniLM's size with random weights is written to the folder, is fine-tuned to classify
short texts, and is trained on pairs at a batch of 8,192. Each is a line of JSON with
its highest rate of some steps, written as soon as it is measured. Encoding is timed by
encode_peers.py.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encode_peers

import bert_jax
from bert_jax.commands import process
from bert_jax.errors import first_line

_WORDS = 32  # of a text


def _text(generator: random.Random) -> str:
    return " ".join(f"w{generator.randrange(20_000)}" for _ in range(_WORDS))


def _write(path: Path, head: str, rows: int, last: Callable[[random.Random], Any]) -> str:
    """Write a table of texts, each with what `last` returns, and return its path."""
    generator = random.Random(0)
    lines = (f"{_text(generator)}\t{last(generator)}" for _ in range(rows))
    path.write_text("\n".join([head, *lines]) + "\n")
    return str(path)


def finetune(folder: Path, *, tiny: bool) -> dict[str, Any]:
    """Return the rate of fine-tuning a classifier."""
    config: Any = bert_jax.recipe("finetune/classification")
    train, held_out = (64, 16) if tiny else (32_768, 256)
    head, label = "sentence\tlabel", lambda generator: f"LABEL_{generator.randrange(2)}"
    config.data.train = _write(folder / "train.tsv", head, train, label)
    config.data.eval = _write(folder / "eval.tsv", head, held_out, label)
    config.epochs = 1.0
    if not tiny:
        config.data.batch_size = 256
    return _rate("fine-tuning", config, folder / "predict", folder / "classifier")


def train_embeddings(folder: Path, *, tiny: bool) -> dict[str, Any]:
    """Return the rate of training embeddings on pairs."""
    config: Any = bert_jax.recipe("finetune/embedding")
    config.data.batch_size = 32 if tiny else 8192
    head = "query\tpassage"
    rows = 8 * config.data.batch_size
    config.data.train = _write(folder / "pairs.tsv", head, rows, _text)
    config.data.eval = _write(folder / "held_out.tsv", head, 64, _text)
    config.epochs = 1.0
    return _rate("training embeddings", config, folder / "encode", folder / "embeddings")


def _rate(name: str, config: Any, init: Path, workdir: Path) -> dict[str, Any]:
    config.model.dtype = "auto"
    config.log_every = 2
    started = time.monotonic()
    bert_jax.finetune(config, init, workdir)
    lines = (workdir / "seed-0/metrics.jsonl").read_text().splitlines()
    rates = [row["sequences_per_second"] for row in map(json.loads, lines) if _is_train(row)]
    return {
        "what": name,
        "batch_size": config.data.batch_size,
        "sequences_per_second": max(rates),
        "seconds": time.monotonic() - started,
    }


def _is_train(row: dict[str, Any]) -> bool:
    return row["split"] == "train" and "sequences_per_second" in row


def main() -> None:
    """Measure, and write a line at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for the models and the texts")
    parser.add_argument("figures", type=Path, help="the file to write")
    parser.add_argument("size", nargs="?", choices=("tiny",), help="of the models; else MiniLM's")
    args = parser.parse_args()
    folder, output, tiny = args.folder, args.figures, args.size == "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    output.write_text("")
    encode_peers.write_models(folder, *(2, 64) if tiny else (6, 384))
    failed = False
    for measure in (finetune, train_embeddings):
        try:
            row = measure(folder, tiny=tiny)
        except Exception as error:  # the other one is measured
            row, failed = {"what": measure.__name__, "cause": first_line(error)[:300]}, True
        with output.open("a") as file:
            file.write(json.dumps(row) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    process.run(main, Path(__file__).name)
