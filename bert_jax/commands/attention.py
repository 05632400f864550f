"""Show what a model sees in a text: its attention, as a page for any browser.

One text or a pair; with --compare, a word in several texts; with --texts, the patterns of each head
over all texts of a file, as a page and as JSON.
"""

import argparse
import warnings
from pathlib import Path

from bert_jax.commands import process
from bert_jax.commands.flags import CHECKPOINT
from bert_jax.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    parser.add_argument("text", metavar="TEXT", nargs="*", help='such as "The cat sat on the mat."')
    parser.add_argument("--compare", metavar="WORD", help="a word that each of several texts has")
    parser.add_argument(
        "--texts",
        metavar="FILE",
        help="one text a line, or a pair with a tab between; plain, .gz or .xz",
    )
    parser.add_argument(
        "--output", default="attention.html", metavar="FILE", help="the page (attention.html)"
    )
    parser.add_argument("--force", action="store_true", help="replace the page that is there")


def run(args: argparse.Namespace, _: list[str]) -> None:
    """Write the page."""
    from bert_jax.bert import load
    from bert_jax.viewer import page

    if bool(args.text) == bool(args.texts):
        raise UserError("give a TEXT or two, or a file of them as --texts=FILE")
    if len(args.text) > 2 and not args.compare:
        raise UserError(f"{len(args.text)} texts are too many; give one, a pair, or --compare=WORD")
    output = Path(args.output)
    page.check_output(output, force=args.force)
    process.cache_compiled_programs()
    bert = load(args.checkpoint)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        compare, texts = args.compare, args.text
        view = bert.compare(texts, compare) if compare else bert.attention(*texts)
    for each in caught:
        print(each.message)
    size = view.save(output, force=args.force)
    print(f"{output}: {size / 1e6:.1f} MB; open it in a browser")
