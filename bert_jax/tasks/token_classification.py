"""Token classification: a tag for each word, such as entities and parts of speech."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import softmax

from bert_jax.batches.buckets import NO_LABEL, Features
from bert_jax.config import DataFiles, ModelConfig, TaskConfig
from bert_jax.console import counted
from bert_jax.errors import UserError, refuse
from bert_jax.models.heads import TaskModel
from bert_jax.tasks import readers
from bert_jax.tasks.base import Task
from bert_jax.tasks.examples import Example
from bert_jax.tasks.sequences import build_sequence, longest_sequence, max_text_tokens
from bert_jax.text.files import file_type
from bert_jax.text.records import JSON_LINES, Record, is_dataset
from bert_jax.text.tokenizer import Tokenizer

_OUTSIDE = "O"  # the tag of a word of no entity
_COLUMNS = {"text": "tokens", "label": "ner_tags"}  # of CoNLL 2003 as a dataset
_PREFIXES = ("B-", "I-", "E-", "S-")  # of the tags that seqeval reads


class TokenClassification(Task):
    """Each word has a tag, predicted at its first token (Devlin et al. 2019, section 5.3).

    A long sentence is read in windows. A word in several counts in the loss of each.
    """

    model_class = TaskModel
    transformers_class = "ForTokenClassification"
    file_suffixes = (".conll",)
    pipeline_tag = "token-classification"
    has_windows = has_short_windows = reads_words = True
    has_txt_lines = False  # but words in columns
    missing_label = "no tags; give each word one in the last column, or a list in data.label"
    value_form = "a list of words, or a dict of the columns of data.text and data.label"
    default_metrics, known_metrics = ("f1",), ("accuracy", "precision", "recall", "f1")

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()):
        if not all(map(_is_of_entities, labels or config.labels)):
            self.default_metrics = self.known_metrics = ("accuracy",)
        super().__init__(config, labels)

    @classmethod
    def check_columns(cls, data: DataFiles, sources: Sequence[Any] = ()) -> None:
        default = DataFiles()
        is_conll = all(isinstance(source, str) and _is_conll(source) for source in sources)
        for name, usual in _COLUMNS.items():
            refuse(
                sources and is_conll and getattr(data, name) not in (usual, getattr(default, name)),
                f"data.{name} names a column, and those of a CoNLL file have no names: the first "
                "is the word, and the last its tag",
                fix="leave it out",
            )

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        return readers.conll(source) if _is_conll(source) else super().read_records(source, data)

    def select_fields(self, record: Record, data: DataFiles) -> Mapping[str, Any]:
        words = record.field(data.text, "data.text")
        id, tags = map(record.fields.get, ("id", data.label))
        return {"id": id, "tokens": words, "tags": tags, "row": record}

    def plain_fields(self, value: Any) -> Mapping[str, Any] | None:
        return {"tokens": value, "tags": None} if _is_list(value) else None

    def line_value(self, line: str, where: str, data: DataFiles) -> Any:
        return line.split()

    def value_of_texts(self, texts: Sequence[str], data: DataFiles) -> Any:
        return " ".join(texts).split()

    def example_code(self, data: DataFiles) -> tuple[str, str]:
        return '["A", "text"]', '"A text."'

    def make_example(self, record: Record) -> Example | None:
        words, tags, where = record.fields["tokens"], record.fields["tags"], record.where
        if not _is_list(words) or not words or not all(map(_is_text, words)):
            raise UserError(f"{where}: a list of words is expected, none of them empty or NaN")
        if tags is not None:
            if not _is_list(tags) or len(tags) != len(words):
                raise UserError(f"{where}: {len(words)} words have the tags {tags!r}; give each")
            unknown = sum(tag is None or tag != tag for tag in tags)  # NaN, as pandas has for none
            if 0 < unknown < len(tags):
                raise UserError(f"{where}: some words have a tag and others none")
            if not unknown and not all(map(_is_text, tags)):
                raise UserError(f"{where}: the tags are {tags!r}; give each as a text")
            tags = None if unknown else tuple(map(str, tags))
        return Example(record.fields.get("id"), where, tuple(map(str, words)), tags)

    def label_place(self, example: Example, index: int) -> str:
        return f"{example.where}, word {index + 1} of the sentence ({example.texts[index]!r})"

    def label_names(self, examples: Iterable[Example]) -> tuple[str, ...]:
        examples = list(examples)
        self._refuse_column_names(examples)
        return tuple(sorted(super().label_names(examples), key=lambda tag: (tag != _OUTSIDE, tag)))

    def _refuse_column_names(self, examples: Sequence[Example]) -> None:
        """Refuse a first line whose tag alone is none of entities: F1 would not be scored."""
        counts = Counter(tag for example in examples for tag in self.example_labels(example))
        others = [tag for tag in counts if not _is_of_entities(tag)]
        is_first_alone = others == [*counts][:1] and [counts[tag] for tag in others] == [1]
        if is_first_alone and any(tag.startswith(_PREFIXES) for tag in counts):
            raise UserError(
                f"{self.label_place(examples[0], 0)}: its tag {others[0]!r} is the only one that "
                f"is neither {_OUTSIDE!r} nor begins with {' or '.join(_PREFIXES)}; remove the "
                "line if it names the columns, or correct the tag"
            )

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        # A word within a text has a space before it, which is a part of a byte-level token.
        space = " " if tokenizer.kind == "byte_bpe" else ""
        encoded = iter(tokenizer.encode([space + word for e in examples for word in e.texts]))
        features = Features(per_token=True)
        room = max_text_tokens(1, model, longest_sequence(model, max_length))
        stride = self.config.stride or max(1, room // 2)
        for index, example in enumerate(examples):
            words = [list(next(encoded)) for _ in example.texts]
            if tokenizer.has_letters_alone:
                words = _joined_letters(words, example.texts)
            features.truncated += sum(len(ids) > room for ids in words)
            words = [ids[:room] for ids in words]
            windows = _windows(list(map(len, words)), room, stride)
            features.windowed += len(windows) > 1
            if example.label and not any(words):
                features.skipped.append(f"{example.where}: none of its words has a token")
            for first, end in windows:
                ids = [token for word in words[first:end] for token in word]
                sequence, second_start = build_sequence([ids], tokenizer, model)
                labels = np.full(len(sequence), NO_LABEL, np.int32)
                spans, position = [], 1
                for word in range(first, end):
                    if words[word]:
                        context = min(position - 1, 1 + len(ids) - position)
                        has_space = tokenizer.has_letters_alone and len(words[word]) > 1
                        spans.append((word, position + has_space, context))
                        position += len(words[word])
                for word, position, _ in spans if example.label else ():
                    labels[position] = self.labels.index(example.label[word])
                features.add(index, labels, [(sequence, second_start)], spans)
        return features

    def truncation(self, count: int, data: DataFiles) -> str:
        return f"{counted(count, 'word')} to the tokens of a window"

    def collect(self, before: Any, features: Features, index: int, logits: np.ndarray) -> Any:
        # Of each word, the number and the probability of its tag in the window where the least
        # of its context is missing, and how many tokens it has there on its shorter side.
        prediction = dict(before or {})
        for word, position, context in features.notes[index]:
            if word not in prediction or context > prediction[word][2]:
                best = int(logits[position].argmax())
                prediction[word] = best, float(softmax(logits[position])[best]), context
        return prediction

    def _tags(self, example: Example, prediction: Mapping[int, Sequence[float]]) -> list[str]:
        """Return the tag of each word; of a word without tokens, no entity."""
        other = self.labels.index(_OUTSIDE) if _OUTSIDE in self.labels else 0
        numbers = [int(prediction.get(word, (other,))[0]) for word in range(len(example.texts))]
        return [self.labels[number] for number in numbers]

    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """Return precision, recall and F1 of whole entities, and the accuracy of tags."""
        from seqeval import metrics

        actual = [list(example.label) for example in examples]
        predicted = list(map(self._tags, examples, predictions))
        scores = {"accuracy": float(metrics.accuracy_score(actual, predicted))}
        if "f1" in self.known_metrics:
            for name in ("precision", "recall", "f1"):
                scorer: Any = getattr(metrics, f"{name}_score")
                scores[name] = float(scorer(actual, predicted, zero_division=0))
        return scores

    def constant_score(self, examples: Sequence[Example]) -> float:
        constants = (
            [dict.fromkeys(range(len(example.texts)), (number, 1.0)) for example in examples]
            for number in range(len(self.labels))
        )
        return max(self.mean_score(self.score(examples, each)) for each in constants)

    def to_json(self, example: Example, prediction: Any) -> dict[str, Any]:
        words = range(len(example.texts))
        return {
            "tokens": list(example.texts),
            "labels": self._tags(example, prediction),
            "probabilities": [prediction[w][1] if w in prediction else None for w in words],
        }

    def as_line(self, example: Example, result: Mapping[str, Any]) -> str:
        return " ".join(map("/".join, zip(result["tokens"], result["labels"], strict=True)))

    def files(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, str]:
        """Return a line for each word: the word, its tag if known, and the predicted tag.

        Tabs, line breaks and outer spaces of a word, which end a column or a line, become "_".
        """
        lines = []
        for example, prediction in zip(examples, predictions, strict=True):
            words = [re.sub(r"[\t\r\n]|^ +| +$", "_", word) for word in example.texts]
            columns = [words, self._tags(example, prediction)]
            columns[1:1] = [] if example.label is None else [example.label]
            lines += ["\t".join(line) for line in zip(*columns, strict=True)] + [""]
        return {".conll": "".join(line + "\n" for line in lines)}


def _joined_letters(words: Sequence[list[int]], texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of words without the space before each, if the words are single letters.

    So the residues of a protein stand together, as in pretraining.
    """
    if any(len(text) > 1 for text in texts):
        return [*words]
    return [words[0], *(ids[-1:] for ids in words[1:])]


def _windows(sizes: Sequence[int], room: int, stride: int) -> list[tuple[int, int]]:
    """Return the first word of each window and the one after its last; every word is in one.

    Args:
      sizes: tokens of each word, at most `room`.
      room: tokens of a window.
      stride: tokens from the start of a window to that of the next, or as near as words allow.
    """
    ends = np.cumsum([0, *sizes])
    windows, first = [], 0
    while True:
        end = int(np.searchsorted(ends, ends[first] + room, side="right")) - 1
        windows.append((first, end))
        if end == len(sizes):
            return windows
        following = int(np.searchsorted(ends, ends[first] + stride))
        first = min(max(following, first + 1), end)


def _is_conll(source: str) -> bool:
    """Return whether a source is a file of words in columns, which have no names."""
    return not is_dataset(source) and file_type(source) not in (*JSON_LINES, ".parquet")


def _is_of_entities(tag: str) -> bool:
    return tag == _OUTSIDE or tag.startswith(_PREFIXES)


def _is_text(value: Any) -> bool:
    """Return whether a value of a file is a text, or a number, and not empty."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return math.isfinite(value) if is_number else isinstance(value, str) and bool(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
