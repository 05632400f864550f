"""Pretrain an encoder from text.

The same command again resumes a run that was interrupted. `--init` continues from the weights, the
shape and the tokenizer of another model; heads that it lacks are randomly initialized.

On several hosts the same command is started on each, with a workdir that all of them share. On a
TPU pod, under Slurm and in Kubernetes they find each other; elsewhere the last four flags say who
they are.
"""

import argparse

from bert_jax.commands import process
from bert_jax.commands.flags import CHECKPOINT, add_config, add_run, read_config
from bert_jax.config import TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "tiny", TrainConfig)
    add_run(parser, None, f"{CHECKPOINT}, to continue from")


def run(args: argparse.Namespace, words: list[str]) -> None:
    process.train("pretraining", args, read_config(args.config, words, TrainConfig))
