"""Make a checkpoint of a Hugging Face or Google checkpoint directory.

    bert-jax import exported imported

Every command takes these directories as they are, too. A checkpoint loads faster and is
self-contained.
"""

import argparse

from bert_jax.commands import process
from bert_jax.errors import without_controls
from bert_jax.storage.paths import CHECKPOINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help=CHECKPOINT)
    parser.add_argument("destination", metavar="DST", help="the checkpoint to write")
    force = "replace a checkpoint that is there"
    parser.add_argument("--force", action="store_true", help=force)


def run(args: argparse.Namespace, _: list[str]) -> None:
    from bert_jax.storage import paths, replacement
    from bert_jax.training.checkpoint import is_checkpoint

    may_replace = is_checkpoint if args.force else None  # asked before a long download
    replacement.check_replaceable(paths.on_disk(args.destination), may_replace)
    bert = process.load_checkpoint(args.source)
    bert.save(args.destination, force=args.force)
    print(f"{args.destination}: {bert!r}")
    if bert.unused:
        unused = without_controls(", ".join(bert.unused))
        print(f"dropped, as the model has no place for them: {unused}")
