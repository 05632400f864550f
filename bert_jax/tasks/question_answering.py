"""Questions whose answer is a part of a text, as in SQuAD: windows of pieces, and the best spans.

Source: google-research/bert `run_squad.py` and Devlin et al. 2019, sections 4.2 and 4.3. A long
text, the context, is seen through windows that overlap, each a row with the question. An answer is
a start and an end in a window; "no answer" is both at [CLS].
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TextIO

import numpy as np
from flax import linen as nn

from bert_jax.batches.features import NO_LABEL, Features
from bert_jax.config import DataFiles, ModelConfig
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForQuestionAnswering
from bert_jax.tasks import readers as records
from bert_jax.tasks import squad_metrics
from bert_jax.tasks.base import Example, Task, choose_metrics, join, room_for
from bert_jax.tasks.readers import Record
from bert_jax.text.tokenizer import Tokenizer

_LIMIT = 1e9  # of logits, so that sums and differences are numbers


@dataclasses.dataclass(frozen=True)
class Window:
    """What a row has of a context.

    Attributes:
      context: the whole of it.
      offsets: [n, 2] int32, where each piece of the window begins and ends in it, in characters.
      is_central: [n] bool, whether the piece has more around it here than in any other window.
    """

    context: str
    offsets: np.ndarray
    is_central: np.ndarray


class Candidate(NamedTuple):
    """An answer that may be given: its score, a sum of two logits, and its place in characters."""

    score: float
    begin: int
    end: int

    def text(self, context: str) -> str:
        """Returns the answer; some tokenizers count the space before a piece with it."""
        return context[self.begin : self.end].strip()


@dataclasses.dataclass(frozen=True)
class Answers:
    """What the windows of an example that have been seen say.

    Attributes:
      best: the best answers of different text, the highest score first.
      null: the score of "no answer", the least of all windows.
    """

    best: tuple[Candidate, ...] = ()
    null: float = math.inf


class QuestionAnswering(Task):
    """Answers to questions, as parts of a text; or none, with `config.with_unanswerable`.

    The label of an example is a tuple of true answers, each a text and where it begins in the
    context, in characters; empty for a question without an answer, None where they are not known.
    """

    suffix: ClassVar[str] = ".json"

    @property
    def metrics(self) -> Sequence[str]:
        known = ["exact_match", "f1", *["best_exact", "best_f1"] * self.config.with_unanswerable]
        usual = ("best_f1",) if self.config.with_unanswerable else ("f1",)
        return choose_metrics(self.config.metrics, usual, known)

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        return records.squad(source)

    def make_example(self, record: Record, data: DataFiles) -> Example:
        fields, where = record.fields, record.where
        texts = (fields["question"].strip(), fields["context"])
        for name, text in zip(("question", "context"), texts, strict=True):
            if not text.strip():
                raise UserError(f"{where}: the {name} is empty; fill it in or remove the question")
        label = fields["answers"]
        if fields["is_impossible"] or (label is not None and not label):
            if not self.config.with_unanswerable:
                raise UserError(
                    f"{where}: the question has no answer; set task.with_unanswerable=True"
                )
            label = []
        for text, _ in label or ():
            if not text.strip():
                raise UserError(
                    f"{where}: an answer is empty; a question without one has an empty list"
                )
        label = None if label is None else tuple(tuple(answer) for answer in label)
        return Example(fields["id"], where, texts, label)

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        """Returns a row for each window, in the order of the examples.

        The label of a row is [2] int32, the positions in the sequence where the first of the true
        answers begins and where its last piece is; both are 0, of [CLS], where the window does not
        have the whole of it, or there is none. They are NO_LABEL where answers are not known, and
        in all rows of an example that `skipped` lists: where the answer does not stand at its
        place in the context, as some of SQuAD's do not.

        Raises:
          UserError: `max_length` has no room for a context.
        """
        config, longest = self.config, room_for(2, model, max_length)
        if longest <= config.max_question:
            raise UserError(
                f"data.max_length {max_length} has no room for a context after a question of "
                f"task.max_question {config.max_question} pieces; raise the one or lower the other"
            )
        rows, numbers = Features([], [], np.empty(0, np.int64), []), []
        questions = tokenizer.encode([example.texts[0] for example in examples])
        contexts: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # several questions share one
        for number, (example, whole) in enumerate(zip(examples, questions, strict=True)):
            question, context = whole[: config.max_question], example.texts[1]
            if context not in contexts:
                ids, places = tokenizer.encode_with_offsets(context)
                contexts[context] = (
                    np.array(ids, np.int32),
                    np.array(places, np.int32).reshape(-1, 2),
                )
            pieces, offsets = contexts[context]
            target = None
            if example.label:
                answer, start = example.label[0]
                target = _target(answer, start, context, offsets)
                if isinstance(target, str):
                    rows.skipped.append(f"{example.where}: {target}")
            windows = _windows(len(pieces), longest - len(question), config.doc_stride)
            for (begin, end), central in zip(windows, _central(windows), strict=True):
                sequence, second = join([question, pieces[begin:end].tolist()], tokenizer, model)
                label = [NO_LABEL] * 2
                if isinstance(target, tuple) or example.label == ():
                    label = [0, 0]
                if isinstance(target, tuple) and begin <= target[0] and target[1] < end:
                    label = [second - begin + piece for piece in target]
                rows.sequences.append(sequence)
                rows.second_starts.append(second)
                rows.labels.append(np.array(label, np.int32))
                rows.spans.append(Window(context, offsets[begin:end], central))
            rows.truncated += len(windows) * (len(whole) > len(question))
            numbers += [number] * len(windows)
        rows.example_indices = np.array(numbers, np.int64)
        return rows

    def model(self, config: ModelConfig, probe: str) -> nn.Module:
        return BertForQuestionAnswering(config, 2, probe)

    def collect(self, found: list[Any], rows: Features, index: int, logits: np.ndarray) -> None:
        """Takes a window's logits, [2, L], into the `Answers` of its example.

        What counts is the sum of the logits of start and end. Only the `n_best` best ends and,
        among the pieces that are central, starts are tried. Of two answers with one score the
        first in the context, then the shorter, goes first. A logit that is not a number is taken
        for the lowest one.
        """
        config, window, second = self.config, rows.spans[index], rows.second_starts[index]
        logits = np.nan_to_num(logits.astype(float), nan=-_LIMIT, posinf=_LIMIT, neginf=-_LIMIT)
        before = found[rows.example_indices[index]] or Answers()
        null = min(before.null, float(logits[0, 0] + logits[1, 0]))
        starts, ends = logits[:, second : second + len(window.offsets)]
        first = np.flatnonzero(window.is_central)
        first = first[np.argsort(-starts[first], kind="stable")[: config.n_best], None]
        last = np.argsort(-ends, kind="stable")[None, : config.n_best]
        fits = (first <= last) & (last < first + config.max_answer)
        score = (starts[first] + ends[last])[fits]
        first, last = (np.broadcast_to(place, fits.shape)[fits] for place in (first, last))
        order = np.lexsort((last, first, -score))
        begins, stops = window.offsets[first[order], 0], window.offsets[last[order], 1]
        values = zip(score[order].tolist(), begins.tolist(), stops.tolist(), strict=True)
        new = _distinct(map(Candidate._make, values), window.context, config.n_best)
        if before.best:
            both = sorted([*before.best, *new], key=lambda c: (-c.score, c.begin, c.end))
            new = _distinct(both, window.context, config.n_best)
        found[rows.example_indices[index]] = Answers(new, null)

    def score(self, examples: Sequence[Example], found: Sequence[Any]) -> dict[str, float]:
        """Returns "exact_match" and "f1".

        With `config.with_unanswerable`, also those of questions with and without an answer, by the
        names of `squad_metrics.summary`; "best_exact" and "best_f1", which the best thresholds
        would give; and "best_f1_threshold", the `null_threshold` for the latter.
        """
        true = [[text for text, _ in example.label] for example in examples]
        best = [_best(example, answers) for example, answers in zip(examples, found, strict=True)]
        odds = np.array([lead for _, lead in best])
        answered, null = (
            np.array([squad_metrics.against(*pair) for pair in pairs]).reshape(-1, 2)
            for pairs in (
                [(text, answers) for (text, _), answers in zip(best, true, strict=True)],
                [("", answers) for answers in true],
            )
        )
        scores = np.where(self._withholds(odds)[:, None], null, answered)
        result = squad_metrics.summary(scores, [bool(answers) for answers in true])
        if not self.config.with_unanswerable:
            return {name: result[name] for name in ("exact_match", "f1")}
        exact = squad_metrics.best_threshold(answered[:, 0], null[:, 0], odds)
        f1 = squad_metrics.best_threshold(answered[:, 1], null[:, 1], odds)
        best_scores = {"best_exact": exact.score, "best_f1": f1.score}
        return {**result, **best_scores, "best_f1_threshold": f1.threshold}

    def constant_score(self, examples: Sequence[Example]) -> float:
        """Returns the share of questions without an answer, which "no answer" gets by any metric.

        A text that answers more questions than that by itself is not looked for.
        """
        return sum(not example.label for example in examples) / max(1, len(examples))

    def answer(self, example: Example, answers: Answers | None) -> str:
        """Returns the answer that is given, a part of the context; "" for "no answer"."""
        text, lead = _best(example, answers)
        return "" if self._withholds(np.array(lead)) else text

    def _withholds(self, lead: np.ndarray) -> np.ndarray:
        return (lead > self.config.null_threshold) & self.config.with_unanswerable

    def write(self, file: TextIO, examples: Sequence[Example], found: Sequence[Any]) -> None:
        """Writes SQuAD's JSON of predictions, which its own scripts read: the text for each id."""
        pairs = zip(examples, found, strict=True)
        json.dump({example.id: self.answer(example, given) for example, given in pairs}, file)
        file.write("\n")

    def writers(self) -> dict[str, Callable[[TextIO, Sequence[Example], Sequence[Any]], None]]:
        return {self.suffix: self.write, ".nbest.json": self.write_nbest}

    def tune(self, scores: Mapping[str, float]) -> None:
        """Datasets the threshold for "no answer" to the best one for these scores."""
        if self.config.with_unanswerable:
            threshold = scores["best_f1_threshold"]
            self.config = dataclasses.replace(self.config, null_threshold=threshold)

    def write_nbest(self, file: TextIO, examples: Sequence[Example], found: Sequence[Any]) -> None:
        """Writes a JSON object with a list of the best answers for each id, best first.

        Each has "text", "score" (the sum of two logits) and "probability" (the softmax of the
        scores in the list). With `config.with_unanswerable` "no answer" is among them, as "".
        """
        result = {}
        for example, given in zip(examples, found, strict=True):
            answers = given or Answers()
            listed = [(c.text(example.texts[1]), c.score) for c in answers.best]
            if self.config.with_unanswerable and given:
                listed.append(("", answers.null))
            listed.sort(key=lambda item: -item[1])
            weights = [math.exp(score - listed[0][1]) for _, score in listed]
            total = sum(weights)
            result[example.id] = [
                {"text": text, "probability": weight / total, "score": score}
                for (text, score), weight in zip(listed, weights, strict=True)
            ]
        json.dump(result, file, indent=1)
        file.write("\n")


