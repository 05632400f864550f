"""Fine-tuning batches with little padding: of any examples, and those of each training step."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from bert_jax.batches import Batch
from bert_jax.batches.loader import ProcessIndices, take_indices
from bert_jax.batches.token_sequences import FILL, Ragged, TokenSequences
from bert_jax.text.tokenizer import Tokenizer

NO_LABEL = -1  # of an example or a token that is not scored

_MAX_LENGTHS = 4  # the train step is compiled once for each padded length
# A longer sequence is padded to a multiple of 128, which the fused attention of a TPU needs.
_MAX_SHORT, _MULTIPLE, _LONG_MULTIPLE = 512, 8, 128
_MAX_CANDIDATES = 12  # whose combinations are tried
# Shuffled examples are sorted by length in windows of 16 batches; an epoch has at least 4 windows.
# Source: `get_length_grouped_indices` of transformers, with at most 50 batches.
_WINDOW, _MIN_WINDOWS = 16, 4
# Packed examples share sequences: 2, 4 or 8 of them, of up to 256 tokens together on average. A
# batch has a multiple of 64 sequences, which devices and microbatches divide.
_MAX_SHARED, _SHARED_TOKENS, _MIN_SEQUENCES = 8, 256, 64


@dataclasses.dataclass
class Features:
    """Token ids and labels; a feature is what the head scores at once, one or more an example."""

    # int32 token ids with special tokens; `choices` consecutive ones a feature.
    sequences: list[np.ndarray] = dataclasses.field(default_factory=list)
    # Where the second text of each sequence starts; its length if there is none.
    second_starts: list[int] = dataclasses.field(default_factory=list)
    example_indices: list[int] = dataclasses.field(default_factory=list)  # of each feature
    # Of each feature, a number or an array; NO_LABEL, or NaN for a regression, if unknown.
    labels: list[Any] = dataclasses.field(default_factory=list)
    choices: int = 1
    is_packed: bool = False  # whether the choices of a feature are packed into one sequence
    # Whether the loss compares the examples of a batch, which must then be random ones: among texts
    # of one length it learns nothing from their lengths.
    is_contrastive: bool = False
    # The roles of the tokens of each sequence, where they have some, as a model numbers them.
    roles: list[np.ndarray] = dataclasses.field(default_factory=list)
    per_token: bool = False  # whether `labels` has a number for each token
    # What a task needs to read the predictions of each feature.
    notes: list[Any] = dataclasses.field(default_factory=list)
    truncated: int = 0  # number of texts, or words of a sentence
    windowed: int = 0  # number of texts that have several features, each a window
    # Where each example is whose label cannot be used, and why.
    skipped: list[str] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.example_indices)

    def add(
        self, index: int, label: Any, sequences: Iterable[tuple[np.ndarray, int]], note: Any = None
    ) -> None:
        """Add a feature of example `index`, each sequence with the start of its second text."""
        self.example_indices.append(index)
        self.labels.append(label)
        self.notes.append(note)
        for sequence, second_start in sequences:
            self.sequences.append(sequence)
            self.second_starts.append(second_start)


class Batcher:
    """Makes batches of features, padded to any length."""

    def __init__(self, features: Features, tokenizer: Tokenizer, types: int, max_length: int):
        """`types` is the number of the model's token types."""
        self.features = features
        self._sequences = TokenSequences(
            features.sequences,
            features.second_starts,
            pad_id=tokenizer.pad_id,
            num_types=types,
            roles=features.roles,
        )
        lengths = self._sequences.lengths.reshape(-1, features.choices)
        # [n], of the longest choice or of all
        self.lengths = lengths.sum(1) if features.is_packed else lengths.max(1)
        max_length *= features.choices if features.is_packed else 1
        # Queries may have other lengths than passages.
        max_length = max(max_length, int(self.lengths.max()))
        self.max_length = max_length  # of a sequence, whatever the examples
        self.longest = min(int(round_up(self.lengths.max())), max_length)  # fits every example
        # Of a sequence.
        self.tokens = float(self.lengths.mean() if features.is_packed else lengths.mean())
        self.padding = 1 - self.tokens / max_length  # its share if all had `max_length`
        self._unk, self._mask = tokenizer.unk_id, tokenizer.mask_id

    @property
    def unknown(self) -> tuple[int, int]:
        """How many tokens stand for text that the tokenizer does not know, and of how many."""
        sequences = self.features.sequences
        unknown = sum(int(np.count_nonzero(ids == self._unk)) for ids in sequences)
        # Without [CLS], the last [SEP], and the [MASK]s that fill up a query.
        return unknown, sum(int(np.count_nonzero(ids != self._mask)) - 2 for ids in sequences)

    @functools.cached_property
    def _ragged_labels(self) -> Ragged:
        return Ragged([np.ravel(label) for label in self.features.labels])

    def batch(self, indices: np.ndarray, length: int) -> Batch:
        """Return examples padded to `length`, for an objective.

        `indices` are [B], or where features are packed [B, E], the examples of each sequence.
        """
        count = self.features.choices
        indices = indices.reshape(len(indices), -1)
        labels = self._labels(indices, length)
        # The sequence of each choice of each example, [B, T].
        sequences = indices[:, :, None] * count + np.arange(count)
        sequences = np.where(indices[:, :, None] == FILL, FILL, sequences).reshape(len(indices), -1)
        if self.features.is_packed:
            return {**self._sequences.packed(sequences, length), "labels": labels}
        batch = self._sequences.padded(sequences.ravel(), length)
        if count > 1:
            batch = {name: array.reshape(-1, count, length) for name, array in batch.items()}
        return {**batch, "labels": labels[:, 0]}

    def _labels(self, indices: np.ndarray, length: int) -> np.ndarray:
        """Return the labels of examples, [B, E, ...], NO_LABEL or NaN for padding."""
        first = np.asarray(self.features.labels[0])
        shape = (length,) if self.features.per_token else first.shape
        empty, dtype = (np.nan, np.float32) if first.dtype.kind == "f" else (NO_LABEL, np.int32)
        labels = np.full((indices.size, math.prod(shape)), empty, dtype)
        is_example = indices.ravel() != FILL
        values, owners, positions = self._ragged_labels.take(indices.ravel()[is_example])
        labels[np.flatnonzero(is_example)[owners], positions] = values
        return labels.reshape(*indices.shape, *shape)


