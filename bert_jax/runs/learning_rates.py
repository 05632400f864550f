"""Find the learning rate of a fine-tuning run, where several are set, on a part of its examples."""

import dataclasses
import shutil
from collections.abc import Callable

import numpy as np

from bert_jax.distributed import hosts
from bert_jax.errors import UserError
from bert_jax.runs import report
from bert_jax.runs.seed import train_seed
from bert_jax.runs.task_run import Examples, Run, tokenize

_MOST = 10_000  # examples of the part
_SCORED = 0.2  # of the part; the rest is trained on
_NAME = "part"


def find_rate(run: Run, stop: Callable[[], str]) -> Run:
    """Return the run with the best of its learning rates, or with the one that it has.

    Each rate trains with the run's first seed and epochs on the same examples, and is scored on
    others, all of them training examples: the held-out ones have no part in the choice. A rate that
    was tried before the run was interrupted is not tried again.
    """
    rates = list(dict.fromkeys(run.config.optimizer.learning_rates))
    if len(rates) == 1:
        return run
    part = _part(run)
    trained, scored = part.datasets.train, part.datasets.evals[_NAME]
    constant_score = run.task.constant_score(scored)
    once = dataclasses.replace(run.config, seeds=1, compare=False)
    tried = []
    for rate in rates:
        hosts.print_on_main(f"\nlearning rate {rate:g}, on {len(trained):,} examples")
        trial = dataclasses.replace(run, config=once).at_rate(rate, part)
        folder = run.workdir / f"rate-{rate:g}"
        result = train_seed(trial, once.seed, run.params, folder, constant_score, stop)
        if hosts.is_main():  # the result says what the rate is worth
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        tried.append({"learning_rate": rate, "scores": result["best"]})
    best = max(tried, key=lambda each: run.task.rank(each["scores"]))["learning_rate"]
    report.rate_found(best, tried, run.task, len(scored))
    return dataclasses.replace(run.at_rate(best, run.examples), tried=tried)


def _part(run: Run) -> Examples:
    """Return a part of the training examples, of which some are for scores."""
    examples = run.examples.datasets.train
    count = min(len(examples), _MOST)
    num_scored = max(1, round(_SCORED * count))
    if num_scored == count:
        raise UserError(
            "optimizer.learning_rate has several rates, and there is one example to try them on; "
            "give one rate"
        )
    order = np.random.default_rng(run.config.seed).permutation(len(examples))[:count]
    scored = [examples[i] for i in sorted(order[:num_scored])]
    trained = [examples[i] for i in sorted(order[num_scored:])]
    train, held_out = (
        tokenize(run.config, run.task, run.tokenizer, each) for each in (trained, scored)
    )
    return dataclasses.replace(
        run.examples,
        datasets=dataclasses.replace(
            run.examples.datasets, train=trained, evals={_NAME: scored}, tests={}
        ),
        train=train,
        held_out={_NAME: held_out},
    )
