"""Apply a fine-tuned model to a file of new examples.

    bert-jax predict runs/docstrings builtin@eval

Writes the predictions: JSON lines; CoNLL columns for words; SQuAD's JSON for questions. Prints the
scores where all examples have labels.
"""

import argparse
import os
from pathlib import Path

from bert_jax.commands import process
from bert_jax.commands.flags import CHECKPOINT, Parser
from bert_jax.errors import UserError


def add_arguments(parser: Parser) -> None:
    parser.flags = {"data.text": "--text", "data.label": "--label"}
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    add("file", metavar="FILE", help="as for fine-tuning, or tfds:NAME@SPLIT")
    add("--output", default="predictions", help="file to write, without its ending (predictions)")
    add("--text", metavar="COLUMNS", help="columns of the text, if they differ")
    add("--label", metavar="COLUMN", help="column of the label, if it differs")


def run(args: argparse.Namespace, _: list[str]) -> None:
    from bert_jax.bert import load

    if not os.access(Path(args.output).absolute().parent, os.W_OK):
        raise UserError(f"--output {args.output} cannot be written there; make the folder first")
    process.keep_host_memory()
    process.cache_compiled_programs()
    bert = load(args.checkpoint)
    predictions = bert.predict(Path(args.file), text=args.text, label=args.label)
    paths = predictions.save(args.output)
    print(f"{len(predictions):,} examples: {', '.join(map(str, paths))}")
    if predictions.num_skipped:
        print(f"skipped {predictions.num_skipped:,} records, as the format's own readers do")
    if predictions.num_truncated:
        print(f"truncated {predictions.num_truncated:,} texts to {bert.data.max_length} tokens")
    scores = (f"{name} {value:z.4f}" for name, value in predictions.scores.items())
    print(", ".join(scores) or "no scores: not every example has a label")
