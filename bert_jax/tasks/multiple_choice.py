"""Multiple choice: which of several endings follows a context, as in SWAG."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scipy.special import softmax

from bert_jax.config import DataFiles
from bert_jax.errors import UserError, refuse
from bert_jax.tasks import readers
from bert_jax.tasks.classification import Classification
from bert_jax.tasks.examples import Example
from bert_jax.tasks.foreign import UnknownColumns
from bert_jax.tasks.readers import Record
from bert_jax.text.classes import ClassName

_COLUMNS = "sent1,sent2,ending0,ending1,ending2,ending3"  # of SWAG


class MultipleChoice(Classification):
    """A class is the number of a choice, from 0. Source: Devlin et al. 2019, section 4.4."""

    transformers_class = "ForMultipleChoice"
    problem_type = pipeline_tag = ""
    num_outputs = 1
    has_choices = True
    has_windows = has_deciding_windows = False
    known_metrics = ("accuracy",)
    value_form = "a dict with context, choices and perhaps start, or the columns of data.text"

    def select_fields(self, record: Record, data: DataFiles) -> Mapping[str, Any]:
        if isinstance(data, UnknownColumns) and data.text == DataFiles().text:
            data = dataclasses.replace(data, text=_COLUMNS)
        return super().select_fields(record, data)

    def plain_fields(self, value: Any) -> Mapping[str, Any] | None:
        choices = value.get("choices") if isinstance(value, Mapping) else None
        if not isinstance(choices, list | tuple):
            return None
        columns = ["context", "start", *(f"choices[{i}]" for i in range(len(choices)))]
        texts = (value.get("context"), value.get("start", ""), *choices)
        own = {name: value.get(name) for name in ("id", "label")}
        return {"columns": columns, "texts": texts, **own}

    def example_from(self, value: Any, index: int | str, data: DataFiles) -> Example:
        if isinstance(value, Mapping) and "choices" in value:
            value = {**value, "label": value.get(data.label, value.get("label"))}
        return super().example_from(value, index, data)

    def line_value(self, line: str, where: str, data: DataFiles) -> Any:
        """Refuse a line, which has no column for each choice."""
        raise UserError(
            f"{where}: a line cannot have the choices of an example; give a .csv or a .jsonl"
        )

    def value_of_texts(self, texts: Sequence[str], data: DataFiles) -> Any:
        return None

    def example_code(self, data: DataFiles) -> tuple[str, str]:
        example = {"context": "A text.", "choices": ["One end.", "Another."]}
        return json.dumps(example), '["A text."] * 2, ["One end.", "Another."], padding=True'

    def library_code(self, data: DataFiles) -> str:
        as_choices = "inputs = {key: value[None] for key, value in inputs.items()}"
        inputs, outputs = super().library_code(data).split("\n")
        return f"{inputs}\n{as_choices}\n{outputs}"

    @classmethod
    def transformers_labels(cls, values: Mapping[str, Any], where: str) -> Sequence[str] | None:
        return ()

    def make_example(self, record: Record) -> Example | None:
        texts, label, where = record.fields["texts"], record.fields.get("label"), record.where
        refuse(
            len(texts) < 4,
            f"{where} has {len(texts)} texts",
            fix="give a context, a start and two choices or more, whose columns data.text names",
        )
        if texts[1] is None:  # as a data frame has an empty start
            texts = (texts[0], "", *texts[2:])
        for position, (name, text) in enumerate(zip(record.fields["columns"], texts, strict=True)):
            readers.refuse_number(text, where)
            if not isinstance(text, str) or (position != 1 and not text.strip()):
                raise UserError(f"{where}: {name} is empty; fill it in or remove the line")
        choices = tuple(map(str, range(len(texts) - 2)))
        refuse(
            self.labels and len(self.labels) != len(choices),
            f"{where} has {len(choices)} choices, and the task has {len(self.labels)}",
            fix="give as many",
        )
        refuse(
            self.labels and self.labels != choices,
            f"{where} has {len(choices)} choices, and the labels are {', '.join(self.labels)}",
            fix=f"they must be {', '.join(choices)}",
        )
        label = label.number if isinstance(label, ClassName) else readers.whole(label)
        # Hugging Face's test set has -1.
        known = None if label in (None, "", "-1", -1) else str(label)
        refuse(
            known not in (None, *choices),
            f"{where}: the label {label!r} is none of the {len(choices)} choices",
            fix=f"number them from 0 to {choices[-1]}",
        )
        return Example(record.fields.get("id"), where, texts, known)

    def baselines(
        self, train: Sequence[Example], held_out: Sequence[Example]
    ) -> dict[str, dict[str, float]]:
        return {}

    def label_names(self, examples: Iterable[Example]) -> tuple[str, ...]:
        return tuple(map(str, range(len(next(iter(examples)).texts) - 2)))

    def sequence_texts(self, example: Example) -> list[tuple[str, ...]]:
        context, start, *ends = example.texts
        return [(context, f"{start} {end}".strip()) for end in ends]

    def to_json(self, example: Example, prediction: Any) -> dict[str, Any]:
        best, probabilities = int(prediction.argmax()), softmax(prediction).tolist()
        return {"choice": best, "probability": probabilities[best], "probabilities": probabilities}
