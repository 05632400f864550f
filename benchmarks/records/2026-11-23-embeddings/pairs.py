"""Write the pairs of this record: python pairs.py train.tsv dev.tsv, the reviews."""

import random
import sys
from pathlib import Path

from bert_jax.text import builtin

_HALVED = 8  # words of a review, at least


def write(name: str, pairs: list[tuple[str, str]]) -> None:
    """Write a table of queries and passages."""
    lines = ["\t".join(" ".join(text.split()) for text in pair) for pair in pairs]
    Path(name).write_text("\n".join(["query\tpassage", *lines]) + "\n", encoding="utf-8")


def halves(path: str) -> list[tuple[str, str]]:
    """Return the first and the second half of each review."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()[1:]
    reviews = [line.rsplit("\t", 1)[0].split() for line in lines]
    long = [words for words in reviews if len(words) >= _HALVED]
    return [(" ".join(w[: len(w) // 2]), " ".join(w[len(w) // 2 :])) for w in long]


pairs = builtin.described("train")
random.Random(1).shuffle(pairs)
write("library.train.tsv", pairs[:35_840])
write("library.dev.tsv", builtin.described("eval"))
write("reviews.train.tsv", halves(sys.argv[1]))
write("reviews.dev.tsv", halves(sys.argv[2]))
