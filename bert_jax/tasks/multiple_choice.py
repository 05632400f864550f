"""One of several ways in which a text may go on, as in SWAG."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import linen as nn

from bert_jax.batches.features import Features
from bert_jax.config import DataFiles, ModelConfig
from bert_jax.errors import UserError
from bert_jax.models.heads import BertForMultipleChoice
from bert_jax.tasks import readers as records
from bert_jax.tasks.base import Example, choose_metrics, join, room_for, shorten
from bert_jax.tasks.classification import Classification
from bert_jax.tasks.readers import Record
from bert_jax.text.tokenizer import Tokenizer


class MultipleChoice(Classification):
    """A class is the number of a choice, from 0. Source: Devlin et al. 2019, section 4.4.

    `data.text` names the columns: the context, how every choice begins, and each choice.
    """

    @property
    def metrics(self) -> Sequence[str]:
        return choose_metrics(self.config.metrics, ("accuracy",), ("accuracy",))

    def read_records(self, source: str, data: DataFiles) -> Iterator[Record]:
        return records.table(source)

    def make_example(self, record: Record, data: DataFiles) -> Example | None:
        columns = [name.strip() for name in data.text.split(",")]
        if len(columns) < 4:
            raise UserError(
                f"data.text names {len(columns)} columns; multiple choice takes a context, the "
                "beginning of the choices, and two choices or more"
            )
        texts = tuple(record.field(name, "data.text") for name in columns)
        for name, text in zip(columns, texts, strict=True):
            if not isinstance(text, str) or (name != columns[1] and not text.strip()):
                raise UserError(f"{record.where}: {name} is empty; fill it in or remove the line")
        label = record.fields.get(data.label)
        label = None if label in ("", "-1", -1) else label  # so Hugging Face's test set has it
        choices = tuple(str(number) for number in range(len(texts) - 2))
        if self.labels and self.labels != choices:
            raise UserError(
                f"data.text names {len(choices)} choices, and the head's labels are "
                f"{', '.join(self.labels)}; they must be {', '.join(choices)}"
            )
        if label is not None and str(label) not in choices:
            raise UserError(
                f"{record.where}: the label {label!r} is none of the {len(choices)} choices, which "
                f"are 0 to {len(choices) - 1}"
            )
        known = None if label is None else str(label)
        return Example(record.fields.get("id"), record.where, texts, known)

    def label_names(self, examples: Iterable[Example]) -> tuple[str, ...]:
        return tuple(str(number) for number in range(len(next(iter(examples)).texts) - 2))

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, model: ModelConfig, max_length: int
    ) -> Features:
        choices = len(self.labels)
        rows = Features([], [], np.arange(len(examples)), [], choices=choices)
        texts = (
            text
            for context, begin, *ends in (example.texts for example in examples)
            for text in (context, *(f"{begin} {end}".strip() for end in ends))
        )
        pieces = iter(tokenizer.encode(list(texts)))
        room = room_for(2, model, max_length)
        for example in examples:
            context, was_cut = next(pieces), False
            for _ in range(choices):
                pair = [context, next(pieces)]
                cut = shorten(pair, room)
                was_cut |= sum(map(len, cut)) < sum(map(len, pair))
                sequence, second = join(cut, tokenizer, model)
                rows.sequences.append(sequence)
                rows.second_starts.append(second)
            rows.labels.append(self.target(example))
            rows.truncated += was_cut
        return rows

    def model(self, config: ModelConfig, probe: str) -> nn.Module:
        return BertForMultipleChoice(config, 1, probe)

    def scores_of(self, examples: Sequence[Example], predicted: Sequence[int]) -> dict[str, float]:
        right = [int(e.label) == choice for e, choice in zip(examples, predicted, strict=True)]
        return {"accuracy": float(np.mean(right))}

    def draw(self, path: Path, examples: Sequence[Example], found: Sequence[Any]) -> None:
        """Draws nothing: which choice is taken for which says little."""
