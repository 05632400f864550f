"""Print the most probable tokens for each [MASK] of a text.

    bert-jax fill-mask runs/tiny "Return the [MASK] of the file."

Each is a probability, a token and the text; an empty line separates the guesses for several masks.
With - for TEXT, the texts are the lines of stdin.
"""

import argparse
import dataclasses
import os

from bert_jax.commands import process, texts
from bert_jax.errors import UserError, check_count, without_controls
from bert_jax.storage.paths import CHECKPOINT
from bert_jax.text.files import STDIN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    what = 'such as "The [MASK] statement"; - for stdin, one a line'
    add("text", metavar="TEXT", type=texts.argument, help=what)
    add("--top-k", type=int, default=5, help="guesses for each mask (5)")
    add("--json", action="store_true", help="print JSON, a line for each text")


def run(args: argparse.Namespace, _: list[str]) -> None:
    if "[MASK]" not in args.text and os.path.isfile(args.text):
        raise UserError(f"{args.text} is a file, and no text with [MASK]; give - < {args.text}")
    check_count(args.top_k, "--top-k")
    bert, previous = process.load_checkpoint(args.checkpoint), None
    lines = texts.numbered(STDIN) if args.text == STDIN else [("", args.text)]
    for where, text in lines:
        try:
            guesses = bert.fill_mask(text, args.top_k)
        except UserError as error:
            raise UserError(f"{where}: {error}" if where else str(error)) from error
        if args.json:
            texts.print_json({"text": text, "guesses": list(map(dataclasses.asdict, guesses))})
            continue
        for guess in guesses:
            if previous not in (None, (where, guess.position)):
                print()
            previous = where, guess.position
            line = f"{guess.probability:6.1%}  {guess.token:<16}  {guess.text}"
            print(without_controls(line), flush=True)
