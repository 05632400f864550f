"""Fine-tuning tasks, one file a kind. A new kind is a new file, and an entry of TASKS."""

from collections.abc import Sequence

from bert_jax.config import TaskConfig
from bert_jax.config.fields import TASKS
from bert_jax.config.settings import check, look_up
from bert_jax.tasks.base import Task


def task_class(kind: str) -> type[Task]:
    """Return the class of a kind of task."""
    return look_up(TASKS, kind, "task.kind")


def make_task(config: TaskConfig, labels: Sequence[str] = ()) -> Task:
    """Return the task of a config, with `labels` unless there are none."""
    task = task_class(config.kind)
    check(config, "task.")
    return task(config, labels)
