"""Mine hard negatives: texts of an index that are near a query and do not answer it.

    bert-jax mine pairs.tsv my.index --text=query,passage --output=mined.jsonl

Each relevant passage of FILE becomes a line of JSON with the query, the passage and the negatives:
the passages that FILE has as not relevant, then the texts of INDEX nearest to the query, but for
those that FILE has as relevant. The index must have the passages as FILE has them. The line that is
printed has the flags that train on them; a held-out file of its own needs the same columns.
"""

import argparse
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from bert_jax import console
from bert_jax.commands import process
from bert_jax.commands.flags import Parser
from bert_jax.errors import UserError, check_count, refuse
from bert_jax.storage.paths import file_to_write
from bert_jax.storage.replacement import replacing

if TYPE_CHECKING:
    from bert_jax.bert import Index

_QUERIES = 256  # that are searched for at once


def add_arguments(parser: Parser) -> None:
    parser.flags = {"data.text": "--text", "data.label": "--label"}
    add = parser.add_argument
    add("file", metavar="FILE", help="a table of queries and passages, perhaps with labels")
    add("index", metavar="INDEX", help="what `bert-jax index` wrote")
    add("--output", metavar="OUT", required=True, help="the .jsonl to write")
    what = "columns of the query and of the passages"
    add("--text", default="query,passage", help=f"{what} (query,passage)")
    what = "column of the relevance, 0 for none; without it the first passage is relevant (label)"
    add("--label", default="label", help=what)
    add("--negatives", type=int, default=7, help="for each relevant passage (7)")
    what = "nearest texts to leave out that FILE does not list, as they may answer the query (0)"
    add("--skip", type=int, default=0, help=what)
    what = "the model that the index was made with, if it is elsewhere now"
    add("--checkpoint", metavar="CHECKPOINT", help=what)


def _nearest_others(
    index: "Index", queries: Sequence[str], excluded: Sequence[Collection[str]], count: int
) -> list[list[str]]:
    """Return the nearest texts of each query, each once, without those that are excluded."""
    most = count + max(map(len, excluded))
    while True:
        found = [
            _distinct(hit.text for hit in hits if _plain(hit.text) not in own)[:count]
            for hits, own in zip(index.search(queries, most), excluded, strict=True)
        ]
        if most >= len(index) or all(len(texts) == count for texts in found):
            return found
        most *= 4  # an index may have a text many times


def run(args: argparse.Namespace, _: list[str]) -> None:
    from bert_jax.bert import Index
    from bert_jax.config import DataFiles
    from bert_jax.tasks.datasets import read_examples
    from bert_jax.tasks.passages import judged_passages, show_skipped
    from bert_jax.tasks.reranker import Reranker, RerankerConfig

    check_count(args.negatives, "--negatives")
    if args.skip < 0:
        raise UserError(f"--skip is {args.skip}; give a whole number, 0 or more")
    if not args.output.endswith(".jsonl"):
        raise UserError(f"--output is {args.output}; name a .jsonl, since it has lines of JSON")
    if file_to_write(args.output).exists():
        raise UserError(f"{args.output} exists; remove it, or choose another --output")
    process.set_up_jax()
    columns = DataFiles(text=args.text, label=args.label)
    examples = read_examples(Reranker(RerankerConfig()), args.file, columns, labelled=True)
    every = judged_passages(examples)
    judged = {query: passages for query, passages in every.items() if any(passages.values())}
    show_skipped(len(every) - len(judged))
    refuse(not judged, f"{args.file} has no relevant passage", fix="give labels above 0")
    index = Index.load(args.index, args.checkpoint)
    with replacing(args.output) as new, new.open("w", encoding="utf-8") as file:
        count = _write(file, judged, index, args.negatives, args.skip)
    names = ",".join(["query", "passage", *(f"negative{i + 1}" for i in range(args.negatives))])
    print(
        f"{args.output}: {console.counted(count, 'relevant passage')} with "
        f"{console.counted(args.negatives, 'negative')} each; to train on them: "
        f"--config.data.train={console.quoted(args.output)} --config.data.eval=none "
        f"--config.data.text={names}"
    )


@console.working("mining")
def _write(
    file: TextIO,
    judged: Mapping[str, Mapping[str, float]],
    index: "Index",
    negatives: int,
    skip: int,
) -> int:
    """Write a line for each relevant passage, and return their number."""
    queries, count = list(judged), 0
    for start in range(0, len(queries), _QUERIES):
        asked = queries[start : start + _QUERIES]
        relevant = [[t for t, value in judged[query].items() if value > 0] for query in asked]
        # A query and what the file has judged are not mined, whatever their white space.
        excluded = [{*map(_plain, (query, *judged[query]))} for query in asked]
        nearest = _nearest_others(index, asked, excluded, skip + negatives)
        for query, own, texts in zip(asked, relevant, nearest, strict=True):
            positive = {*map(_plain, (query, *own))}
            irrelevant = [text for text, value in judged[query].items() if not value]
            # Those of the file first, which somebody has judged.
            known = [text for text in irrelevant if _plain(text) not in positive]
            chosen = _distinct([*known, *texts[skip:]])[:negatives]
            if len(chosen) < negatives:
                raise UserError(
                    f"the index has {console.counted(len(chosen), 'negative')} for {query!r}, of "
                    f"{negatives}; lower --negatives or --skip, or index more texts"
                )
            for passage in own:
                values = {"query": query, "passage": passage}
                values |= {f"negative{i}": text for i, text in enumerate(chosen, start=1)}
                file.write(json.dumps(values, ensure_ascii=False) + "\n")
                count += 1
        console.advance(start + len(asked), len(queries))
    return count


def _distinct(texts: Iterable[str]) -> list[str]:
    """Return the first of texts that differ only in white space."""
    found: dict[str, str] = {}
    for text in texts:
        found.setdefault(_plain(text), text)
    return [*found.values()]


def _plain(text: str) -> str:
    return " ".join(text.split())
