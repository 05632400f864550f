"""Words of a sentence by class: named entities, parts of speech."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

import numpy as np
from flax import linen as nn

from bert_jax.batches.features import NO_LABEL, Features
from bert_jax.config import DataFiles, ModelConfig
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForTokenClassification
from bert_jax.tasks import readers as records
from bert_jax.tasks.base import Example, Task, choose_metrics, join, room_for
from bert_jax.tasks.readers import Record
from bert_jax.text.tokenizer import Tokenizer

_OUTSIDE = "O"  # the tag of a word of no entity
_INSIDE = ("B-", "I-", "E-", "S-")  # what begins the tags of entities that seqeval reads


class TokenClassification(Task):
    """Each word has a tag, which its first piece carries (Devlin et al. 2019, section 5.3).

    A sentence that is too long becomes several rows, so that every word is predicted.
    """

    suffix = ".conll"

    @property
    def metrics(self) -> Sequence[str]:
        usual = ("f1",) if self._has_entities else ("accuracy",)
        known = ("accuracy", "precision", "recall", "f1") if self._has_entities else usual
        return choose_metrics(self.config.metrics, usual, known)

    @property
    def _has_entities(self) -> bool:
        return all(tag == _OUTSIDE or tag.startswith(_INSIDE) for tag in self.labels)

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        if source.startswith("tfds:") or records.kind_of(source) == ".jsonl":
            for record in records.table(source):
                words = record.field(data.text, "data.text")
                yield Record(record.where, {"tokens": words, "tags": record.fields.get(data.label)})
        else:
            yield from records.conll(source)

    def make_example(self, record: Record, data: DataFiles) -> Example | None:
        words, tags = record.fields["tokens"], record.fields["tags"]
        is_list = isinstance(words, Sequence) and not isinstance(words, str)
        if not is_list or not words or not all(words):
            raise UserError(f"{record.where}: a list of words is wanted, none of them empty")
        if tags is not None and (not isinstance(tags, Sequence) or isinstance(tags, str)):
            raise UserError(f"{record.where}: a list of tags is wanted, one for each word")
        if tags is not None and len(tags) != len(words):
            raise UserError(f"{record.where}: {len(words)} words have {len(tags)} tags")
        if tags is not None and None in tags:
            if any(tag is not None for tag in tags):
                raise UserError(f"{record.where}: some words have a tag and others none")
            tags = None
        return Example(None, record.where, tuple(map(str, words)), tags and tuple(map(str, tags)))

    def example_labels(self, example: Example) -> Sequence[str]:
        return example.label or ()

    def label_location(self, example: Example, label: str) -> str:
        word = example.label.index(label)
        return f"{example.where}, word {word + 1} of the sentence ({example.texts[word]!r})"

    def label_names(self, examples: Iterable[Example]) -> tuple[str, ...]:
        return tuple(sorted(super().label_names(examples), key=lambda tag: (tag != _OUTSIDE, tag)))

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        # A word within a text has a space before it, which byte-level pieces begin with.
        space = " " if tokenizer.kind == "byte_bpe" else ""
        encoded = iter(tokenizer.encode([space + word for e in examples for word in e.texts]))
        rows, of_rows = Features([], [], np.empty(0, int), [], per_token=True), []
        numbers = {name: number for number, name in enumerate(self.labels)}
        room = room_for(1, model, max_length)

        def add(example: int, pieces: list[int], firsts: list[tuple[int, int]]) -> None:
            sequence, second = join([pieces], tokenizer, model)
            labels = np.full(len(sequence), NO_LABEL, np.int32)
            tags = examples[example].label
            for word, place in firsts:
                labels[place] = NO_LABEL if tags is None else numbers[tags[word]]
            rows.sequences.append(sequence)
            rows.second_starts.append(second)
            rows.labels.append(labels)
            rows.spans.append(firsts)
            of_rows.append(example)

        for number, example in enumerate(examples):
            pieces: list[int] = []
            firsts: list[tuple[int, int]] = []  # each word, and the place of its first piece
            for word in range(len(example.texts)):
                of_word = list(next(encoded))
                rows.truncated += len(of_word) > room
                if len(pieces) + len(of_word[:room]) > room:
                    add(number, pieces, firsts)
                    pieces, firsts = [], []
                if of_word:
                    firsts.append((word, len(pieces) + 1))
                    pieces += of_word[:room]
            add(number, pieces, firsts)
        rows.example_indices = np.array(of_rows, int)
        return rows

    def model(self, config: ModelConfig, probe: str) -> nn.Module:
        return BertForTokenClassification(config, len(self.labels), probe)

    def collect(self, found: list[Any], rows: Features, index: int, logits: np.ndarray) -> None:
        example = rows.example_indices[index]
        if found[example] is None:
            found[example] = {}
        for word, place in rows.spans[index]:
            found[example][word] = int(logits[place].argmax())

    def _tags(self, example: Example, found: dict[int, int]) -> list[str]:
        """Returns the tag of each word; of one that the tokenizer has no pieces for, no entity."""
        other = self.labels.index(_OUTSIDE) if _OUTSIDE in self.labels else 0
        return [self.labels[found.get(word, other)] for word in range(len(example.texts))]

    def score(self, examples: Sequence[Example], found: Sequence[Any]) -> dict[str, float]:
        """Returns precision, recall and F1 of whole entities, and the accuracy of tags."""
        predicted = [self._tags(*pair) for pair in zip(examples, found, strict=True)]
        return self._scores([list(example.label) for example in examples], predicted)

    def _scores(self, actual: list[list[str]], predicted: list[list[str]]) -> dict[str, float]:
        from seqeval import metrics

        scores = {"accuracy": float(metrics.accuracy_score(actual, predicted))}
        if self._has_entities:
            for name in ("precision", "recall", "f1"):
                scorer: Any = getattr(metrics, f"{name}_score")
                scores[name] = float(scorer(actual, predicted, zero_division=0))
        return scores

    def constant_score(self, examples: Sequence[Example]) -> float:
        actual = [list(example.label) for example in examples]
        constant = ([[tag] * len(tags) for tags in actual] for tag in self.labels)
        return max(self.mean_score(self._scores(actual, predicted)) for predicted in constant)

    def write(self, file: TextIO, examples: Sequence[Example], found: Sequence[Any]) -> None:
        """Writes a word a line, its tag where that is known, and the one predicted."""
        for example, of_words in zip(examples, found, strict=True):
            columns = [example.texts, self._tags(example, of_words)]
            columns[1:1] = [] if example.label is None else [example.label]
            file.writelines("\t".join(line) + "\n" for line in zip(*columns, strict=True))
            file.write("\n")
