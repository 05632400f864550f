"""Fine-tune an encoder for a task.

The same command again resumes a run that was interrupted. Fields of the model that are not set are
the checkpoint's. On several hosts it is started as `bert-jax pretrain` is.
"""

import argparse
from pathlib import Path

from bert_jax.commands import process
from bert_jax.commands.flags import CHECKPOINT, add_config, add_hosts, read_config
from bert_jax.config import FinetuneConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_config(parser, "finetune/docstrings", FinetuneConfig)
    parser.add_argument("--workdir", help="folder of the run (runs/NAME of the recipe)")
    parser.add_argument(
        "--init", metavar="CHECKPOINT", default="runs/tiny", help=f"{CHECKPOINT} (runs/tiny)"
    )
    add_hosts(parser)


def run(args: argparse.Namespace, words: list[str]) -> None:
    """Read the task, train with each seed, and print the scores."""
    recipe = read_config(args.config, words, FinetuneConfig)

    def command() -> None:
        from bert_jax.finetuning import start, train

        workdir = Path(args.workdir or f"runs/{recipe.name}")
        run = start(recipe.config, args.init, workdir, recipe.model_fields)
        with process.StopSignals() as signals:
            train(run, signals.reason)

    process.keep_host_memory()
    process.run_on_hosts(args, command)
