"""Question answering as in SQuAD: windows over a context, and the best spans in them.

Source: google-research/bert `run_squad.py` and Devlin et al. 2019, sections 4.2 and 4.3. A window
over a long context and the question are a feature. "No answer" starts and ends at [CLS].
"""

import collections
import dataclasses
import heapq
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.special import softmax

from bert_jax.batches.buckets import NO_LABEL, Features
from bert_jax.config import DataFiles, FinetuneConfig, ModelConfig, TaskConfig
from bert_jax.config.ranges import FINITE
from bert_jax.config.settings import setting
from bert_jax.console import counted
from bert_jax.errors import UserError, refuse
from bert_jax.models.heads import TaskModel
from bert_jax.tasks import readers, squad_metrics
from bert_jax.tasks.base import Task
from bert_jax.tasks.examples import Example
from bert_jax.tasks.readers import Record
from bert_jax.tasks.sequences import (
    build_sequence,
    central_tokens,
    max_text_tokens,
    token_windows,
)
from bert_jax.text.tokenizer import Tokenizer

_LIMIT = 1e9  # of logits, so that sums and differences are finite


class Window(NamedTuple):
    """What a feature has of a context."""

    context: str  # all of it
    offsets: np.ndarray  # [n, 2] int32, the start and end of each token, in characters
    is_central: np.ndarray  # [n] bool, whether a token has more context here than in any other


class Candidate(NamedTuple):
    """A possible answer: its score, a sum of two logits, and its span in characters."""

    score: float
    start: int
    end: int

    def text(self, context: str) -> str:
        """Return the answer, without the space that some tokenizers count with a token."""
        return context[self.start : self.end].strip()


class Answers(NamedTuple):
    """The prediction of an example."""

    best: tuple[Candidate, ...] = ()  # of different text, the highest score first
    null: float = math.inf  # the score of "no answer", the minimum over the windows


@dataclasses.dataclass(slots=True)
class QuestionAnsweringConfig(TaskConfig):
    """Settings of question answering.

    Source of the defaults: Devlin et al. 2019 and google-research/bert `run_squad.py`.

    >>> QuestionAnsweringConfig(with_unanswerable=True).max_answer
    30
    """

    kind: str = setting("question_answering", "kind of task")
    doc_stride: int = setting(128, "tokens from a window of a long context to the next")
    max_question: int = setting(64, "longest question, in tokens")
    max_answer: int = setting(30, "longest answer, in tokens")
    n_best: int = setting(20, "candidates of a window, and answers kept")
    with_unanswerable: bool = setting(False, "questions may have no answer, as in SQuAD 2.0")
    null_threshold: float = setting(
        0.0, "lead of no answer that withholds one; 0: tuned on held-out examples", FINITE
    )


class BertForQuestionAnswering(TaskModel):
    """Scores of every token as the first and as the last token of the answer."""

    has_dropout = False  # as in google-research/bert `run_squad.py`

    def __call__(self, input_ids, token_type_ids, attention_mask, dropout_key=None) -> Array:
        """Return float32 logits [B, 2, L], very low for padding, so that it has no effect."""
        logits = super().__call__(input_ids, token_type_ids, attention_mask, dropout_key)
        return jnp.where(attention_mask[:, None, :] > 0, logits.swapaxes(1, 2), -1e9)


