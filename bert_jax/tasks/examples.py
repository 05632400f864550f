"""An example of a task, and its id in the predictions."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from bert_jax.tasks import readers


@dataclasses.dataclass(frozen=True)
class Example:
    """What is to be labelled."""

    id: Any  # its name in the predictions, a text or a number; None for its index
    where: str  # file and line, for messages
    texts: tuple[str, ...]  # one text or several; the words of a sentence
    label: Any  # of the task's own type; None if it is unknown
    # The name of the column of its label where its record has none; else empty.
    absent_column: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        """Make an id a text or a whole number; of another type, such as a date, its text."""
        is_missing = self.id is None or self.id != self.id  # NaN and NaT, which pandas has for none
        name = readers.whole(self.id)
        name = name if isinstance(name, str | int) else str(name)
        object.__setattr__(self, "id", None if is_missing else name)


def example_ids(examples: Sequence[Example], first: int = 0) -> list[Any]:
    """Return the id of each example: its own, or its number, of which `first` is the first.

    A number that is the id of another example does not name this one, which then has None.
    """
    own = {str(example.id) for example in examples}
    numbers = (None if str(number) in own else number for number in itertools.count(first))
    return [
        number if example.id is None else example.id
        for example, number in zip(examples, numbers, strict=False)
    ]
