"""How the token ids of texts become sequences: joined, truncated, or in windows."""

from collections.abc import Sequence

import numpy as np

from bert_jax.batches.buckets import Batcher, Features
from bert_jax.config import ModelConfig
from bert_jax.models.architecture import num_separators, num_token_types
from bert_jax.text.tokenizer import Tokenizer


def build_sequence(
    texts: Sequence[Sequence[int]], tokenizer: Tokenizer, model: ModelConfig
) -> tuple[np.ndarray, int]:
    """Return `[CLS] A [SEP] B [SEP]`, or with more separators before B, and where B starts."""
    first, *rest = texts
    ids = [tokenizer.cls_id, *first, tokenizer.sep_id]
    between = [tokenizer.sep_id] * (num_separators(model) - 1)
    second_start = len(ids) + len(between) if rest else len(ids)
    for text in rest:
        ids += [*between, *text, tokenizer.sep_id]
    return np.array(ids, np.int32), second_start


def join(
    texts: Sequence[Sequence[int]], tokenizer: Tokenizer, model: ModelConfig, max_length: int
) -> tuple[np.ndarray, int, bool]:
    """Return `build_sequence` of texts truncated to `max_length`, and whether they were."""
    kept = truncate(texts, max_text_tokens(len(texts), model, max_length))
    is_truncated = sum(map(len, kept)) < sum(map(len, texts))
    return *build_sequence(kept, tokenizer, model), is_truncated


def max_text_tokens(texts: int, model: ModelConfig, max_length: int) -> int:
    """Return how many tokens one or two texts may have in a sequence of `max_length`."""
    return max_length - 2 - num_separators(model) * (texts - 1)


def make_batcher(
    features: Features, tokenizer: Tokenizer, model: ModelConfig, max_length: int
) -> Batcher:
    """Return what makes batches of features for a model, of texts of at most `max_length`."""
    longest = longest_sequence(model, max_length)
    return Batcher(features, tokenizer, num_token_types(model), longest)


def longest_sequence(model: ModelConfig, max_length: int) -> int:
    """Return the most tokens of a sequence, where a text may have `max_length` in several."""
    return min(max_length, model.max_position_embeddings)


def token_windows(size: int, room: int, stride: int = 0) -> list[tuple[int, int]]:
    """Return the start and end of each window over `size` tokens; every token is in one.

    `stride` is the number of tokens from one to the next; 0: half of a window.
    """
    last = max(0, size - room)  # the first start whose window has all the rest
    step = min(stride or max(1, room // 2), room)
    return [(i, min(i + room, size)) for i in range(0, last + step, step)]


def central_tokens(windows: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Return, for each window, which of its tokens [n] have more context there than in any other.

    Source: google-research/bert `run_squad.py`, `_check_is_max_context`.
    """
    size = windows[-1][1]
    most, owner = np.full(size, -1.0), np.zeros(size, np.int64)
    for number, (start, end) in enumerate(windows):
        position = np.arange(end - start)
        around = np.minimum(position, position[::-1]) + 0.01 * (end - start)
        is_more = around > most[start:end]
        most[start:end][is_more] = around[is_more]
        owner[start:end][is_more] = number
    return [owner[start:end] == number for number, (start, end) in enumerate(windows)]


def text_windows(ids: Sequence[int], size: int, stride: int = 0) -> list[Sequence[int]]:
    """Return the token ids of a text in windows of at most `size`, which overlap.

    `stride` is the number of tokens from one to the next; 0: half of a window.

    >>> text_windows([1, 2, 3, 4, 5], 4)
    [[1, 2, 3, 4], [3, 4, 5]]
    """
    return [ids[start:end] for start, end in token_windows(len(ids), size, stride)]


def truncate(texts: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Truncate texts to `size` tokens in all, the longer first: Google's `_truncate_seq_pair`."""
    kept = [list(text[:size]) for text in texts]
    while sum(map(len, kept)) > size:
        max(reversed(kept), key=len).pop()  # of two with one length, the second
    return kept
