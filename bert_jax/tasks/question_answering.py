"""Question answering as in SQuAD: windows over a context, and the best spans in them.

Source: google-research/bert `run_squad.py` and Devlin et al. 2019, sections 4.2 and 4.3. Each
window over a long context is a feature, together with the question. An answer is a start and an end
in a window; "no answer" is both at [CLS].
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np

from bert_jax.batches.features import NO_LABEL, Features
from bert_jax.config import DataFiles, ModelConfig, TaskConfig
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForQuestionAnswering
from bert_jax.tasks import readers, squad_metrics
from bert_jax.tasks.base import Example, Task, build_sequence, max_text_tokens, softmax
from bert_jax.tasks.readers import Record
from bert_jax.text.tokenizer import Tokenizer

_LIMIT = 1e9  # of logits, so that sums and differences are finite


class Window(NamedTuple):
    """What a feature has of a context.

    Attributes:
      context: all of it.
      offsets: [n, 2] int32, the start and end of each token of the window, in characters.
      is_central: [n] bool, whether the token has more context in this window than in any other.
    """

    context: str
    offsets: np.ndarray
    is_central: np.ndarray


class Candidate(NamedTuple):
    """A possible answer: its score, a sum of two logits, and its span in characters."""

    score: float
    start: int
    end: int

    def text(self, context: str) -> str:
        """Return the answer, without the space that some tokenizers count with a token."""
        return context[self.start : self.end].strip()


class Answers(NamedTuple):
    """The prediction of an example.

    Attributes:
      best: the best answers of different text, the highest score first.
      null: the score of "no answer", the minimum over the windows.
    """

    best: tuple[Candidate, ...] = ()
    null: float = math.inf


class QuestionAnswering(Task):
    """Answers to questions, as spans of a text; or none, with `config.with_unanswerable`.

    The label of an example is a tuple of true answers, each a text and where it starts in the
    context, in characters; empty for a question without an answer, None if unknown.
    """

    model_class = BertForQuestionAnswering
    num_outputs = 2
    suffix = ".json"
    value_form = "a dict with question and context"
    default_metrics, known_metrics = ("f1",), ("exact_match", "f1")

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()):
        super().__init__(config, labels)
        if config.with_unanswerable:
            self.default_metrics = ("best_f1",)
            self.known_metrics = ("exact_match", "f1", "best_exact", "best_f1")

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        return readers.squad(source)

    def select_fields(self, record: Record, data: DataFiles) -> Mapping[str, Any]:
        return readers.question_fields(record.where, readers.pair_answers(record.fields))

    def make_example(self, record: Record, data: DataFiles) -> Example:
        fields, where = record.fields, record.where
        answers = [] if fields["is_impossible"] else fields["answers"]
        if answers == [] and not self.config.with_unanswerable:
            raise UserError(f"{where}: the question has no answer; set task.with_unanswerable=True")
        if not all(text.strip() for text, _ in answers or ()):
            raise UserError(
                f"{where}: an answer is empty; a question without one has an empty list"
            )
        label = None if answers is None else tuple(map(tuple, answers))
        return Example(fields["id"], where, (fields["question"].strip(), fields["context"]), label)

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        """Return a feature for each window, in the order of the examples.

        A label is [2] int32, the positions of the first and last token of the first true answer.
        Both are 0, of [CLS], if the window does not have all of it, or there is none. They are
        NO_LABEL if answers are unknown, and in all features of an example that `skipped` lists:
        where the answer is not at its position in the context, as in some of SQuAD.

        Raises:
          UserError: a context does not fit `max_length`.
        """
        config, size = self.config, max_text_tokens(2, model, max_length)
        if size <= config.max_question:
            raise UserError(
                f"data.max_length {max_length} has no room for a context after a question of "
                f"task.max_question {config.max_question} tokens; raise the one or lower the other"
            )
        features = Features()
        questions = tokenizer.encode([example.texts[0] for example in examples])
        contexts: dict[str, tuple[list[int], np.ndarray]] = {}  # several questions share one
        for index, (example, question_ids) in enumerate(zip(examples, questions, strict=True)):
            question, context = question_ids[: config.max_question], example.texts[1]
            if context not in contexts:
                ids, offsets = tokenizer.encode_with_offsets(context)
                contexts[context] = list(ids), np.array(offsets, np.int32).reshape(-1, 2)
            ids, offsets = contexts[context]
            target = None
            if example.label:
                text, first_character = example.label[0]
                target = _target(text, first_character, context, offsets)
                if isinstance(target, str):
                    features.skipped.append(f"{example.where}: {target}")
            windows = _windows(len(ids), size - len(question), config.doc_stride)
            for (start, end), is_central in zip(windows, _central(windows), strict=True):
                sequence, second_start = build_sequence(
                    [question, ids[start:end]], tokenizer, model
                )
                label = [NO_LABEL] * 2
                if isinstance(target, tuple) or example.label == ():
                    label = [0, 0]
                if isinstance(target, tuple) and start <= target[0] and target[1] < end:
                    label = [second_start - start + position for position in target]
                window = Window(context, offsets[start:end], is_central)
                label = np.array(label, np.int32)
                features.add(index, label, [(sequence, second_start)], window)
            features.truncated += len(windows) * (len(question_ids) > len(question))
        return features

    def collect(self, before: Any, features: Features, index: int, logits: np.ndarray) -> Any:
        """Return the `Answers` of an example from the logits of a window, [2, L].

        A score is the sum of the logits of start and end. Only the `n_best` best ends and, among
        the central tokens, starts are tried. Of two answers with one score the first in the
        context, then the shorter, ranks higher. A logit that is NaN counts as the lowest.
        """
        config, window = self.config, features.spans[index]
        before, second_start = before or Answers(), features.second_starts[index]
        logits = np.nan_to_num(logits.astype(float), nan=-_LIMIT, posinf=_LIMIT, neginf=-_LIMIT)
        null = min(before.null, float(logits[0, 0] + logits[1, 0]))
        starts, ends = logits[:, second_start : second_start + len(window.offsets)]
        first = np.flatnonzero(window.is_central)
        first = first[np.argsort(-starts[first], kind="stable")[: config.n_best], None]
        last = np.argsort(-ends, kind="stable")[None, : config.n_best]
        fits = (first <= last) & (last < first + config.max_answer)
        score = (starts[first] + ends[last])[fits]
        first, last = (np.broadcast_to(positions, fits.shape)[fits] for positions in (first, last))
        order = np.lexsort((last, first, -score))
        spans = window.offsets[first[order], 0].tolist(), window.offsets[last[order], 1].tolist()
        values = zip(score[order].tolist(), *spans, strict=True)
        best = _distinct(map(Candidate._make, values), window.context, config.n_best)
        if before.best:
            both = sorted([*before.best, *best], key=lambda c: (-c.score, c.start, c.end))
            best = _distinct(both, window.context, config.n_best)
        return Answers(best, null)

    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """Return "exact_match" and "f1".

        With `config.with_unanswerable`, also those of questions with and without an answer, by the
        names of `squad_metrics.summary`; "best_exact" and "best_f1" with the best thresholds; and
        "best_f1_threshold", the `null_threshold` for the latter.
        """
        true = [[text for text, _ in example.label] for example in examples]
        best = [_best(*pair) for pair in zip(examples, predictions, strict=True)]
        odds = np.array([lead for _, lead in best])
        texts = [text for text, _ in best]
        answered = np.array([*map(squad_metrics.against, texts, true)]).reshape(-1, 2)
        null = np.array([squad_metrics.against("", answers) for answers in true]).reshape(-1, 2)
        scores = np.where(self._withholds(odds)[:, None], null, answered)
        result = squad_metrics.summary(scores, [bool(answers) for answers in true])
        if not self.config.with_unanswerable:
            return {name: result[name] for name in ("exact_match", "f1")}
        exact, f1 = (squad_metrics.best_threshold(answered[:, i], null[:, i], odds) for i in (0, 1))
        result |= {"best_exact": exact.score, "best_f1": f1.score}
        return {**result, "best_f1_threshold": f1.threshold}

    def constant_score(self, examples: Sequence[Example]) -> float:
        """Return the share of questions without an answer: the score of "no answer" by any metric.

        A text that answers more questions than that is not looked for.
        """
        return sum(not example.label for example in examples) / max(1, len(examples))

    def answer(self, example: Example, answers: Answers | None) -> str:
        """Return the answer, a span of the context; "" for "no answer"."""
        text, lead = _best(example, answers)
        return "" if self._withholds(np.array(lead)) else text

    def _withholds(self, lead: np.ndarray) -> np.ndarray:
        return (lead > self.config.null_threshold) & self.config.with_unanswerable

    def tune(self, scores: Mapping[str, float]) -> None:
        """Set the threshold of "no answer" to the best one for these scores."""
        if self.config.with_unanswerable:
            threshold = scores["best_f1_threshold"]
            self.config = dataclasses.replace(self.config, null_threshold=threshold)

    def to_json(self, example: Example, prediction: Any) -> dict[str, Any]:
        """Return the answer, its probability among the best, and its span in characters."""
        answer, context = self.answer(example, prediction), example.texts[1]
        ranked = {each["text"]: each["probability"] for each in self._ranked(example, prediction)}
        start = end = None
        if answer:
            start = context.index(answer, prediction.best[0].start)
            end = start + len(answer)
        probability = ranked.get(answer)
        return {"answer": answer, "probability": probability, "start": start, "end": end}

    def write(self, file: TextIO, examples: Sequence[Example], predictions: Sequence[Any]) -> None:
        """Write SQuAD's JSON of predictions, which its own scripts read: the text for each id."""
        pairs = zip(examples, predictions, strict=True)
        answers = {example.id: self.answer(example, answers) for example, answers in pairs}
        file.write(json.dumps(answers) + "\n")

    def write_nbest(
        self, file: TextIO, examples: Sequence[Example], predictions: Sequence[Any]
    ) -> None:
        """Write a JSON object with a list of the best answers for each id."""
        pairs = zip(examples, predictions, strict=True)
        ranked = {example.id: self._ranked(example, answers) for example, answers in pairs}
        file.write(json.dumps(ranked, indent=1) + "\n")

    def writers(self) -> dict[str, Callable[[TextIO, Sequence[Example], Sequence[Any]], None]]:
        return {self.suffix: self.write, ".nbest.json": self.write_nbest}

    def _ranked(self, example: Example, answers: Answers | None) -> list[dict[str, Any]]:
        """Return the best answers, best first, and "" for "no answer" if there may be none.

        Each has "text", "score" (the sum of two logits) and "probability" (the softmax of the
        scores in the list).
        """
        ranked = [(c.text(example.texts[1]), c.score) for c in answers.best] if answers else []
        if self.config.with_unanswerable and answers:
            ranked.append(("", answers.null))
        ranked.sort(key=lambda item: -item[1])
        probabilities = softmax(np.array([score for _, score in ranked])) if ranked else []
        return [
            {"text": text, "probability": float(probability), "score": score}
            for (text, score), probability in zip(ranked, probabilities, strict=True)
        ]


