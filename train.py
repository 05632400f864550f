"""Pretrains BERT: `python train.py --config=configs/tiny.py --workdir=runs/tiny`.

`--config` is a recipe (configs/tiny.py) and `--workdir` where the run is kept (runs/NAME of the
recipe). The same command again goes on where the run stopped. Any field of the config can be set
with `--config.FIELD=VALUE`.

`--init=CHECKPOINT` begins with the weights, the shape and the tokenizer of another model, ours,
Hugging Face's or Google's; heads that it lacks begin anew.
"""

import dataclasses
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from absl import flags
from jax.sharding import Mesh

from bert_jax import cli, pretrained, report
from bert_jax import config as config_lib
from bert_jax import workdir as workdir_lib
from bert_jax.config import TrainConfig
from bert_jax.data import corpus as corpus_lib
from bert_jax.data import loader
from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.data.corpus import Corpus
from bert_jax.models.heads import BertForPreTraining
from bert_jax.training import loop, parallel
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
    config, workdir, init = read_flags()
    parallel.keep_host_memory()
    mesh = parallel.make_mesh(config.parallel)
    parallel.check_model(config.model, mesh)
    for _, phase in config_lib.phases(config):
        parallel.check_divides(phase.batch_size, config.optimizer.microbatches, mesh)
    tokenizer = config.tokenizer
    if tokenizer.path:
        tokenizer = tokenizer_lib.load(tokenizer.path, lowercase=tokenizer.lowercase)
        tokenizer_lib.check_fits(tokenizer, config.model.vocab_size)  # before it is used
    elif init:
        tokenizer = init.tokenizer
    corpus = corpus_lib.prepare(config.data, tokenizer, config.model.vocab_size, workdir / "store")
    tokenizer_lib.check_fits(corpus.tokenizer, config.model.vocab_size)
    workdir_lib.check_text(workdir, corpus.fingerprint)

    model = BertForPreTraining(config.model, next_sentence=config.data.pairs != "none")
    optimizer = make_optimizer(config.optimizer, config.steps)

    def new_state(key: jax.Array) -> Any:
        return init_state(model.init_params(key), optimizer, config.seed)

    like, shardings = parallel.layout(new_state, mesh)
    stages = make_stages(config, corpus, model, optimizer, mesh, shardings)
    batches = loader.TrainBatches(corpus, config)
    checkpoints = Checkpoints(
        workdir / "checkpoints",
        config.checkpoint,
        dataclasses.asdict(config),
        corpus.tokenizer,
        rank=lambda held_out: -held_out["loss"],
    )
    step = checkpoints.latest()
    if step is None:
        step = 0
        state = parallel.place(new_state, shardings, jax.random.key(config.seed))
        if init:
            state = state.replace(params=pretrained.fill(state.params, init.params))
            report.begun_with(INIT.value, state.params, init.params)
    else:
        state = checkpoints.restore(step, like)
        if init:
            print(f"going on from step {step:,}; --init is not used again")
    workdir_lib.claim(workdir, config, corpus.tokenizer, corpus.fingerprint)
    report.start(config, corpus, mesh, state, batches.epochs(), workdir)

    with closing(Writer(workdir, step, PANELS)) as writer:
        state = loop.fit(
            state,
            stages,
            batches.starting_at(step),
            checkpoints,
            writer,
            log_every=config.log_every,
            eval_every=config.eval_every,
            save_every=config.checkpoint.every,
        )
        held_out = writer.latest.get("eval") or stages[-1].evaluate(state)
    bert = pretrained.Bert(config.model, state.params, corpus.tokenizer, model)
    batches = loader.eval_batches(corpus, config, config_lib.phases(config)[-1][1])
    report.end(held_out, batches, corpus, config.data.pairs, bert, workdir)


def read_flags() -> tuple[TrainConfig, Path, pretrained.Bert | None]:
    """Returns the config, validated, the workdir, writable and of no other run, and `--init`."""
    config, name = cli.read_config(Path(__file__).parent / "configs" / "tiny.py", TrainConfig)
    init = pretrained.load(INIT.value) if INIT.value else None
    if init:
        config.model = pretrained.model_to_train(init, config.model, cli.fields_given("model."))
    config_lib.validate(config)
    workdir = Path(WORKDIR.value or f"runs/{name}")
    workdir_lib.check(workdir, config)
    return config, workdir, init


def make_stages(
    config: TrainConfig,
    corpus: Corpus,
    model: BertForPreTraining,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    shardings: Any,
) -> list[loop.Stage]:
    """Returns a stage for each phase of the config: the programs of its length and batch size."""
    stages, phases = [], config_lib.phases(config)
    ends = [first for first, _ in phases[1:]] + [config.steps]
    for end, (_, phase) in zip(ends, phases, strict=True):
        masking = make_masking(
            corpus.tokenizer,
            phase.max_length,
            phase.max_predictions,
            config.data.mask_fraction,
            whole_word=config.data.whole_word_masking,
        )
        objective = Pretraining(model, masking)
        train_step = make_train_step(objective, optimizer, config.optimizer.microbatches)
        compiled = partial(
            parallel.compile_step, mode=config.parallel.mode, mesh=mesh, shardings=shardings
        )
        stages.append(
            loop.Stage(
                end=end,
                batch_size=phase.batch_size,
                train_step=compiled(train_step, gives=("state", "sums")),
                evaluate=partial(
                    loop.evaluate,
                    compiled(make_eval_step(objective), gives=("sums",)),
                    partial(loader.eval_batches, corpus, config, phase),
                    phase.batch_size,
                ),
            )
        )
    return stages


if __name__ == "__main__":
    cli.run(main)
