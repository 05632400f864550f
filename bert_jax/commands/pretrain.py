"""Pretrain an encoder from text.

    bert-jax pretrain --config=tiny --workdir=runs/tiny

The same command again resumes a run that was interrupted, and with more steps it lengthens a run,
finished or not. Without `--config`, a run that is in `--workdir` has its own config. `--init`
continues from the weights, the shape and the tokenizer of another model; heads that it lacks are
randomly initialized. `--fork` begins a new run from the whole state of another one, the optimizer's
included, with its config unless `--config` names a recipe. The workdir may be gs://BUCKET/FOLDER.

On several hosts the same command is started on each, with a workdir that all of them share;
docs/machines.md says how they find each other.
"""

import argparse
import math

from bert_jax import console
from bert_jax.commands import process
from bert_jax.commands.flags import Parser, Recipe, add_config, add_run, read_config
from bert_jax.config import TrainConfig, settings
from bert_jax.errors import UserError, refuse
from bert_jax.storage import paths
from bert_jax.storage.paths import CHECKPOINT

_DEFAULT = "tiny"


def add_arguments(parser: Parser) -> None:
    add_config(parser, _DEFAULT, TrainConfig)
    parser.set_defaults(config=None)
    add_run(parser, None, f"{CHECKPOINT}, to continue from")
    what = "a workdir whose run to continue in another workdir, from its last checkpoint or STEP"
    parser.add_argument("--fork", metavar="RUN[@STEP]", help=what)
    what = "train for about so long: a step is timed, and sets the steps, the batch and the size"
    parser.add_argument("--minutes", type=float, metavar="M", help=what)


def run(args: argparse.Namespace, words: list[str]) -> None:
    own = None
    if args.fork and not args.workdir:
        raise UserError("--fork begins a new run; name its folder by --workdir")
    if args.workdir and not args.config:
        from bert_jax.runs import origin  # late, as it imports JAX

        own = origin.own_config(paths.as_path(args.workdir), args.fork)
    recipe = read_config(args.config or _DEFAULT, words, TrainConfig, own)
    if args.minutes is not None:
        _check_minutes(args, recipe)
        own = own or _config_of_run(recipe.name, args.workdir)
        if own:  # so that the same command resumes
            console.show("minutes    are those of the run, which resumes with its own steps")
            args.minutes, args.workdir = None, args.workdir or f"runs/{recipe.name}"
            _take_fitted(recipe, own)
    process.train("pretrain", args, recipe._replace(name="") if own else recipe)


def _check_minutes(args: argparse.Namespace, recipe: Recipe) -> None:
    """Refuse minutes that are none, or beside what else says how long a run is."""
    refuse(
        not 0 < args.minutes < math.inf,
        f"--minutes={args.minutes:g} is no time",
        fix="give a positive number of minutes",
    )
    refuse(
        "steps" in recipe.fields,
        "--minutes and --config.steps both say how long to train",
        fix="give one of them",
    )
    starts = [phase.start for phase in recipe.config.data.phases]
    fields = {
        "data.phases": any(start >= 1 for start in starts),
        "data.length_warmup_fraction": recipe.config.data.length_warmup_fraction >= 1,
    }
    in_steps = next((name for name, has in fields.items() if has and name in recipe.fields), None)
    refuse(
        in_steps,
        f"{in_steps} is in steps, and --minutes finds out how many there are",
        fix="give a share of them, such as 0.9",
    )
    refuse(
        args.fork,
        "--minutes begins a schedule of its own, and --fork continues that of another run",
        fix="give --config.steps instead",
    )
    refuse(
        args.num_processes and args.num_processes > 1,
        "--minutes times a step on one host",
        fix="give --config.steps on several",
    )


def _take_fitted(recipe: Recipe, own: TrainConfig) -> None:
    """Set what the minutes have changed of a recipe in a run; the rest is compared with the run."""
    from bert_jax.planning import time_budget  # late, as it imports JAX

    before = settings.flatten(own)
    for name in time_budget.FITTED:
        if name not in recipe.fields:
            settings.assign(recipe.config, name, before[name])


def _config_of_run(name: str, workdir: str | None) -> TrainConfig | None:
    """Return the config of the run that has a workdir, by default that of a recipe's name."""
    from bert_jax.runs import origin  # late, as it imports JAX

    return origin.own_config(paths.as_path(workdir or f"runs/{name}"))
