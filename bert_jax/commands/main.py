"""Entry point of `bert-jax`: choose a command, parse its flags, run it."""

import argparse
import importlib
import itertools
import keyword
import sys
import time
from pathlib import Path
from typing import Any

from bert_jax import __version__, console
from bert_jax.commands import process
from bert_jax.commands.flags import Parser
from bert_jax.console import Level
from bert_jax.errors import UserError

_STARTED = time.monotonic()
# By what they are for, in the order of a project.
TASKS = {
    "train": ("prepare", "pretrain", "finetune"),
    "use": ("predict", "fill-mask", "attention", "embed", "index", "search", "mine"),
    "exchange": ("import", "export"),
    "measure": ("plan", "benchmark"),
}
COMMANDS = list(itertools.chain(*TASKS.values()))


def main(command: str | None = None) -> None:
    """Run `bert-jax`, or the command that `train.py` or `finetune.py` stands for."""
    script = Path(sys.argv[0]).name
    prog = "bert-jax" if script in ("__main__.py", "-c", "") else script
    words = [command, *sys.argv[1:]] if command else sys.argv[1:]
    name = f"{prog} {words[0]}" if not command and words and words[0] in COMMANDS else prog
    process.run(lambda: _run(prog, words, name), name)


def import_command(name: str) -> Any:
    """Return the module of a command, with its docstring, `add_arguments` and `run`."""
    module = name.replace("-", "_") + "_" * keyword.iskeyword(name)
    return importlib.import_module(f"bert_jax.commands.{module}")


def _about(prog: str) -> str:
    """Return what the program is, and the first line of what each command says of itself."""
    about = "Encoders in JAX: pretrain, fine-tune and use BERT.\n\n    bert-jax pretrain\n"
    for task, commands in TASKS.items():
        lines = (f"  {n:<10} {import_command(n).__doc__.splitlines()[0]}\n" for n in commands)
        about += f"\n{task}\n{''.join(lines)}"
    return f"{about}\n`{prog} COMMAND --help` explains each."


def add_output(parser: Parser) -> None:
    """Add the flags of every command that say how much is printed."""
    add = parser.add_mutually_exclusive_group().add_argument
    add("-q", "--quiet", action="store_true", help="print only results, warnings and errors")
    more = "also print what took time, libraries' warnings and the origin of errors"
    add("-v", "--verbose", action="store_true", help=more)


def _run(prog: str, words: list[str], name: str) -> None:
    about = "" if words[:1] and words[0] in COMMANDS else _about(prog)
    parser = Parser(prog=prog, usage="%(prog)s COMMAND ...", description=about)
    parser.add_argument("-V", "--version", action="version", version=f"bert-jax {__version__}")
    parser.add_argument("command", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.others = "flags follow the command, and --help lists the commands"
    args, rest = parser.parse_known_args(words[:1])
    parser.check(rest)
    command = args.command
    if not command:
        parser.print_help()
        return
    module = import_command(command)
    parser = Parser(prog=name, description=module.__doc__)
    module.add_arguments(parser)
    add_output(parser)
    args, rest = parser.parse(words[1:])
    process.use_data_dir(getattr(args, "data_dir", None))
    level = Level.RESULTS if args.quiet else Level.DETAILS if args.verbose else Level.PROGRESS
    if args.verbose:
        process.show_details()
    process.show_warnings_of_texts()
    # The output of the other commands is their result.
    to_stderr = command not in TASKS["train"]
    try:
        with console.output(level, to_stderr=to_stderr, started=_STARTED):
            module.run(args, rest)
    except UserError as error:
        raise UserError(parser.in_its_words(str(error))) from error
