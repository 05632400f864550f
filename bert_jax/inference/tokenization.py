"""Texts of a user as sequences of tokens, and the warnings of those that are not read whole."""

import contextlib
import inspect
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax import console
from bert_jax.batches.token_sequences import TokenSequences
from bert_jax.errors import TextWarning, UserError, check_count
from bert_jax.inference.loading import LoadedModel
from bert_jax.inference.runner import Sequences
from bert_jax.models.architecture import num_token_types
from bert_jax.tasks import task_class
from bert_jax.tasks.embedding import BertForEmbedding
from bert_jax.tasks.retrieval import Retrieval
from bert_jax.tasks.sequences import join, max_text_tokens
from bert_jax.text.memory import is_iterable

UNKNOWN_TOKENS = (
    "of the tokens are unknown to the tokenizer; choose a model that was trained on such text"
)
# The frames of the stack that are not the user's: those of the package, and of its decorators.
_PACKAGE, _DECORATORS = str(Path(__file__).parents[1]), contextlib.__file__


def text_list(texts: Any, name: str = "texts") -> list[str]:
    """Return one text or several as a list; UserError where one is no text."""
    return list(each_text(texts, name))


def each_text(texts: Any, name: str = "texts", *, pairs: bool = False) -> Iterator[Any]:
    """Yield one text or several as they come, or with `pairs` also two; UserError for others."""
    if isinstance(texts, str):
        texts = [texts]
    if hasattr(texts, "columns"):
        raise UserError(f"{name} is a table; give one column of it, such as data['text']")
    if hasattr(texts, "to_pylist"):  # a column of Arrow
        texts = texts.to_pylist()
    if isinstance(texts, bytes | Mapping) or not is_iterable(texts):
        raise UserError(f"{name} is {reprlib.repr(texts)}; give a text, or a list of texts")
    for index, text in enumerate(texts):
        where = f"{name}[{index}]"
        is_pair = pairs and isinstance(text, tuple | list) and len(text) == 2
        parts: Sequence[Any] = text if is_pair else [text]
        if not all(isinstance(part, str) for part in parts):
            wanted = "a text, or two of a pair" if pairs else "a text, as a str"
            raise UserError(f"{where} is {reprlib.repr(text)}; give {wanted}")
        for part in parts:
            check_unicode(part, where)
        yield text


def check_unicode(text: str, where: str) -> None:
    """Refuse a text with half of a surrogate pair, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} is not Unicode ({error}); correct it") from error


def tokenize(
    model: LoadedModel,
    texts: str | Iterable[str],
    text_pairs: str | Iterable[str] | None,
    max_length: int | None,
) -> Sequences:
    """Return texts or pairs as sequences; `Bert.tokenize` says what the arguments are."""
    columns = [text_list(texts)]
    if text_pairs is not None:
        columns.append(text_list(text_pairs, "text_pairs"))
    if not columns[0]:
        raise UserError("there are no texts; give one or more")
    if len(columns[0]) != len(columns[-1]):
        raise UserError(
            f"there are {len(columns[0])} texts and {len(columns[1])} second texts; give each text "
            "its second one"
        )
    longest = model.config.max_position_embeddings
    length = longest if max_length is None else max_length
    check_count(length, "max_length")
    if max_text_tokens(len(columns), model.config, length) < 1 or length > longest:
        raise UserError(f"max_length is {length}; it must leave room and be at most {longest}")
    examples = zip(*map(model.tokenizer.encode, columns), strict=True)
    joined = [join(each, model.tokenizer, model.config, length) for each in examples]
    token_ids, second_starts, truncated = zip(*joined, strict=True)
    if max_length is None:
        warn_truncated(sum(truncated), len(token_ids), longest)
    return sequences_of(model, token_ids, second_starts)


def sequences_of(
    model: LoadedModel,
    token_ids: Sequence[Sequence[int] | np.ndarray],
    second_starts: Sequence[int] | None = None,
    **columns: np.ndarray,
) -> Sequences:
    """Return sequences of token ids as inputs of a model; by default each of one text.

    `columns` are further arrays of a batch, an entry for each sequence.
    """
    sequences = TokenSequences(
        token_ids,
        [len(sequence) for sequence in token_ids] if second_starts is None else second_starts,
        pad_id=model.tokenizer.pad_id,
        num_types=num_token_types(model.config),
    )
    return Sequences(sequences, model.config.max_position_embeddings, **columns)


def check_prompt(model: LoadedModel, name: str) -> None:
    """Refuse the name of a prompt that a model does not have; no name is no prompt."""
    has_prompts = model.task and issubclass(task_class(model.task.kind), Retrieval)
    if name and (name not in ("query", "passage") or not has_prompts):
        known = "query and passage" if has_prompts else "none, as it was not trained for embeddings"
        raise UserError(f"prompt is {name!r}; the model has {known}")


def own_prompt(model: LoadedModel, name: str) -> str:
    """Return what a model puts before each "query" or "passage", if it has any prompts."""
    if not name or not isinstance(model.model, BertForEmbedding):
        return ""
    return getattr(model.model.embedding, f"{name}_prompt")


def warn_truncated(count: int, total: int, max_length: int) -> None:
    """Warn the user of texts that were truncated to a length, if there are any."""
    if count:
        which, did = f"{count:,} of {total:,} texts are", "were"
        if total == 1:
            which, did = "the text is", "was"
        _warn(f"{which} longer than the model's {max_length} tokens and {did} truncated")


def warn_unknown(unknown: int, tokens: int) -> None:
    """Warn the user of texts with many unknown tokens; a few of a short text are not many.

    The warning has no number, so that it is shown once for texts that come in chunks.
    """
    if 10 * unknown > tokens and (unknown >= 10 or 2 * unknown > tokens):
        _warn(f"more than 10% {UNKNOWN_TOKENS}")


def warn_skipped(skipped: Sequence[str]) -> None:
    """Warn of examples whose labels cannot be used, which are scored, and have no loss."""
    if skipped:
        _warn(
            f"the loss is without {console.counted(len(skipped), 'example')}, whose labels cannot "
            f"be used; the first: {skipped[0]}"
        )


def _warn(message: str) -> None:
    """Show a warning where the user calls the package."""
    files = (frame.filename for frame in inspect.stack(context=0))
    level = next(
        (
            number
            for number, file in enumerate(files)
            if not file.startswith(_PACKAGE) and file != _DECORATORS
        ),
        0,
    )
    warnings.warn(message, TextWarning, stacklevel=level + 1)
