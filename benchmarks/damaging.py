"""Damage each file of a workdir, a store and a checkpoint, and read what is left."""

import argparse
import collections
import contextlib
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import fuzzing
from fault_samples import (
    by_kind,
    digest,
    finetuning_config,
    in_a_child,
    make_samples,
    pretraining_config,
    row,
    scores,
)

import bert_jax
from bert_jax import DataConfig, console
from bert_jax.batches.loader import TrainBatches
from bert_jax.config.schedule import make_schedule
from bert_jax.errors import CommandError
from bert_jax.text import prepare


def _flip(data: bytes, share: float, draw: random.Random) -> bytes:
    at = min(len(data) - 1, int((share + draw.random() / 3) * len(data)))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes] | None] = {
    "emptied": lambda data, draw: b"",
    "half": lambda data, draw: data[: len(data) // 2],
    "a byte more": lambda data, draw: data + draw.randbytes(1),
    "bit flipped in the first third": lambda data, draw: _flip(data, 0, draw),
    "bit flipped in the middle": lambda data, draw: _flip(data, 1 / 3, draw),
    "bit flipped in the last third": lambda data, draw: _flip(data, 2 / 3, draw),
    "zeroed": lambda data, draw: bytes(len(data)),
    "noise": lambda data, draw: draw.randbytes(len(data)),
    "deleted": None,
    "a directory": None,
}


def damage_file(path: Path, way: str, draw: random.Random) -> None:
    """Damage a file in one of the ways of `DAMAGES`."""
    if change := DAMAGES[way]:
        if data := path.read_bytes():
            path.write_bytes(change(data, draw))
        return
    path.unlink()
    if way == "a directory":
        path.mkdir()


def _pretrained(samples: Path, folder: Path) -> Any:
    config = pretraining_config(samples / "text.txt")
    result = bert_jax.pretrain(config, folder, quiet=True)
    assert result.bert
    return scores(result.scores), result.baselines, digest(result.bert.params)


def _finetuned(samples: Path, folder: Path) -> Any:
    config = finetuning_config(samples / "train.tsv")
    result = bert_jax.finetune(config, samples / "pretrained", folder, quiet=True)
    rows = [(each["name"], each["scores"]) for each in result.comparison]
    predictions = (folder / "predictions.jsonl").read_text()
    return result.scores, rows, digest(result.bert.params), predictions


def _loaded(samples: Path, folder: Path) -> Any:
    bert = bert_jax.load(folder)
    return bert.config, bert.task, bert.tokenizer.fingerprint, digest(bert.params)


def _prepared(samples: Path, folder: Path) -> Any:
    config = pretraining_config(samples / "text.txt")
    with console.quiet():
        corpus = prepare.prepare(config.data, config.tokenizer, 64, folder)
    corpus.verify()
    batches = TrainBatches(corpus, make_schedule(config).stages, config.data, config.seed)
    return [digest(batches[step]) for step in range(3)], corpus.tokenizer.fingerprint


def _resumed_store(samples: Path, folder: Path) -> Any:
    data = DataConfig(source=str(samples / "unfinished/text.txt"), eval_fraction=0.4)
    with console.quiet():
        corpus = prepare.prepare(data, fuzzing.wordpiece(), 0, folder)
    corpus.verify()
    return [digest(vars(split)) for split in (corpus.train, corpus.eval)]


# What is damaged, by its folder in the samples, and what then reads it and returns its numbers.
TARGETS: dict[str, tuple[str, Callable[[Path, Path], Any]]] = {
    "pretraining, finished": ("pretrained", _pretrained),
    "pretraining, stopped": ("half-pretrained", _pretrained),
    "fine-tuning, finished": ("finetuned", _finetuned),
    "fine-tuning, stopped": ("half-finetuned", _finetuned),
    "checkpoint": ("finetuned/best", _loaded),
    "store": ("pretrained/store", _prepared),
    "unfinished store": ("unfinished/store", _resumed_store),
}


def damage(args: argparse.Namespace) -> str:
    """Damage every kind of file of every target in every way, and return a table by target."""
    samples = args.output / "samples"
    if not samples.exists():
        in_a_child(make_samples, samples)
    draw = random.Random(args.seed)
    jobs = []  # the damages of a kind of file, each to a file that is drawn
    for target, (folder, _) in TARGETS.items():
        paths = sorted(p for p in (samples / folder).rglob("*") if p.is_file())
        names = [str(path.relative_to(samples / folder)) for path in paths]
        names = [n for n in names if "store" in target or not n.startswith("store/")]
        for kind in by_kind(names).values():
            jobs.append((target, [(names[draw.choice(kind)], way) for way in DAMAGES]))
    jobs = draw.sample(jobs, min(args.count or len(jobs), len(jobs)))
    expected = {target: in_a_child(numbers, samples, target) for target in TARGETS}
    counts: dict[str, collections.Counter] = {target: collections.Counter() for target in TARGETS}
    faults = []

    def run(job: tuple[str, list[tuple[str, str]]]) -> None:
        if time.monotonic() > args.deadline:
            return
        target, damages = job
        found = _attempt_all(samples, target, damages, expected[target], args.seed)
        for (name, way), (kind, text) in zip(damages, found, strict=True):
            counts[target][kind] += 1
            if kind not in ("refused", "same"):
                faults.append(f"{target}: {name}, {way}: {kind}")
                print(faults[-1], text.strip().splitlines()[-1:], flush=True)
                with (args.output / "faults.txt").open("a") as file:
                    file.write(f"{faults[-1]}\n{text}\n\n")

    with ThreadPoolExecutor(args.processes) as pool:
        list(pool.map(run, jobs))
    kinds = ("refused", "same", "other numbers", "traceback", "crash or hang")
    rows = [f"| damaged | times | {' | '.join(kinds)} |", "|---|" + "---:|" * 6]
    rows += [row(t, sum(c.values()), *(c[kind] for kind in kinds)) for t, c in counts.items()]
    total = sum(counts.values(), collections.Counter())
    rows.append(row("all", sum(total.values()), *(total[kind] for kind in kinds)))
    return "\n".join([*rows, "", *(f"- {fault}" for fault in sorted(faults))])


def _attempt_all(
    samples: Path, target: str, damages: Sequence[tuple[str, str]], expected: Any, seed: int
) -> list[tuple[str, str]]:
    """Return the outcome of each damage, in one process; in one for each where that one ends."""
    try:
        return in_a_child(_attempts, samples, target, damages, expected, seed, seconds=300)
    except (ChildProcessError, TimeoutError) as error:
        if len(damages) == 1:
            return [("crash or hang", str(error))]
        each = (_attempt_all(samples, target, [one], expected, seed) for one in damages)
        return [outcome for outcomes in each for outcome in outcomes]


def _attempts(
    samples: Path, target: str, damages: Sequence[tuple[str, str]], expected: Any, seed: int
) -> list[tuple[str, str]]:
    return [attempt(samples, target, name, way, expected, seed) for name, way in damages]


def numbers(samples: Path, target: str) -> Any:
    """Return the numbers of a target that nothing has damaged."""
    with _copied(samples / TARGETS[target][0]) as folder:
        return TARGETS[target][1](samples, folder)


@contextlib.contextmanager
def _copied(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        yield Path(shutil.copytree(folder, Path(scratch) / "x"))


def attempt(
    samples: Path, target: str, name: str, way: str, expected: Any, seed: int
) -> tuple[str, str]:
    """Return what a copy of the target does with a damaged file, in words, and a fault's text."""
    folder, read = TARGETS[target]
    with _copied(samples / folder) as copied:
        damage_file(copied / name, way, random.Random(f"{seed}{name}{way}"))
        found: list[Any] = []
        call = partial(read, samples, copied)
        refused, fault = fuzzing.outcome(lambda: found.append(call()), target, CommandError)
    if fault:
        return "traceback", "\n".join([*fault, *fault.values()])
    if refused:
        return "refused", ""
    if found[0] == expected:
        return "same", ""
    return "other numbers", f"{found[0]}\ninstead of\n{expected}"
