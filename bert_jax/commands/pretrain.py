"""Pretrain an encoder from text.

    bert-jax pretrain --config=tiny --workdir=runs/tiny

The same command again resumes a run that was interrupted, and with more steps it lengthens a run,
finished or not. Without `--config`, a run that is in `--workdir` has its own config. `--init`
continues from the weights, the shape and the tokenizer of another model; heads that it lacks are
randomly initialized.

On several hosts the same command is started on each, with a workdir that all of them share. On a
TPU pod, under Slurm and in Kubernetes they find each other; elsewhere the last four flags say who
they are.
"""

import argparse
from pathlib import Path

from bert_jax.commands import process
from bert_jax.commands.flags import CHECKPOINT, Parser, add_config, add_run, read_config
from bert_jax.config import TrainConfig

_DEFAULT = "tiny"


def add_arguments(parser: Parser) -> None:
    add_config(parser, _DEFAULT, TrainConfig)
    parser.set_defaults(config=None)
    add_run(parser, None, f"{CHECKPOINT}, to continue from")


def run(args: argparse.Namespace, words: list[str]) -> None:
    own = None
    if args.workdir and not args.config:
        from bert_jax.training import workdir  # late, as it imports JAX

        own = workdir.own_config(Path(args.workdir))
    recipe = read_config(args.config or _DEFAULT, words, TrainConfig, own)
    process.train("pretraining", args, recipe)
