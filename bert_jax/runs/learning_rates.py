"""Choose the best of several learning rates by trials on a sample of the training examples."""

import dataclasses
import shutil
from collections.abc import Callable

import numpy as np

from bert_jax.distributed import hosts
from bert_jax.errors import DivergedError, UserError
from bert_jax.runs import report
from bert_jax.runs.seed import train_seed
from bert_jax.runs.task_run import Examples, Run, tokenize
from bert_jax.storage import json_files
from bert_jax.tasks.datasets import groups_of

_MAX_SAMPLE = 10_000  # examples
_EVAL_FRACTION = 0.2  # of the sample; the rest is trained on
_SAMPLE = "sample"


def find_rate(run: Run, stop: Callable[[], str]) -> Run:
    """Return the run with the best of its learning rates, or as it is if it has one.

    Each rate trains with the run's first seed and its epochs on one part of the sample and is
    scored on the other; the held-out examples have no part in the choice. A rate that diverges is
    dropped. A rate that was tried before the run was interrupted is not tried again.

    Args:
      run: whose `config.optimizer.learning_rates` are tried.
      stop: returns why to stop training now, or "".
    """
    rates = list(dict.fromkeys(run.config.optimizer.learning_rates))
    if len(rates) == 1:
        return run
    sample = _sample(run)
    num_trained, scored = len(sample.datasets.train), sample.datasets.evals[_SAMPLE]
    # One seed, which then prints no heading of its own.
    config = dataclasses.replace(run.config, seeds=1, compare=False)
    results = []
    for rate in rates:
        hosts.print_on_main(f"\nlearning rate {rate:g}, on {num_trained:,} examples")
        trial = dataclasses.replace(run, config=config).at_rate(rate, sample)
        folder = run.workdir.path / f"rate-{rate}"
        try:
            result = train_seed(trial, config.seed, run.params, folder, stop)
        except DivergedError as error:
            # Without what it says of the checkpoints, which are removed.
            result = {"diverged": str(error).partition(";")[0]}
            if hosts.is_main():
                json_files.write_record(folder / "result.json", result)
        if hosts.is_main():  # the result says what the rate is worth
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        if "diverged" in result:
            hosts.warn_on_main(f"the learning rate {rate:g} is dropped: {result['diverged']}")
            results.append({"learning_rate": rate, **result})
        else:
            is_degenerate = result["degenerate"]
            results.append(
                {"learning_rate": rate, "scores": result["best"], "degenerate": is_degenerate}
            )
    finite = [each for each in results if "scores" in each]
    if not finite:
        raise DivergedError(
            "no learning rate has a finite loss; give lower ones and another --workdir"
        )
    best = max(finite, key=lambda each: run.task.rank(each["scores"]))["learning_rate"]
    report.rate_found(best, results, run.task, len(scored))
    return dataclasses.replace(run.at_rate(best, run.examples), tried=results)


def _sample(run: Run) -> Examples:
    """Return a random sample of the training examples, of which some are held out for scores."""
    examples = run.examples.datasets.train
    count = min(len(examples), _MAX_SAMPLE)
    num_scored = max(1, round(_EVAL_FRACTION * count))
    groups = groups_of(run.task, examples)
    ranks = np.argsort(np.random.default_rng(run.config.seed).permutation(groups.max() + 1))
    order = np.argsort(ranks[groups], kind="stable")[:count]
    while num_scored < count and groups[order[num_scored]] == groups[order[num_scored - 1]]:
        num_scored += 1  # a query is not trained on with one passage, and scored with another
    if num_scored == count:
        raise UserError(
            "optimizer.learning_rate has several rates, and there is one example, or one query, to "
            "try them on; give one rate"
        )
    scored = [examples[i] for i in sorted(order[:num_scored])]
    trained = [examples[i] for i in sorted(order[num_scored:])]
    train, held_out = (
        tokenize(run.config, run.task, run.tokenizer, each, is_training=each is trained)
        for each in (trained, scored)
    )
    datasets = dataclasses.replace(
        run.examples.datasets, train=trained, evals={_SAMPLE: scored}, tests={}
    )
    return dataclasses.replace(
        run.examples, datasets=datasets, train=train, held_out={_SAMPLE: held_out}
    )