def _best(example: Example, answers: Answers | None) -> tuple[str, float]:
    """Return the best answer, "" if there is none, and the lead of "no answer" over it."""
    if not answers or not answers.best:
        return "", 0.0
    best = answers.best[0]
    return best.text(example.texts[1]), answers.null - best.score


def _distinct(candidates: Iterable[Candidate], context: str, count: int) -> tuple[Candidate, ...]:
    """Return the first `count` candidates of different text that is not empty."""
    kept: dict[str, Candidate] = {}
    for candidate in candidates:
        kept.setdefault(candidate.text(context), candidate)
        if len(kept) - ("" in kept) == count:
            break
    kept.pop("", None)
    return tuple(kept.values())


def _target(text: str, start: int, context: str, offsets: np.ndarray) -> tuple[int, int] | str:
    """Return the first and last token of an answer, or why it cannot be learned."""
    stop = start + len(text)
    if start < 0 or context[start:stop].split() != text.split():  # spaces may be of other kinds
        return f"the answer {text!r} is not at character {start} of the context"
    inside = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > start))
    if not len(inside):
        return f"the answer {text!r} has no tokens"
    return int(inside[0]), int(inside[-1])


def _windows(size: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Return the start and end of each window over `size` tokens; every token is in one."""
    last = max(0, size - room)  # the first start whose window has all the rest
    step = min(stride, room)
    return [(i, min(i + room, size)) for i in range(0, last + step, step)]


def _central(windows: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Return for each token of each window whether it has more context than in the others.

    That is the lesser number of tokens before and after it, and a hundredth of the window's length.
    Of equal windows it is the first. Source: `_check_is_max_context` in `run_squad.py`.
    """
    size = windows[-1][1]
    most, owner = np.full(size, -1.0), np.zeros(size, np.int64)
    for number, (start, end) in enumerate(windows):
        position = np.arange(end - start)
        around = np.minimum(position, position[::-1]) + 0.01 * (end - start)
        is_more = around > most[start:end]
        most[start:end][is_more] = around[is_more]
        owner[start:end][is_more] = number
    return [owner[start:end] == number for number, (start, end) in enumerate(windows)]
