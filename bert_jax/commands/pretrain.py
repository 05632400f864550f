"""Pretrain an encoder from text.

The same command again resumes a run that was interrupted. `--init` continues from the weights, the
shape and the tokenizer of another model; heads that it lacks are randomly initialized.

On several hosts the same command is started on each, with a workdir that all of them share. On a
TPU pod, under Slurm and in Kubernetes they find each other; elsewhere the last four flags say who
they are.
"""

import argparse
from pathlib import Path

from bert_jax.commands import process
from bert_jax.commands.flags import CHECKPOINT, add_config, add_hosts, read_config
from bert_jax.config import TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_config(parser, "tiny", TrainConfig)
    parser.add_argument("--workdir", help="folder of the run (runs/NAME of the recipe)")
    parser.add_argument("--init", metavar="CHECKPOINT", help=f"{CHECKPOINT}, to continue from")
    add_hosts(parser)


def run(args: argparse.Namespace, words: list[str]) -> None:
    """Prepare the text, train, and print the scores."""
    recipe = read_config(args.config, words, TrainConfig)

    def command() -> None:
        from bert_jax.pretraining import start, train

        workdir = Path(args.workdir or f"runs/{recipe.name}")
        run = start(recipe.config, workdir, args.init, recipe.model_fields)
        with process.StopSignals() as signals:
            train(run, signals.reason)

    process.keep_host_memory()
    process.run_on_hosts(args, command)
