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
    "attention": "show what a model sees in a text, as a page for a browser",
    "embed": "write embeddings of texts",
    "import": "make a checkpoint of a Hugging Face or Google directory",
    "export": "make a Hugging Face directory of a checkpoint",
    "plan": "say what a training step will cost on devices that are not here",
    "benchmark": "measure how fast the training step of a config is here",
}


def main(command: str | None = None) -> None:
    """Run `bert-jax`, or the command that `train.py` or `finetune.py` stands for."""
    script = Path(sys.argv[0]).name
    prog = "bert-jax" if script in ("__main__.py", "") else script
    process.run(lambda: _run(prog, command), prog)


def _run(prog: str, command: str | None) -> None:
    parser = argparse.ArgumentParser(
        prog=prog, description="Encoders in JAX: pretrain, fine-tune and use BERT."
    )
    parser.add_argument("-V", "--version", action="version", version=f"bert-jax {__version__}")
    explained = f"`{prog} COMMAND --help` explains each."
    commands = parser.add_subparsers(
        title="commands", description=explained, metavar="COMMAND", required=True
    )
    for name, text in COMMANDS.items():
        module = name.replace("-", "_") + "_" * keyword.iskeyword(name)
        module = importlib.import_module(f"bert_jax.commands.{module}")
        own = commands.add_parser(
            name,
            prog=prog if command else f"{prog} {name}",
            help=text,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(own)
        own.set_defaults(run=module.run, parser=own)
    args, rest = parser.parse_known_args([command, *sys.argv[1:]] if command else None)
    if isinstance(getattr(args, "text", None), list) and not any(w[:1] == "-" for w in rest):
        # Words after a flag, which argparse adds to no list before Python 3.13.
        args.text, rest = [*args.text, *rest], []
    if rest and "config" not in args:
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    process.run(lambda: args.run(args, rest), args.parser.prog)
