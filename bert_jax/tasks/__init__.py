"""Fine-tuning tasks, one file a kind. A new kind is a new file, and an entry of TASKS."""

from collections.abc import Sequence

from bert_jax.config import TaskConfig
from bert_jax.errors import UserError
from bert_jax.tasks.base import Task
from bert_jax.tasks.classification import Classification, Regression
from bert_jax.tasks.embedding import Embedding
from bert_jax.tasks.multiple_choice import MultipleChoice
from bert_jax.tasks.question_answering import QuestionAnswering
from bert_jax.tasks.token_classification import TokenClassification

TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "regression": Regression,
    "token_classification": TokenClassification,
    "question_answering": QuestionAnswering,
    "multiple_choice": MultipleChoice,
    "embedding": Embedding,
}


def make_task(config: TaskConfig, labels: Sequence[str] = ()) -> Task:
    """Return the task of a config, with `labels` unless there are none."""
    if config.kind not in TASKS:
        raise UserError(f"task.kind is {config.kind!r}; choose one of {', '.join(TASKS)}")
    return TASKS[config.kind](config, labels)
