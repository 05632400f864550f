"""Show what a model sees in a text: its attention, as a page for any browser.

    bert-jax attention runs/tiny "Return the name of the file."

One text or a pair; with --compare, a word in several texts; with --texts, the patterns of each head
over all texts of a file, as a page and as JSON.
"""

import argparse
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from bert_jax import console
from bert_jax.commands import process, texts
from bert_jax.console import counted
from bert_jax.errors import UserError, refuse
from bert_jax.storage.paths import CHECKPOINT
from bert_jax.text import records
from bert_jax.text.files import file_type

if TYPE_CHECKING:
    from bert_jax.viewer.patterns import Patterns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    what = 'such as "The cat sat on the mat."'
    add("text", metavar="TEXT", nargs="*", type=texts.argument, help=what)
    add("--compare", metavar="WORD", help="a word that each of several texts has")
    what = "one text a line, or a pair with a tab between; plain, .gz or .xz; - for stdin"
    add("--texts", metavar="FILE", help=what)
    what = "the page (attention.html; patterns.html for --texts, with its numbers as .json)"
    add("--output", metavar="FILE", help=what)
    add("--force", action="store_true", help="replace files that are there")


def run(args: argparse.Namespace, _: list[str]) -> None:
    if bool(args.text) == bool(args.texts):
        raise UserError("give a TEXT or two, or a file of them as --texts=FILE; not both")
    if args.texts and args.compare:
        raise UserError("--compare=WORD takes each text as a TEXT, and not from --texts=FILE")
    if len(args.text) > 2 and not args.compare:
        raise UserError(f"{len(args.text)} texts are too many; give one, a pair, or --compare=WORD")
    refuse(
        args.texts and records.reader(args.texts) and file_type(args.texts) != ".tsv",
        f"--texts={args.texts} has records, not a text a line",
        fix="write the texts alone to a .txt",
    )
    from bert_jax.viewer import page, patterns

    output = args.output or ("patterns.html" if args.texts else "attention.html")
    outputs = patterns.files(output) if args.texts else (output,)
    for path in outputs:
        page.check_output(path, force=args.force)
    lines = texts.numbered(args.texts) if args.texts else None
    bert = process.load_checkpoint(args.checkpoint)
    if lines:
        found = bert.attention_patterns(_texts_and_pairs(lines))
    elif args.compare:
        found = bert.compare(args.text, args.compare)
    else:
        found = bert.attention(*args.text)
    if isinstance(found, patterns.Patterns):
        _print(found)
    size = found.save(output, force=args.force)
    print(f"{output}: {size / 1e6:.1f} MB; open it in a browser")
    for path in outputs[1:]:
        print(f"{path}: its numbers")


def _texts_and_pairs(lines: Iterable[tuple[str, str]]) -> Iterator[str | tuple[str, str]]:
    """Yield the text of each line, or the two with a tab between, with a progress bar."""
    with console.working("reading", says_end=False):
        for where, line in lines:
            text, *pair = line.split("\t")
            if len(pair) > 1:
                raise UserError(
                    f"{where} has {len(pair)} tabs; a line is a text, or two with a tab between"
                )
            yield (text, pair[0]) if pair else text


def _print(found: "Patterns") -> None:
    """Print the strongest heads of each kind."""
    print(f"{counted(found.num_texts, 'text')} of {counted(found.num_tokens, 'token')}")
    for name, uniform in found.uniform.items():
        heads = [f"layer {i} head {j:<2} {share:4.0%}" for i, j, share in found.strongest(name)]
        words = [*heads, f"(uniform {uniform:.0%})"] if heads else ["none in these texts"]
        print(f"{name.replace('_', ' '):<13}  {'   '.join(words)}")
