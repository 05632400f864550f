"""What a text becomes by a model of late interaction or of sparse vectors."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse

from bert_jax.errors import check_count, refuse
from bert_jax.inference.embeddings import TextEmbedding, TextEncoder
from bert_jax.inference.loading import LoadedModel
from bert_jax.inference.tokenization import own_prompt, warn_unknown
from bert_jax.tasks import make_task, task_class
from bert_jax.tasks.retrieval import EncodingTask
from bert_jax.tasks.sequences import make_batcher


class RetrievalEncoder:
    """Encode texts as a task of retrieval does, on all local devices."""

    def __init__(self, model: LoadedModel, task: EncodingTask, prompt: str, batch_size: int | None):
        self._model, self._task, self._batch_size = model, task, batch_size
        self._is_query, self.is_by_token = prompt == "query", task.vectors_kind == "tokens"
        self.size = model.config.vocab_size  # of a vector that is not one of a token
        self.max_length = task.longest_text(model.data.max_length, is_query=self._is_query)
        objective = task.objective(model.model)
        function = functools.partial(objective.apply, dropout_key=None)
        self._step = model.runner.compile("task vectors", function)

    def encode_chunk(self, texts: Sequence[str]) -> list[TextEmbedding]:
        """Return the vectors of each text, all at once; sparse ones with their zeros, [V]."""
        return [
            dataclasses.replace(each, vectors=_as_array(each.vectors))
            for each in self.encode_native(texts)
        ]

    def encode_native(self, texts: Sequence[str]) -> list[TextEmbedding]:
        """Return the vectors of each text, all at once, as the task has them."""
        model, length = self._model, self._model.data.max_length
        config, tokenizer = model.config, model.tokenizer
        features = self._task.text_features(
            texts, tokenizer, config, length, is_query=self._is_query
        )
        batcher = make_batcher(features, tokenizer, config, length)
        warn_unknown(*batcher.unknown)
        found: list[Any] = [None] * len(texts)
        for indices, values in model.runner.run(self._step, batcher, self._batch_size):
            for index, value in zip(indices.tolist(), np.asarray(values), strict=False):
                prediction = self._task.collect(None, features, index, value)
                found[index] = self._task.vectors_by_text(prediction)[0]
        return [
            TextEmbedding(vectors, None, is_truncated=is_truncated)
            for vectors, is_truncated in zip(found, features.notes, strict=True)
        ]


def text_encoder(
    model: LoadedModel,
    layers: Sequence[int] | None = None,
    pooling: str | None = None,
    prompt: str = "",
    batch_size: int | None = None,
) -> TextEncoder | RetrievalEncoder:
    """Return what encodes texts by a model: its own way, unless a layer or a pooling is given.

    `prompt` is "query", "passage" or "", for what the texts are.
    """
    if batch_size is not None:
        check_count(batch_size, "batch_size")
    task = make_task(model.task) if model.task else None
    is_own = layers is None and pooling is None
    if is_own and isinstance(task, EncodingTask):
        return RetrievalEncoder(model, task, prompt, batch_size)
    refuse(
        prompt and isinstance(task, EncodingTask),
        f"the prompt {prompt!r} is for the model's own vectors",
        fix="leave it out, or layer and pooling",
    )
    before = own_prompt(model, prompt)
    return TextEncoder(model, layers, pooling, before=before, batch_size=batch_size)


def kind_of_vectors(model: LoadedModel) -> str:
    """Return the name in `retrieval.vectors.KINDS` of what a text becomes by a model."""
    return task_class(model.task.kind).vectors_kind if model.task else "dense"


def _as_array(vectors: Any) -> np.ndarray:
    return vectors.toarray()[0] if sparse.issparse(vectors) else vectors
