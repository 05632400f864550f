"""One seed of fine-tuning: from the parameters to start from to the seed's best evaluation."""

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from bert_jax.batches import loader
from bert_jax.config import CheckpointConfig
from bert_jax.distributed import hosts
from bert_jax.runs import weights
from bert_jax.runs.task_run import Run
from bert_jax.storage import json_files
from bert_jax.training import checkpoint, loop
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.metrics import Writer
from bert_jax.training.optimizer import learning_rate


def train_seed(
    run: Run,
    seed: int,
    params: Any,
    folder: Path,
    stop: Callable[[], str],
) -> dict[str, Any]:
    """Train with one seed from `params`, or None for random ones; return the result, as kept."""
    config, task, path = run.config, run.task, folder / "result.json"
    remedy = f"remove {folder} to train it again"
    earlier = hosts.broadcast_from_main(
        lambda: json_files.read_record(path, remedy) if path.exists() else None
    )
    if earlier:
        return earlier
    if config.seeds > 1 or config.compare:
        hosts.print_on_main(f"\n{folder.name}")
    started = time.monotonic()
    keep = CheckpointConfig(keep=1)
    checkpoints = Checkpoints(folder / "checkpoints", keep, run.tokenizer, rank=task.rank)
    first, state = weights.initial_state(
        checkpoints.latest_path(),
        partial(run.new_state, seed),
        run.program.setup.abstract_state,
        params=params,
    )
    if first:
        hosts.print_on_main(f"resuming from step {first:,}")
    baselines = {task.metrics[0]: run.constant_score} if len(task.metrics) == 1 else {}
    stage = _make_stage(run)
    with closing(checkpoints), Writer(folder, first, config, _progress(run), baselines) as writer:
        with loop.Training(
            state,
            [stage],
            loader.prefetch(run.batches(seed), first),
            checkpoints,
            writer,
            run.program.objective,
        ).shown() as training:
            for step in training.steps(
                log_every=config.log_every,
                eval_every=run.eval_every,
                patience=config.patience,
                stop=stop,
            ):
                if step.scores or step.stop_reason:
                    training.save(step, config)
        records = writer.records
        seconds = time.monotonic() - started if first == 0 else None
        result = hosts.broadcast_from_main(lambda: _result(run, seed, records, seconds, folder))
    if hosts.is_main():
        json_files.write_record(path, result)
    return result


def _progress(run: Run) -> Callable[[int], dict[str, float]]:
    """Return the counters of a step."""
    rate = learning_rate(run.rate)

    def progress(step: int) -> dict[str, float]:
        epoch = step / run.steps_per_epoch
        sequences = step * len(run.examples.train.features) // run.steps_per_epoch
        return {"learning_rate": rate(step), "epoch": epoch, "sequences": sequences}

    return progress


def _make_stage(run: Run) -> loop.Stage:
    """Return the one stage that fine-tuning has."""
    size = run.config.data.batch_size
    return loop.Stage(
        end=run.steps,
        batch_size=size,
        cost=size,
        train_step=run.program.train_step,
        evaluate=lambda state: run.evaluate(state.params),
    )


def _result(
    run: Run,
    seed: int,
    records: list[dict[str, Any]],
    seconds: float | None,
    folder: Path,
) -> dict[str, Any]:
    """Return the best evaluation of a seed among those whose checkpoint was kept."""
    kept = checkpoint.list_checkpoints(folder / "checkpoints")
    # Not from the records, whose file could have been changed.
    read = ((int(path.name), checkpoint.read_scores(path)) for path in kept)
    evaluations = [{"step": step, "split": "eval", **scores} for step, scores in read if scores]
    best = max(evaluations, key=lambda each: (run.task.rank(each), each["step"]))
    speeds = [r["sequences_per_second"] for r in records if r["split"] == "train"]
    return {
        "seed": seed,
        "best": best,
        "degenerate": run.task.mean_score(best) <= run.constant_score,
        "seconds": seconds,
        "sequences_per_second": statistics.median(speeds) if speeds else None,
        "checkpoint": f"{folder.name}/checkpoints/{best['step']}",
    }