class QuestionAnswering(Task):
    """Answers as spans of a text, or none; a label is true answers, each a text and its start."""

    settings = QuestionAnsweringConfig
    config: QuestionAnsweringConfig
    model_class = BertForQuestionAnswering
    transformers_class = "ForQuestionAnswering"
    file_suffixes = (".json", ".nbest.json")
    pipeline_tag = "question-answering"
    num_outputs = 2
    missing_label = "no answers; give them, or [] where there are none"
    foreign_max_length = 384  # of google-research/bert `run_squad.py`
    value_form = "a question and a context, or a dict of them"
    default_metrics, known_metrics = ("f1",), ("exact_match", "f1")

    def __init__(self, config: QuestionAnsweringConfig, labels: Sequence[str] = ()):
        if config.with_unanswerable:
            self.default_metrics = ("best_f1",)
            self.known_metrics = ("exact_match", "f1", "best_exact", "best_f1")
        super().__init__(config, labels)

    @classmethod
    def check_columns(cls, data: DataFiles, sources: Sequence[Any] = ()) -> None:
        default = DataFiles()
        for name in ("text", "label"):
            refuse(
                getattr(data, name) != getattr(default, name),
                f"data.{name} names a column, and {cls.settings().kind} reads those of SQuAD",
                fix="leave it out",
            )

    @classmethod
    def check(cls, config: FinetuneConfig) -> None:
        super().check(config)
        task: Any = config.task
        length = config.data.max_length
        size = max_text_tokens(2, config.model, length)
        is_long = task.max_question > min(length // 2, size - 2)
        question = size // 2 if is_long else task.max_question
        room = size - question
        is_overlapping = task.doc_stride < room
        stride = f"task.doc_stride to {room // 2}"
        refuse(
            task.null_threshold and not task.with_unanswerable,
            f"task.null_threshold {task.null_threshold} is for questions that may have no answer",
            fix="leave it out, or set task.with_unanswerable=True",
        )
        refuse(
            is_long,
            f"task.max_question {task.max_question} leaves too little for the context of "
            f"data.max_length {length}",
            fix=f"set task.max_question to {question}{'' if is_overlapping else f' and {stride}'}, "
            "or raise data.max_length",
        )
        refuse(
            not is_overlapping,
            f"task.doc_stride {task.doc_stride} leaves no overlap between windows: data.max_length "
            f"{length} has room for {room} tokens of a context beside the longest question "
            f"(task.max_question {task.max_question})",
            fix=f"set {stride}",
        )

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        return readers.squad(source)

    def task_records(self, records: Iterable[Record], data: DataFiles) -> Iterator[Record]:
        return readers.questions(records, need_ids=False)

    def select_fields(self, record: Record, data: DataFiles) -> Mapping[str, Any]:
        return record.fields

    def plain_fields(self, value: Any) -> Mapping[str, Any] | None:
        is_pair = isinstance(value, tuple | list) and len(value) == 2
        return dict(zip(("question", "context"), value, strict=True)) if is_pair else None

    def value_of_texts(self, texts: Sequence[str], data: DataFiles) -> Any:
        return self.plain_fields(texts)

    def example_code(self, data: DataFiles) -> tuple[str, str]:
        example = {"question": "Which text?", "context": "A text."}
        return json.dumps(example), '"Which text?", "A text."'

    def make_example(self, record: Record) -> Example:
        fields, where = record.fields, record.where
        question = readers.text_field(fields, "question", where)
        context = readers.text_field(fields, "context", where)
        answers = readers.answers(fields.get("answers"), where)
        impossible = fields.get("is_impossible") or False
        if not isinstance(impossible, bool):
            raise UserError(f"{where}: is_impossible is {impossible!r}; it must be true or false")
        answers = () if impossible else answers
        name = readers.whole(fields.get("id"))
        name = None if name is None else str(name)
        return Example(name, where, (question.strip(), context), answers)

    def complete(self, example: Example, data: DataFiles, *, labelled: bool) -> Example:
        if example.label != () or self.config.with_unanswerable:
            return example
        refuse(
            labelled,
            f"{example.where}: the question has no answer",
            fix="set task.with_unanswerable=True",
        )
        return dataclasses.replace(example, label=None)  # as in a file of questions to answer

    def held_out_examples(self, examples: Sequence[Example]) -> Sequence[Example]:
        _names(examples)  # refused before the training if two are the same
        return examples

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        """Return a feature for each window; its label is the first and last token of an answer."""
        config, size = self.config, max_text_tokens(2, model, max_length)
        features = Features()
        questions = tokenizer.encode([example.texts[0] for example in examples])
        contexts: dict[str, tuple[list[int], np.ndarray]] = {}  # several questions share one
        for index, (example, question_ids) in enumerate(zip(examples, questions, strict=True)):
            question, context = question_ids[: config.max_question], example.texts[1]
            refuse(
                len(question) >= size,
                f"{example.where} has a question of {len(question)} tokens, after which "
                f"{max_length} tokens, the data.max_length, have no room for a context",
                fix="shorten it, or lower task.max_question",
            )
            if context not in contexts:
                ids, offsets = tokenizer.encode_with_offsets(context)
                contexts[context] = list(ids), np.array(offsets, np.int32).reshape(-1, 2)
            ids, offsets = contexts[context]
            room = size - len(question)
            # A model from elsewhere may have fewer tokens than the stride.
            stride = config.doc_stride if config.doc_stride < room else max(1, room // 2)
            windows = token_windows(len(ids), room, stride)
            target = _target(example.label[0], context, offsets, windows) if example.label else None
            if isinstance(target, str):
                features.skipped.append(f"{example.where}: {target}")
            for (start, end), is_central in zip(windows, central_tokens(windows), strict=True):
                sequence, second = build_sequence([question, ids[start:end]], tokenizer, model)
                label = [NO_LABEL] * 2
                if isinstance(target, tuple) or example.label == ():
                    label = [0, 0]
                if isinstance(target, tuple) and start <= target[0] and target[1] < end:
                    label = [second - start + position for position in target]
                window = Window(context, offsets[start:end], is_central)
                label = np.array(label, np.int32)
                features.add(index, label, [(sequence, second)], window)
            features.truncated += len(question_ids) > len(question)
        return features

    def truncation(self, count: int, data: DataFiles) -> str:
        questions = counted(count, "question")
        return f"{questions} to {self.config.max_question} tokens, which is task.max_question"

    def collect(self, before: Any, features: Features, index: int, logits: np.ndarray) -> Any:
        """Return the best `Answers` of the `n_best` best starts, of central tokens, and ends."""
        config, window = self.config, features.notes[index]
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
        candidates = map(Candidate._make, zip(score[order].tolist(), *spans, strict=True))
        merged = heapq.merge(before.best, candidates, key=lambda c: (-c.score, c.start, c.end))
        return Answers(_distinct(merged, window.context, config.n_best), null)

    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """Return exact match and F1; with unanswerable questions, of the best thresholds too."""
        true = [[text for text, _ in example.label] for example in examples]
        answers = map(self.answer, examples, predictions)
        scores = list(map(squad_metrics.against, answers, true))
        result = squad_metrics.summary(scores, [bool(answers) for answers in true])
        if not self.config.with_unanswerable:
            return {name: result[name] for name in ("exact_match", "f1")}
        texts, odds = zip(*map(_best, examples, predictions), strict=True)
        answered = np.array(list(map(squad_metrics.against, texts, true)))
        null = np.array([squad_metrics.against("", answers) for answers in true])
        (exact, _), (f1, threshold) = (
            squad_metrics.best_threshold(answered[:, i], null[:, i], np.array(odds)) for i in (0, 1)
        )
        return {**result, "best_exact": exact, "best_f1": f1, "best_f1_threshold": threshold}

    def constant_score(self, examples: Sequence[Example]) -> float:
        """Return the share of questions without an answer: the score of "no answer"."""
        return sum(not example.label for example in examples) / max(1, len(examples))

    def answer(self, example: Example, answers: Answers) -> str:
        """Return the answer, a span of the context; "" for "no answer"."""
        text, lead = _best(example, answers)
        withheld = self.config.with_unanswerable and lead > self.config.null_threshold
        return "" if withheld else text

    def tune(
        self, examples: Sequence[Example], predictions: Sequence[Any], scores: Mapping[str, float]
    ) -> None:
        if self.config.with_unanswerable and not self.config.null_threshold:
            threshold = scores["best_f1_threshold"]
            self.config = dataclasses.replace(self.config, null_threshold=threshold)

    def to_json(self, example: Example, prediction: Any) -> dict[str, Any]:
        """Return the answer, its probability among the best, and its span in characters."""
        answer, context = self.answer(example, prediction), example.texts[1]
        ranked = {each["text"]: each["probability"] for each in self._ranked(example, prediction)}
        start = context.index(answer, prediction.best[0].start) if answer else None
        end = None if start is None else start + len(answer)
        return {"answer": answer, "probability": ranked.get(answer), "start": start, "end": end}

    def as_line(self, example: Example, result: Mapping[str, Any]) -> str:
        answer = result["answer"] or "no answer"
        return super().as_line(example, {**result, "answer": answer})

    def shown_text(self, example: Example) -> str:
        return example.texts[0]

    def files(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, str]:
        """Return SQuAD's own file, the text for each id, and one of the best answers for each."""
        names = _names(examples)
        answers = map(self.answer, examples, predictions)
        ranked = map(self._ranked, examples, predictions)
        return {
            ".json": json.dumps(dict(zip(names, answers, strict=True))) + "\n",
            ".nbest.json": json.dumps(dict(zip(names, ranked, strict=True)), indent=1) + "\n",
        }

    def _ranked(self, example: Example, answers: Answers) -> list[dict[str, Any]]:
        """Return the answers, "" for none, with the softmax of their sums of two logits."""
        ranked = [(c.text(example.texts[1]), c.score) for c in answers.best]
        if self.config.with_unanswerable:
            ranked.append(("", answers.null))
        ranked.sort(key=lambda item: -item[1])
        probabilities = softmax(np.array([score for _, score in ranked])) if ranked else []
        return [
            {"text": text, "probability": float(probability), "score": score}
            for (text, score), probability in zip(ranked, probabilities, strict=True)
        ]


def _names(examples: Sequence[Example]) -> list[str]:
    """Return what each answer is written under: the id of its question, or else its number."""
    ids = (example.id for example in examples)
    names = [str(number if name is None else name) for number, name in enumerate(ids)]
    twice = next((name for name, count in collections.Counter(names).items() if count > 1), "")
    refuse(
        twice,
        f"two questions have the id {twice!r}, under which one answer alone can be written (a "
        "question without an id has its number)",
        fix="give each an id of its own",
    )
    return names


def _best(example: Example, answers: Answers) -> tuple[str, float]:
    """Return the best answer, "" if there is none, and the lead of "no answer" over it."""
    if not answers.best:
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


def _target(
    answer: tuple[str, int], context: str, offsets: np.ndarray, windows: Sequence[tuple[int, int]]
) -> tuple[int, int] | str:
    """Return the first and last token of an answer, or why it cannot be learned."""
    text, start = answer
    stop = start + len(text)
    if context[start:stop].split() != text.split():  # spaces may be of other kinds
        return f"the answer {text!r} is not at character {start} of the context"
    inside = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > start))
    if not len(inside):
        return f"the answer {text!r} has no tokens"
    first, last = int(inside[0]), int(inside[-1])
    if not any(begin <= first and last < end for begin, end in windows):
        return (
            f"the answer at character {start} of the context has {last - first + 1} tokens, and no "
            "window has them all; lower task.doc_stride, or raise data.max_length"
        )
    return first, last
