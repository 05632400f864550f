"""Batches of a task's rows: in a few static lengths, by step, and each once for evaluation."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from bert_jax.batches import Batch
from bert_jax.batches.features import NO_LABEL, Features
from bert_jax.text.tokenizer import Tokenizer

FILL = -1  # in a list of rows: one of padding alone, which no sum counts

# Programs are compiled for so many lengths at most, each a multiple of _MULTIPLE tokens.
_MOST_LENGTHS, _MULTIPLE = 4, 8
_MOST_CANDIDATES = 12  # whose combinations are tried
_SAMPLED_STEPS = 200
# A step is split in two only where that saves this share of its tokens: each part is a call of its
# own, and adds up a gradient.
_WORTHWHILE = 0.12


class Batcher:
    """Makes batches of rows.

    Args:
      rows: all of them.
      tokenizer: whose padding fills them up.
      types: token types of the model; a RoBERTa has one.
      max_length: of a sequence, in tokens.

    Attributes:
      rows: all of them.
      sizes: tokens of each row; of its longest sequence.
      longest: the static length that every row fits.
      mean_size: tokens of a sequence, in the mean.
      padding: the share of padding, were all sequences padded to `max_length`.
    """

    def __init__(self, rows: Features, tokenizer: Tokenizer, types: int, max_length: int):
        self.rows = rows
        self._pad, self._types = tokenizer.pad_id, types
        sizes = np.array([len(sequence) for sequence in rows.sequences], np.int64)
        self.sizes = sizes.reshape(-1, rows.choices).max(1)
        self.longest = min(round_up(int(self.sizes.max())), max_length)
        self.mean_size = float(sizes.mean())
        self.padding = 1 - sizes.mean() / max_length  # where all rows are of the greatest length

    def make(self, indices: np.ndarray, length: int) -> Batch:
        """Returns some rows, padded to `length` tokens; a batch as `TaskObjective` takes it."""
        rows, count = self.rows, self.rows.choices
        ids = np.full((len(indices), count, length), self._pad, np.int32)
        types, mask = np.zeros_like(ids), np.zeros_like(ids)
        labels = self._labels(indices, length)
        for place, index in enumerate(indices.tolist()):
            if index == FILL:
                continue
            for choice in range(count):
                at = index * count + choice
                sequence = rows.sequences[at]
                ids[place, choice, : len(sequence)] = sequence
                mask[place, choice, : len(sequence)] = 1
                if self._types > 1:
                    types[place, choice, rows.second[at] : len(sequence)] = 1
        batch = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
        if count == 1:
            batch = {name: array[:, 0] for name, array in batch.items()}
        return {**batch, "labels": labels}

    def padding_under(self, plan: "Plan") -> float:
        """Returns the share of padding in training by a plan."""
        return 1 - self.mean_size / plan.mean_length

    def _labels(self, indices: np.ndarray, length: int) -> np.ndarray:
        first = np.asarray(self.rows.labels[0])
        shape = (length,) if self.rows.per_piece else first.shape
        is_number = first.dtype.kind == "f"
        empty, dtype = (np.nan, np.float32) if is_number else (NO_LABEL, np.int32)
        labels = np.full((len(indices), *shape), empty, dtype)
        for place, index in enumerate(indices.tolist()):
            if index != FILL:
                label = self.rows.labels[index]
                if self.rows.per_piece:
                    labels[place, : len(label)] = label
                else:
                    labels[place] = label
        return labels


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the rows of a step are padded.

    Attributes:
      parts: in which a step is run, its shortest rows first.
      lengths: that a part may have, in tokens, rising.
      mean_length: tokens of a padded row, in the mean.
    """

    parts: int
    lengths: tuple[int, ...]
    mean_length: float


