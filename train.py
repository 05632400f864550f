"""Pretrains BERT: `python train.py --config=configs/tiny.py --workdir=runs/tiny`.

`--config` is a recipe (configs/tiny.py) and `--workdir` where the run is kept (runs/NAME of the
recipe). The same command again goes on where the run stopped. Any field of the config can be set
with `--config.FIELD=VALUE`.

`--init=CHECKPOINT` begins with the weights, the shape and the tokenizer of another model, ours,
Hugging Face's or Google's; heads that it lacks begin anew.

On several hosts the same command is started on each, with a workdir that all of them share. On a
TPU pod, under Slurm and in Kubernetes they find each other; elsewhere
`--coordinator_address=HOST:PORT` (of the first one), `--num_processes=N` and `--process_id=I` (from
0) say who they are. They wait `--connect_timeout` seconds for each other (120).
"""

import dataclasses
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from absl import flags

from bert_jax import bert as pretrained
from bert_jax import config as config_lib
from bert_jax import report
from bert_jax.batches import loader
from bert_jax.batches.loader import ProcessSlices
from bert_jax.commands import flags as cli
from bert_jax.commands import process as programs
from bert_jax.commands.process import keep_host_memory
from bert_jax.config import TrainConfig
from bert_jax.distributed import hosts
from bert_jax.distributed.mesh import (
    Layout,
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
from bert_jax.models.heads import BertForPreTraining
from bert_jax.text import prepare as prepare_lib
from bert_jax.text.prepare import resolve_vocab_size
from bert_jax.text.store import Corpus, is_store, open_store
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import loop
from bert_jax.training import workdir as workdir_lib
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.masking import make_masking
from bert_jax.training.metrics import Writer
from bert_jax.training.objectives import Pretraining
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.step import init_state, make_eval_step, make_train_step

PANELS = {
    "mlm_loss": "MLM loss (nats)",
    "mlm_accuracy": "MLM accuracy",
    "nsp_loss": "NSP loss (nats)",
    "nsp_accuracy": "NSP accuracy",
}
WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept; runs/NAME of the config.")
INIT = flags.DEFINE_string("init", None, "A checkpoint whose weights and tokenizer to begin with.")


def main() -> None:
    """Prepares the text, trains, and says what came out."""
    keep_host_memory()
    config, workdir, init = read_flags()
    programs.keep()
    mesh = make_mesh(config.parallel)
    slices = partial(process_slices, mesh)
    check_model(config.model, mesh)
    for _, phase in config_lib.phases(config):
        check_divides(phase.batch_size, config.optimizer.microbatches, mesh)
    corpus = read_text(config, init.tokenizer if init else None, workdir / "store")
    workdir_lib.check_text(workdir, corpus.fingerprint)
    workdir_lib.check_shared(workdir)

    model = BertForPreTraining(config.model, next_sentence=config.data.pairs != "none")
    optimizer = make_optimizer(config.optimizer, config.steps)

    def new_state(key: jax.Array) -> Any:
        return init_state(model.init_params(key), optimizer, config.seed)

    like, layout = make_layout(new_state, mesh, config.parallel)
    stages = make_stages(config, corpus, model, optimizer, layout, slices)
    batches = loader.TrainBatches(corpus, config, slices)
    checkpoints = Checkpoints(
        workdir / "checkpoints",
        config.checkpoint,
        dataclasses.asdict(config),
        corpus.tokenizer,
        rank=lambda held_out: -held_out["loss"],
    )
    hosts.keep_checkpoints_in(checkpoints.folder)
    step = checkpoints.latest()
    if step is None:
        step = 0
        state = init_sharded(new_state, layout.state, jax.random.key(config.seed))
        if init:
            state = state.replace(params=pretrained.fill(state.params, init.params))
            report.begun_with(INIT.value, state.params, init.params)
    else:
        state = checkpoints.restore(step, like)
        if init:
            hosts.print_on_main(f"going on from step {step:,}; --init is not used again")
    workdir_lib.claim(workdir, config, corpus.tokenizer, corpus.fingerprint)
    report.start(config, corpus, mesh, state, batches, workdir)

    with closing(Writer(workdir, step, PANELS)) as writer:
        state = loop.fit(
            state,
            stages,
            loader.prefetch(batches, step),
            checkpoints,
            writer,
            log_every=config.log_every,
            eval_every=config.eval_every,
            save_every=config.checkpoint.every,
        )
        held_out = writer.latest.get("eval") or stages[-1].evaluate(state)
    if hosts.is_main():
        # Of several hosts none has all parameters; what was saved can be asked afterwards.
        alone = hosts.count() == 1
        bert = pretrained.Bert(config.model, state.params, corpus.tokenizer, model)
        batches = loader.eval_batches(corpus, config, config_lib.phases(config)[-1][1])
        pairs = config.data.pairs
        report.end(held_out, batches, corpus, pairs, bert if alone else None, workdir)


def read_flags() -> tuple[TrainConfig, Path, pretrained.Bert | None]:
    """Returns the config, validated, the workdir, writable and of no other run, and `--init`.

    It is where the hosts of a run meet, if there are several.
    """
    config, name = cli.read_config(Path(__file__).parent / "configs" / "tiny.py", TrainConfig)
    hosts.connect()
    config.model = resolve_dtype(config.model, jax.local_devices()[0])
    workdir = Path(WORKDIR.value or f"runs/{name}")
    hosts.check_same_run(config, workdir=str(workdir), init=INIT.value)
    init = pretrained.load(INIT.value) if INIT.value else None
    if init:
        weights = {"what --init holds": workdir_lib.checksum(init.params)}
        hosts.check_same(weights, "copy it once more")
        config.model = pretrained.model_to_train(init, config.model, cli.fields_given("model."))
    config_lib.validate(config)
    # Where it is 0, the size of the tokenizer, which the first host has.
    tokenizer = init.tokenizer if init else None
    vocab_size = hosts.run_on_all_hosts(
        lambda: resolve_vocab_size(config, tokenizer) if hosts.is_main() else 0
    )
    config.model.vocab_size = hosts.broadcast_from_main(lambda: vocab_size)
    if hosts.count() > 1 and config.parallel.mode == "pmap":
        raise UserError("parallel.mode pmap runs on one host; set it to mesh")
    hosts.run_on_all_hosts(lambda: workdir_lib.check(workdir, config))
    return config, workdir, init


def read_text(config: TrainConfig, given: Tokenizer | None, store: Path) -> Corpus:
    """Returns the text, which the first host prepares where that has not been done.

    Args:
      config: of the run.
      given: the tokenizer of `--init`.
      store: where it is prepared, which all hosts see.
    """

    def read() -> Corpus:
        return prepare_lib.read(config, given, store)

    if hosts.broadcast_from_main(lambda: is_store(config.data.source)):
        corpus = hosts.run_on_all_hosts(read)  # each host its own copy, or all the same
        hosts.check_same({"the text of data.source": corpus.fingerprint}, "copy it once more")
    else:
        prepared = hosts.run_on_all_hosts(lambda: read() if hosts.is_main() else None)
        corpus = hosts.run_on_all_hosts(lambda: prepared or open_store(store))
    return corpus


def make_stages(
    config: TrainConfig,
    corpus: Corpus,
    model: BertForPreTraining,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    slices: ProcessSlices,
) -> list[loop.Stage]:
    """Returns a stage for each phase of the config: the programs of its length and batch size."""
    stages, phases = [], config_lib.phases(config)
    ends = [first for first, _ in phases[1:]] + [config.steps]
    for end, (_, phase) in zip(ends, phases, strict=True):
        masking = make_masking(corpus.tokenizer, phase, config.data)
        objective = Pretraining(model, masking)
        train_step = make_train_step(objective, optimizer, config.optimizer.microbatches)
        eval_step = make_eval_step(objective)
        compiled = partial(compile_step, mode=config.parallel.mode, layout=layout)
        stages.append(
            loop.Stage(
                end=end,
                batch_size=phase.batch_size,
                train_step=compiled(
                    train_step, in_sharding=layout.state, outputs=("state", "metrics")
                ),
                evaluate=partial(
                    loop.evaluate,
                    compiled(eval_step, in_sharding=layout.params, outputs="metrics"),
                    partial(loader.eval_batches, corpus, config, phase, slices),
                    phase.batch_size,
                ),
            )
        )
    return stages


if __name__ == "__main__":
    cli.run(lambda: hosts.run(main))
