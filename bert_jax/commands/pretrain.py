"""Pretrain an encoder from text.

    bert-jax pretrain --config=tiny --workdir=runs/tiny

The same command resumes an interrupted run. With more steps it lengthens a run, even a finished
one. Without `--config`, a run that is in `--workdir` keeps its config. `--init` takes the weights,
the shape and the tokenizer of another model; heads that it lacks start from random weights.
`--fork` begins a new run from the whole state of another run, the optimizer's included, and takes
its config, unless `--config` names a recipe. The workdir may be gs://BUCKET/FOLDER.

On several hosts, start the same command on each, with a workdir that they share. docs/machines.md
says how they find each other.
"""

import argparse
import math
from collections.abc import Collection
from functools import partial

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
    what = "the workdir of a run to continue in --workdir, from its last checkpoint or from STEP"
    parser.add_argument("--fork", metavar="RUN[@STEP]", help=what)
    what = "train for about so many minutes: the time of a step sets steps, batch and model size"
    parser.add_argument("--minutes", type=float, metavar="M", help=what)


def run(args: argparse.Namespace, words: list[str]) -> None:
    own = None
    if args.fork and not args.workdir:
        raise UserError("--fork begins a new run; name its folder with --workdir")
    if args.workdir and not args.config:
        from bert_jax.runs import origin  # late, as it imports JAX

        own = origin.own_config(paths.as_path(args.workdir), args.fork)
    recipe = read_config(args.config or _DEFAULT, words, TrainConfig, own)
    args.workdir = args.workdir or f"runs/{recipe.name}"
    if args.minutes is not None:
        _check_minutes(args, recipe)
        from bert_jax.runs import origin  # late, as it imports JAX

        own = own or origin.own_config(paths.as_path(args.workdir))
        if own:  # so that the same command resumes
            console.show("minutes    have no effect: the run resumes with its own steps")
            args.minutes = None
            _take_fitted(recipe, own)
    fit = None
    if args.minutes is not None:
        from bert_jax.planning import time_budget

        fit = partial(_fit, minutes=args.minutes, fields=recipe.fields, init=args.init)
        # Not with the recipe's steps: the user's warm-up may be longer.
        recipe = recipe._replace(config=time_budget.open_ended(recipe.config, recipe.fields))
    recipe = recipe._replace(name="that of the run") if own else recipe
    process.train("pretrain", args, recipe, fork=args.fork, fit=fit)


def _check_minutes(args: argparse.Namespace, recipe: Recipe) -> None:
    """Refuse minutes that are no time, or do not fit other flags."""
    refuse(
        not 0 < args.minutes < math.inf,
        f"--minutes={args.minutes:g} is no time",
        fix="give a positive, finite number",
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
        f"{in_steps} is in steps, and --minutes decides how many there are",
        fix="give a share of the steps, such as 0.9",
    )
    refuse(
        args.fork,
        "--minutes begins a schedule of its own, and --fork continues that of another run",
        fix="give --config.steps instead",
    )


def _take_fitted(recipe: Recipe, own: TrainConfig) -> None:
    """Set what `--minutes` chose for the run, but for what the command line sets.

    Whether the rest of the recipe is that of the run is checked as for any run that resumes.
    """
    from bert_jax.planning import time_budget  # late, as it imports JAX

    before = settings.flatten(own)
    for name in time_budget.FITTED:
        if name not in recipe.fields:
            settings.assign(recipe.config, name, before[name])


def _fit(config: TrainConfig, minutes: float, fields: Collection[str], init: str) -> TrainConfig:
    """Return the config of a run for so many minutes, with all that the command line sets."""
    from bert_jax.distributed import hosts
    from bert_jax.planning import time_budget
    from bert_jax.text import mixture

    refuse(
        hosts.count() > 1,
        "--minutes is for one host",
        fix="give --config.steps on several",
    )
    mixture.check_sources(config.data, mixture.find(config.data.source))
    return time_budget.fit(
        config,
        minutes,
        keeps_size=bool(init) or not time_budget.SHAPE.isdisjoint(fields),
        kept=fields,
    )