def plan_lengths(
    batcher: Batcher, batch_size: int, devices: int, splits: Sequence[int] = (1, 2, 4)
) -> Plan:
    """Returns the plan that pads least, among a few lengths and some numbers of parts.

    Args:
      batcher: of the training rows.
      batch_size: rows a step.
      devices: over which the rows of a part are shared evenly.
      splits: numbers of parts, rising.
    """
    generator = np.random.default_rng(0)
    sampled = generator.choice(batcher.sizes, (_SAMPLED_STEPS, batch_size))
    sizes = np.sort(sampled, axis=1)
    plan = None
    for parts in splits:
        if batch_size % (parts * devices):
            break
        greatest = sizes[:, batch_size // parts - 1 :: batch_size // parts]
        lengths = choose_lengths(greatest.ravel(), batcher.longest)
        padded = float(pad_to(greatest, lengths).mean())
        if plan is None or padded < plan.mean_length * (1 - _WORTHWHILE):
            plan = Plan(parts, tuple(lengths), padded)
    assert plan is not None  # a batch that does not divide has been refused
    return plan


class TrainSteps:
    """The rows of every step, by index: a pure function of (rows, seed, step).

    A step is `batch_size` rows of a shuffled epoch, in which each row stands once; the last step of
    an epoch is filled up with padding. Its rows are sorted by length and run in parts, each padded
    to the least of a few lengths that fits: the rows of a step are the same however it is split,
    and so is the sum of their losses.

    Args:
      batcher: of the training rows.
      plan: of lengths and parts.
      batch_size: rows a step.
      steps: of the run.
      seed: of the order.
    """

    def __init__(self, batcher: Batcher, plan: Plan, batch_size: int, steps: int, seed: int):
        self._batcher, self._plan, self._batch_size = batcher, plan, batch_size
        self._steps, self._seed = steps, seed
        self._epoch = (-1, np.empty(0, int))

    def __len__(self) -> int:
        return self._steps

    def order(self, step: int) -> np.ndarray:
        """Returns the rows of a step, [batch_size], -1 where there is none."""
        count, size = len(self._batcher.rows), self._batch_size
        epoch, place = divmod(step, -(-count // size))
        if self._epoch[0] != epoch:
            self._epoch = epoch, epoch_order(count, self._seed, epoch)
        rows = self._epoch[1][place * size : (place + 1) * size]
        return np.pad(rows, (0, size - len(rows)), constant_values=FILL)

    def __getitem__(self, step: int) -> list[Batch]:
        order = self.order(step)
        sizes = np.where(order == FILL, 0, self._batcher.sizes[order])
        parts = []
        for part in np.split(np.argsort(sizes, kind="stable"), self._plan.parts):
            length = int(pad_to(sizes[part].max(), self._plan.lengths))
            row = part.astype(np.int32)  # dropout is keyed by the place in the whole step
            parts.append({**self._batcher.make(order[part], length), "index": row})
        return parts


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of the rows in an epoch, [count]."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def eval_batches(batcher: Batcher, batch_size: int) -> Iterator[tuple[np.ndarray, Batch]]:
    """Yields every row once, as (indices, batch), the longest rows first.

    The last batch is filled up with padding, whose index is -1.
    """
    order = np.argsort(-batcher.sizes, kind="stable")
    order = np.pad(order, (0, -len(order) % batch_size), constant_values=FILL)
    batches = order.reshape(-1, batch_size)
    greatest = batcher.sizes[batches[:, 0]]
    lengths = choose_lengths(greatest, batcher.longest)
    for indices, longest in zip(batches, greatest, strict=True):
        yield indices, batcher.make(indices, int(pad_to(longest, lengths)))


def round_up(length: int) -> int:
    """Returns the static length for rows of up to `length` tokens."""
    return -(-length // _MULTIPLE) * _MULTIPLE


def pad_to(sizes: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Returns the least of some rising lengths that each size fits."""
    return np.asarray(lengths)[np.searchsorted(lengths, sizes)]


def choose_lengths(sizes: np.ndarray, longest: int) -> list[int]:
    """Returns a few rising lengths, `longest` among them, that pad `sizes` with least in all.

    Each is a multiple of 8; of more than a dozen such, those that split the sizes evenly are tried.
    """
    rounded = np.minimum(-(-np.asarray(sizes) // _MULTIPLE) * _MULTIPLE, longest)
    candidates = np.unique(rounded)
    if len(candidates) > _MOST_CANDIDATES:
        shares = np.linspace(0, 1, _MOST_CANDIDATES)
        candidates = np.unique(np.quantile(rounded, shares, method="higher"))
    candidates = [int(length) for length in candidates if length < longest]
    best, least = [longest], longest * len(rounded)
    for count in range(1, _MOST_LENGTHS):
        for chosen in combinations(candidates, count):
            total = int(pad_to(rounded, [*chosen, longest]).sum())
            if total < least:
                best, least = [*chosen, longest], total
    return best
