"""Entry point of `bert-jax`: choose a subcommand, parse its flags, run it."""

import argparse
import importlib
import keyword
import sys
from pathlib import Path

from bert_jax import __version__
from bert_jax.commands import process

# In the order of a project: text, training, use, exchange, planning.
COMMANDS = {
    "prepare": "tokenize text into a store for pretraining",
    "pretrain": "pretrain an encoder from text",
    "finetune": "fine-tune an encoder for a task",
    "predict": "apply a fine-tuned model to new examples",
    "fill-mask": "guess the masked words of a text",
    "embed": "write embeddings of texts",
    "import": "make a checkpoint of a Hugging Face or Google directory",
    "export": "make a Hugging Face directory of a checkpoint",
    "plan": "say what a training step will cost on devices that are not here",
    "benchmark": "measure how fast the training step of a config is here",
}


def main(command: str | None = None) -> None:
    """Run `bert-jax`, or one of its commands under the name of a script.

    Args:
      command: the command that `train.py` and `finetune.py` stand for.
    """
    name = Path(sys.argv[0]).name
    prog = "bert-jax" if name in ("__main__.py", "") else name
    words = sys.argv[1:]
    if command is None:
        command, words = _choose(prog, words)
        prog = f"{prog} {command}"
    name = command.replace("-", "_") + "_" * keyword.iskeyword(command)
    module = importlib.import_module(f"bert_jax.commands.{name}")
    parser = argparse.ArgumentParser(prog=prog, description=module.__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    module.add_arguments(parser)
    args, rest = parser.parse_known_args(words)
    if rest and "config" not in args:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    process.run(lambda: module.run(args, rest), prog)


def _choose(prog: str, words: list[str]) -> tuple[str, list[str]]:
    width = max(map(len, COMMANDS)) + 2
    listed = "\n".join(f"  {name:<{width}}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Encoders in JAX: pretrain, fine-tune and use BERT.",
        epilog=f"commands:\n{listed}\n\n`{prog} COMMAND --help` explains each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bert-jax {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="see below")
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    return args.command, args.words
