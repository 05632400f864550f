"""Time the train step of a config on the devices of this host, on random sequences.

    bert-jax benchmark --config=tiny

Prints its speed, MFU, memory and compile time, beside the speed of a matmul alone. For devices that
are elsewhere, such as v5e-8, `bert-jax plan --topology=v5e-8` answers by formula.
"""

import argparse
import json
import tempfile

from bert_jax import console
from bert_jax.commands import process
from bert_jax.commands.flags import Parser, add_config, read_config
from bert_jax.commands.memory import keep_host_memory
from bert_jax.config import TrainConfig, settings
from bert_jax.config.schedule import make_schedule
from bert_jax.config.validation import validate
from bert_jax.errors import UserError
from bert_jax.storage.paths import on_disk


def add_arguments(parser: Parser) -> None:
    add_config(parser, "tiny", TrainConfig)
    add = parser.add_argument
    add("--phase", type=int, default=1, metavar="N", help="phase to time, from 1 (1)")
    add("--steps", type=int, default=50, metavar="N", help="steps to time, at most (50)")
    add("--seconds", type=float, default=60.0, metavar="S", help="to time them, at most (60)")
    add("--profile", metavar="DIR", help="write a trace of some steps, for TensorBoard and XProf")
    add("--json", action="store_true", help="print JSON, in bytes and seconds")


def run(args: argparse.Namespace, words: list[str]) -> None:
    if args.steps < 1 or not 0 < args.seconds < float("inf"):
        raise UserError("--steps and --seconds must be positive and finite")
    recipe = read_config(args.config, words, TrainConfig)
    config, name = recipe.config, recipe.name
    config = settings.check(config)
    validate(config)
    count = len(config.data.phases) + 1
    if not 1 <= args.phase <= count:
        raise UserError(f"--phase {args.phase}: the config has phases 1 to {count}")
    if config.parallel.mode == "pmap":
        raise UserError("parallel.mode pmap is not measured; set it to mesh")
    folder = on_disk(args.profile) if args.profile else None
    if folder:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise UserError(
                f"--profile={args.profile} cannot be written ({error.strerror}); "
                "choose another folder"
            ) from error
    keep_host_memory()
    process.use_enough_threads()
    process.start_jax()
    from bert_jax.planning import benchmark

    stage = make_schedule(config).main_stages[args.phase - 1]
    with console.working("measuring", says_end=False):
        result = benchmark.measure(
            config,
            stage,
            steps=args.steps,
            seconds=args.seconds,
            trace_folder=folder and str(folder),
        )
    print(json.dumps(result, indent=2) if args.json else benchmark.as_text(result, name))
