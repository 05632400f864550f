"""Fine-tunes BERT: `python finetune.py --config=configs/finetune/docstrings.py --init=runs/tiny`.

`--config` is a recipe (configs/finetune/docstrings.py, which needs no data) and `--init` what to
begin with: a workdir, a checkpoint, or a directory of Hugging Face's or Google's (runs/tiny, which
train.py makes). `--workdir` is where the run is kept (runs/NAME of the recipe). The same command
again goes on where the run stopped. Any field of the config can be set with
`--config.FIELD=VALUE`; a field of the model that is not set is the checkpoint's.

On several hosts it is started as train.py is, whose account of it holds here too.
"""

import dataclasses
import json
import shutil
import statistics
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
from absl import flags

from bert_jax import bert as pretrained
from bert_jax import config as config_lib
from bert_jax import report
from bert_jax.batches import loader
from bert_jax.batches.buckets import Batcher, BucketedBatches
from bert_jax.commands import flags as cli
from bert_jax.commands import process as programs
from bert_jax.commands.process import keep_host_memory
from bert_jax.config import CheckpointConfig, FinetuneConfig
from bert_jax.distributed import hosts
from bert_jax.distributed.mesh import (
    check_divides,
    check_model,
    compile_step,
    init_sharded,
    make_layout,
    make_mesh,
    process_slices,
)
from bert_jax.distributed.precision import resolve_dtype
from bert_jax.errors import UserError
from bert_jax.tasks import datasets
from bert_jax.tasks.base import Task
from bert_jax.tasks.baseline import tfidf_scores
from bert_jax.tasks.classification import Classification
from bert_jax.tasks.datasets import Datasets
from bert_jax.tasks.results import Table
from bert_jax.training import checkpoint, loop
from bert_jax.training import evaluation as prediction
from bert_jax.training import workdir as workdir_lib
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.metrics import Writer
from bert_jax.training.objectives import TaskObjective
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.step import (
    init_state,
    make_predict_step,
    make_train_step,
)

RECIPES = Path(__file__).parent / "configs" / "finetune"
INIT = flags.DEFINE_string("init", "runs/tiny", "The checkpoint to begin with.")
WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept; runs/NAME of the config.")


def main() -> None:
    """Reads the task, trains with each seed, and says what came out."""
    keep_host_memory()
    config, workdir, init = read_flags()
    programs.keep()
    # The head that the run begins with: another kind of probe's fits no better than none.
    is_alike = init.task and init.model.probe == config.probe
    head = init.task if is_alike and not config.new_head else None
    task, sets = hosts.run_on_all_hosts(
        lambda: datasets.load_datasets(config, head.labels if head else ())
    )
    if head:
        datasets.check_same_head(task, head)
    job = Job(dataclasses.replace(config, task=task.config), task, sets, init)
    hosts.check_same({"what is learned from": job.fingerprint()}, "copy the files once more")
    workdir_lib.check_text(workdir, job.fingerprint())
    workdir_lib.check_shared(workdir)
    workdir_lib.claim(workdir, config, init.tokenizer, job.fingerprint())
    batches = job.batches(config.seed)
    report.start_finetuning(job.config, sets, job.train, batches, job.mesh, workdir)
    given = init.params if head else {"bert": init.params["bert"]}
    report.begun_with(INIT.value, job.like.params, given)

    seeds = range(config.seed, config.seed + config.seeds)
    results = [job.run(seed, given, workdir / f"seed-{seed}") for seed in seeds]
    random = []
    if config.compare:
        random = [job.run(seed, None, workdir / f"random-{seed}") for seed in seeds]
    job.finish(results, random, workdir)


def read_flags() -> tuple[FinetuneConfig, Path, pretrained.Bert]:
    """Returns the config, validated, the workdir, writable and of no other run, and `--init`.

    It is where the hosts of a run meet, if there are several.
    """
    config, name = cli.read_config(RECIPES / "docstrings.py", FinetuneConfig)
    hosts.connect()
    config.model = resolve_dtype(config.model, jax.local_devices()[0])
    workdir = Path(WORKDIR.value or f"runs/{name}")
    hosts.check_same_run(config, workdir=str(workdir), init=INIT.value)
    init = pretrained.load(INIT.value)
    config.model = pretrained.model_to_train(init, config.model, cli.fields_given("model."))
    config_lib.validate_finetuning(config)
    if hosts.count() > 1 and config.parallel.mode == "pmap":
        raise UserError("parallel.mode pmap runs on one host; set it to mesh")
    hosts.run_on_all_hosts(lambda: workdir_lib.check(workdir, config))
    return config, workdir, init


