"""Print the most probable tokens for each [MASK] of a text.

    bert-jax fill-mask runs/tiny "Return the [MASK] of the file."

An empty line separates the guesses for several masks. Each is a probability, a token and the text.
"""

import argparse

from bert_jax.commands import process
from bert_jax.commands.flags import CHECKPOINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    parser.add_argument("text", metavar="TEXT", help='such as "The [MASK] statement"')
    parser.add_argument("--top-k", type=int, default=5, help="guesses for each mask (5)")


def run(args: argparse.Namespace, _: list[str]) -> None:
    from bert_jax.bert import load

    process.cache_compiled_programs()
    previous = None
    for guess in load(args.checkpoint).fill_mask(args.text, args.top_k):
        if previous not in (None, guess.position):
            print()
        previous = guess.position
        print(f"{guess.probability:6.1%}  {guess.token:<16}  {guess.text}")
