"""Pretrain an encoder from text.

    bert-jax pretrain --config=tiny --workdir=runs/tiny

The same command again resumes a run that was interrupted, and with more steps it lengthens a run,
finished or not. Without `--config`, a run that is in `--workdir` has its own config. `--init`
continues from the weights, the shape and the tokenizer of another model; heads that it lacks are
randomly initialized. `--fork` begins a new run from the whole state of another one, the optimizer's
included, with its config unless `--config` names a recipe. The workdir may be gs://BUCKET/FOLDER.

On several hosts the same command is started on each, with a workdir that all of them share. On a
TPU pod, under Slurm and in Kubernetes they find each other; elsewhere four flags of `--help-all`
say who they are.
"""

import argparse

from bert_jax.commands import process
from bert_jax.commands.flags import Parser, add_config, add_run, read_config
from bert_jax.config import TrainConfig
from bert_jax.errors import UserError
from bert_jax.storage import paths
from bert_jax.storage.paths import CHECKPOINT

_DEFAULT = "tiny"


def add_arguments(parser: Parser) -> None:
    add_config(parser, _DEFAULT, TrainConfig)
    parser.set_defaults(config=None)
    add_run(parser, None, f"{CHECKPOINT}, to continue from")
    what = "a workdir whose run to continue in another workdir, from its last checkpoint or STEP"
    parser.add_argument("--fork", metavar="RUN[@STEP]", help=what)


def run(args: argparse.Namespace, words: list[str]) -> None:
    own = None
    if args.fork and not args.workdir:
        raise UserError("--fork begins a new run; name its folder by --workdir")
    if args.workdir and not args.config:
        from bert_jax.runs import origin  # late, as it imports JAX

        own = origin.own_config(paths.as_path(args.workdir), args.fork)
    recipe = read_config(args.config or _DEFAULT, words, TrainConfig, own)
    process.train("pretrain", args, recipe._replace(name="") if own else recipe)