class Job:
    """What the runs of a task have in common, whatever their seed: rows and programs."""

    def __init__(self, config: FinetuneConfig, task: Task, sets: Datasets, init: pretrained.Bert):
        self.config, self.task, self.sets, self.init = config, task, sets, init
        data = config.data
        self.mesh = make_mesh(config.parallel)
        self.slices = partial(process_slices, self.mesh)
        check_model(config.model, self.mesh)
        check_divides(data.batch_size, config.optimizer.microbatches, self.mesh)
        self.train = self.batcher(sets.train)
        self.held_out = {name: self.batcher(examples) for name, examples in sets.evals.items()}
        per_epoch = -(-len(self.train.features) // data.batch_size)
        self.steps = max(1, round(config.epochs * per_epoch))
        self.eval_every = max(1, per_epoch // config.evaluations)
        self.model = task.model(config.model, config.probe)
        self.optimizer = make_optimizer(
            config.optimizer,
            self.steps,
            layer_decay=config.layer_decay,
            freezes_encoder=bool(config.probe),
        )
        new_state = partial(self.new_state, 0)
        self.like, self.layout = make_layout(new_state, self.mesh, config.parallel)
        self.train_step, self.predict_step = self.compile()

    def batcher(self, examples: Any) -> Batcher:
        """Returns the rows of some examples."""
        c, tokenizer = self.config, self.init.tokenizer
        rows = self.task.features(examples, tokenizer, c.model, c.data.max_length)
        return Batcher(rows, tokenizer, c.model.type_vocab_size, c.data.max_length)

    def new_state(self, seed: int, key: jax.Array) -> Any:
        """Returns a state with random parameters."""
        return init_state(self.model.init_params(key), self.optimizer, seed)

    def compile(self) -> tuple[Any, Any]:
        """Return the train step and the prediction of a batch."""
        c, layout = self.config, self.layout
        objective = TaskObjective(self.model, is_regression=c.task.kind == "regression")
        compiled = partial(compile_step, mode=c.parallel.mode, layout=layout)
        train_step = make_train_step(objective, self.optimizer, c.optimizer.microbatches)
        predict_step = make_predict_step(objective)
        return (
            compiled(train_step, in_sharding=layout.state, outputs=("state", "metrics")),
            compiled(predict_step, in_sharding=layout.params, outputs=("per_example", "metrics")),
        )

    def batches(self, seed: int) -> BucketedBatches:
        """Return this process's part of the training batches."""
        size = self.config.data.batch_size
        return BucketedBatches(self.train, size, self.steps, seed, self.slices)

    def fingerprint(self) -> str:
        """Returns a hash of all that the runs learn from, but for the config."""
        return f"{self.sets.fingerprint()}-{workdir_lib.checksum(self.init.params)}"

    def run(self, seed: int, given: Any, folder: Path) -> dict[str, Any]:
        """Trains with one seed, or goes on with it, and returns what came of it.

        Args:
          seed: of a new head, of the order of the rows and of dropout.
          given: parameters to begin with; None for random ones.
          folder: where this run is kept.
        """
        c, ended = self.config, folder / "result.json"
        before = hosts.broadcast_from_main(
            lambda: json.loads(ended.read_text()) if ended.exists() else None
        )
        if before:
            return before
        if c.seeds > 1 or c.compare:
            hosts.print_on_main(f"\n{folder.name}")
        started = time.monotonic()
        checkpoints = Checkpoints(
            folder / "checkpoints",
            CheckpointConfig(keep=1),
            dataclasses.asdict(c),
            self.init.tokenizer,
            rank=self.task.rank,
        )
        hosts.keep_checkpoints_in(checkpoints.folder)
        step = checkpoints.latest()
        if step is None:
            step = 0
            key = jax.random.key(seed)
            state = init_sharded(partial(self.new_state, seed), self.layout.state, key)
            if given:
                state = state.replace(params=pretrained.fill(state.params, given))
        else:
            state = checkpoints.restore(step, self.like)
            hosts.print_on_main(f"going on from step {step:,}")
        size = c.data.batch_size
        panels = {"loss": "loss", **{name: name for name in self.task.metrics}}
        with closing(Writer(folder, step, panels)) as writer:
            loop.fit(
                state,
                [loop.Stage(self.steps, size, self.train_step, self.evaluate)],
                loader.prefetch(self.batches(seed), step),
                checkpoints,
                writer,
                log_every=c.log_every,
                eval_every=self.eval_every,
                save_every=self.eval_every,
                patience=c.patience,
            )
            records = writer.records()
        seconds = time.monotonic() - started if step == 0 else None
        result = hosts.broadcast_from_main(lambda: self.result(seed, records, seconds, folder))
        workdir_lib.write(ended, json.dumps(result, indent=2) + "\n")
        return result

    def result(
        self, seed: int, records: list[dict[str, Any]], seconds: float | None, folder: Path
    ) -> dict[str, Any]:
        """Returns what came of a run, given all that it recorded and how long it took."""
        there = {
            int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit()
        }
        evaluations = [r for r in records if r["split"] == "eval" and r["step"] in there]
        best = max(evaluations, key=lambda record: (self.task.rank(record), record["step"]))
        speeds = [r["sequences_per_second"] for r in records if r["split"] == "train"]
        examples = next(iter(self.sets.evals.values()))
        return {
            "seed": seed,
            "best": best,
            "degenerate": self.task.mean_score(best) <= self.task.constant_score(examples),
            "seconds": seconds,
            "sequences_per_second": statistics.median(speeds) if speeds else None,
            "checkpoint": f"{folder.name}/checkpoints/{best['step']}",
        }

    def evaluate(self, state: Any) -> dict[str, float]:
        """Returns the loss and the scores for the first set that is held out."""
        name, batcher = next(iter(self.held_out.items()))
        return self.predict(state.params, self.sets.evals[name], batcher)[1]

    def predict(
        self, params: Any, examples: Any, batcher: Batcher
    ) -> tuple[list[Any], dict[str, float]]:
        """Returns the prediction of each example and, where all have labels, the scores."""
        size = self.config.data.batch_size
        return prediction.predict(
            self.predict_step, params, self.task, examples, batcher, size, self.slices
        )

    def finish(
        self, results: list[dict[str, Any]], random: list[dict[str, Any]], workdir: Path
    ) -> None:
        """Predicts everything with the best of the runs, and writes and prints what came out."""
        task, sets = self.task, self.sets
        best = max(results, key=lambda result: task.rank(result["best"]))
        params = checkpoint.read_params(workdir / best["checkpoint"], self.like.params)
        params = pretrained.fill(self.like.params, params)
        scores, cut, main = {}, {}, next(iter(sets.evals))
        for name, examples in {**sets.evals, **sets.tests}.items():
            batcher = self.held_out.get(name) or self.batcher(examples)
            cut[name] = batcher.features.truncated
            found, scores[name] = self.predict(params, examples, batcher)
            del scores[name]["sequences_per_second"]
            if name == main:
                if hosts.is_main():
                    task.draw(workdir / "confusion.png", examples, found)
                task.tune(scores[name])
                scores[name] |= task.score(examples, found)
            middle = "" if name == main else f".{name}"
            prediction.write(task, examples, found, workdir / f"predictions{middle}")
        description = dataclasses.asdict(dataclasses.replace(self.config, task=task.config))
        anew = workdir / "best.new"
        if hosts.is_main():
            shutil.rmtree(anew, ignore_errors=True)
        checkpoint.write_params(anew, params, description, self.init.tokenizer)
        if not hosts.is_main():
            return
        shutil.rmtree(workdir / "best", ignore_errors=True)
        anew.rename(workdir / "best")
        table = Table(task, sets.evals[main], results)
        if random:
            table.add_runs("random weights", random)
        if self.config.compare and type(task) is Classification:
            table.add("TF-IDF, logistic regression", tfidf_scores(task, sets))
        summary = {
            "task": dataclasses.asdict(task.config),
            "best": best["checkpoint"],
            "scores": scores,
            "summary": table.rows,
            "seeds": results,
            "random_weights": random,
            "padding": {
                "before": self.train.padding,
                "after": self.batches(self.config.seed).padding,
            },
            "skipped": {"records": sets.skipped, "training_examples": self.train.features.skipped},
            "cut": {"train": self.train.features.truncated, **cut},
        }
        workdir_lib.write(workdir / "results.json", json.dumps(summary, indent=2) + "\n")
        report.end_finetuning(table, scores, cut, workdir)


if __name__ == "__main__":
    cli.run(lambda: hosts.run(main))