class BucketedBatches:
    """The batch of every step, by index: each example once an epoch, in most tasks by length."""

    def __init__(
        self,
        batcher: Batcher,
        batch_size: int,
        steps: int,
        seed: int,
        process_indices: ProcessIndices = np.arange,
    ):
        self._batcher, self._steps, self._process_indices = batcher, steps, process_indices
        self._per_epoch = -(-len(batcher.lengths) // batch_size)
        is_packed = batcher.features.is_packed
        count = _examples_per_sequence(batch_size, batcher.tokens)
        self.per_sequence = count if is_packed else 1  # examples
        window = 1 if batcher.features.is_contrastive else _WINDOW
        draw = functools.partial(epoch_batches, batcher.lengths, batch_size, window=window)
        self._epoch = functools.lru_cache(maxsize=1)(functools.partial(draw, seed))
        # Independent of `seed`, so that runs of several seeds share their compiled programs.
        longest = np.array([self._longest(self._sequences(each)) for each in draw(0, 0)])
        # Sequences that are shared have about one length: there are few to compile a step for.
        fits = batcher.longest
        if self.per_sequence > 1:
            fits = int(round_up(np.array(self.per_sequence * fits)))
            multiple = _MULTIPLE * self.per_sequence
            longest = np.minimum(-(-longest // multiple) * multiple, fits)
        self.lengths = choose_lengths(longest, fits)  # in rising order
        rows = self._per_epoch * batch_size // self.per_sequence  # some of the last batch are empty
        tokens = len(batcher.lengths) * batcher.tokens
        self.padding = 1 - tokens / (rows * float(pad_to(longest, self.lengths).mean()))

    def __len__(self) -> int:
        return self._steps

    def indices(self, step: int) -> np.ndarray:
        """Return the examples of a step, [batch_size], FILL for padding."""
        epoch, number = divmod(step, self._per_epoch)
        return self._epoch(epoch)[number]

    def __getitem__(self, step: int) -> Batch:
        indices = self._sequences(self.indices(step))
        length = int(pad_to(self._longest(indices), self.lengths))
        # Dropout is keyed by the index in the global batch.
        index = np.arange(len(indices), dtype=np.int32)
        batch = {**self._batcher.batch(indices, length), "index": index}
        return take_indices(batch, self._process_indices)

    def _sequences(self, indices: np.ndarray) -> np.ndarray:
        """Return the examples of each sequence of a batch, [B, E]."""
        return balance(indices, self._lengths(indices), self.per_sequence)

    def _lengths(self, indices: np.ndarray) -> np.ndarray:
        return np.where(indices == FILL, 0, self._batcher.lengths[indices])

    def _longest(self, sequences: np.ndarray) -> np.ndarray:
        return self._lengths(sequences).sum(1).max()


def _examples_per_sequence(batch_size: int, tokens: float) -> int:
    """Return how many examples share a sequence, if one has `tokens` on average."""
    count = 1
    while (
        2 * count <= _MAX_SHARED
        and 2 * count * tokens <= _SHARED_TOKENS
        and batch_size % (2 * count * _MIN_SEQUENCES) == 0
    ):
        count *= 2
    return count


def balance(indices: np.ndarray, lengths: np.ndarray, count: int) -> np.ndarray:
    """Return examples in sequences of `count`, [B, count], of about the same length together."""
    if count == 1:
        return indices[:, None]
    order, together = np.argsort(-lengths, kind="stable"), np.zeros(len(indices) // count, np.int64)
    sequences = np.empty((len(together), count), indices.dtype)
    # The longest ones first, each to the sequence that is the shortest so far.
    for slot, chosen in enumerate(order.reshape(count, -1)):
        shortest = np.argsort(together, kind="stable")
        sequences[shortest, slot] = indices[chosen]
        together[shortest] += lengths[chosen]
    return sequences


def epoch_batches(
    lengths: np.ndarray, batch_size: int, seed: int, epoch: int, *, window: int = _WINDOW
) -> np.ndarray:
    """Return the examples of each batch of an epoch, [batches, batch_size], FILL for padding.

    Examples are sorted by length within each `window` of batches.
    """
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
    count = -(-len(order) // batch_size)
    size = batch_size * max(1, min(window, count // _MIN_WINDOWS))
    windows = [order[start : start + size] for start in range(0, len(order), size)]
    # Longest first, so that the batch with padding examples is one of the shortest.
    order = np.concatenate([w[np.argsort(-lengths[w], kind="stable")] for w in windows])
    order = np.pad(order, (0, count * batch_size - len(order)), constant_values=FILL)
    return generator.permutation(order.reshape(count, batch_size))


def round_up(lengths: np.ndarray) -> np.ndarray:
    """Return the least multiples of 8, or above 512 of 128, that are not below `lengths`."""
    multiple = np.where(lengths > _MAX_SHORT, _LONG_MULTIPLE, _MULTIPLE)
    return -(-lengths // multiple) * multiple


def pad_to(lengths: np.ndarray, padded: Sequence[int]) -> np.ndarray:
    """Return for each length the smallest of the rising `padded` lengths that fits it."""
    return np.asarray(padded)[np.searchsorted(padded, lengths)]


def choose_lengths(lengths: np.ndarray, longest: int) -> list[int]:
    """Return up to four rising padded lengths, the last `longest`, with the least padding."""
    rounded = np.minimum(round_up(np.asarray(lengths)), longest)
    candidates = np.unique(rounded)
    if len(candidates) > _MAX_CANDIDATES:
        shares = np.linspace(0, 1, _MAX_CANDIDATES)
        candidates = np.unique(np.quantile(rounded, shares, method="higher"))
    candidates = [int(length) for length in candidates if length < longest]
    best, least = [longest], longest * len(rounded)
    for count in range(1, _MAX_LENGTHS):
        for chosen in combinations(candidates, count):
            total = int(pad_to(rounded, [*chosen, longest]).sum())
            if total < least:
                best, least = [*chosen, longest], total
    return best
