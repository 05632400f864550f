"""Apply a fine-tuned model to new examples.

    bert-jax predict runs/docstrings builtin@eval

Of a FILE as for fine-tuning it writes the predictions: JSON lines; CoNLL columns for words; SQuAD's
JSON for questions; and prints the scores where all examples have labels. Texts of --text, of plain
text and of stdin (-) are predicted as they come, and printed. Two texts of a pair, and a question
and its context, have a tab between, or are given as --text TEXT TEXT.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_jax.commands import process, texts
from bert_jax.commands.flags import Parser, add_data_dir
from bert_jax.errors import UserError, refuse, without_controls
from bert_jax.storage.paths import CHECKPOINT, check_writable
from bert_jax.text.files import STDIN, file_type

if TYPE_CHECKING:
    from bert_jax.inference.predictions import Predictions

_STEM = "predictions"


def add_arguments(parser: Parser) -> None:
    parser.flags = {"data.text": "--columns", "data.label": "--label"}
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    what = "as for fine-tuning, or tfds:NAME@SPLIT; a .txt with a text a line; - for stdin"
    add("file", metavar="FILE", nargs="?", help=what)
    what = "texts to predict, in place of a FILE; the two of a pair"
    add("--text", metavar="TEXT", nargs="+", action="extend", type=texts.argument, help=what)
    what = "file to write, without its ending (predictions; of plain text, none)"
    add("--output", metavar="STEM", help=what)
    add("--json", action="store_true", help="print JSON, a line for each example")
    add_data_dir(parser)
    add("--columns", help="columns of the text, if they differ")
    add("--label", metavar="COLUMN", help="column of the label, if it differs")
    process.add_dtype(parser)


def run(args: argparse.Namespace, _: list[str]) -> None:
    from bert_jax.tasks import make_task

    if bool(args.text) == bool(args.file):
        raise UserError("give a FILE, whose columns --columns names, or texts as --text; not both")
    is_saved = args.output or not (args.json or args.text or args.file == STDIN)
    output = args.output or _STEM
    if is_saved:
        check_writable(Path(output))
    lines: Any = None
    if args.file and (args.file == STDIN or file_type(args.file) == ".txt"):
        lines = texts.numbered(args.file)
    bert = process.load_checkpoint(args.checkpoint, args.dtype)
    if not bert.task:
        raise UserError("the model has no head of a task; fine-tune it first")
    task, data = make_task(bert.task), bert.data
    if args.file and is_saved:
        _check_kept(args.file, [f"{output}{suffix}" for suffix in task.file_suffixes])
    if not task.has_txt_lines and args.file and args.file != STDIN:
        lines = None
    if args.text:
        is_pair = "," in (args.columns or "") or not task.value_of_texts(args.text[:1], data)
        lines = [("--text", text) for text in (["\t".join(args.text)] if is_pair else args.text)]
    predict = partial(bert.predict, text=args.columns, label=args.label)

    def predict_lines(some: Iterable[tuple[str, str]]) -> "Predictions":
        values = ((where, task.line_value(line, where, data)) for where, line in some)
        examples = [task.example_from(value, where, data) for where, value in values]
        return predict(examples)

    if lines is not None and not args.output:
        parts = (predict_lines(some) for some in texts.read_ahead(lines))
    else:
        parts = [predict(Path(args.file)) if lines is None else predict_lines(lines)]
    is_printed = args.json or (lines is not None and not args.output)
    say = partial(print, file=sys.stderr if is_printed else sys.stdout)
    count = truncated = 0
    for predictions in parts:
        for example, result in zip(predictions.examples, predictions, strict=True):
            if args.json:
                name = count if example.id is None else example.id
                inputs = {} if "tokens" in result else {"texts": example.texts}
                texts.print_json({"id": name, **inputs, **result})
            elif is_printed:
                print(without_controls(task.as_line(example, result)), flush=True)
            count += 1
        truncated += predictions.num_truncated
        if args.output or not is_printed:
            paths = predictions.save(args.output or _STEM)
            say(f"{count:,} examples: {', '.join(map(str, paths))}")
        if lines is None:
            scores = (f"{name} {value:z.4f}" for name, value in predictions.scores.items())
            say(", ".join(scores) or "no scores: not every example has a label")
    if truncated:
        say(f"truncated {truncated:,} texts to {data.max_length} tokens")


def _check_kept(file: str, written: Sequence[str]) -> None:
    """Refuse to write over the file that is read."""
    for path in written:
        refuse(
            os.path.exists(file) and os.path.exists(path) and os.path.samefile(file, path),
            f"the predictions would be written over {file}, which they are of",
            fix="choose another --output",
        )
