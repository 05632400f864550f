"""`bert-jax benchmark`: reads the config, and prints what was measured."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from bert_jax.commands import flags as cli
from bert_jax.config import TrainConfig, phases, validate
from bert_jax.errors import UserError


def run(words: list[str]) -> None:
    """Runs the command with these words of the command line."""
    args, fields = _parser().parse_known_args(words)
    if args.steps < 1 or not 0 < args.seconds < float("inf"):
        raise UserError("--steps and --seconds must be positive")
    from bert_jax.commands.process import keep_host_memory

    keep_host_memory()
    from bert_jax.planning import benchmark_table as table
    from bert_jax.planning import measure

    config = cli.read_config(args.config, fields, TrainConfig).config
    validate(config)
    count = len(phases(config))
    if not 1 <= args.phase <= count:
        raise UserError(f"--phase {args.phase}: the config has phases 1 to {count}")
    if config.parallel.mode == "pmap":
        raise UserError("parallel.mode pmap is not measured; leave it out")
    limits = measure.Limits(args.steps, args.seconds)
    with tempfile.TemporaryDirectory(prefix="bert-jax-") as folder:
        traces = None if args.profile is None else _folder(args.profile or folder)
        report = measure.measure(config, args.phase, limits, _say, traces)
    if args.json:
        print(json.dumps(table.as_json(report), indent=2))
    else:
        print(table.text(report, args.config))


def _folder(name: str) -> Path:
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--profile={name} cannot be made ({error.strerror})") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"--profile={name} cannot be written; choose another folder")
    return path


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bert-jax benchmark",
        description="Takes the training steps of a config on the devices of this host, and prints "
        "how long they take: with random rows, and with rows of its text. Besides: the time to "
        "compile, memory, how fast the text alone is, and how fast matrix products alone are here. "
        "Nothing is kept. Fields are set as for train.py: --config.data.batch_size=64. Text that "
        "takes long to prepare is better prepared before: --config.data.source=STORE",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="such as configs/base.py")
    parser.add_argument(
        "--phase",
        type=int,
        default=1,
        metavar="N",
        help="of a config with rows of several lengths: which of them (1)",
    )
    parser.add_argument(
        "--steps", type=int, default=50, metavar="N", help="to time of each kind, at most (50)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="to time them, at most (60)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    parser.add_argument(
        "--profile",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="break a step down by kind of operation; with a folder, the profile is left there, "
        "which XProf and Perfetto show",
    )
    return parser