def _best(example: Example, answers: Answers | None) -> tuple[str, float]:
    """Returns the best answer, "" if none could be, and by how much "no answer" leads it."""
    if not answers or not answers.best:
        return "", 0.0
    best = answers.best[0]
    return best.text(example.texts[1]), answers.null - best.score


def _distinct(candidates: Iterable[Candidate], context: str, count: int) -> tuple[Candidate, ...]:
    """Returns the first `count` candidates whose text is not empty nor that of one before."""
    kept: dict[str, Candidate] = {}
    for candidate in candidates:
        text = candidate.text(context)
        if text and text not in kept:
            kept[text] = candidate
            if len(kept) == count:
                break
    return tuple(kept.values())


def _target(text: str, start: int, context: str, offsets: np.ndarray) -> tuple[int, int] | str:
    """Returns the first and the last piece of an answer, or why it cannot be learned."""
    stop = start + len(text)
    if start < 0 or context[start:stop].split() != text.split():  # spaces may be of other kinds
        return f"the answer {text!r} is not at character {start} of the context"
    inside = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > start))
    if not len(inside):
        return f"the answer {text!r} has no pieces"
    return int(inside[0]), int(inside[-1])


def _windows(size: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Returns where each window over `size` pieces begins and ends; no piece is left out."""
    last = max(0, size - room)  # the first begin whose window has all that is left
    step = min(stride, room)
    return [(i, min(i + room, size)) for i in range(0, last + step, step)]


def _central(windows: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Returns for each piece of each window whether it has more around it than in the others.

    That is the lesser of the pieces before and after it, and a hundredth of the window's length;
    of equal windows it is the first. Source: `_check_is_max_context` in `run_squad.py`.
    """
    size = windows[-1][1]
    most, owner = np.full(size, -1.0), np.zeros(size, np.int64)
    for number, (begin, end) in enumerate(windows):
        place = np.arange(end - begin)
        around = np.minimum(place, place[::-1]) + 0.01 * (end - begin)
        is_more = around > most[begin:end]
        most[begin:end][is_more] = around[is_more]
        owner[begin:end][is_more] = number
    return [owner[begin:end] == number for number, (begin, end) in enumerate(windows)]
