"""Apply a fine-tuned model to new examples.

    bert-jax predict runs/docstrings builtin@eval

Of a FILE as for fine-tuning it writes the predictions: JSON lines; CoNLL columns for words; SQuAD's
JSON for questions; and prints the scores where all examples have labels. Texts of --text, of plain
text and of stdin (-) are predicted as they come, and printed. Two texts of a pair, and a question
and its context, have a tab between, or are given as --text TEXT TEXT. A model from elsewhere takes
these for two single texts, unless --columns names two.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_jax.commands import process, texts
from bert_jax.commands.flags import Parser, add_data_dir
from bert_jax.console import counted
from bert_jax.errors import UserError, refuse, without_controls
from bert_jax.storage.paths import CHECKPOINT, file_to_write, is_same_file
from bert_jax.text.files import STDIN, file_type

if TYPE_CHECKING:
    from bert_jax.config import DataFiles
    from bert_jax.inference.predictions import Predictions
    from bert_jax.tasks.base import Task
    from bert_jax.tasks.examples import Example

_STEM = "predictions"
Values = Iterator[tuple[str, Any]]  # where each is, for messages, and what an example is made of


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
    from bert_jax.inference.predictions import predict
    from bert_jax.tasks import make_task

    if bool(args.text) == bool(args.file):
        raise UserError("give a FILE, whose columns --columns names, or texts as --text; not both")
    if args.output:
        args.output = str(file_to_write(args.output))
    lines: Iterator[tuple[str, str]] | None = None
    if args.file and (args.file == STDIN or file_type(args.file) == ".txt"):
        lines = texts.numbered(args.file)  # whose faults come before long work
    bert = process.load_checkpoint(args.checkpoint, args.dtype)
    if not bert.task:
        raise UserError("the model has no head of a task; fine-tune it first")
    task = make_task(bert.task)
    if not task.has_txt_lines and args.file != STDIN:
        lines = None
    values: Values | None = None
    if args.text:
        values = _given(args, task, bert.data)
    elif lines:
        values = ((where, task.line_value(line, where, bert.data)) for where, line in lines)
    is_printed = args.json or (values is not None and not args.output)
    output = args.output or ("" if is_printed else _STEM)
    if output:
        file_to_write(output)
        _check_kept(args.file, [f"{output}{suffix}" for suffix in task.file_suffixes])
    predicted = partial(predict, bert, text=args.columns, label=args.label)

    # Each is made when it is read, so that the lines before a wrong one are answered.
    examples = (task.example_from(value, where, bert.data) for where, value in values or ())
    if values is None:
        parts = iter([predicted(Path(args.file))])
    elif output:
        parts = iter([predicted([*examples])])
    else:
        parts = map(predicted, texts.read_ahead(examples))
    # What is read by a program or a person has standard output for itself.
    say = partial(print, file=sys.stderr if is_printed else sys.stdout)
    count = truncated = 0
    for predictions in parts:
        if is_printed:
            _show(task, predictions, count, is_json=args.json)
        count += len(predictions)
        truncated += predictions.num_truncated
        if output:
            paths = predictions.save(output)
            say(f"{counted(count, 'example')}: {', '.join(map(str, paths))}")
        if values is None:
            scores = (f"{name} {value:z.4f}" for name, value in predictions.scores.items())
            say(", ".join(scores) or f"no scores: {_no_label(predictions.examples)}")
    if truncated:
        say(f"truncated {task.truncation(truncated, bert.data)}")


def _no_label(examples: Sequence["Example"]) -> str:
    """Return why examples have no scores, with the column that the first of them lacks."""
    for example in examples:
        if example.label is None and example.absent_column:
            return f"{example.where} has no column {example.absent_column!r}; --label names another"
    is_labelled = all(example.label is not None for example in examples)
    return "the labels give none" if is_labelled else "not every example has a label"


def _given(args: argparse.Namespace, task: "Task", data: "DataFiles") -> Values:
    """Yield the values of the texts of --text: each, or all of them as one."""
    is_one = "," in (args.columns or "") or not task.value_of_texts(args.text[:1], data)
    for texts_of_one in [args.text] if is_one else [[text] for text in args.text]:
        value = task.value_of_texts(texts_of_one, data)
        if value is None:  # which is refused as such a line is
            value = task.line_value("\t".join(texts_of_one), "--text", data)
        yield "--text", value


def _show(task: "Task", predictions: "Predictions", first: int, *, is_json: bool) -> None:
    """Print predictions, each as a line of JSON or for a reader; `first` is the first's number."""
    from bert_jax.tasks.examples import example_ids

    examples = predictions.examples
    ids = example_ids(examples, first)
    for name, example, result in zip(ids, examples, predictions, strict=True):
        if is_json:
            inputs = {} if "tokens" in result else {"texts": example.texts}
            texts.print_json({"id": name, **inputs, **result})
        else:
            print(without_controls(task.as_line(example, result)), flush=True)


def _check_kept(file: str | None, written: Sequence[str]) -> None:
    """Refuse to write over the file that is read."""
    for path in written:
        refuse(
            file and is_same_file(file, path),
            f"the predictions would be written over {file}, which they are of",
            fix="choose another --output",
        )
