"""Fine-tuning tasks, one file a kind. A new kind is a new file, and an entry of TASKS."""

from collections.abc import Sequence

from bert_jax.config import TaskConfig
from bert_jax.config.fields import TASKS
from bert_jax.config.settings import check, resolve
from bert_jax.errors import UserError, nearest
from bert_jax.tasks.base import Task


def task_class(kind: str) -> type[Task]:
    """Return the class of a kind of task."""
    if kind not in TASKS:
        every = f"choose one of {', '.join(TASKS)}, or import the file of your own"
        raise UserError(f"task.kind is {kind!r}; {nearest(kind, [*TASKS], every)}")
    return resolve(TASKS, kind)


def make_task(config: TaskConfig, labels: Sequence[str] = ()) -> Task:
    """Return the task of a config, with `labels` unless there are none."""
    task = task_class(config.kind)
    check(config, "task.")
    return task(config, labels)
