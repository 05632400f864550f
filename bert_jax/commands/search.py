"""Print the texts of an index whose meaning is nearest to that of a query.

    bert-jax search my.index "how to remove a file"

Each line has a score, then the file and the line of the text, and how the text begins. The score is
a cosine, at most 1 to within 5e-4; of late interaction a sum of such, of sparse vectors their
product; or that of the reranker.
With - for QUERY, the queries are the lines of stdin.
"""

import argparse
import dataclasses

from bert_jax.commands import process, texts
from bert_jax.commands.flags import Parser
from bert_jax.errors import UserError, check_count, without_controls
from bert_jax.text.files import STDIN

_SHOWN = 160  # characters of a text


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("index", metavar="INDEX", help="what `bert-jax index` wrote")
    what = 'such as "how to remove a file"; - for stdin, one a line'
    add("query", metavar="QUERY", type=texts.argument, help=what)
    add("--top-k", type=int, default=10, help="texts for each query (10)")
    add("--json", action="store_true", help="print JSON, a line for each query, with whole texts")
    what = "a model of finetune/reranker, which ranks the nearest texts anew"
    add("--reranker", metavar="CHECKPOINT", help=what)
    what = "texts that a reranker reads for each query (100)"
    add("--candidates", type=int, help=what)
    what = "the model that the index was made with, if it is elsewhere now"
    add("--checkpoint", metavar="CHECKPOINT", help=what)


def run(args: argparse.Namespace, _: list[str]) -> None:
    from bert_jax.bert import Index, load

    process.set_up_jax()
    if args.candidates is not None and args.reranker is None:
        raise UserError("--candidates are what a reranker reads; give --reranker, or leave it out")
    candidates = 100 if args.candidates is None else args.candidates
    check_count(args.top_k, "--top-k")
    check_count(candidates, "--candidates")
    index = Index.load(args.index, args.checkpoint)
    reranker = None if args.reranker is None else load(args.reranker)
    is_several = args.query == STDIN
    parts = texts.read_ahead(texts.numbered(STDIN)) if is_several else [[("", args.query)]]
    is_first = True
    for part in parts:
        queries = [query for _, query in part]
        found = index.search(queries, args.top_k, reranker=reranker, candidates=candidates)
        for query, hits in zip(queries, found, strict=True):
            if args.json:
                texts.print_json({"query": query, "hits": list(map(dataclasses.asdict, hits))})
                continue
            if is_several:
                print(f"{'' if is_first else chr(10)}{without_controls(query)}")
            is_first = False
            for hit in hits:
                text = " ".join(hit.text.split())
                text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
                line = f"{hit.score:6.3f}  {hit.file}:{hit.line}  {text}"
                print(without_controls(line), flush=True)
