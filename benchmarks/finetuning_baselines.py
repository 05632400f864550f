"""Non-neural baselines of named entity recognition and extractive question answering.

    python benchmarks/finetuning_baselines.py --train=train.conll dev.conll test.conll
    python benchmarks/finetuning_baselines.py --train=train.json dev.json

For named entities, each word gets its most frequent tag in training. For SQuAD, the sentence that
shares most words with the question is chosen, each weighted by its inverse frequency among training
sentences; the answer is that sentence, or consecutive words of it that the question does not have.
"""

import argparse
import collections
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from seqeval import metrics

sys.path.insert(0, str(Path(__file__).parents[1]))

from bert_jax.config import TaskConfig
from bert_jax.tasks import readers, squad_metrics
from bert_jax.tasks.question_answering import QuestionAnswering
from bert_jax.text.sentences import split_sentences

WORD = re.compile(r"\w+")
MARKS = ".,;:!?()[]\"'“”‘’"
NUMBER = re.compile(r"\b(when|how (many|much|old|long|far)|what (year|date|percent\w*))\b", re.I)


def entities(train: str, held_out: Sequence[str]) -> None:
    """Print precision, recall and F1 of entities by file."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for record in readers.conll(train):
        for token, tag in zip(record.fields["tokens"], record.fields["tags"], strict=True):
            counts[token][tag] += 1
    usual = {token: tags.most_common(1)[0][0] for token, tags in counts.items()}
    print(f"{'file':<24}{'sentences':>10}{'entities':>9}{'precision':>10}{'recall':>10}{'F1':>10}")
    for name in held_out:
        sentences = [record.fields for record in readers.conll(name)]
        actual = [list(fields["tags"]) for fields in sentences]
        predicted = [[usual.get(token, "O") for token in fields["tokens"]] for fields in sentences]
        number = sum(tag.startswith("B-") for tags in actual for tag in tags)
        measures = (metrics.precision_score, metrics.recall_score, metrics.f1_score)
        scores = "".join(f"{measure(actual, predicted):>10.4f}" for measure in measures)
        print(f"{Path(name).name:<24}{len(sentences):>10,}{number:>9,}{scores}")


def words(text: str) -> set[str]:
    """Return the words of a text, in lower case."""
    return set(WORD.findall(text.lower()))


def weigh(train: str) -> Mapping[str, float]:
    """Return the inverse document frequency of each word among the sentences of the contexts."""
    contexts = {record.fields["context"] for record in readers.squad(train)}
    sentences = [words(s) for context in contexts for s in split_sentences(context)]
    counts = collections.Counter(word for sentence in sentences for word in sentence)
    total = len(sentences) + 1
    weights = {word: math.log(total / (n + 1)) for word, n in counts.items()}
    return collections.defaultdict(lambda: math.log(total), weights)


def nearest(question: str, context: str, weights: Mapping[str, float]) -> str:
    """Return the first of the sentences that share most with the question."""
    asked = words(question)
    return max(split_sentences(context), key=lambda s: sum(weights[w] for w in words(s) & asked))


def runs(sentence: str, question: str, wanted: Callable[[str], object]) -> Iterator[str]:
    """Yield the longest runs of words that are wanted and that the question does not have."""
    asked, run = words(question), []
    for token in [*sentence.split(), "."]:  # a mark ends the last run
        bare = token.strip(MARKS)
        fits = bare and wanted(bare) and not words(bare) <= asked
        run += [token] * bool(fits)
        if run and (not fits or token[-1] in MARKS):
            yield " ".join(run)
            run = []


def capitals(sentence: str, question: str) -> str:
    """Return the longest run of words with a capital, or the sentence where there is none."""
    return max(runs(sentence, question, lambda t: t[0].isupper()), key=len, default=sentence)


def numbers(sentence: str, question: str) -> str:
    """Return the longest run of numbers where the question asks for one, else of capitals."""
    instead = capitals(sentence, question)
    wanted = re.compile(r"\d").search if NUMBER.search(question) else lambda _: False
    return max(runs(sentence, question, wanted), key=len, default=instead)


ANSWERS = {
    "the whole sentence": lambda sentence, question: sentence,
    "its longest run of capitalized words": capitals,
    "the same; of numbers for when, how many": numbers,
}


def answers(train: str, held_out: Sequence[str]) -> None:
    """Print exact match and F1 by file and way of answering."""
    weights = weigh(train)
    print(f"{'file':<12}{'answer':<42}{'questions':>10}{'EM':>8}{'F1':>8}")
    for name in held_out:
        examples = map(QuestionAnswering(TaskConfig()).make_example, readers.squad(name))
        asked = [example for example in examples if example.label is not None]
        sentences = [nearest(example.texts[0], example.texts[1], weights) for example in asked]
        for way, answer in ANSWERS.items():
            scores = [
                squad_metrics.against(answer(s, e.texts[0]), [text for text, _ in e.label])
                for s, e in zip(sentences, asked, strict=True)
            ]
            means = [100 * sum(values) / len(asked) for values in zip(*scores, strict=True)]
            print(
                f"{Path(name).name:<12}{way:<42}{len(asked):>10,}{means[0]:>8.2f}{means[1]:>8.2f}"
            )


def main() -> None:
    """Print the table of the kind of files that are given."""
    parser = argparse.ArgumentParser(description="Baselines for entities and for SQuAD.")
    parser.add_argument("--train", required=True)
    parser.add_argument("held_out", nargs="+")
    arguments = parser.parse_args()
    table = answers if ".json" in Path(arguments.train).suffixes else entities
    table(arguments.train, arguments.held_out)


if __name__ == "__main__":
    main()
