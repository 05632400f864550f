"""Index the texts of files, to search them by their meaning.

    bert-jax index runs/tiny notes.txt articles.csv --output=my.index --column=body

INDEX is a folder with the texts and their embeddings: all of it or, where the command was
interrupted, none. Then: bert-jax search my.index "a question"
"""

import argparse

from bert_jax.commands import process, texts
from bert_jax.commands.flags import Parser
from bert_jax.console import counted, quoted
from bert_jax.storage import paths
from bert_jax.storage.paths import CHECKPOINT


def add_arguments(parser: Parser) -> None:
    parser.flags = {"set column": "set --column"}
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    what = "a text a line; or .tsv, .csv, .jsonl, .parquet, with a text in --column"
    example = "builtin: the functions of Python's library"
    add("files", metavar="FILE", nargs="+", help=f"{what}; {example}")
    add("--output", metavar="INDEX", required=True, help="the folder to write")
    add("--column", help="column of the text in tables (text)")
    add("--force", action="store_true", help="replace an index that is there")
    process.add_dtype(parser)


def run(args: argparse.Namespace, _: list[str]) -> None:
    from bert_jax.bert import Index

    column = texts.column_of(args.column, args.files)
    bert = process.load_checkpoint(args.checkpoint, args.dtype)
    index = Index.build(bert, args.files, args.output, column=column, force=args.force)
    of = f"{counted(len(index), 'text')} of {counted(len(args.files), 'file')}"
    search = f'bert-jax search {quoted(args.output)} "a question"'
    if paths.is_on_hub(args.checkpoint):  # from which a search downloads only what it is told to
        search += f" --checkpoint={quoted(args.checkpoint)}"
    print(f"{args.output}: {of}; to search: {search}")
    if index.num_truncated:
        print(f"truncated {counted(index.num_truncated, 'text')} to what the model reads")
