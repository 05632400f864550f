"""Pretrains BERT: `python train.py --config=configs/tiny.py --workdir=runs/tiny`.

`--config` is a recipe (configs/tiny.py) and `--workdir` where the run is kept (runs/NAME of the
recipe). The same command again goes on where the run stopped. Any field of the config can be set
with `--config.FIELD=VALUE`.

`--init=CHECKPOINT` begins with the weights, the shape and the tokenizer of another model, ours,
Hugging Face's or Google's; heads that it lacks begin anew.
"""

import dataclasses
import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from absl import flags
from flax import linen as nn
from jax.sharding import Mesh

from bert_jax import cli, pretrained, report
from bert_jax import config as config_lib
from bert_jax.config import TrainConfig
from bert_jax.data import corpus as corpus_lib
from bert_jax.data import loader
from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.data.corpus import Corpus
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForPreTraining
from bert_jax.training import loop, parallel
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.masking import make_masking
from bert_jax.training.metrics import Writer
from bert_jax.training.objectives import Pretraining
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.step import init_state, make_eval_step, make_train_step

WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept; runs/NAME of the config.")
INIT = flags.DEFINE_string("init", None, "A checkpoint whose weights and tokenizer to begin with.")


def main() -> None:
    """Prepares the text, trains, and says what came out."""
    config, workdir, init = read_flags()
    parallel.keep_host_memory()
    mesh = parallel.make_mesh()
    for _, phase in config_lib.phases(config):
        parallel.check_divides(phase.batch_size, config.optimizer.microbatches, mesh.size)
    tokenizer = config.tokenizer
    if tokenizer.path:
        tokenizer = tokenizer_lib.load(tokenizer.path, lowercase=tokenizer.lowercase)
        tokenizer_lib.check_fits(tokenizer, config.model.vocab_size)  # before it is used
    elif init:
        tokenizer = init.tokenizer
    corpus = corpus_lib.prepare(config.data, tokenizer, config.model.vocab_size, workdir / "store")
    tokenizer_lib.check_fits(corpus.tokenizer, config.model.vocab_size)
    check_same_text(corpus, workdir)

    model = BertForPreTraining(config.model, next_sentence=config.data.pairs != "none")
    optimizer = make_optimizer(config.optimizer, config.steps)

    def new_state(key: jax.Array) -> Any:
        return init_state(model.init_params(key), optimizer, config.seed)

    key = jax.random.key(config.seed)
    boxed = jax.eval_shape(new_state, key)
    shardings = parallel.state_shardings(boxed, mesh)
    stages = make_stages(config, corpus, model, optimizer, mesh, shardings)
    batches = loader.TrainBatches(corpus, config)
    checkpoints = Checkpoints(
        workdir / "checkpoints", config.checkpoint, dataclasses.asdict(config), corpus.tokenizer
    )
    step = checkpoints.latest()
    if step is None:
        step = 0
        state = jax.jit(lambda k: nn.unbox(new_state(k)), out_shardings=shardings)(key)
        if init:
            state = state.replace(params=pretrained.fill(state.params, init.params))
            report.begun_with(INIT.value, state.params, init.params)
    else:
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            nn.unbox(boxed),
            shardings,
        )
        state = checkpoints.restore(step, like)
        if init:
            print(f"going on from step {step:,}; --init is not used again")
    save_config(config, corpus, workdir)
    report.start(config, corpus, mesh, state, batches.epochs(), workdir)

    with closing(Writer(workdir, step)) as writer:
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
    report.end(held_out, stages[-1].eval_batches(), corpus, config.data.pairs, bert, workdir)


def read_flags() -> tuple[TrainConfig, Path, pretrained.Bert | None]:
    """Returns the config, validated, the workdir, writable and of no other run, and `--init`."""
    config, name = cli.read_config(Path(__file__).parent / "configs" / "tiny.py")
    init = pretrained.load(INIT.value) if INIT.value else None
    if init:
        config.model = pretrained.model_to_train(init, config.model, cli.fields_given("model."))
    config_lib.validate(config)
    workdir = Path(WORKDIR.value or f"runs/{name}")
    # Nothing is made yet: a mistake found later should leave nothing behind.
    nearest = next(path for path in (workdir, *workdir.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"--workdir {workdir} cannot be made in {nearest}; choose another")
    if (workdir / "config.json").exists():
        config_lib.check_same_run(config, workdir / "config.json")
    return config, workdir, init


def check_same_text(corpus: Corpus, workdir: Path) -> None:
    """Refuses to resume on other text, or other pieces, than the run was trained on so far."""
    path = workdir / "text.sha256"
    if path.exists() and path.read_text().strip() != corpus.fingerprint:
        raise UserError(
            f"{workdir} was trained on other text, or with another tokenizer, than data.source now "
            "gives; choose another --workdir, or put the text back"
        )


def save_config(config: TrainConfig, corpus: Corpus, workdir: Path) -> None:
    """Writes the config and the tokenizer: from here on the workdir belongs to this run."""
    corpus.tokenizer.save(workdir / "tokenizer")
    contents = {"text.sha256": corpus.fingerprint + "\n", "config.json": config_lib.to_json(config)}
    for name, content in contents.items():
        temporary = workdir / (name + ".tmp")
        temporary.write_text(content)
        os.replace(temporary, workdir / name)


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
        compiled = partial(parallel.compile_step, mode=config.parallel.mode, mesh=mesh)
        stages.append(
            loop.Stage(
                end=end,
                batch_size=phase.batch_size,
                train_step=compiled(train_step, shardings=shardings, updates_state=True),
                eval_step=compiled(
                    make_eval_step(objective), shardings=shardings, updates_state=False
                ),
                eval_batches=partial(
                    loader.eval_batches, corpus, config, phase.max_length, phase.batch_size
                ),
            )
        )
    return stages


if __name__ == "__main__":
    cli.run(main)
