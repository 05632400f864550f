"""Distillation: what a larger model says of the training examples, in place of their labels."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax import console
from bert_jax.bert import Bert, load
from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.inference.embeddings import TextEncoder
from bert_jax.inference.tokenization import own_prompt
from bert_jax.tasks.base import Example, Task


@console.working("asking the teacher")
def teacher_labels(task: Task, model: ModelConfig, examples: Sequence[Example]) -> list[np.ndarray]:
    """Return the vectors [C, I] of each example's texts, or the probabilities [N] of its classes.

    Source: Hinton et al. 2015, with a temperature of 1; of vectors, Reimers and Gurevych 2020.
    """
    teacher = load(task.config.teacher)
    if task.config.kind == "embedding":
        return _vectors(teacher, task, model, examples)
    if task.config.kind != "classification":
        wrong = f"task.teacher is for embedding and classification, not {task.config.kind}"
        raise UserError(f"{wrong}; leave it empty")
    labels = teacher.task.labels if teacher.task else ()
    if not teacher.task or teacher.task.kind != task.config.kind or {*labels} != {*task.labels}:
        known = ", ".join(labels) or "no classes"
        wrong = f"task.teacher {task.config.teacher} has {known}, and the task"
        raise UserError(f"{wrong} {', '.join(task.labels)}; fine-tune the teacher on this task")
    answers = teacher.predict(examples)
    return [
        np.array([answer["probabilities"][label] for label in task.labels], np.float32)
        for answer in answers
    ]


def _vectors(
    teacher: Bert, task: Task, model: ModelConfig, examples: Sequence[Example]
) -> list[np.ndarray]:
    encoder, size = TextEncoder(teacher), task.config.embedding.dense or model.hidden_size
    if encoder.size != size:
        wrong = f"task.teacher has vectors of {encoder.size} numbers, and the model of {size}"
        raise UserError(f"{wrong}; set task.embedding.dense to {encoder.size}")
    prompts = [own_prompt(teacher, kind) for kind in ("query", "passage")]
    texts = [prompts[i > 0] + text for each in examples for i, text in enumerate(each.texts)]
    unique = list(dict.fromkeys(texts))
    by_text: dict[str, Any] = {
        text: embedding.vectors for text, embedding in zip(unique, encoder(unique), strict=True)
    }
    vectors = iter([by_text[text] for text in texts])
    return [np.array([next(vectors) for _ in each.texts], np.float32) for each in examples]
