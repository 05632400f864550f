"""Fine-tune an encoder for a task.

    bert-jax finetune --init=runs/tiny --workdir=runs/docstrings

The same command again resumes a run that was interrupted. Fields of the model that are not set are
the checkpoint's, but for how it computes: dtype, remat, scan_layers and attention. On several hosts
it is started as `bert-jax pretrain` is.
"""

import argparse

from bert_jax.commands import process
from bert_jax.commands.flags import Parser, add_config, add_run, read_config
from bert_jax.config import FinetuneConfig
from bert_jax.errors import refuse
from bert_jax.storage.paths import CHECKPOINT, is_remote


def add_arguments(parser: Parser) -> None:
    add_config(parser, "finetune/docstrings", FinetuneConfig)
    add_run(parser, "runs/tiny", f"{CHECKPOINT} (runs/tiny)")


def run(args: argparse.Namespace, words: list[str]) -> None:
    refuse(
        args.workdir and is_remote(args.workdir),
        f"--workdir {args.workdir} is not on a disk, which fine-tuning needs",
        fix="give a folder, and copy it when the run has ended",
    )
    recipe = read_config(args.config, words, FinetuneConfig)
    data = recipe.config.data
    refuse(
        data.eval and "data.eval_fraction" in recipe.fields,
        f"data.eval_fraction {data.eval_fraction} has no effect beside data.eval {data.eval}",
        fix="leave it out, or set data.eval=none to hold out a part of the training examples",
    )
    from bert_jax.tasks import glue

    refuse(
        glue.has_own_sources(recipe.config.task.glue, data.train)
        and "data.eval_fraction" in recipe.fields,
        f"data.eval_fraction {data.eval_fraction} has no effect on a task of GLUE, which has "
        "held-out examples of its own",
        fix="leave it out, or give a single file as data.train",
    )
    process.train("finetune", args, recipe)
