"""The interface of a fine-tuning task: examples, features, predictions and scores."""

import abc
import copy
import dataclasses
import json
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bert_jax.batches.buckets import Features
from bert_jax.config import DataFiles, FinetuneConfig, ModelConfig, TaskConfig, settings
from bert_jax.config.validation import refuse_probe
from bert_jax.console import counted
from bert_jax.errors import UserError, refuse
from bert_jax.models.heads import TaskModel
from bert_jax.objectives.labels import LabelsObjective
from bert_jax.tasks.examples import Example, example_ids
from bert_jax.tasks.foreign import read_labels
from bert_jax.tasks.sequences import longest_sequence
from bert_jax.text.records import Record, read_records
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.objective import PredictionObjective


class Task(abc.ABC):
    """A kind of task; `labels` are the names of the head's outputs, or else those of `config`."""

    settings: ClassVar[type[TaskConfig]] = TaskConfig  # with what this kind alone has
    model_class: ClassVar[type[TaskModel]]
    num_outputs: ClassVar[int | None] = None  # of the head; None: one for each label
    has_choices: ClassVar[bool] = False  # whether its labels are the choices of an example
    min_labels: ClassVar[int] = 0  # fewer of them leave nothing to tell apart
    # Dotted names of settings that vectors depend on, beside the parameters.
    vector_settings: ClassVar[Sequence[str]] = ()
    size_setting: ClassVar[str] = ""  # the dotted name of one that sizes parameters of the head
    # Whether the first text asks for the others. Examples with the same one are held out together:
    # else a query is trained on with one passage, and asks for another.
    has_queries: ClassVar[bool] = False
    # Whether a text of more tokens than the model has positions is read in windows.
    has_windows: ClassVar[bool] = False
    # Whether one of more than `data.max_length` is, and not truncated.
    has_short_windows: ClassVar[bool] = False
    # Whether an example is the words of a text, each read with a space before it.
    reads_words: ClassVar[bool] = False
    # Whether a single window may answer for its text.
    has_deciding_windows: ClassVar[bool] = False
    # Tokens of a sequence, at most, where a model from elsewhere does not say it; None for as many
    # as it has positions.
    foreign_max_length: ClassVar[int | None] = None
    vectors_kind: ClassVar[str] = "dense"  # what a text becomes, of `retrieval.vectors.KINDS`
    is_headless: ClassVar[bool] = False  # whether an encoder has scores before it is trained for it
    is_ranking_passages: ClassVar[bool] = False  # whether a query and a passage have a "score"
    has_quick_baselines: ClassVar[bool] = False  # shown without `compare`
    # What `example_from` takes, for messages.
    value_form: ClassVar[str] = "a dict of the columns of the data"
    has_txt_lines: ClassVar[bool] = True  # whether a .txt to predict has a text on each line
    # The end of the name of the class of `transformers` that the head is exported as, such as
    # "ForTokenClassification". A task without one exports its encoder alone.
    transformers_class: ClassVar[str] = ""
    problem_type: ClassVar[str] = ""  # in `config.json`, where several tasks share a class
    library: ClassVar[str] = "transformers"  # that its exports are for
    file_suffixes: ClassVar[Sequence[str]] = (".jsonl",)  # of what `files` returns
    trains_without_labels: bool = False  # whether only held-out examples need labels
    # What is said of an example without a label, after "has".
    missing_label: ClassVar[str] = "no label; fill it in, or set data.label"
    pipeline_tag: ClassVar[str] = ""  # the hub's name of the kind of task
    known_metrics: Sequence[str]
    default_metrics: Sequence[str]

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()):
        self.labels = tuple(labels or config.labels)  # of the head's outputs, in their order
        self.config = dataclasses.replace(config, labels=self.labels)
        self.metrics = config.metrics or self.default_metrics  # their mean chooses the best model
        unknown = sorted(set(self.metrics) - set(self.known_metrics))
        if unknown:
            known = ", ".join(self.known_metrics)
            raise UserError(f"task.metrics has {unknown[0]!r}; this task has {known}")

    @classmethod
    def check(cls, config: FinetuneConfig) -> None:
        """Refuse settings of a run that this task cannot be trained with."""
        labels, stride = config.task.labels, config.task.stride
        length, positions = config.data.max_length, config.model.max_position_embeddings
        cls.check_columns(config.data)
        refuse(
            stride and not cls.has_windows,
            f"task.stride has no effect on {config.task.kind}",
            fix="set task.doc_stride" if hasattr(config.task, "doc_stride") else "leave it out",
        )
        refuse(
            config.task.window_confidence and not cls.has_deciding_windows,
            "task.window_confidence is for the windows of a text in classification, not "
            f"{config.task.kind}",
            fix="leave it out",
        )
        refuse(
            (stride or config.task.window_confidence)
            and length <= positions
            and not cls.has_short_windows,
            f"task.{'stride' if stride else 'window_confidence'} is of windows, which no text has: "
            f"data.max_length {length} is not above the {positions} positions of the model",
            fix="leave it out, or raise data.max_length",
        )
        room = longest_sequence(config.model, length) - 2
        refuse(
            stride > room,
            f"task.stride {stride} exceeds the {room} tokens of a window, so that no window has "
            "those between",
            fix="lower it",
        )
        refuse(
            labels and cls.num_outputs is not None and not cls.has_choices,
            f"task.labels are {', '.join(labels)}, and {config.task.kind} has no labels",
            fix="leave it out",
        )
        refuse(
            len(set(labels)) < len(labels),
            f"task.labels has a label twice: {', '.join(labels)}",
            fix="name each once",
        )

    @classmethod  # noqa: B027 - nearly all kinds read them
    def check_columns(cls, data: DataFiles, sources: Sequence[Any] = ()) -> None:
        """Refuse names of columns that a task does not read, or not of these sources."""

    @classmethod
    def continued(
        cls,
        config: TaskConfig,
        initial: TaskConfig,
        fields: Collection[str] = (),
        *,
        new_head: bool = False,
    ) -> TaskConfig:
        """Return the settings of a run that starts from a model with `initial` ones.

        The `vector_settings` that are as by default are the model's, unless they are among the
        `fields` that the user has set. UserError for another size of a head that is kept.
        """
        result = copy.deepcopy(config)
        default, own = settings.flatten(cls.settings()), settings.flatten(initial)
        for name, value in settings.flatten(config).items():
            if name in cls.vector_settings and name not in fields and value == default[name]:
                settings.assign(result, name, own[name])
        size, there = (settings.flatten(each).get(cls.size_setting) for each in (result, initial))
        refuse(
            size and there and size != there and not new_head,  # 0 is for none
            f"task.{cls.size_setting} is {size}, and that of the checkpoint is {there}",
            fix="leave it out, or set new_head",
        )
        return result

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        """Return the records of a file or a TensorFlow dataset, with the fields of a task."""
        return self.task_records(read_records(source), data)

    def task_records(self, records: Iterable[Record], data: DataFiles) -> Iterator[Record]:
        """Yield records of columns with the fields of a task."""
        for record in records:
            yield Record(record.where, self.select_fields(record, data))

    @abc.abstractmethod
    def select_fields(self, record: Record, data: DataFiles) -> Mapping[str, Any]:
        """Return the fields of a task from the columns of a record, by the names in `data`."""

    def plain_fields(self, value: Any) -> Mapping[str, Any] | None:
        """Return the fields of a task from a Python value that does not name columns, or None."""
        return None

    @abc.abstractmethod
    def make_example(self, record: Record) -> Example | None:
        """Return the example of the fields of a task; None if the format's own tools skip it."""

    def line_value(self, line: str, where: str, data: DataFiles) -> Any:
        """Return the Python value of a line: a text, or several with a tab between."""
        texts = tuple(line.split("\t"))
        return texts if len(texts) > 1 else line

    def value_of_texts(self, texts: Sequence[str], data: DataFiles) -> Any:
        """Return the Python value of a text or a pair that has no columns; None if it is none."""
        return texts if self.has_queries and len(texts) > 1 else None

    def example_from(self, value: Any, index: int | str, data: DataFiles) -> Example:
        """Return the example of a Python value, whose keys are columns as `data` names them."""
        where = index if isinstance(index, str) else f"examples[{index}]"
        fields = self.plain_fields(value)
        if fields is None and isinstance(value, Mapping):
            fields = self.select_fields(Record(where, value), data)
        example = self.make_example(Record(where, fields)) if fields else None
        if example is None:
            raise UserError(f"{where} is {reprlib.repr(value)}; give {self.value_form}")
        return self.complete(example, data, labelled=False)

    def example_labels(self, example: Example) -> Sequence[str]:
        """Return the labels of an example that are outputs of the head."""
        if isinstance(example.label, str):
            return (example.label,)
        return () if self.num_outputs else example.label or ()

    def label_place(self, example: Example, index: int) -> str:
        """Return where one of the `example_labels` is, for messages."""
        return example.where

    def label_names(self, examples: Iterable[Example]) -> tuple[str, ...]:
        """Return the names of all labels, in the order of the head's outputs."""
        return tuple(sorted({label for each in examples for label in self.example_labels(each)}))

    def complete(self, example: Example, data: DataFiles, *, labelled: bool) -> Example:
        """Return an example of a file, with the label that it is taken to have without one.

        `labelled` says whether it is to be trained on or scored, or may be without a label.
        """
        return example

    def has_loss(self, examples: Sequence[Example]) -> bool:
        """Return whether the loss of training is that of these labelled examples too."""
        return True

    def training_examples(self, examples: Sequence[Example]) -> Sequence[Example]:
        """Return what is trained on, from the labelled examples of a file."""
        return examples

    def held_out_examples(self, examples: Sequence[Example]) -> Sequence[Example]:
        """Return what is predicted and scored, from the labelled examples of a file."""
        return examples

    @abc.abstractmethod
    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        """Return the features of examples, with at most `max_length` tokens a sequence."""

    def model(self, config: ModelConfig, probe: str = "") -> TaskModel:
        """Return the encoder with the head of this task; `probe` is that of `FinetuneConfig`."""
        if not self.num_outputs and not 0 < len(set(self.labels)) == len(self.labels):
            raise UserError(f"task.labels are {list(self.labels)}; name every label once")
        refuse_probe(probe, config)
        return self.model_class(config, self.num_outputs or len(self.labels), probe)

    def objective(self, model: TaskModel) -> PredictionObjective:
        """Return what the model of this task is trained by."""
        return LabelsObjective(model)

    def truncation(self, count: int, data: DataFiles) -> str:
        """Return how many of the examples' texts were truncated, and to what, in words."""
        return f"{counted(count, 'text')} to {data.max_length} tokens"

    def collect(self, before: Any, features: Features, index: int, logits: np.ndarray) -> Any:
        """Return the prediction of an example from the logits of one of its features.

        `before` is the prediction from the features so far; None for none.
        """
        return logits.copy()  # a view would keep the batch

    @abc.abstractmethod
    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """Return the metrics of the predictions for examples that all have labels.

        Those that these labels leave undefined are absent.
        """

    @abc.abstractmethod
    def constant_score(self, examples: Sequence[Example]) -> float:
        """Return the best mean of `metrics` of any constant prediction."""

    @abc.abstractmethod
    def to_json(self, example: Example, prediction: Any) -> dict[str, Any]:
        """Return a prediction as plain values: what is predicted, and its probability."""

    def as_line(self, example: Example, result: Mapping[str, Any]) -> str:
        """Return the result of `to_json` for a reader: its probability, what it is, and of what."""
        predicted, texts = next(iter(result.values())), self.shown_text(example)
        if isinstance(predicted, float):
            return f"{predicted:8.4f}  {texts}"
        if "probability" not in result:
            return f"{predicted!s:<16}  {texts}"
        return f"{result['probability'] or 0:6.1%}  {predicted:<16}  {texts}"

    def shown_text(self, example: Example) -> str:
        """Return the text of an example that is printed beside its prediction."""
        return " | ".join(example.texts)

    def files(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, str]:
        """Return the content of each file of predictions, by its suffix: by default JSON lines."""
        ids = example_ids(examples)
        lines = [
            {"id": name, **self.file_fields(example, prediction)}
            for name, example, prediction in zip(ids, examples, predictions, strict=True)
        ]
        return {".jsonl": "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)}

    def file_fields(self, example: Example, prediction: Any) -> dict[str, Any]:
        """Return what the line of an example has after its id in a file of predictions."""
        result = self.to_json(example, prediction)
        # A value, the name of a class, a choice, or a list of names.
        predicted = next(iter(result.values()))
        fields: dict[str, Any] = {
            "prediction": predicted if isinstance(predicted, float | list) else str(predicted)
        }
        if "probability" in result:
            fields["probability"] = round(result["probability"], 6)
        return fields if example.label is None else {**fields, "label": example.label}

    def baselines(
        self, train: Sequence[Example], held_out: Sequence[Example]
    ) -> dict[str, dict[str, float]]:
        """Return the scores on held-out examples of methods without an encoder, by their names."""
        return {}

    def draw(  # noqa: B027 - few kinds have one
        self, path: Path, examples: Sequence[Example], predictions: Sequence[Any]
    ) -> None:
        """Write a picture of the predictions of examples that all have labels."""

    def tune(  # noqa: B027 - few kinds have any
        self, examples: Sequence[Example], predictions: Sequence[Any], scores: Mapping[str, float]
    ) -> None:
        """Choose settings of `config` by the predictions of held-out examples, and their scores."""

    def transformers_config(self) -> dict[str, Any]:
        """Return what the `config.json` of `transformers_class` says of the task."""
        values: dict[str, Any] = {"problem_type": self.problem_type} if self.problem_type else {}
        if self.num_outputs:
            return values
        label2id = {label: index for index, label in enumerate(self.labels)}
        return values | {"id2label": dict(enumerate(self.labels)), "label2id": label2id}

    @classmethod
    def transformers_labels(cls, values: Mapping[str, Any], where: str) -> Sequence[str] | None:
        """Return the labels in the `config.json` of `transformers_class`; None of another task."""
        problem_type = values.get("problem_type") or cls.problem_type
        if cls.problem_type and problem_type != cls.problem_type:
            return None
        return () if cls.num_outputs else read_labels(values, where)

    @classmethod
    def transformers_settings(cls, values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """Return the settings that another library writes to `config.json`."""
        return {}

    def description(self, model: ModelConfig) -> str:
        """Return sentences for the card of an export: what a prediction is."""
        return ""

    def example_code(self, data: DataFiles) -> tuple[str, str]:
        """Return Python code of an example for `predict`, and for a tokenizer of `transformers`."""
        return '"A text."', '"A text."'

    def python_code(self, data: DataFiles) -> str:
        """Return Python code for the card of an export, which uses `bert`."""
        return f"print(bert.predict([{self.example_code(data)[0]}])[0])"

    def library_code(self, data: DataFiles) -> str:
        """Return Python code for the card, which uses the `tokenizer` and `model` of `library`."""
        texts = self.example_code(data)[1]
        return f'inputs = tokenizer({texts}, return_tensors="pt")\noutputs = model(**inputs)'

    def mean_score(self, scores: Mapping[str, float]) -> float:
        """Return the mean of `metrics` among the scores; UserError where one is absent."""
        absent = next((name for name in self.metrics if name not in scores), "")
        refuse(
            absent,
            f"the labels of the held-out examples give no {absent}",
            fix="give more examples",
        )
        return float(np.mean([scores[name] for name in self.metrics]))

    def rank(self, values: Mapping[str, float]) -> float:
        """Return the mean score, less a little of the loss, which decides between equal scores."""
        # Of a regression, in the squared units of its labels; none where no label can be used.
        loss = values.get("loss", 0.0)
        return self.mean_score(values) - 1e-9 * loss / (1 + abs(loss))
